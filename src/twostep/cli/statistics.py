"""Where the time of one answer went, in lines for a person. Terms as in the README."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostep.engine.outputs import ChunkTime, Timeline


def engine_line(*, isa: str, threads: int, file_bytes: int, weight_bytes: int, kv_bytes: int) -> str:
    """What the native executor made of the file."""
    sizes = f"weights {_mib(file_bytes)} in the file, {_mib(weight_bytes)} repacked in memory"
    return f"engine   {isa}, {threads} threads; {sizes}; KV cache {_mib(kv_bytes)}"


def timeline_lines(timeline: "Timeline", prompt_tokens: int) -> Iterator[str]:
    """The steps of an answer. The first token comes from prefill: decode made the others."""
    queue_s, prefill_s, ttft_s = timeline.queue_s, timeline.prefill_s, timeline.ttft_s
    if queue_s is None or prefill_s is None or ttft_s is None:
        return
    yield f"queue    {1000 * queue_s:.1f} ms"
    yield f"prefill  {prompt_tokens} tokens, TTFT {ttft_s:.3f} s, {prompt_tokens / prefill_s:.0f} tokens/s"
    if len(timeline.chunks) > 1:
        yield f"         in chunks: {_chunks(timeline.chunks)}"
    if timeline.tpot_s is not None:
        count = len(timeline.token_ns) - 1
        yield f"decode   {count} tokens, TPOT {1000 * timeline.tpot_s:.1f} ms, {1 / timeline.tpot_s:.0f} tokens/s"


def _chunks(chunks: "Sequence[ChunkTime]") -> str:
    return ", ".join(f"{chunk.tokens} in {(chunk.end_ns - chunk.start_ns) / 1e6:.0f} ms" for chunk in chunks)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
