"""Names for the KV blocks of a workload's prompts, as the prefix cache knows them."""

from struct import Struct

from twostep.core.request import BLOCK_TOKENS
from twostep.workload.definition import WorkloadRequest

_NAME = Struct("<qi4x")
"""Of 16 bytes, like hashes."""


class PromptBlocks:
    """Names blocks of 16 tokens by the content that a workload declares in blocks of `block_tokens`.

    Two names are equal exactly if the prompts declare the same blocks up to the end of the block that is named. What a
    prompt does not declare, text included, is unlike anything else.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._nodes: dict[tuple[int, int], int] = {}
        """(node of the prefix, next block) to the node of both, from 1; 0 is the empty prefix."""

    def names(self, number: int, request: WorkloadRequest) -> tuple[bytes, ...]:
        """Of the full blocks of the prompt of request `number`, in order."""
        nodes, own, size = self._path(request.blocks), -1 - number, self._block_tokens
        declared = (-(-(end * BLOCK_TOKENS) // size) for end in range(1, request.input_tokens // BLOCK_TOKENS + 1))
        return tuple([
            _NAME.pack(nodes[count - 1] if count <= len(nodes) else own, block)
            for block, count in enumerate(declared)
        ])  # fmt: skip

    def _path(self, blocks: tuple[int, ...]) -> list[int]:
        """The node after each block."""
        node, path, nodes = 0, [], self._nodes
        for block in blocks:
            node = nodes.setdefault((node, block), len(nodes) + 1)
            path.append(node)
        return path
