"""What parameters may be."""

from reprlib import repr as short

from twostep.errors import InvalidParameterError


def check_within(name: str, value: float | None, least: float, most: float) -> None:
    """None is allowed. Raises `InvalidParameterError`."""
    if value is not None and not least <= value <= most:
        shown = short(value) if isinstance(value, int) else f"{value:g}"
        raise InvalidParameterError(f"{name} is {shown}; it has to be from {least:g} to {most:g}", name)
