"""Says what this machine lacks to build Twostep, a line each, before a compiler does in many. Exit code 1 if so."""

import os
import shutil
import sys
import sysconfig

OLDEST = (3, 11)
COMPILERS = (os.environ.get("CXX", ""), "c++", "g++", "clang++")

lacks = []
if sys.version_info < OLDEST:
    lacks.append("Python {}.{} or newer, this is {}: set PYTHON=...".format(*OLDEST, sys.version.split()[0]))
if not any(shutil.which(compiler) for compiler in COMPILERS if compiler):
    lacks.append("a C++17 compiler (Debian: apt install g++)")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    lacks.append("Python's C headers (Debian: apt install python3-dev)")
for lack in lacks:
    print(f"twostep needs {lack}", file=sys.stderr)
sys.exit(bool(lacks))
