"""Sees to what a build of Twostep needs: root on Debian has it installed, others read a line for each thing lacking."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

OLDEST = (3, 11)


def lacking() -> "Iterator[tuple[str, str | None]]":
    """Pairs of what is lacking and Debian's package of it, if any. Runs on any Python 3: an old one is named too."""
    if sys.version_info < OLDEST:
        yield "Python {}.{} or newer, this is {}: set PYTHON=...".format(*OLDEST, sys.version.split()[0]), None
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))):
        yield "a C++17 compiler", "g++"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        yield "Python's C headers", "python3-dev"
    if not (find_spec("ensurepip") or find_spec("virtualenv")):
        yield "Python's venv with pip", "python3-venv"


def install(packages: "Sequence[str]") -> None:
    """Only as root of a machine with apt-get, nearly always a container: anybody else decides for themselves."""
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    print("twostep: apt-get install " + " ".join(packages), file=sys.stderr)
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", "-qq", *arguments], env=environment, stdout=sys.stderr)


def main() -> bool:
    install([package for _, package in lacking() if package])
    lacks = list(lacking())
    for lack, package in lacks:
        advice = " (Debian: apt install " + package + ")" if package else ""
        print("twostep needs " + lack + advice, file=sys.stderr)
    return bool(lacks)


sys.exit(main())
