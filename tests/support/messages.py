"""Messages of an engine's process, as large as real ones."""

from twostep.core.request import FinishReason
from twostep.engine.backend import Capabilities, Snapshot
from twostep.engine.outputs import ChoiceOutput, Delta, RequestOutput, Timeline
from twostep.engine.process.messages import StepEnded
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.engine.timing.meter import StepMeter
from twostep.perf.linear import LinearCostModel

FAKE_CAPABILITIES = Capabilities(
    max_sequence_tokens=1000,
    max_model_len=1000,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    kv_blocks=64,
    isa="avx2",
    threads=2,
    description=("KV cache: 64 blocks",),
)


def snapshot(steps: int = 7) -> Snapshot:
    return Snapshot(
        steps, 2, 1, 64, 50, 100, 48, 1, 16, dict.fromkeys(FinishReason, 3), StepMeter(LinearCostModel()).measured()
    )


def packed(tokens: int, alternatives: int) -> PackedLogprobs:
    top = tuple((id_, -0.5 * id_) for id_ in range(alternatives))
    return PackedLogprobs(TokenLogprobs(1000 + token, -0.25, 1, top) for token in range(tokens))


def delta(id_: str, logprobs: int | None = None) -> Delta:
    return Delta(id_, 0, " word", (12345,), b"" if logprobs is None else packed(1, logprobs).to_bytes())


def step(streams: int, logprobs: int | None = None) -> StepEnded:
    """Of so many streams that each got a token."""
    return StepEnded(tuple(delta(f"chatcmpl-{number:032x}", logprobs) for number in range(streams)), snapshot())


def whole_output(id_: str, logprobs: int | None = None, tokens: int = 3) -> RequestOutput:
    times = Timeline(1, 2, token_ns=tuple(range(3, 3 + tokens)), finish_ns=9)
    entries = None if logprobs is None else packed(tokens, logprobs)
    choice = ChoiceOutput(0, "one two", [5] * tokens, "length", times, logprobs=entries)
    return RequestOutput(id_, [1, 2], (choice,), 0)
