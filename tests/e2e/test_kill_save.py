"""SIGKILL at random moments of a process that does nothing but save."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, storage
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.mesh import Axis, MeshSizes, ParallelState
from tests.distpool import RankError, run_ranks

PEERS = Peers(Axis.single("world"))


def state(iteration):
    value = float(iteration)
    pieces = [Piece(torch.full((64, 512), value), (64 * i, 0)) for i in range(8)]
    return {"big": Sharded((512, 512), pieces), "step": whole(torch.tensor(value))}


def save_until_killed(root, first, same):
    """Save on and on; report each iteration whose save has returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        iteration = first
        while True:
            tensors = state(iteration if not same else first + (iteration - first) / 1000)
            io.save(root, first if same else iteration, tensors, {"x": b"y"}, PEERS)
            os.write(writer, f"{iteration}\n".encode())
            iteration += 1
    os.close(writer)
    return child, reader


def kill_after(child, reader, seconds):
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as lines:
        return [int(line) for line in lines.read().splitlines()]


@pytest.mark.parametrize("same", [False, True], ids=["next iteration", "same iteration"])
def test_twenty_kills_lose_nothing(tmp_path, same):
    rng = random.Random(0)
    io.save(tmp_path, 1, state(1), {"x": b"y"}, PEERS)
    newest = 1
    interrupted = 0
    for round_number in range(20):
        first = newest + 1
        child, reader = save_until_killed(tmp_path, first, same)
        returned = kill_after(child, reader, rng.uniform(0.002, 0.05))
        leftovers = [n for n in os.listdir(tmp_path) if n.endswith((".tmp", ".old"))]
        interrupted += bool(leftovers)
        found = place.find(tmp_path)
        opened = io.open_checkpoint(found.directory, PEERS)
        stored = opened.read("step").item()
        assert (opened.read("big") == stored).all(), round_number
        assert found.notes == (), round_number
        if same:
            assert found.iteration in (newest, first)
            if returned:
                assert found.iteration == first
                assert stored >= first + (returned[-1] - first) / 1000 - 1e-3
        else:
            assert stored == found.iteration
            assert found.iteration >= max([newest, *returned])
            kept = [i for i, _ in place.committed(tmp_path)]
            assert set(kept) >= {newest, *returned}
        newest = found.iteration
    assert interrupted >= 3  # the kills did hit saves


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
        run_ranks(_save_and_die, 2, tmp_path, timeout=40)
    assert time.monotonic() - start < 20
    found = place.find(tmp_path)
    assert found.iteration == 1
    assert io.open_checkpoint(found.directory, PEERS).read("t0").sum() == 1000
