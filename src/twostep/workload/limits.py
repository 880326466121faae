"""What parameters may be."""

from twostep.errors import InvalidParameterError


def check_within(name: str, value: float | None, least: float, most: float) -> None:
    """None is allowed. Raises `InvalidParameterError`."""
    if value is not None and not least <= value <= most:
        raise InvalidParameterError(f"{name} is {value:g}; it has to be from {least:g} to {most:g}", name)
