"""Runs in a Python with openvino-genai, without Twostep: measures on request, line by line.

`openvino_driver.py MODEL.gguf THREADS CHUNK [CACHE]`: steps have at most CHUNK tokens, the KV cache holds CACHE
tokens, by default 2 GB. Each line of standard input is a request. {"what": "prefill" or "decode", "prompts", "tokens"}
returns {"rate"} in tokens per second. {"what": "serve", "jobs": [[prompt, tokens]...], "outstanding"} and {"what":
"interrupt", "jobs", "after"}, whose last job is the newcomer, return {"traces": [{"asked_s", "token_s"}...]}.
Uses the default precisions, which measured fastest.
"""

import json
import sys
from time import perf_counter
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

CACHE_GB = 2
BLOCK_TOKENS = 32
"""Block size of the KV cache on CPUs."""


def make_pipeline(model: str, threads: int, chunk: int, cache: int | None) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = chunk
    if cache is None:
        scheduler.cache_size = CACHE_GB
    else:
        scheduler.num_kv_blocks = cache // BLOCK_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


class Requests:
    """Prompts that run together, and the tokens generated so far for each."""

    def __init__(self, pipeline: Any, prompts: list[list[int]], tokens: int) -> None:
        self._pipeline = pipeline
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        self._handles = [pipeline.add_request(number, one, config) for number, one in enumerate(ids)]
        self.counts = [0] * len(prompts)

    def step(self) -> None:
        self._pipeline.step()
        for i, handle in enumerate(self._handles):
            while handle.can_read():
                self.counts[i] += sum(len(output.generated_ids) for output in handle.read().values())


def prefill_rate(pipeline: Any, prompts: list[list[int]]) -> float:
    """Prefill rate up to the first and only token."""
    started = perf_counter()
    requests = Requests(pipeline, prompts, 1)
    while not all(requests.counts):
        requests.step()
    return sum(map(len, prompts)) / (perf_counter() - started)


def decode_rate(pipeline: Any, prompts: list[list[int]], tokens: int) -> float:
    """Total rate from when every request has its first token until one is complete; then runs all to the end."""
    requests = Requests(pipeline, prompts, tokens)
    while not all(requests.counts):
        requests.step()
    started, before = perf_counter(), sum(requests.counts)
    while max(requests.counts) < tokens:
        requests.step()
    rate = (sum(requests.counts) - before) / (perf_counter() - started)
    while min(requests.counts) < tokens:
        requests.step()
    return rate


class Request:
    """A prompt with a fixed number of output tokens, and the times of submission and of each token."""

    def __init__(self, pipeline: Any, number: int, prompt: list[int], tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        self.tokens, self.asked_s, self.token_s = tokens, perf_counter(), list[float]()
        self._handle = pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)

    def read(self) -> bool:
        """Records new tokens. Returns whether all have arrived."""
        while self._handle.can_read():
            for output in self._handle.read().values():
                self.token_s += [perf_counter()] * len(output.generated_ids)
        return len(self.token_s) >= self.tokens


def step(pipeline: Any, requests: list[Request]) -> list[Request]:
    """Runs one step. Returns the incomplete requests."""
    pipeline.step()
    return [request for request in requests if not request.read()]


def serve(pipeline: Any, jobs: list[tuple[list[int], int]], outstanding: int) -> list[Request]:
    requests, live = list[Request](), list[Request]()
    while live or len(requests) < len(jobs):
        while len(live) < outstanding and len(requests) < len(jobs):
            requests.append(Request(pipeline, len(requests), *jobs[len(requests)]))
            live.append(requests[-1])
        live = step(pipeline, live)
    return requests


def interrupt(pipeline: Any, jobs: list[tuple[list[int], int]], after: int) -> list[Request]:
    """Submits the last job when all others have `after` tokens."""
    requests = [Request(pipeline, number, *job) for number, job in enumerate(jobs[:-1])]
    live = list(requests)
    while min(len(request.token_s) for request in requests) < after:
        live = step(pipeline, live)
    requests.append(Request(pipeline, len(requests), *jobs[-1]))
    live.append(requests[-1])
    while live:
        live = step(pipeline, live)
    return requests


def answer(pipeline: Any, question: dict[str, Any]) -> dict[str, Any]:
    match question.pop("what"):
        case "prefill":
            return {"rate": prefill_rate(pipeline, question["prompts"])}
        case "decode":
            return {"rate": decode_rate(pipeline, **question)}
        case "serve":
            return traces(serve(pipeline, **question))
        case "interrupt":
            return traces(interrupt(pipeline, **question))
        case other:
            raise ValueError(f"unknown request {other!r}")


def traces(requests: list[Request]) -> dict[str, Any]:
    return {"traces": [{"asked_s": request.asked_s, "token_s": request.token_s} for request in requests]}


def main(model: str, threads: int, chunk: int, cache: int | None = None) -> None:
    pipeline = make_pipeline(model, threads, chunk, cache)
    print(json.dumps({"version": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(pipeline, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
