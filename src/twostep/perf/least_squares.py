"""Least squares without negative values, for costs that are times and cannot be negative."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 that makes |matrix x - target| least; columns of zeros get 0.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23): columns enter one at
    a time, the steepest first, and leave where the unconstrained solution of those inside would be negative.
    """
    scale = np.linalg.norm(matrix, axis=0)
    columns = np.flatnonzero(scale)
    x = np.zeros(matrix.shape[1])
    x[columns] = _active_set(matrix[:, columns] / scale[columns], target) / scale[columns]
    return x


def _active_set(matrix: Floats, target: Floats) -> Floats:
    """The same for columns of length 1."""
    count = matrix.shape[1]
    x, inside = np.zeros(count), np.zeros(count, bool)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(10 * count + 10):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[inside] = -np.inf
        if inside.all() or gradient.max() <= tolerance:
            break
        inside[gradient.argmax()] = True
        x = _within(matrix, target, x, inside)
    return x


def _within(matrix: Floats, target: Floats, x: Floats, inside: NDArray[np.bool_]) -> Floats:
    """The best x with the columns `inside`; moves those out that would be negative, and changes `inside` so."""
    while True:
        wanted = np.zeros_like(x)
        wanted[inside] = np.linalg.lstsq(matrix[:, inside], target, rcond=None)[0]
        below = inside & (wanted <= 0)
        if not below.any():
            return wanted
        share = (x[below] / np.maximum(x[below] - wanted[below], 1e-300)).min()
        x = x + share * (wanted - x)
        leaving = below & (x <= 1e-14)
        if not leaving.any():  # rounding: the one that limits the share
            leaving = below & (x == x[below].min())
        inside &= ~leaving
        x[~inside] = 0.0
