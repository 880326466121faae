"""One request's body, field by field."""

from collections.abc import Mapping
from typing import Any

from twostep.engine.refusals import shown
from twostep.openai_api.errors import ApiError
from twostep.openai_api.known_fields import KNOWN, Refused


class Fields:
    """The fields of a body; null counts as absent. What is taken is not left over for `rest`."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise ApiError(f"the body is {shown(body)}; it has to be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def take_all(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Those of `names` that are there."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ApiError(f"{name} is {shown(value)}; it has to be true or false", param=name)
        return value

    def leave(self, name: str) -> None:
        """A member of a field that nobody knows: for `rest`."""
        self._left[name] = True

    def rest(self) -> tuple[str, ...]:
        """Names of fields that nobody knows. Raises `ApiError` if one is left that would change the answer."""
        for name, value in self._left.items():
            known = KNOWN.get(name)
            if isinstance(known, Refused) and value not in known.allowed:
                raise _refusal(name, value, known)
        return tuple(sorted(self._left.keys() - KNOWN.keys()))


def _refusal(name: str, value: object, known: Refused) -> ApiError:
    allowed = " or ".join(map(shown, known.allowed))
    only = f", only {allowed}" if allowed else ""
    instead = f"; {known.instead}" if known.instead else ""
    return ApiError(f"{name} is {shown(value)}; {name} is not supported here{only}{instead}", param=name)
