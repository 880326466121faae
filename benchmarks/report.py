"""`python -m benchmarks.report`: generates the tables and plots of README and docs from the committed result files.

Text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` is generated, everything else is written by hand. Plots are
separate files.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    batching_tables,
    busy_tables,
    calibration_tables,
    itl_tables,
    peers_tables,
    profile_tables,
    results,
    serve_tables,
    simulator_tables,
    tables,
    two_phases,
    validation_tables,
)
from benchmarks.machine import ROOT
from benchmarks.tables import Json
from twostep.errors import TwostepError

NOTHING_YET = "`make bench-model` measures this machine and writes the table here."
NOT_MEASURED = "Not measured yet."


class ReportError(TwostepError):
    """A document has no markers for a generated part."""


def fill(text: str, name: str, body: str) -> str:
    """`text` with the generated part `name` replaced. Raises `ReportError` if there is no such part."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ReportError(f"the document must have exactly one part between {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n{body}\n{end}", text)


Part = Callable[[Path], str]
"""Makes a generated part from the folder of result files."""


def from_each(kind: str, make: Callable[[Json], str]) -> Part:
    """What `make` returns for each result of this kind, one below the other."""
    return lambda folder: "\n\n".join(map(make, results.read(kind, folder))) or NOT_MEASURED


def computed(make: Callable[[], str]) -> Part:
    """A table that needs no result file."""
    return lambda _: make()


def readme(folder: Path) -> str:
    """The comparison on the default model for each machine; without one, the results of Twostep alone."""
    compared = [(tables.peers(one["models"][0], spreads=False), one) for one in results.read("peers-model", folder)]
    alone = [(tables.prefill(one["prefill"]), one) for one in results.read("model", folder)]
    shown = [f"{table}\n\n{tables.provenance(one)}" for table, one in compared or alone]
    return "\n\n".join(shown) or NOTHING_YET


def _comparison(result: Json) -> str:
    parts = [tables.provenance(result)]
    for model in result["models"]:
        parts += [tables.peers(model, spreads=True), tables.versions(model)]
    return "\n\n".join(parts)


def _model(result: Json) -> str:
    parts = [
        f"### {result['model']['name']}",
        f"{tables.provenance(result)}\n\n{tables.model_line(result['model'])}",
        tables.prefill(result["prefill"]),
        tables.decode(result["decode"]),
        tables.loading(result["loading"]),
        tables.limits(result["limits"]),
        tables.counters(result["counters"]),
    ]
    return "\n\n".join(parts)


def batching_readme(folder: Path) -> str:
    found = results.read("batching", folder)
    shown = [f"{batching_tables.main_rows(one)}\n\n{tables.provenance(one)}" for one in found]
    return "\n\n".join(shown) or NOT_MEASURED


def batching_peers(folder: Path) -> str:
    found = [one for one in results.read("batching", folder) if one["peers"]]
    return "\n\n".join(map(batching_tables.peers, found)) or NOT_MEASURED


def two_phases_measured(folder: Path) -> str:
    return two_phases.measured(results.read("peers-model", folder))


def two_phases_claims(folder: Path) -> str:
    found = results.read("peers-model", folder)
    return two_phases.claims(found) if found else NOT_MEASURED


performance_peers = from_each("peers-model", _comparison)
performance_model = from_each("model", _model)
profile = from_each("profile", profile_tables.profile)
busy = from_each("busy", busy_tables.busy)
batching = from_each("batching", batching_tables.batching)
scheduler = from_each("scheduler", batching_tables.scheduler)
serve_readme = from_each("serve", serve_tables.readme)
serve = from_each("serve", serve_tables.serve)
versions = from_each("versions", serve_tables.versions)
itl = from_each("itl", itl_tables.itl)
clients = from_each("clients", serve_tables.clients)
peers = from_each("peers-serving", peers_tables.peers)
peers_readme = from_each("peers-serving", peers_tables.readme)
simulated_vllm = from_each("simulated-vllm", simulator_tables.vllm)
simulated_here = from_each("simulated-here", simulator_tables.here)
simulator = from_each("simulator", simulator_tables.speed)
calibration = from_each("calibration", calibration_tables.calibration)
calibration_readme = from_each("calibration", calibration_tables.readme)

PARTS: tuple[tuple[str, str, Part], ...] = (
    ("README.md", "bench-model", readme),
    ("docs/performance.md", "bench-peers-model", performance_peers),
    ("docs/performance.md", "bench-busy", busy),
    ("docs/performance.md", "bench-model", performance_model),
    ("docs/performance.md", "profile-steps", profile),
    ("README.md", "bench-batching", batching_readme),
    ("docs/facts.md", "bench-batching", batching_readme),
    ("docs/batching.md", "bench-batching", batching),
    ("docs/batching.md", "bench-batching-peers", batching_peers),
    ("docs/batching.md", "bench-scheduler", scheduler),
    ("README.md", "bench-serve", serve_readme),
    ("docs/serving.md", "bench-serve", serve),
    ("docs/serving.md", "bench-versions", versions),
    ("docs/itl.md", "bench-itl", itl),
    ("docs/benchmarking.md", "compared", clients),
    ("README.md", "bench-calibration", calibration_readme),
    ("docs/calibration.md", "bench-calibration", calibration),
    ("README.md", "bench-peers", peers_readme),
    ("docs/peers.md", "bench-peers", peers),
    ("docs/simulate.md", "example", computed(simulator_tables.example)),
    ("docs/simulate.md", "policies", computed(simulator_tables.policies)),
    ("docs/simulate.md", "simulated-vllm", simulated_vllm),
    ("docs/simulate.md", "simulated-here", simulated_here),
    ("docs/simulate.md", "bench-simulator", simulator),
    ("docs/two-phases.md", "phases", computed(two_phases.phases)),
    ("docs/two-phases.md", "prompts", computed(two_phases.prompts)),
    ("docs/two-phases.md", "chunks", computed(two_phases.chunks)),
    ("docs/two-phases.md", "claims", two_phases_claims),
    ("docs/two-phases.md", "batches", computed(two_phases.batches)),
    ("docs/two-phases.md", "sizes", computed(two_phases.sizes)),
    ("docs/two-phases.md", "devices", computed(two_phases.devices)),
    ("docs/two-phases.md", "measured", two_phases_measured),
    ("docs/validation.md", "summary", from_each("validation", validation_tables.summary)),
    ("docs/validation.md", "steps", from_each("validation", validation_tables.steps)),
    ("docs/validation.md", "layers", from_each("validation", validation_tables.layers)),
    ("docs/validation.md", "kernels", from_each("validation", validation_tables.kernels)),
    ("docs/validation.md", "efficiency", from_each("validation", validation_tables.efficiency)),
)
"""File, name of the generated part, function that makes it."""


def render(documents: Path = ROOT, folder: Path = results.FOLDER) -> dict[str, str]:
    """The full generated text of each document and plot, by path."""
    texts = {path: (documents / path).read_text() for path, _, _ in PARTS}
    for path, name, make in PARTS:
        texts[path] = fill(texts[path], name, make(folder))
    for result in results.read("batching", folder):
        texts |= {f"docs/{path}": text for path, text in batching_tables.plots(result).items()}
    for result in results.read("itl", folder):
        texts |= {f"docs/{path}": text for path, text in itl_tables.plots(result)}
    return texts | {f"docs/{path}": text for path, text in two_phases.drawings().items()}


def main() -> int:
    try:
        for path, text in render().items():
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(text)
    except TwostepError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
