"""How sequences are cut for context-parallel ranks, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.datasets.batch import Batch, cut_window
from megatron.core.errors import MeshError
from megatron.core.mesh import Axis
from megatron.core.transformer.context_parallel import (
    ContextBlock,
    chunks_of,
    comm_type,
    context_attention,
    take_local,
    to_ranks,
    to_sequence,
)


def axis(rank, size):
    return Axis("cp", size, rank, tuple(range(size)), None)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_chunk_has_one_owner_and_every_owner_the_same_work(size):
    held = [chunks_of(rank, size) for rank in range(size)]
    assert sorted(chunk for pair in held for chunk in pair) == list(range(2 * size))
    assert {sum(pair) for pair in held} == {2 * size - 1}  # keys seen grow with the chunk's number


def test_rank_r_takes_chunks_r_and_2p_minus_1_minus_r():
    x = torch.arange(16)[None]
    assert take_local(x, axis(0, 2)).tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert take_local(x, axis(1, 2)).tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert take_local(x, Axis.single("cp")) is x


@pytest.mark.parametrize("size", [2, 4])
def test_laying_ranks_end_to_end_and_back(size):
    x = torch.randn(8 * size, 3)
    by_rank = torch.cat([take_local(x, axis(r, size), dim=0) for r in range(size)])
    assert torch.equal(to_sequence(by_rank, size), x)
    assert torch.equal(to_ranks(x, size), by_rank)


def test_a_batch_keeps_its_positions_and_the_whole_map_of_documents():
    window = torch.tensor([5, 0, 6, 7, 8, 0, 9, 1, 2])
    sample = cut_window(
        window, eod=0, pad=None, eod_mask_loss=True, reset_position_ids=True,
        reset_attention_mask=True,
    )  # fmt: skip
    batch = Batch.stack([sample])
    assert batch.document_starts.tolist() == [[0, 0, 2, 2, 2, 2, 6, 6]]
    part = batch.context_shard(axis(1, 2))
    assert part.tokens.tolist() == [[6, 7, 8, 0]]
    assert part.labels.tolist() == [[7, 8, 0, 9]]
    assert part.position_ids.tolist() == [[0, 1, 2, 3]]
    assert part.loss_mask.tolist() == [[1, 1, 1, 0]]
    assert part.document_starts is batch.document_starts
    assert batch.context_shard(Axis.single("cp")) is batch
    with pytest.raises(MeshError, match=r"got 8.*multiple of 6"):
        batch.context_shard(axis(0, 3))


def test_document_starts_come_only_when_asked_for():
    options = {"eod": 0, "pad": None, "eod_mask_loss": False}
    sample = cut_window(torch.tensor([1, 0, 2]), reset_position_ids=True, **options)
    assert "document_starts" not in sample
    assert Batch.stack([sample]).document_starts is None


def test_one_kind_of_communication_for_all_layers_or_one_each():
    assert comm_type(SimpleNamespace(cp_comm_type=("a2a",)), 7) == "a2a"
    assert comm_type(SimpleNamespace(cp_comm_type=("p2p", "all_gather")), 2) == "all_gather"


def test_shapes_that_cannot_be_chunks_are_refused():
    job = ContextBlock(axis(0, 2), 1.0)
    x = torch.zeros(3, 1, 2, 4)
    with pytest.raises(MeshError, match="two chunks of a sequence"):
        context_attention(x, x, x, job)
    x = torch.zeros(4, 1, 3, 4)
    with pytest.raises(MeshError, match=r"a2a with 3 key/value groups on 2 ranks"):
        context_attention(x, x, x, job, "a2a")


def test_masks_of_dropout_differ_between_blocks_and_repeat():
    job = ContextBlock(axis(0, 2), 1.0, dropout=0.1, seed=3)
    seeds = {job.block(q, k, 4).seed for q in range(4) for k in (0, 4, 8)}
    assert len(seeds) == 12
    assert job.block(2, 4, 4) == job.block(2, 4, 4)
