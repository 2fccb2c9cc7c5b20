"""Which checkpoints are removed, and which never."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, retention
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.retention import Retention, drop_newer
from megatron.core.dist_checkpointing.shard import whole
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis

PEERS = Peers(Axis.single("world"))


def save(root, iteration, keep=None):
    care = io.Care(retention=keep)
    tensors = {"w": whole(torch.full((100,), float(iteration)))}
    return io.save(root, iteration, tensors, {}, PEERS, care=care)


def kept(root):
    return [iteration for iteration, _ in place.committed(root)]


def test_the_last_ones_and_every_so_many(tmp_path):
    keep = Retention(tmp_path, 2, 4)
    for iteration in range(1, 10):
        save(tmp_path, iteration, keep)
    assert kept(tmp_path) == [4, 8, 9]
    assert not list(tmp_path.glob("*.del"))
    assert io.open_checkpoint(place.find(tmp_path).directory, PEERS).read("w")[0] == 9


def test_what_is_never_removed(tmp_path):
    for iteration in (1, 2, 3, 4, 5, 6, 9):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000002" / "notes.txt").write_text("mine")
    (tmp_path / "iter_0000003" / place.MANIFEST_FILE).unlink()  # not written by a save
    (tmp_path / "other").mkdir()
    (tmp_path / place.TRACKER_FILE).write_text("6")  # 9 is of a run that was given up
    keep = Retention(tmp_path, 1)
    keep.protected = {tmp_path / "iter_0000004"}
    keep.apply()
    assert kept(tmp_path) == [2, 3, 4, 6, 9]
    assert (tmp_path / "other").is_dir()
    (tmp_path / place.TRACKER_FILE).unlink()
    keep.protected.clear()
    keep.apply()
    assert kept(tmp_path) == [2, 3, 4, 6, 9]


def test_a_link_to_a_folder_is_a_foreign_file(tmp_path):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    (tmp_path / "mine").mkdir()
    (tmp_path / "iter_0000001" / "link").symlink_to(tmp_path / "mine")
    Retention(tmp_path, 1).apply()
    assert kept(tmp_path) == [1, 2]


def test_the_last_sound_one_stays(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    next((tmp_path / "iter_0000003").glob("*.distcp")).write_bytes(b"x")
    Retention(tmp_path, 1).apply()
    assert kept(tmp_path) == [2, 3]


def test_room_is_made_as_long_as_one_stays(tmp_path, monkeypatch):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    space = {"free": 0}
    monkeypatch.setattr(
        place.shutil, "disk_usage", lambda _: type("Usage", (), {"free": space["free"]})
    )
    with pytest.raises(CheckpointError, match="only 0 are free"):
        save(tmp_path, 4, Retention(tmp_path, 2))
    assert kept(tmp_path) == [3]
    with pytest.raises(CheckpointError, match="only 0 are free"):
        save(tmp_path, 4, Retention(tmp_path, 1))
    assert kept(tmp_path) == [3]

    def remove(directory):
        space["free"] = 1 << 40
        shutil.rmtree(directory)

    monkeypatch.undo()
    save(tmp_path, 4)
    monkeypatch.setattr(
        place.shutil, "disk_usage", lambda _: type("Usage", (), {"free": space["free"]})
    )
    monkeypatch.setattr(retention, "remove", remove)
    save(tmp_path, 5, Retention(tmp_path, 2))
    assert kept(tmp_path) == [4, 5]


def test_a_crash_while_one_is_removed(tmp_path, monkeypatch):
    for iteration in (1, 2):
        save(tmp_path, iteration)

    def crash(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(retention.shutil, "rmtree", crash)
    saved = save(tmp_path, 3, Retention(tmp_path, 1))
    assert "--keep-last" in saved.warning
    monkeypatch.undo()
    assert kept(tmp_path) == [2, 3]
    assert [p.name for p in tmp_path.glob("*.del")] == ["iter_0000001.del"]
    save(tmp_path, 4)
    assert not list(tmp_path.glob("*.del"))


def test_newer_ones_of_a_run_that_was_given_up(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    drop_newer(tmp_path, 2)
    assert kept(tmp_path) == [1, 2]
