"""SIGKILL at random moments of a process that does nothing but save."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, storage
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import whole
from megatron.core.mesh import MeshSizes, ParallelState
from tests.distpool import RankError, run_ranks
from tests.kills import PEERS, saves, state


@pytest.mark.parametrize(
    ("same", "behind", "keep"),
    [(False, False, 0), (True, False, 0), (False, True, 2)],
    ids=["next iteration", "same iteration", "async, keep two"],
)
def test_twenty_kills_lose_nothing(tmp_path, same, behind, keep):
    io.save(tmp_path, 1, state(1), {"x": b"y"}, PEERS)
    newest, interrupted = 1, 0
    for number, (first, returned, left) in enumerate(saves(tmp_path, 400, same, behind, keep)):
        if number >= 20 and interrupted >= 3:  # as a rule after twenty: the kills did hit saves
            break
        interrupted += bool(left)
        found = place.find(tmp_path)
        opened = io.open_checkpoint(found.directory, PEERS)
        stored = opened.read("step").item()
        assert (opened.read("big") == stored).all()
        assert found.notes == ()
        kept = [i for i, _ in place.committed(tmp_path)]
        if same:
            assert found.iteration in (newest, first)
            if returned:
                assert found.iteration == first
                assert stored >= first + (returned[-1] - first) / 1000 - 1e-3
        else:
            assert stored == found.iteration
            assert found.iteration >= max([newest, *returned])
            wanted = {newest, *returned, found.iteration}
            assert set(kept) >= (set(sorted(wanted)[-keep:]) if keep else wanted)
            assert not keep or len(kept) <= keep + 1
        newest = found.iteration
    assert interrupted >= 3


def _save_and_die(rank, world, root):
    mesh = ParallelState.build(MeshSizes(world=world), rank, world)
    peers = Peers(mesh.world)
    tensors = {f"t{i}": whole(torch.ones(1000)) for i in range(6)}
    io.save(root, 1, tensors, {}, peers)
    if rank == 1:

        def die(self, data):
            os.kill(os.getpid(), signal.SIGKILL)

        storage._ChecksumStream.write = die
    io.save(root, 2, tensors, {}, peers)


def test_a_killed_rank_does_not_leave_the_others_waiting(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(_save_and_die, 2, tmp_path)
    assert time.monotonic() - start < 120  # the time limit of a collective is longer
    found = place.find(tmp_path)
    assert found.iteration == 1
    assert io.open_checkpoint(found.directory, PEERS).read("t0").sum() == 1000
