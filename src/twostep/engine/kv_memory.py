"""The size of the KV cache as a user writes it: a share of free memory, or bytes with a unit."""

import re
from typing import Any

from twostep.errors import InvalidParameterError

UNITS = {"B": 1} | {
    f"{prefix}{ending}": base**power
    for ending, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), 1)
}


def kv_memory(text: str, name: str = "kv_memory") -> dict[str, Any]:
    """Keywords for `EngineConfig`: a share above 0 and at most 1, or bytes. `name` is what
    the user calls it. Raises `InvalidParameterError`."""
    if match := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip()):
        number, unit = float(match[1]), match[2]
        if unit in UNITS and number > 0:
            return {"kv_bytes": int(number * UNITS[unit])}
        if not unit and 0 < number <= 1:
            return {"kv_share": number}
    allowed = f"a share above 0 and at most 1, such as 0.5, or a size in {', '.join(UNITS)}, such as 2GiB"
    raise InvalidParameterError(f"{name} is {text!r}; it has to be {allowed}", "kv_memory")
