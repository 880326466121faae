"""Runs in any Python, and knows nothing of Twostep: what a package is installed as, with all that it needs.

`installed.py PACKAGE...` prints {"version", "bytes"}: the version of the first, and the size of the files of all these
and, as their metadata say, of all that they require. Python itself does not count, nor what only an extra requires.
"""

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def closure(names: list[str]) -> dict[str, Distribution]:
    """Those that are there, by name. What only other systems need is not there."""
    found: dict[str, Distribution] = {}
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        left += [required_name(line) for line in found[name].requires or [] if "extra ==" not in line]
    return found


def required_name(requirement: str) -> str:
    """Of `numpy>=1.26; python_version > "3"`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def size(one: Distribution) -> int:
    paths = {Path(str(path.locate())).resolve() for path in one.files or []}
    return sum(path.stat().st_size for path in paths if path.is_file())


def main(names: list[str]) -> None:
    found = closure(names)
    print(json.dumps({"version": distribution(names[0]).version, "bytes": sum(map(size, found.values()))}))


if __name__ == "__main__":
    main(sys.argv[1:])
