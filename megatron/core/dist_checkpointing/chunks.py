"""The blocks that a stored tensor consists of: which of them a box meets, and whether they fit.

A tensor of many layers and experts has tens of thousands of blocks, each inside one layer and one
expert. They are found by these two numbers, since comparing all with all would take minutes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.core.dist_checkpointing.shard import overlap, volume

_SHOWN = 3


class ChunkIndex:
    """Blocks by the leading coordinates in which each of them has extent 1.

    Args:
        chunks: The blocks of one tensor.
    """

    def __init__(self, chunks: Iterable[ChunkStorageMetadata]) -> None:
        self._all = list(chunks)
        self._leading = min((_leading_ones(c.sizes) for c in self._all), default=0)
        self.rows: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in self._all:
            self.rows.setdefault(tuple(chunk.offsets[: self._leading]), []).append(chunk)

    def near(self, offset: Sequence[int], shape: Sequence[int]) -> Iterator[ChunkStorageMetadata]:
        """Yield the blocks that a box may meet: all that do, and perhaps others."""
        leading = self._leading
        spans = [range(o, o + n) for o, n in zip(offset[:leading], shape[:leading], strict=True)]
        if math.prod(len(span) for span in spans) >= len(self.rows):
            yield from self._all
            return
        for row in itertools.product(*spans):
            yield from self.rows.get(row, ())


def _leading_ones(sizes: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda n: n == 1, sizes))


def misplaced(key: str, size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> list[str]:
    """Say what is wrong with the blocks of a tensor, nothing if they cover it exactly once.

    Args:
        key: Name of the tensor.
        size: Its shape.
        chunks: Its blocks.
    """
    problems = []
    for chunk in chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > extent for end, extent in zip(ends, size, strict=True)):
            problems.append(f"{key}: {_box(chunk)} reaches out of {tuple(size)}")
    for row in ChunkIndex(chunks).rows.values():
        for one, two in itertools.combinations(row, 2):
            if overlap(one.offsets, one.sizes, two.offsets, two.sizes) is not None:
                problems.append(f"{key}: {_box(one)} and {_box(two)} overlap")
    covered = sum(volume(chunk.sizes) for chunk in chunks)
    if covered != volume(size):
        problems.append(f"{key}: {covered} of {volume(size)} elements are there")
    return problems[:_SHOWN]


def _box(chunk: ChunkStorageMetadata) -> str:
    return f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
