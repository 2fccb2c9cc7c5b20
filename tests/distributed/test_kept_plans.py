"""Ranks that keep their plan: only a rank whose blocks change sends them again."""

from __future__ import annotations

import torch

from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.plans import Plans
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.mesh import MeshSizes, ParallelState
from tests.distpool import run_ranks


def tensors_of(rank, iteration):
    half = torch.full((2, 3), 10.0 * rank + iteration)
    tensors = {
        "split": Sharded((4, 3), [Piece(half, (2 * rank, 0))]),
        "replica": whole(torch.full((2,), float(iteration))),
    }
    if iteration == 3 and rank == 1:
        tensors["late"] = whole(torch.ones(5))
    return tensors


def save_three_times(rank, world, root):
    peers = Peers(ParallelState.build(MeshSizes(world=world), rank, world).world)
    plans, asked, found = Plans(peers), [], []
    describe = plans._describe
    plans._describe = lambda *args: (asked.append(iteration), describe(*args))[1]
    for iteration in (1, 2, 3):
        tensors = tensors_of(rank, iteration)
        saving = io.Saving(root, iteration, tensors, {"b": b"raw"}, peers, plans=plans)
        saving.write()
        reader = io.open_checkpoint(saving.finish().directory, peers)
        found.append({key: reader.read(key).tolist() for key in reader.tensors})
    return asked, found


def test_only_a_rank_with_news_sends_them(tmp_path):
    expected = [
        {"split": [[float(i)] * 3] * 2 + [[10.0 + i] * 3] * 2, "replica": [float(i)] * 2}
        for i in (1, 2, 3)
    ]
    expected[2]["late"] = [1.0] * 5
    for rank, (asked, found) in enumerate(run_ranks(save_three_times, 2, tmp_path)):
        assert asked == ([1], [1, 3])[rank]
        assert found == expected
