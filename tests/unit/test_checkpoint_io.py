from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, storage
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Piece, Sharded, merge, stack, whole
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis

PEERS = Peers(Axis.single("world"))


def state(value: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(4, 3, generator=generator) * value for _ in range(3)]
    return {
        "embedding": whole(torch.randn(8, 3, generator=generator) * value, padded_dim=0),
        "layers.w": merge("layers.w", [stack(whole(t), i, 3) for i, t in enumerate(layers)]),
        "norm": whole(torch.full((3,), value, dtype=torch.bfloat16)),
        "step": whole(torch.tensor(value)),
    }


def save(root, iteration=1, value=1.0):
    return io.save(root, iteration, state(value), {"common": b"{}"}, PEERS).directory


def value_of(directory):
    return Reader(directory).read("step").item()


def load_latest(root):
    found = place.find(root)
    return io.open_checkpoint(found.directory, PEERS)


def test_round_trip_is_bitwise(tmp_path):
    saved = io.save(tmp_path, 7, state(), {"common": b"\x00raw"}, PEERS)
    assert saved.directory == tmp_path / "iter_0000007"
    assert saved.size_bytes > 0
    reader = load_latest(tmp_path)
    assert reader.read_blob("common") == b"\x00raw"
    for key, shard in state().items():
        stored = reader.read(key)
        assert stored.dtype == shard.dtype
        for piece in shard.pieces:
            where = tuple(
                slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True)
            )
            assert torch.equal(stored[where], piece.local), key
    assert torch.equal(reader.read_row("layers.w", 2), state()["layers.w"].pieces[2].local[0])


def test_files_of_a_checkpoint(tmp_path):
    directory = save(tmp_path, 12)
    assert json.loads((directory / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert sorted(os.listdir(directory)) == [
        ".metadata", "__0_0.distcp", "manifest.json", "metadata.json"
    ]  # fmt: skip


def test_torch_can_read_it(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    tensors = {k: v for k, v in state().items()}
    directory = io.save(tmp_path, 1, tensors, {}, PEERS).directory
    dcp_to_torch_save(directory, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(loaded["layers.w"][1], tensors["layers.w"].pieces[1].local[0])


def test_load_converts_dtype_in_place(tmp_path):
    save(tmp_path)
    target = torch.zeros(3, dtype=torch.float32)
    load_latest(tmp_path).load({"norm": whole(target)})
    assert target.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("rows", [5, 8, 11])
def test_vocabulary_padding_may_differ(tmp_path, rows):
    save(tmp_path)
    stored = load_latest(tmp_path).read("embedding")
    target = torch.full((rows, 3), 9.0)
    load_latest(tmp_path).load({"embedding": whole(target, padded_dim=0)})
    common = min(rows, 8)
    assert torch.equal(target[:common], stored[:common])
    assert (target[common:] == 0).all()


def test_a_rank_that_holds_only_padding_gets_zeros(tmp_path):
    save(tmp_path)
    target = torch.full((4, 3), 9.0)
    load_latest(tmp_path).load({"embedding": Sharded((16, 3), [Piece(target, (12, 0))], 0)})
    assert (target == 0).all()


@pytest.mark.parametrize("key", ["norm", "layers.w"])
def test_other_shapes_are_refused_by_name(tmp_path, key):
    save(tmp_path)
    reader = load_latest(tmp_path)
    shape = [n + 1 for n in reader.tensors[key].shape]
    with pytest.raises(CheckpointError, match=rf"{key} has shape .* the model needs"):
        reader.load({key: whole(torch.zeros(shape))})
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        reader.read("absent")


def test_resharding_columns_from_rows(tmp_path):
    full = torch.arange(24.0).view(6, 4)
    pieces = [Piece(full[:4], (0, 0)), Piece(full[4:], (4, 0))]
    io.save(tmp_path, 1, {"w": Sharded((6, 4), pieces)}, {}, PEERS)
    target = torch.zeros(6, 1)
    load_latest(tmp_path).load({"w": Sharded((6, 4), [Piece(target, (0, 2))])})
    assert torch.equal(target, full[:, 2:3])


def test_a_hole_in_the_stored_tensor_is_noticed(tmp_path, monkeypatch):
    half = Sharded((6, 4), [Piece(torch.ones(3, 4), (0, 0))])
    with pytest.raises(CheckpointError, match="w: 12 of 24 elements are there"):
        io.save(tmp_path, 1, {"w": half}, {}, PEERS)
    monkeypatch.setattr(storage, "misplaced", lambda *_: [])  # as another program wrote it
    io.save(tmp_path, 1, {"w": half}, {}, PEERS)
    with pytest.raises(CheckpointError, match="12 of the 24 elements"):
        load_latest(tmp_path).load({"w": whole(torch.zeros(6, 4))})


# ------------------------------------------------------------------ damage


def data_file(directory):
    return directory / "__0_0.distcp"


def test_a_truncated_file_is_named_with_the_previous_good_checkpoint(tmp_path):
    save(tmp_path, 1)
    directory = save(tmp_path, 2)
    content = data_file(directory).read_bytes()
    data_file(directory).write_bytes(content[:-1])
    with pytest.raises(CheckpointError) as failure:
        load_latest(tmp_path)
    text = str(failure.value)
    assert "__0_0.distcp" in text
    assert f"{len(content) - 1} bytes instead of {len(content)}" in text
    assert "iter_0000001 (iteration 1)" in text


def test_a_missing_file_is_named(tmp_path):
    directory = save(tmp_path)
    data_file(directory).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing.*no other complete"):
        load_latest(tmp_path)


def test_a_changed_byte_is_noticed(tmp_path):
    directory = save(tmp_path)
    content = bytearray(data_file(directory).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(directory).write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has the right size but other"):
        load_latest(tmp_path)


def test_without_a_manifest_truncation_is_still_named(tmp_path):
    directory = save(tmp_path)
    (directory / "manifest.json").unlink()
    content = data_file(directory).read_bytes()
    data_file(directory).write_bytes(content[:2000])
    reader = load_latest(tmp_path)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: it ends too early"):
        reader.load({key: whole(torch.zeros(e.shape)) for key, e in reader.tensors.items()})


class Payload:
    def __reduce__(self):
        return os.mkdir, (Payload.target,)


def test_an_index_that_would_run_code_is_refused(tmp_path):
    directory = save(tmp_path)
    Payload.target = str(tmp_path / "ran")
    (directory / ".metadata").write_bytes(pickle.dumps(Payload()))
    (directory / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="refused, because it asks for posix.mkdir"):
        load_latest(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_garbage_index(tmp_path):
    directory = save(tmp_path)
    (directory / "manifest.json").unlink()
    for garbage in (b"", b"\x80\x04", b"hello", pickle.dumps({"a": 1})):
        (directory / ".metadata").write_bytes(garbage)
        with pytest.raises(CheckpointError, match=r"\.metadata: it is not a checkpoint index"):
            load_latest(tmp_path)


# ------------------------------------------------------------------ which checkpoint


def test_no_tracker_means_no_checkpoint(tmp_path):
    assert place.find(tmp_path) is None
    assert place.find(tmp_path / "absent") is None


def test_a_checkpoint_directory_may_be_named_itself(tmp_path):
    first = save(tmp_path, 1)
    save(tmp_path, 2)
    assert place.find(first).iteration == 1
    assert place.find(tmp_path).iteration == 2
    assert place.find(tmp_path, step=1).directory == first


def test_an_absent_step_lists_the_others(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"--ckpt-step: got 3\..*\(1, 2\)"):
        place.find(tmp_path, step=3)


def test_a_directory_that_was_never_finished_is_refused_when_named(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "iter_0000002").mkdir()
    with pytest.raises(CheckpointError, match="never completely written.*iter_0000001"):
        place.find(tmp_path / "iter_0000002")
    with pytest.raises(CheckpointError, match="no such directory"):
        place.find(tmp_path / "iter_0000009")


@pytest.mark.parametrize("content", ["", "garbage", "3"])
def test_a_useless_tracker_falls_back_to_the_newest_complete_checkpoint(tmp_path, content):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "iter_0000003").mkdir()  # no metadata.json: never completely written
    (tmp_path / place.TRACKER_FILE).write_text(content)
    found = place.find(tmp_path)
    assert found.iteration == 2
    assert "WARNING" in found.notes[0]
    assert "iteration 2" in found.notes[0]


def test_a_useless_tracker_without_any_checkpoint_is_an_error(tmp_path):
    (tmp_path / place.TRACKER_FILE).write_text("5")
    with pytest.raises(CheckpointError, match="never completely written"):
        place.find(tmp_path)


def test_release(tmp_path):
    directory = save(tmp_path, "release")
    assert directory.name == "release"
    assert (tmp_path / place.TRACKER_FILE).read_text() == "release"
    assert place.find(tmp_path).iteration == "release"


# ------------------------------------------------------------------ saving over and around others


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 5, value=1.0)
    directory = save(tmp_path, 5, value=2.0)
    assert value_of(directory) == 2.0
    assert sorted(os.listdir(tmp_path)) == ["iter_0000005", place.TRACKER_FILE]


def test_leftovers_of_crashed_saves_are_removed_by_the_next_one(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "iter_0000002.tmp").mkdir()
    (tmp_path / "iter_0000002.tmp" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes.tmp").mkdir()  # not ours
    save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == [
        "iter_0000001", "iter_0000003", place.TRACKER_FILE, "notes.tmp"
    ]  # fmt: skip


def save_in_child_that_dies(number, *args, **kwargs):
    """Save in a forked process that dies at its `number`-th change of the file system.

    Returns:
        Whether the save finished before that.
    """
    child = os.fork()
    if child == 0:
        calls = [0]

        def guard(module, name):
            real = getattr(module, name)

            def wrapped(*arguments, **keywords):
                calls[0] += 1
                if calls[0] == number:
                    os._exit(1)
                return real(*arguments, **keywords)

            setattr(module, name, wrapped)

        for name in ("rename", "replace", "fsync", "unlink", "mkdir"):
            guard(os, name)
        guard(shutil, "rmtree")
        save(*args, **kwargs)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("iteration", [5, 6])  # over the latest one, and beside it
def test_a_crash_at_any_file_operation_leaves_a_good_latest_checkpoint(tmp_path, iteration):
    number, finished = 0, False
    while not finished:
        number += 1
        root = tmp_path / str(number)
        save(root, 5, value=1.0)
        finished = save_in_child_that_dies(number, root, iteration, value=2.0)
        found = place.find(root)
        assert found.notes == (), number  # the tracker was never empty or wrong
        stored = io.open_checkpoint(found.directory, PEERS).read("step").item()
        if iteration == 6:
            assert stored == (1.0 if found.iteration == 5 else 2.0), number
        assert stored == 2.0 or not finished
        assert stored in (1.0, 2.0)
        assert value_of(save(root, 7, value=3.0)) == 3.0  # and the next save works
        assert not [n for n in os.listdir(root) if n.endswith((".tmp", ".old"))], number
        assert value_of(root / "iter_0000005") in (1.0, 2.0)
    assert number > 10  # the steps that were meant to be interrupted were


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"--save: got .*file/ckpt\. It cannot be written"):
        save(tmp_path / "file" / "ckpt")


def test_too_little_space_is_known_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes and only 9 are free"):
        save(tmp_path, 2)
    assert place.find(tmp_path).iteration == 1


def test_disk_full_while_writing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    from megatron.core.dist_checkpointing import storage

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage._ChecksumStream, "write", full)
    with pytest.raises(CheckpointError, match="No space left on device.*Earlier checkpoints"):
        save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", place.TRACKER_FILE]
