"""The executor that serves: the network's operations, fused, run by compiled code without returning to Python."""

import os
from collections.abc import Sequence
from mmap import MADV_DONTNEED, mmap

import numpy as np
from numpy.typing import NDArray

from twostep.errors import TwostepError
from twostep.kernels import _native
from twostep.kernels.check import check_arrays, check_copy, check_step
from twostep.kernels.lowering import (
    Instruction,
    LinearAdd,
    LoweringError,
    NormGatedSilu,
    NormLinear,
    NormLogits,
    RotateAttend,
    lower,
    rotation,
)
from twostep.kernels.quantize import fine_weights
from twostep.kernels.sampling import Sampler
from twostep.kernels.step import Ints, Slice, StepArrays, StepCancelledError
from twostep.kernels.teams import Team
from twostep.kernels.threads import default_threads
from twostep.model.network import Network
from twostep.model.ops import Embed, Linear, Logits
from twostep.model.quants import dequantize
from twostep.model.tensor import Tensor, TensorType
from twostep.processes import Owner

_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
_LARGEST_COUNT = 2**31 - 1
_EMPTY = np.empty(0, np.float32)
_IN_ORDER = np.empty(0, np.int32)


class NativeError(TwostepError):
    """The compiled kernels cannot run this network, or not as asked."""


def usable_isas() -> list[str]:
    """Instruction sets of this build that this machine runs, best first."""
    return list(_native.usable_isas())


def packed_weight_bytes(network: Network) -> int:
    """What `NativeExecutor.weight_bytes` will be for this network: known before memory is divided."""
    matrices = {op.weight for op in network.ops if isinstance(op, Linear | Logits)}
    tensors = [network.tensors[name] for name in matrices]
    return sum(_native.packed_bytes(int(tensor.type), *tensor.shape) for tensor in tensors)


class NativeExecutor:
    """Runs steps of `network` on `threads` threads over `kv_blocks` blocks of float16 KV cache.

    `isa` forces an instruction set (default: `$TWOSTEP_ISA`, else the best of this machine). Raises `NativeError` that
    names what is not possible and what is. Weights are repacked here, once; the network's tensors are then read only
    for embeddings.
    """

    def __init__(self, network: Network, kv_blocks: int, *, threads: int | None = None, isa: str | None = None) -> None:
        self._network = network
        self._kv_blocks = _count("kv_blocks", kv_blocks)
        threads = default_threads() if threads is None else _count("threads", threads)
        isa = os.environ.get("TWOSTEP_ISA", "") if isa is None else isa
        self._packed: dict[tuple[str, bool], int] = {}
        self._owner = Owner("this executor")
        try:
            self._program = _program(network, kv_blocks, threads, isa)
            self._team = Team(self._program)
            self._fine = fine_weights(network.ops)
            for instruction in lower(network.ops):
                self._add(instruction)
        except BaseException as error:
            self.close()  # at once, however long the error and its frames are kept
            if isinstance(error, LoweringError):
                raise NativeError(str(error)) from error
            if isinstance(error, MemoryError):
                raise NativeError("no memory for the repacked weights") from error
            raise
        self._logits = np.empty((1, network.shape.vocab), np.float32)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._program.isa)

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""
        return int(self._program.threads)

    @property
    def weight_bytes(self) -> int:
        """Bytes of repacked weights in memory; embeddings stay in the file."""
        return int(self._program.weight_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache reserved; the system provides them as they are first written."""
        return int(self._program.kv_bytes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of what the widest step so far, or `reserve`, needed: a row's activations and a row's logits each.

        Scratch of the threads, a few MiB each at most, is not in it.
        """
        return int(self._program.buffer_bytes) + self._logits.nbytes

    def reserve(self, step_tokens: int, logit_rows: int) -> None:
        """Takes the memory now for steps of so many tokens and rows of logits, which else grows as steps need it.

        Raises `NativeError` where there is not so much.
        """
        try:
            self._program.reserve(_count("step_tokens", step_tokens))
            self._logits_for(_count("logit_rows", logit_rows))
        except MemoryError as error:
            raise NativeError(f"no memory for steps of {step_tokens} tokens and {logit_rows} rows of logits") from error

    def close(self) -> None:
        """Gives back weights, KV cache and threads, the latter once its samplers have gone too. It cannot be used any
        more."""
        self.__dict__.pop("_program", None)
        self.__dict__.pop("_team", None)

    def sampler(self) -> Sampler:
        """A sampler of this vocabulary that uses this executor's threads, between its steps."""
        return Sampler(self._network.shape.vocab, program=self._program)

    def lacked_ns(self) -> int:
        """How long the threads had no core inside steps so far, added up over all threads.

        Either they were not let run, or they did not take part since others use the cores; waiting for each other does
        not count.
        """
        return int(self._program.lacked_ns)

    def step_seconds(self) -> dict[str, float]:
        """Wall time of the last step by part: linear, attention, head, rest."""
        return dict(self._program.seconds())

    def cancel(self) -> None:
        """Stops the step that another thread runs, at its next layer; that `forward` raises `StepCancelledError`.

        Where no step computes, it does nothing, now or later: also while `forward` still checks its arguments, and when
        the step has passed its last layer. To stop a loop of steps, tell the loop as well.
        """
        self._program.cancel()

    def forward(self, slices: Sequence[Slice]) -> NDArray[np.float32]:
        """See `Executor.forward`; the next call reuses the result. Raises `StepCancelledError` after `cancel()`."""
        check_step(slices, self._network.shape.vocab, self._kv_blocks)
        return self.forward_arrays(StepArrays.of(slices))

    def forward_arrays(self, step: StepArrays) -> NDArray[np.float32]:
        """See `Executor.forward_arrays`; otherwise as `forward`.

        A table that names twice a block that this step only reads is not noticed here, as it is by `forward`. Raises
        `ForkedError` in a forked child, where the threads are not.
        """
        self._owner.check()
        check_arrays(step, self._network.shape.vocab)
        rows = len(step.logit_rows)
        logits = self._logits_for(rows)  # kept here: another thread may replace it, though its step is refused
        arrays = step.tokens, step.starts, step.counts, step.tables, step.table_starts, step.logit_rows
        if not self._program.forward(*arrays, logits):
            raise StepCancelledError("the step was cancelled")
        return logits[:rows]

    def copy_block(self, source: int, target: int) -> None:
        """See `Executor.copy_block`."""
        check_copy(source, target, self._kv_blocks)
        self._program.copy_block(source, target)

    def _logits_for(self, rows: int) -> NDArray[np.float32]:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._network.shape.vocab), np.float32)
        return self._logits

    def _add(self, instruction: Instruction) -> None:
        match instruction:
            case Embed():
                tensor = self._network.tensors[instruction.weight]
                self._program.embed(int(tensor.type), tensor.data)
            case NormLinear():
                self._add_qkv(instruction)
            case RotateAttend():
                self._program.attention(instruction.attention.layer)
            case LinearAdd(linear, _, from_heads):
                matrix, bias = self._matrix(linear.weight), self._vector(linear.bias)
                self._program.linear_add(matrix, bias, linear.weight in self._fine, from_heads)
            case NormGatedSilu(norm, gate, up):
                self._check_alike(gate, up)
                weights, fine = (self._matrix(gate.weight), self._matrix(up.weight)), gate.weight in self._fine
                self._program.norm_gated_silu(self._vector(norm.weight), norm.eps, *weights, fine)
            case NormLogits(norm, logits):
                head, fine = self._matrix(logits.weight), logits.weight in self._fine
                self._program.logits(self._vector(norm.weight), norm.eps, head, fine)

    def _add_qkv(self, instruction: NormLinear) -> None:
        rotated = rotation(self._network.ops).style == "interleaved"
        q, k, v = instruction.q, instruction.k, instruction.v
        self._check_alike(q, k, v)
        widths = [self._network.tensors[linear.weight].shape[0] for linear in (q, k, v)]
        self._program.norm_linear(
            self._vector(instruction.norm.weight),
            instruction.norm.eps,
            [self._matrix(q.weight, rotated), self._matrix(k.weight, rotated), self._matrix(v.weight)],
            [self._vector(q.bias, rotated), self._vector(k.bias, rotated), self._vector(v.bias)],
            [0, widths[0], widths[0] + widths[1]],
            [linear.weight in self._fine for linear in (q, k, v)],
        )

    def _check_alike(self, *linears: Linear) -> None:
        """Inputs of one instruction are prepared once: quantised for all its matrices, or for none."""
        tensors = [self._network.tensors[linear.weight] for linear in linears]
        if len({tensor.type in _FLOATS for tensor in tensors}) > 1:
            found = ", ".join(f"{tensor.name} {tensor.type.name}" for tensor in tensors)
            raise NativeError(f"matrices that share an input must all be quantised or all be floats, not {found}")

    def _matrix(self, name: str, rotated: bool = False) -> int:
        """The packed matrix of a tensor, packed at its first use (a tied head is packed once)."""
        key = (name, rotated)
        if key not in self._packed:
            tensor = self._network.tensors[name]
            outputs, inputs = tensor.shape
            order = self._halves_order(outputs) if rotated else _IN_ORDER
            self._packed[key] = self._program.add_matrix(int(tensor.type), tensor.data, outputs, inputs, order)
            _let_go(tensor)
        return self._packed[key]

    def _vector(self, name: str | None, rotated: bool = False) -> NDArray[np.float32]:
        if name is None:
            return _EMPTY
        vector = dequantize(self._network.tensors[name])
        return np.ascontiguousarray(vector[self._halves_order(len(vector))] if rotated else vector)

    def _halves_order(self, outputs: int) -> Ints:
        """Rows of interleaved pairs (0, 1), (2, 3), ... as halves: first all firsts, then all seconds, head by head.

        Queries and keys are permuted alike, so that their products stay what they were.
        """
        head_dim = self._network.shape.head_dim
        return np.arange(outputs, dtype=np.int32).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()


def _count(name: str, value: int) -> int:
    if not 1 <= value <= _LARGEST_COUNT:
        raise NativeError(f"{name} is {value}; it must be from 1 to {_LARGEST_COUNT}")
    return value


def _program(network: Network, kv_blocks: int, threads: int, isa: str) -> _native.Program:
    s = network.shape
    rope = rotation(network.ops)
    exponents = np.arange(0, s.head_dim, 2, dtype=np.float32) / np.float32(s.head_dim)
    frequencies = (1.0 / np.float32(rope.base) ** exponents).astype(np.float32)
    dims = [s.width, s.heads, s.kv_heads, s.head_dim, s.ffn_width, s.vocab, s.layers]
    try:
        return _native.Program(dims, isa, threads, kv_blocks, frequencies)
    except ValueError as error:
        raise NativeError(f"TWOSTEP_ISA: {error}") from error
    except MemoryError as error:
        raise NativeError(f"no memory for a KV cache of {kv_blocks} blocks") from error
    except RuntimeError as error:
        raise NativeError(f"the system does not give {threads} threads: {error}") from error


def _let_go(tensor: Tensor) -> None:
    """Lets the system take back the pages of a mapped weight file, so that a model is not resident twice.

    They stay in the system's cache while it has room, and come back when touched, as embeddings do.
    """
    base: object = tensor.data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview) and base.readonly and isinstance(base.obj, mmap):
        base.obj.madvise(MADV_DONTNEED)
