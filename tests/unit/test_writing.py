"""Copies in host memory, writing behind the caller's back, and reading back."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, writing
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.dist_checkpointing.writing import HostBuffers, ShareWriter
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis

PEERS = Peers(Axis.single("world"))


def test_the_copy_is_what_is_written_and_its_room_is_used_again(tmp_path):
    live = torch.arange(24.0).view(6, 4)
    scalar, half = torch.tensor(7.0), torch.ones(3, dtype=torch.bfloat16)
    tensors = {
        "w": Sharded((6, 4), [Piece(live[:2], (0, 0)), Piece(live[2:], (2, 0))]),
        "s": whole(scalar),
        "h": whole(half),
    }
    buffers, places = HostBuffers(), []
    for iteration in (1, 2):
        expected = live.clone()
        saving = io.Saving(tmp_path, iteration, tensors, {"b": b"raw"}, PEERS)
        saving.write_behind(buffers)
        live += 1  # the run goes on
        saved = saving.finish()
        reader = io.open_checkpoint(saved.directory, PEERS)
        assert torch.equal(reader.read("w"), expected)
        assert reader.read("s") == 7
        assert reader.read("h").dtype == torch.bfloat16
        assert reader.read_blob("b") == b"raw"
        places.append({room.data_ptr() for room in buffers._rooms.values()})
    assert places[0] == places[1]
    assert buffers.num_bytes == 24 * 4 + 4 + 3 * 2


def test_nothing_counts_before_the_end(tmp_path):
    saving = io.Saving(tmp_path, 1, {"w": whole(torch.ones(4))}, {}, PEERS)
    saving.write_behind(HostBuffers())
    assert saving.wait(10)
    assert saving.written
    assert place.find(tmp_path) is None
    assert place.committed(tmp_path) == []
    saving.finish()
    assert place.find(tmp_path).iteration == 1


def test_too_little_host_memory(tmp_path, monkeypatch):
    def none(room, live):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(writing, "_fitting", none)
    saving = io.Saving(tmp_path, 1, {"w": whole(torch.ones(4))}, {}, PEERS)
    with pytest.raises(CheckpointError, match="--async-save: got too little host memory"):
        saving.write_behind(HostBuffers())
    assert list(tmp_path.iterdir()) == []


def test_reading_back_finds_what_the_disk_changed(tmp_path, monkeypatch):
    care = io.Care(read_back=True)
    tensors = {"w": whole(torch.ones(1000))}
    assert io.save(tmp_path, 1, tensors, {}, PEERS, care=care).directory.is_dir()
    forget = writing._forget_cached

    def spoil(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        forget(path)

    monkeypatch.setattr(writing, "_forget_cached", spoil)
    with pytest.raises(CheckpointError, match="other content than was written"):
        io.save(tmp_path, 2, tensors, {}, PEERS, care=care)
    assert place.find(tmp_path).iteration == 1
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["iter_0000001", place.TRACKER_FILE]


def test_any_failure_of_a_writer_is_told(tmp_path, monkeypatch):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(ShareWriter, "_write", broken)
    with pytest.raises(CheckpointError, match="ZeroDivisionError.*rank 0"):
        io.save(tmp_path, 1, {"w": whole(torch.ones(4))}, {}, PEERS)
