"""What is in a weight file, in words, for `twostep inspect`. A part that cannot be used says why instead of failing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

from twostep.errors import ModelFileError
from twostep.model.families import load_network
from twostep.model.gguf import GgufFile, read_gguf
from twostep.model.metadata import Metadata, Value
from twostep.model.tokenizer import supported_pre
from twostep.model.vocabulary import TEMPLATE_KEY, read_vocabulary

_SAMPLING = "general.sampling."  # keys under which files keep what `generation_config.json` recommends
_MIB = 1 << 20

Part = Callable[[GgufFile], Iterator[tuple[str, str]]]


def describe(path: Path) -> str:
    """Several lines of name and value. Raises `ModelFileError` only if the file cannot be read as GGUF at all."""
    file = read_gguf(path)
    parts: list[Part] = [_file, _network, _weights, _tokenizer, _template]
    lines = [line for part in parts for line in _told(part, file)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _told(part: Part, file: GgufFile) -> Iterator[tuple[str, str]]:
    try:
        yield from part(file)
    except ModelFileError as error:
        yield "not usable", str(error).removeprefix(f"{file.path}: ")


def _file(file: GgufFile) -> Iterator[tuple[str, str]]:
    yield "file", f"{file.path} (GGUF {file.version}, {file.size / _MIB:.1f} MiB)"
    name = file.metadata.get("general.name")
    if name is not None:
        yield "name", _line(name)


def _network(file: GgufFile) -> Iterator[tuple[str, str]]:
    yield "architecture", _line(file.metadata.text("general.architecture"))
    shape = load_network(file).shape
    yield "shape", f"{shape.layers} layers of width {shape.width}, feed-forward {shape.ffn_width}"
    yield "attention", f"{shape.heads} heads, {shape.kv_heads} KV heads, {shape.head_dim} values each"
    yield "context", f"{shape.context} tokens"
    yield "KV cache", f"{shape.kv_bytes_per_token()} bytes per token (f16)"


def _weights(file: GgufFile) -> Iterator[tuple[str, str]]:
    parameters = sum(prod(tensor.shape) for tensor in file.tensors.values())
    yield "parameters", f"{parameters} in {len(file.tensors)} tensors"
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.nbytes
    for kind, size in sizes.most_common():
        yield f"  {kind}", f"{counts[kind]} tensors, {size / _MIB:.1f} MiB"


def _tokenizer(file: GgufFile) -> Iterator[tuple[str, str]]:
    metadata = file.metadata
    model, pre = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre", "not named")
    yield "tokenizer", f"{_line(model)}, pre-tokenizer {_line(pre)}"
    vocabulary = read_vocabulary(metadata)
    special = len(vocabulary.control) + len(vocabulary.user_defined)
    yield "vocabulary", f"{len(vocabulary.tokens)} tokens, {special} of them special"
    yield from (("put right", note) for note in vocabulary.notes())
    yield "begins with", _tokens(vocabulary.tokens, [vocabulary.bos_id] if vocabulary.adds_bos else [])
    yield "ends at", _tokens(vocabulary.tokens, sorted(vocabulary.eos_ids))
    yield "sampling", _sampling(metadata)
    supported_pre(metadata)


def _tokens(tokens: list[str], ids: Iterable[int | None]) -> str:
    return ", ".join(f"{tokens[id_]!r} ({id_})" for id_ in ids if id_ is not None) or "nothing"


def _sampling(metadata: Metadata) -> str:
    """The defaults for generation that the file recommends."""
    told = {key.removeprefix(_SAMPLING): value for key, value in metadata.items() if key.startswith(_SAMPLING)}
    return ", ".join(f"{_line(key)} {_line(value)}" for key, value in told.items()) or "no recommendation in the file"


def _template(file: GgufFile) -> Iterator[tuple[str, str]]:
    if TEMPLATE_KEY not in file.metadata:
        yield "chat template", "none"
        return
    source = file.metadata.text(TEMPLATE_KEY)
    yield "chat template", f"{len(source)} characters: {_line(source)}"


def _line(value: Value) -> str:
    """A value on one short line, without what would steer a terminal."""
    if not isinstance(value, str | int | float | bool):
        return f"{len(value)} values"
    first = (str(value).splitlines() or [""])[0]
    printable = "".join(character if character.isprintable() else "\ufffd" for character in first)
    return printable if len(printable) <= 80 else printable[:77] + "..."
