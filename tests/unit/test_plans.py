"""A plan is made once, made anew when blocks change, and keeps nothing of their values."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.plans import Plans
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.dist_checkpointing.storage import PlainPlanner
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis

PEERS = Peers(Axis.single("world"))


@pytest.fixture
def made(monkeypatch):
    """The global plans that were made."""
    found, make = [], PlainPlanner.create_global_plan

    def counted(self, plans):
        found.append(plans)
        return make(self, plans)

    monkeypatch.setattr(PlainPlanner, "create_global_plan", counted)
    return found


def state(value, rows=6):
    live = torch.full((rows, 4), float(value))
    return {
        "w": Sharded((rows, 4), [Piece(live[:2], (0, 0)), Piece(live[2:], (2, 0))]),
        "s": whole(torch.tensor(float(value))),
    }


def save(root, iteration, plans, tensors, blobs):
    saving = io.Saving(root, iteration, tensors, blobs, PEERS, plans=plans)
    saving.write()
    return io.open_checkpoint(saving.finish().directory, PEERS)


def test_blocks_that_stay_are_planned_once(tmp_path, made):
    plans = Plans(PEERS)
    for iteration in (1, 2, 3):
        reader = save(tmp_path, iteration, plans, state(iteration), {"b": b"x" * iteration})
        assert torch.equal(reader.read("w"), torch.full((6, 4), float(iteration)))
        assert reader.read("s") == iteration
        assert reader.read_blob("b") == b"x" * iteration
    assert len(made) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, blobs: tensors.update(state(2, rows=7)),
        lambda tensors, blobs: tensors.update(w=whole(torch.full((6, 4), 2.0))),
        lambda tensors, blobs: tensors.update(s=whole(torch.tensor(2, dtype=torch.int64))),
        lambda tensors, blobs: tensors.update(new=whole(torch.ones(3))),
        lambda tensors, blobs: tensors.pop("s"),
        lambda tensors, blobs: blobs.update(c=b"new"),
    ],
    ids=["shape", "boxes", "dtype", "one more", "one less", "blob"],
)
def test_blocks_that_change_are_planned_anew(tmp_path, made, change):
    plans = Plans(PEERS)
    save(tmp_path, 1, plans, state(1), {"b": b"raw"})
    tensors, blobs = state(2), {"b": b"raw"}
    change(tensors, blobs)
    reader = save(tmp_path, 2, plans, tensors, blobs)
    assert len(made) == 2
    assert set(reader.tensors) == set(tensors)
    assert set(reader.blobs) == set(blobs)
    for key, shard in tensors.items():
        blocks = [piece.values().reshape(-1) for piece in shard.pieces]
        assert torch.equal(reader.read(key).reshape(-1), torch.cat(blocks))


def test_values_are_not_kept(tmp_path):
    plans, tensors = Plans(PEERS), state(1)
    save(tmp_path, 1, plans, tensors, {})
    gone = [weakref.ref(shard) for shard in tensors.values()]
    tensors.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_plan_that_failed_is_not_taken_for_one(tmp_path):
    plans, half = Plans(PEERS), {"w": Sharded((6, 4), [Piece(torch.ones(2, 4), (0, 0))])}
    for _ in range(2):
        with pytest.raises(CheckpointError, match="do not fit together"):
            io.Saving(tmp_path, 1, half, {}, PEERS, plans=plans)
    save(tmp_path, 1, plans, state(1), {})


def test_the_commit_goes_on_in_the_background(tmp_path):
    saving = io.Saving(tmp_path, 1, state(1), {}, PEERS)
    saving.write_behind(None)
    saving.wait()
    assert not saving.handed_in
    saving.hand_in()
    saving.wait_for_commit()
    assert saving.committed
    assert place.find(tmp_path).iteration == 1  # before anybody asked for the result
    assert saving.finish().directory == tmp_path / "iter_0000001"


def test_a_commit_that_fails_in_the_background_is_told(tmp_path, monkeypatch):
    def full(tmp, records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, "commit", full)
    saving = io.Saving(tmp_path, 1, state(1), {}, PEERS)
    saving.write_behind(None)
    saving.wait()
    saving.hand_in()
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        saving.finish()
    assert list(tmp_path.iterdir()) == []
