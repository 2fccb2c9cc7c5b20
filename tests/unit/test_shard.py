from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.shard import (
    Piece,
    Sharded,
    merge,
    overlap,
    stack,
    whole,
)
from megatron.core.errors import CheckpointError


def test_size_is_global_and_pieces_are_views():
    weight = torch.zeros(4, 3)
    shard = Sharded((8, 3), [Piece(weight[:2], (0, 0)), Piece(weight[2:], (4, 0))])
    assert tuple(shard.size()) == (8, 3)
    assert shard.dtype == torch.float32
    shard.pieces[1].local.fill_(1)
    assert weight.tolist() == [[0, 0, 0]] * 2 + [[1, 1, 1]] * 2


def test_writing_through_a_piece_bumps_the_version_of_the_parameter():
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    before = weight._version
    with torch.no_grad():
        whole(weight).pieces[0].local.copy_(torch.ones(4, 3))
    assert weight._version > before


def test_write_items_carry_global_shape_and_offset():
    shard = Sharded((8, 3), [Piece(torch.zeros(2, 3), (4, 0))])
    (item,) = shard.__create_write_items__("w", shard)
    assert (tuple(item.index.offset), tuple(item.tensor_data.size)) == ((4, 0), (8, 3))
    assert tuple(item.tensor_data.chunk.sizes) == (2, 3)


@pytest.mark.parametrize(
    ("shape", "block", "offset"),
    [
        ((4, 3), (4, 3), (1, 0)),  # past the end
        ((4, 3), (4, 3), (-1, 0)),
        ((4, 3), (4,), (0,)),  # another number of axes
        ((4, 3), (4, 3), (0,)),
    ],
)
def test_blocks_outside_are_refused(shape, block, offset):
    with pytest.raises(CheckpointError, match="does not fit"):
        Sharded(shape, [Piece(torch.zeros(block), offset)])


def test_mixed_dtypes_and_no_blocks_are_refused():
    with pytest.raises(CheckpointError, match="different dtypes"):
        Sharded((2,), [Piece(torch.zeros(1), (0,)), Piece(torch.zeros(1).half(), (1,))])
    with pytest.raises(CheckpointError, match="at least one"):
        Sharded((2,), [])


def test_computing_with_a_description_is_refused():
    with pytest.raises(TypeError, match="holds no values"):
        torch.mul(whole(torch.ones(2)), 2)


def test_stacked_layers_share_a_key():
    layers = [torch.full((2, 3), float(i)) for i in range(3)]
    shards = [stack(whole(t, padded_dim=0), i, 3) for i, t in enumerate(layers)]
    stacked = merge("layers.w", shards)
    assert tuple(stacked.size()) == (3, 2, 3)
    assert [p.offset for p in stacked.pieces] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert stacked.padded_dim == 1


def test_layers_of_different_shapes_cannot_be_stacked():
    shards = [stack(whole(torch.zeros(n)), i, 2) for i, n in enumerate((2, 3))]
    with pytest.raises(CheckpointError, match=r"layers\.w: the layers have different shapes"):
        merge("layers.w", shards)


def boxes(dims):
    one = st.tuples(st.integers(0, 6), st.integers(0, 5))
    return st.lists(one, min_size=dims, max_size=dims)


@settings(max_examples=80)
@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))))
def test_overlap_agrees_with_counting_points(pair):
    def points(box):
        grid = torch.zeros([12] * len(box), dtype=torch.bool)
        grid[tuple(slice(o, o + n) for o, n in box)] = True
        return grid

    a, b = pair
    both = points(a) & points(b)
    found = overlap([o for o, _ in a], [n for _, n in a], [o for o, _ in b], [n for _, n in b])
    if found is None:
        assert not both.any()
    else:
        start, shape = found
        assert torch.equal(both, points(list(zip(start, shape, strict=True))))
