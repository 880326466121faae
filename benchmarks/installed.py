"""Runs in any Python, without Twostep: version and installed size of a package with its requirements.

`installed.py PACKAGE...` prints {"version", "bytes"}: the version of the first package, and the size of the files of
all packages and their requirements. Excludes Python itself and requirements of extras.
"""

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def closure(names: list[str]) -> dict[str, Distribution]:
    """Installed packages by name, with their installed requirements."""
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
    """The name in a requirement such as `numpy>=1.26; python_version > "3"`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def size(one: Distribution) -> int:
    paths = {Path(str(path.locate())).resolve() for path in one.files or []}
    return sum(path.stat().st_size for path in paths if path.is_file())


def main(names: list[str]) -> None:
    found = closure(names)
    print(json.dumps({"version": distribution(names[0]).version, "bytes": sum(map(size, found.values()))}))


if __name__ == "__main__":
    main(sys.argv[1:])
