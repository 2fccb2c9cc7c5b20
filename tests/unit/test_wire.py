"""Ranks on paper, and the log of what is sent between ranks."""

from __future__ import annotations

import pytest
import torch

from megatron.core import wire
from megatron.core.comm_log import AMAX, KINDS, PARTS, CommLog, Packing, Transfer
from megatron.core.mesh import Axis, MeshSizes, PaperGroup, ParallelState
from megatron.core.tensor_parallel import mappings


def paper(size=4, log=None):
    return Axis("tp", size, 1, tuple(range(size)), PaperGroup(), log)


def noted(log):
    return {(t.kind, t.payload_bytes, t.sent_bytes): n for t, n in log.counts.items()}


def test_a_ring_of_four_sends():
    sent = {kind: Transfer(kind, "tp", 4, 400).sent_bytes for kind in KINDS}
    assert sent == {
        "all_reduce": 600,
        "all_gather": 300,
        "reduce_scatter": 300,
        "all_to_all": 300,
        "broadcast": 300,
        "send": 400,
        "recv": 0,
    }


def test_every_function_notes_what_it_would_move():
    log = CommLog()
    axis, x = paper(log=log), torch.ones(8, 2)
    mappings.all_reduce_(x, axis)
    mappings.all_gather(x, axis)
    mappings.reduce_scatter(x, axis)
    mappings.broadcast(x, axis)
    mappings.start_all_reduce(x, axis).wait()
    wire.all_to_all(torch.empty_like(x), x, axis)
    wire.exchange(x, torch.empty_like(x), axis, 2, 0)
    assert wire.send(x, axis, 2).is_completed()
    wire.receive(x, axis, 0).wait()
    assert noted(log) == {
        ("all_reduce", 64, 96): 2,
        ("all_gather", 256, 192): 1,
        ("reduce_scatter", 64, 48): 1,
        ("broadcast", 64, 48): 1,
        ("all_to_all", 64, 48): 1,
        ("send", 64, 64): 2,
        ("recv", 64, 0): 2,
    }
    assert torch.equal(x, torch.ones(8, 2))


def test_packed_lines_are_known_by_what_they_stand_for():
    log = CommLog()
    axis = paper(log=log).packed(Packing(sent=33, scales=1, plain=64))
    wire.all_to_all(torch.empty(0), torch.empty(8, 33, dtype=torch.uint8), axis)
    mappings.all_reduce_(torch.ones(1), paper(log=log), "max", AMAX)
    packed, agreed = log.counts
    assert (packed.sent_bytes, packed.plain_bytes, packed.spent_bytes) == (198, 384, 6)
    assert (agreed.sent_bytes, agreed.plain_bytes, agreed.spent_bytes) == (6, 0, 6)
    silent = paper()
    assert silent.packed(Packing(1, 0, 2)) is silent


def test_fp8_counts_one_byte_an_element():
    log = CommLog()
    mappings.all_gather(torch.zeros(8, 2, dtype=torch.float8_e4m3fn), paper(log=log))
    assert noted(log) == {("all_gather", 64, 48): 1}


def test_part_and_place_keep_transfers_apart():
    place = ["0F1"]
    log = CommLog(lambda: place[0])
    axis, x = paper(log=log), torch.ones(4)
    mappings.all_reduce_(x, axis)
    mappings.all_reduce_(x, axis, part="loss")
    place[0] = "0B1"
    mappings.all_reduce_(x, axis)
    assert sorted((t.part, t.place, n) for t, n in log.counts.items()) == [
        ("", "0B1", 1),
        ("", "0F1", 1),
        ("loss", "0F1", 1),
    ]
    assert "loss" in PARTS
    log.clear()
    assert not log.counts


def test_nothing_is_noted_without_a_log_or_without_other_ranks():
    log = CommLog()
    mappings.all_reduce_(torch.ones(4), paper())
    mappings.all_reduce_(torch.ones(4), ParallelState.single().recording(log).tp)
    assert not log.counts


def test_ranks_on_paper_answer_like_this_one():
    assert wire.gather_objects("x", paper()) == ["x"] * 4
    assert wire.broadcast_object("x", paper()) == "x"


@pytest.mark.parametrize("rank", [0, 5, 4095])
def test_a_large_mesh_on_paper(rank):
    sizes = MeshSizes(4096, tp=8, pp=16)
    log = CommLog()
    mesh = ParallelState.build(sizes, rank, 4096, lambda ranks: PaperGroup()).recording(log)
    assert (mesh.tp.size, mesh.pp.size, mesh.dp.size, mesh.rank) == (8, 16, 32, rank)
    for axis in (mesh.tp, mesh.pp, mesh.dp, mesh.world, mesh.embedding, mesh.pipe_forward):
        assert axis.log is log
        assert axis.ranks[axis.rank] == rank or axis.size == 1
    assert mesh == ParallelState.build(sizes, rank, 4096, lambda ranks: PaperGroup())
