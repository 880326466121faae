"""Says what this machine lacks to build Twostep, a line each, before a compiler does in many. Exit code 1 if so."""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec

OLDEST = (3, 11)


def lacking():
    """Runs on any Python 3, so that an old one is named too."""
    if sys.version_info < OLDEST:
        yield "Python {}.{} or newer, this is {}: set PYTHON=...".format(*OLDEST, sys.version.split()[0])
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))):
        yield "a C++17 compiler (Debian: apt install g++)"
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        yield "Python's C headers (Debian: apt install python3-dev)"
    if not (find_spec("ensurepip") or find_spec("virtualenv")):
        yield "Python's venv with pip (Debian: apt install python3-venv)"


lacks = list(lacking())
for lack in lacks:
    print("twostep needs " + lack, file=sys.stderr)
sys.exit(bool(lacks))
