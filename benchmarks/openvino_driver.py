"""Runs in a Python with openvino-genai, and knows nothing of Twostep: measures what it is asked, line by line.

`openvino_driver.py MODEL.gguf THREADS`; each line of standard input is {"what", "prompts", "tokens"}, each of standard
output {"rate"}: tokens per second. Settings are those that measured fastest: chunks of 256 tokens, default precisions.
"""

import json
import sys
from time import perf_counter
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

CHUNK_TOKENS = 256
CACHE_GB = 2


def make_pipeline(model: str, threads: int) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = CHUNK_TOKENS
    scheduler.cache_size = CACHE_GB
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


class Requests:
    """Some prompts that run together, and how many tokens each has by now."""

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
    """Up to the first token, which is the only one."""
    started = perf_counter()
    requests = Requests(pipeline, prompts, 1)
    while not all(requests.counts):
        requests.step()
    return sum(map(len, prompts)) / (perf_counter() - started)


def decode_rate(pipeline: Any, prompts: list[list[int]], tokens: int) -> float:
    """Of all requests together, from when each has its first token until one is complete; then runs all to the end."""
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


def answer(pipeline: Any, question: dict[str, Any]) -> float:
    if question["what"] == "prefill":
        return prefill_rate(pipeline, question["prompts"])
    return decode_rate(pipeline, question["prompts"], question["tokens"])


def main(model: str, threads: int) -> None:
    pipeline = make_pipeline(model, threads)
    print(json.dumps({"version": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"rate": answer(pipeline, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
