"""The memory that was planned is what is used, by all processes together and by what the system says of them."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
INTERPRETER_BYTES = 24 * MIB
"""The engine's process when it plans: it is no part of the plan, as it is no longer free memory by then."""
MOST_OVER = 1.5
"""How far the plan may exceed what is used by this small model; a larger one has the same processes around it."""
UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell")


def family(pid: int) -> Iterator[int]:
    """A process and all that it started, directly or not."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def used_bytes(pid: int) -> int:
    """Memory of a process and its children that no file holds, so that the system cannot drop it."""
    total = 0
    for one in family(pid):
        [found] = re.findall(r"^Anonymous: +(\d+) kB$", Path(f"/proc/{one}/smaps_rollup").read_text(), re.MULTILINE)
        total += int(found) * 1024
    return total


def planned_bytes(lines: list[str]) -> int:
    """The sum of weights, activations, processes and KV cache as the arithmetic gives them."""
    sizes = {}
    for line in lines:
        if match := re.match(r" *(weights|activations|processes|KV cache): (.*)", line):
            found = re.findall(r"([\d.]+) ([KMG]iB)", match[2])
            number, unit = found[0] if match[1] == "KV cache" else found[-1]
            sizes[match[1]] = float(number) * UNITS[unit]
    assert sizes.keys() == {"weights", "activations", "processes", "KV cache"}, lines
    return int(sum(sizes.values()))


def assert_planned(used: int, lines: list[str], before: int) -> None:
    planned = planned_bytes(lines)
    assert used - before <= planned, f"{(used - before) / MIB:.0f} MiB used, {planned / MIB:.0f} MiB planned"
    assert planned <= MOST_OVER * (used - before), f"{(used - before) / MIB:.0f} of {planned / MIB:.0f} MiB used"


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as reply:
        assert json.load(reply)["choices"]


@pytest.mark.usefixtures("default_model_path")
def test_a_server_uses_what_was_planned() -> None:
    """When its KV cache is full, and chats, forms and streams have been served."""
    command = [str(Path(sys.executable).parent / "twostep"), "serve", "smollm2-135m", "--port", "0"]
    command += ["--kv-memory", "48MiB", "--max-num-seqs", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as served:
        try:
            assert served.stdout is not None
            lines = []
            for line in served.stdout:
                lines.append(line)
                if address := re.search(r"http://[\d.]+:\d+", line):
                    break
            assert address is not None, lines
            chats = f"{address[0]}/v1/chat/completions"

            def ask(number: int) -> None:
                message = {"role": "user", "content": f"{number}: " + "word " * 500}
                post(chats, {"model": "smollm2-135m", "messages": [message], "max_tokens": 8, "logprobs": True})

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ask, range(6)))
            message = {"role": "user", "content": "Hi"}
            form = {"response_format": {"type": "json_object"}, "max_tokens": 4}
            post(chats, {"model": "smollm2-135m", "messages": [message], **form})
            assert_planned(used_bytes(served.pid), lines, INTERPRETER_BYTES)
        finally:
            served.terminate()


IN_PROCESS = """
import sys
from twostep import LLM, SamplingParams, StructuredOutput
sys.path.insert(0, sys.argv[2])
from test_memory_used import used_bytes
import os
import twostep.llm
before = used_bytes(os.getpid())
llm = LLM(sys.argv[1], kv_bytes=48 << 20, max_num_seqs=4)
for _ in range(2):
    llm.generate([[n + 5] * 500 for n in range(5)], SamplingParams(max_tokens=4), progress=False)
llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4), progress=False)
form = SamplingParams(max_tokens=4, structured=StructuredOutput("regex", "a+"))
llm.generate("Say a", form, progress=False)
print(before, used_bytes(os.getpid()), *llm.engine.describe(), sep="\\n")
"""


def test_an_engine_in_this_process_uses_what_was_planned(default_model_path: Path) -> None:
    command = [sys.executable, "-c", IN_PROCESS, str(default_model_path), str(Path(__file__).parent)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True).stdout
    before, used, *lines = said.splitlines()
    assert_planned(int(used), lines, int(before))
