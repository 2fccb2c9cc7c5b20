from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.core.dist_checkpointing.chunks import ChunkIndex, misplaced
from megatron.core.dist_checkpointing.shard import overlap


def chunk(offset, shape):
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))


def stacked(layers, experts, rows=2):
    """Blocks `[1, 1, 4, 3]` of a tensor `[layers, experts, 4 rows, 3]`."""
    places = itertools.product(range(layers), range(experts), range(rows))
    return [chunk((i, e, 4 * r, 0), (1, 1, 4, 3)) for i, e, r in places]


@pytest.mark.parametrize(
    "chunks",
    [
        stacked(3, 4),
        [chunk((i, 0, 0, 0), (1, 4, 8, 3)) for i in range(3)],
        [chunk((0, 0, 4 * r, 0), (3, 4, 4, 3)) for r in range(2)],
        [chunk((0, 0, 0, 0), (3, 4, 8, 3))],
    ],
    ids=["experts", "layers", "rows", "whole"],
)
def test_a_box_finds_what_it_meets(chunks):
    index, draw = ChunkIndex(chunks), random.Random(0)
    for _ in range(200):
        offset = [draw.randrange(n) for n in (3, 4, 8, 3)]
        shape = [draw.randint(1, n - o) for n, o in zip((3, 4, 8, 3), offset, strict=True)]
        found = list(index.near(offset, shape))
        meets = [c for c in chunks if overlap(offset, shape, c.offsets, c.sizes) is not None]
        assert [c for c in meets if c not in found] == []
        assert len(found) == len({id(c) for c in found})


def test_scalars_and_vectors():
    assert list(ChunkIndex([chunk((), ())]).near((), ())) == [chunk((), ())]
    ones = [chunk((i,), (1,)) for i in range(5)]
    assert list(ChunkIndex(ones).near((2,), (2,))) == ones[2:4]
    assert misplaced("x", (), [chunk((), ())]) == []
    assert misplaced("x", (0, 3), [chunk((0, 0), (0, 3))]) == []


def test_what_does_not_fit_is_named():
    whole = stacked(2, 2)
    assert misplaced("w", (2, 2, 8, 3), whole) == []
    (missing,) = misplaced("w", (2, 2, 8, 3), whole[1:])
    assert missing == "w: 84 of 96 elements are there"
    (overlapping,) = misplaced("w", (2, 2, 8, 3), [*whole[1:], chunk((0, 0, 3, 0), (1, 1, 4, 3))])
    assert overlapping == "w: (1, 1, 4, 3) at (0, 0, 4, 0) and (1, 1, 4, 3) at (0, 0, 3, 0) overlap"
    outside = misplaced("w", (2, 2, 8, 3), [*whole[:-1], chunk((1, 2, 4, 0), (1, 1, 4, 3))])
    assert outside == ["w: (1, 1, 4, 3) at (1, 2, 4, 0) reaches out of (2, 2, 8, 3)"]


def test_many_experts_take_no_minutes():
    """24 thousand blocks: all against all are 300 million comparisons."""
    chunks = stacked(94, 128)
    start = time.process_time()
    assert misplaced("w", (94, 128, 8, 3), chunks) == []
    index = ChunkIndex(chunks)
    for one in chunks[::2]:
        assert sum(1 for _ in index.near(one.offsets, one.sizes)) == 2
    assert time.process_time() - start < 10
