"""The executor that serves: the network's operations, fused, run by compiled code without returning to Python."""

import os
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from math import sqrt
from mmap import MADV_DONTNEED, mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostep.errors import BlockImportError, TwostepError
from twostep.kernels import _native
from twostep.kernels.check import check_arrays, check_block, check_copy, check_step, kv_pools
from twostep.kernels.kv_image import Buffer
from twostep.kernels.lowering import (
    Attend,
    Instruction,
    LinearAdd,
    LoweringError,
    NormGated,
    NormLinear,
    NormLogits,
    lower,
)
from twostep.kernels.quantize import fine_weights
from twostep.kernels.sampling import Sampler
from twostep.kernels.step import Capabilities, Ints, Slice, StepArrays, StepCancelledError
from twostep.kernels.teams import Team
from twostep.kernels.threads import default_threads
from twostep.model.network import Network
from twostep.model.ops import Attention, Embed, HeadNorm, Linear, Logits, RmsNorm, Rope
from twostep.model.quants import dequantize
from twostep.model.tensor import Tensor, TensorType
from twostep.processes import Owner

_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)
_LARGEST_COUNT = 2**31 - 1
_EMPTY = np.empty(0, np.float32)
_Piece = tuple[int, NDArray[np.float32], int, bool]
_IN_ORDER = np.empty(0, np.int32)


class NativeError(TwostepError):
    """The compiled kernels cannot run this network, or not as asked."""


def usable_isas() -> list[str]:
    """Instruction sets of this build that this machine runs, best first."""
    return list(_native.usable_isas())


def chosen_isa() -> str:
    """What an executor takes that is not told otherwise: `$TWOSTEP_ISA`, else the best of this machine."""
    return os.environ.get("TWOSTEP_ISA") or usable_isas()[0]


def packed_weight_bytes(network: Network) -> int:
    """What `NativeExecutor.weight_bytes` will be for this network: known before memory is divided."""
    matrices = {op.weight for op in network.ops if isinstance(op, Linear | Logits)}
    tensors = [network.tensors[name] for name in matrices]
    return sum(_native.packed_bytes(int(tensor.type), *tensor.shape) for tensor in tensors)


class NativeExecutor:
    """Runs steps of `network` on `threads` threads over `kv_blocks` blocks of float16 KV cache, by group of the
    network's KV layout, or as many in each group.

    `isa` forces an instruction set (default: `$TWOSTEP_ISA`, else the best of this machine). With `shareable_kv` other
    processes can map the KV memory through `kv_file_descriptor`. Raises `NativeError` for a network, number or
    instruction set that is not supported. Weights are repacked here, once; the network's tensors are then read only for
    embeddings.
    """

    def __init__(
        self,
        network: Network,
        kv_blocks: int | Sequence[int],
        *,
        threads: int | None = None,
        isa: str | None = None,
        shareable_kv: bool = False,
    ) -> None:
        self._network = network
        for blocks in (kv_blocks,) if isinstance(kv_blocks, int) else kv_blocks:
            _count("kv_blocks", blocks)
        threads = default_threads() if threads is None else _count("threads", threads)
        isa = os.environ.get("TWOSTEP_ISA", "") if isa is None else isa
        self._packed: dict[tuple[str, bool], int] = {}
        self._owner = Owner("this executor")
        try:
            instructions = list(lower(network.ops))
            self._layout = network.kv_layout
            self._pools = kv_pools(self._layout, kv_blocks)
            self._program = self._make_program(threads, isa, shareable_kv)
            self._team = Team(self._program)
            self._fine = fine_weights(network.ops)
            for instruction, following in zip_longest(instructions, instructions[1:]):
                self._add(instruction, following)
        except BaseException as error:
            self.close()  # at once, however long the error and its frames are kept
            if isinstance(error, LoweringError | ValueError):
                raise NativeError(str(error)) from error
            if isinstance(error, MemoryError):
                raise NativeError("no memory for the repacked weights") from error
            raise
        self._logits = np.empty((1, network.shape.vocab), np.float32)

    @cached_property
    def capabilities(self) -> Capabilities:
        """See `Executor.capabilities`."""
        blocks, shareable = tuple(pool.blocks for pool in self._pools), self.kv_file_descriptor is not None
        return Capabilities(self._layout, blocks, drafts=True, transfers=True, shareable=shareable)

    @property
    def kv_file_descriptor(self) -> int | None:
        """Of the memory file that holds the KV cache, which other processes can map; None for private memory.

        The groups of blocks follow each other in it. It stays open as long as this executor.
        """
        descriptor = int(self._program.kv_file_descriptor)
        return None if descriptor < 0 else descriptor

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
        """Allocates the memory for steps of so many tokens and rows of logits now, instead of when steps need it.

        Raises `NativeError` if there is not enough.
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
        check_step(slices, self._network.shape.vocab, self._pools)
        return self.forward_arrays(StepArrays.of(slices))

    def forward_arrays(self, step: StepArrays) -> NDArray[np.float32]:
        """See `Executor.forward_arrays`; otherwise as `forward`.

        A table that names twice a block that this step only reads is not noticed here, as it is by `forward`. Raises
        `ForkedError` in a forked child, where the threads are not.
        """
        self._owner.check()
        check_arrays(step, self._network.shape.vocab, len(self._pools))
        rows = len(step.logit_rows)
        logits = self._logits_for(rows)  # kept here: another thread may replace it, though its step is refused
        arrays = step.tokens, step.starts, step.counts, list(step.tables), step.table_starts, step.logit_rows
        if not self._program.forward(*arrays, logits):
            raise StepCancelledError("the step was cancelled")
        return logits[:rows]

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        """See `Executor.copy_block`."""
        check_copy(source, target, group, self._pools)
        self._program.copy_block(group, source, target)

    def export_block(self, block: int, group: int = 0) -> bytes:
        """See `Executor.export_block`."""
        check_block("export_block", block, group, self._pools)
        return bytes(self._program.export_block(group, block))

    def import_block(self, data: Buffer, block: int, group: int = 0) -> None:
        """See `Executor.import_block`."""
        check_block("import_block", block, group, self._pools)
        try:
            self._program.import_block(group, block, np.frombuffer(data, np.uint8))
        except ValueError as error:
            raise BlockImportError(str(error)) from None

    def _logits_for(self, rows: int) -> NDArray[np.float32]:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._network.shape.vocab), np.float32)
        return self._logits

    # --- building -------------------------------------------------------------------------------------------------

    def _make_program(self, threads: int, isa: str, shareable: bool) -> _native.Program:
        s = self._network.shape
        dims = [s.width, s.heads, s.kv_heads, s.head_dim, s.ffn_width, s.vocab]
        groups = [
            (len(group.layers), pool.blocks, group.window)
            for group, pool in zip(self._layout.groups, self._pools, strict=True)
        ]
        try:
            program = _native.Program(dims, isa, threads, groups, self._layout.digest, shareable)
        except ValueError as error:
            setting = "TWOSTEP_ISA: " if isa not in ("", *usable_isas()) else ""
            raise NativeError(f"{setting}{error}") from error
        except MemoryError as error:
            blocks = " + ".join(str(pool.blocks) for pool in self._pools)
            raise NativeError(f"no memory for a KV cache of {blocks} blocks") from error
        except RuntimeError as error:
            raise NativeError(f"the system does not give {threads} threads: {error}") from error
        for base in self._network.rotations:
            program.add_rotation(_inverse_frequencies(base, s.head_dim))
        return program

    def _add(self, instruction: Instruction, following: Instruction | None) -> None:
        """Adds a row to the program's table. Projections to heads have to know how these will be rotated."""
        match instruction:
            case Embed():
                tensor = self._network.tensors[instruction.weight]
                self._program.set_embedding(int(tensor.type), tensor.data)
                self._program.add("embed", {"scale": instruction.scale})
            case NormLinear(norm, q, k, v):
                rope = following.q_rope if isinstance(following, Attend) else None
                pieces = self._pieces((q, k, v), rotated=(_interleaved(rope), _interleaved(rope), False))
                self._program.add("linear", {"norm": self._norm(norm), "pieces": pieces, "to": "qkv"})
            case Attend():
                self._program.add("attention", self._attention(instruction))
            case LinearAdd(linear, post_norm, _, from_heads):
                source, pieces = "heads" if from_heads else "ffn", self._pieces((linear,))
                self._program.add("linear_add", {"from": source, "pieces": pieces, **self._norms(post_norm=post_norm)})
            case NormGated(norm, gate, up, gated):
                pieces = [(matrix, bias, 0, fine) for matrix, bias, _, fine in self._pieces((gate, up))]
                parameters = {"norm": self._norm(norm), "pieces": pieces, "activation": gated.activation, "to": "ffn"}
                self._program.add("gated", parameters)
            case NormLogits(norm, logits):
                piece = (self._matrix(logits.weight), _EMPTY, 0, logits.weight in self._fine)
                self._program.add("logits", {"norm": self._norm(norm), "pieces": [piece]})

    def _attention(self, instruction: Attend) -> dict[str, Any]:
        op, rope = instruction.attention, instruction.q_rope
        self._check_attention(op)
        group = next(g for g, group in enumerate(self._layout.groups) if op.layer in group.layers)
        return {
            "group": group,
            "layer": self._layout.groups[group].layers.index(op.layer),
            "rotation": -1 if rope is None else self._network.rotations.index(rope.base),
            "scale": 1 / sqrt(op.head_dim) if op.scale is None else op.scale,
            **self._norms(_interleaved(rope), q_norm=instruction.q_norm, k_norm=instruction.k_norm),
        }

    def _check_attention(self, op: Attention) -> None:
        shape = self._network.shape
        if op.heads != shape.heads:
            raise NativeError(f"layer {op.layer} has {op.heads} heads; the native program needs {shape.heads} in each")
        if op.head_dim % 2:
            raise NativeError(f"layer {op.layer} has heads of {op.head_dim} elements; the native program needs pairs")

    def _pieces(self, linears: Sequence[Linear], rotated: Sequence[bool] = (False, False)) -> list[_Piece]:
        """Matrices side by side: (number, bias, column of the first output, whether its input is rounded finely)."""
        self._check_alike(*linears)
        pieces, column = [], 0
        for linear, turned in zip(linears, rotated, strict=False):
            bias, fine = self._vector(linear.bias, turned), linear.weight in self._fine
            pieces.append((self._matrix(linear.weight, turned), bias, column, fine))
            column += self._network.tensors[linear.weight].shape[0]
        return pieces

    def _norm(self, norm: RmsNorm | HeadNorm, rotated: bool = False) -> tuple[NDArray[np.float32], float]:
        return self._vector(norm.weight, rotated), norm.eps

    def _norms(self, rotated: bool = False, **norms: RmsNorm | HeadNorm | None) -> dict[str, Any]:
        """Those that there are, as parameters."""
        return {name: self._norm(norm, rotated) for name, norm in norms.items() if norm is not None}

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


def _interleaved(rope: Rope | None) -> bool:
    """Whether rows of the projection are reordered: the kernels rotate halves only."""
    return rope is not None and rope.style == "interleaved"


def _inverse_frequencies(base: float, head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1.0 / np.float32(base) ** exponents).astype(np.float32)


def _let_go(tensor: Tensor) -> None:
    """Lets the system take back the pages of a mapped weight file, so that a model is not resident twice.

    They stay in the system's cache while it has room, and come back when touched, as embeddings do.
    """
    base: object = tensor.data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview) and base.readonly and isinstance(base.obj, mmap):
        base.obj.madvise(MADV_DONTNEED)
