"""Checkpoints in an object store: the same ones, without directories and renames."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, lock, store, uploads
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.retention import Retention
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.dist_checkpointing.store import path_of
from megatron.core.dist_checkpointing.writing import HostBuffers
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis
from tests import object_store
from tests.object_store import FlatStore, ThrottledError

PEERS = Peers(Axis.single("world"))
SLOW_DOWN = ThrottledError("SlowDown")


@pytest.fixture
def root(tmp_path, monkeypatch):
    object_store.without_pauses(tmp_path, monkeypatch)
    yield path_of("flat://bucket/run")
    assert os.listdir(tmp_path) == ["stores"]  # nobody took a store's name for a folder's


def state(value):
    pieces = [Piece(torch.full((8, 64), float(value)), (8 * i, 0)) for i in range(4)]
    return {"big": Sharded((32, 64), pieces), "step": whole(torch.tensor(float(value)))}


def save(root, iteration=1, value=None, care=None, behind=False):
    tensors = state(iteration if value is None else value)
    assets = {"common.pt": b"c", "tokenizer/t.json": b"{}"}
    saving = io.Saving(root, iteration, tensors, {"x": b"y"}, PEERS, assets, care)
    if behind:
        saving.write_behind(HostBuffers())
    else:
        saving.write()
    return saving.finish().directory


def value_of(directory):
    reader = io.open_checkpoint(directory, PEERS)
    value = reader.read("step").item()
    assert (reader.read("big") == value).all()
    return value


def latest(root):
    return value_of(place.find(root).directory)


def objects(root):
    return sorted(path_of(str(root)).sizes())


# -- paths -----------------------------------------------------------------------------------------


def test_paths_keep_their_form(root):
    assert str(root / "a" / "b") == "flat://bucket/run/a/b"
    assert str((root / "a").parent.with_name("x")) == "flat://bucket/x"
    assert str((root / "a/b").relative_to(root)) == "a/b"
    assert (root / "a").name == "a"
    for other in (pickle.loads(pickle.dumps(root)), path_of(str(root)), root.resolve()):  # noqa: S301
        assert (type(other), other, str(other)) == (type(root), root, str(root))
    with pytest.raises(TypeError, match="flat://bucket/run is not in the file system"):
        os.makedirs(root)
    assert path_of("file:///tmp/x") == Path("/tmp/x")
    assert path_of("a/b") == Path("a/b")
    assert type(path_of("file:///tmp/x")) is type(path_of("a")) is type(Path("a"))


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///x", "a::s3://b/c", "s3://b/run*", "://x", "s3://:1"]
)
def test_what_is_no_place_is_refused(text):
    with pytest.raises(CheckpointError, match="Write it like s3://bucket/run"):
        path_of(text)


def test_a_protocol_without_its_package(tmp_path):
    with pytest.raises(CheckpointError, match=r"fsspec cannot reach it: .*s3fs.* pip install s3fs"):
        place.check_writable(path_of("s3://bucket/run"))
    with pytest.raises(CheckpointError, match="Protocol not known: nothing"):
        place.find(path_of("nothing://bucket/run"))


def test_reading_asks_for_no_more_than_it_must(root):
    (root / "a").write_bytes(bytes(range(100)))
    with (root / "a").open("rb") as file:
        assert (file.seek(90), file.read(4), file.read(), file.read()) == (
            90, bytes(range(90, 94)), bytes(range(94, 100)), b"",
        )  # fmt: skip
    parts, requests = store.Parts(), []
    FlatStore.asked = staticmethod(lambda what, key: requests.append((what, key)))
    for start in range(0, 90, 10):
        assert parts.read(root / "a", start, 10) == bytes(range(start, start + 10))
    assert parts.read(root / "a", 95, 10) == bytes(range(95, 100))
    assert requests.count(("get", "bucket/run/a")) == 3


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_the_same_files_as_on_a_disk(root, tmp_path, behind):
    care = io.Care(read_back=True)
    in_store = save(root, care=care, behind=behind)
    local = save(tmp_path / "stores" / "disk", care=care)
    assert str(in_store) == "flat://bucket/run/iter_0000001"
    names = {str(p.relative_to(local)) for p in local.rglob("*") if p.is_file()}
    assert set(in_store.sizes()) == names
    for name in names - {".metadata", place.MANIFEST_FILE}:  # they name the folder, and each save
        assert (in_store / name).read_bytes() == (local / name).read_bytes()
    assert objects(root) == sorted({f"iter_0000001/{n}" for n in names} | {place.TRACKER_FILE})
    assert latest(root) == 1.0
    assert place.verify(in_store) == []
    index = (in_store / ".metadata").read_bytes()
    assert b"StorePath" not in index  # readers that do not know this project can read it


def test_in_memory(monkeypatch):
    root = path_of("memory://bucket/run")
    for iteration in (1, 2, 2):
        save(root, iteration)
    assert latest(root) == 2.0
    assert [i for i, _ in place.committed(root)] == [1, 2]


def test_which_one_is_loaded(root):
    for iteration in (1, 2, 3):
        save(root, iteration)
    assert value_of(place.find(root, 1).directory) == 1.0
    assert place.find(root / "iter_0000002").named
    data = root / "iter_0000003" / "__0_0.distcp"
    changed = bytearray(data.read_bytes())
    changed[100] ^= 1
    data.write_bytes(bytes(changed))
    found = place.find(root)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has the right size but other content"):
        io.open_checkpoint(found.directory, PEERS)
    assert [value_of(one.directory) for one in place.older(found)] == [2.0, 1.0]
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing.*iteration 2"):
        io.open_checkpoint(found.directory, PEERS)
    (root / place.TRACKER_FILE).write_text("")
    assert place.find(root).notes[0].startswith("WARNING: flat://bucket/run/latest_")
    assert place.find(root / "other") is None


def test_a_checkpoint_of_ranks_files_is_refused(root):
    (root / "iter_0000001/mp_rank_00/model_optim_rng.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="Copy it to one"):
        io.open_checkpoint(root / "iter_0000001", PEERS)


def test_retention(root):
    keep = Retention(root, 2, 4)
    for iteration in range(1, 8):
        save(root, iteration, care=io.Care(retention=keep))
    assert [i for i, _ in place.committed(root)] == [4, 6, 7]
    assert {name.split("/")[0] for name in objects(root)} == {
        "iter_0000004", "iter_0000006", "iter_0000007", place.TRACKER_FILE,
    }  # fmt: skip
    (root / "iter_0000006" / "notes.txt").write_text("not of a save")
    save(root, 9, care=io.Care(retention=keep))
    save(root, 10, care=io.Care(retention=keep))
    assert [i for i, _ in place.committed(root)] == [4, 6, 9, 10]


# -- failures --------------------------------------------------------------------------------------


def afresh(root, name):
    """The same place in another store, whose listings are short."""
    object_store.install(FlatStore.home.parent / str(name))
    store._REACHED.clear()
    return root


class Failing:
    """Lets changes of the store fail: those of the numbers given, or all from one on."""

    def __init__(self, numbers=(), since=None, error=SLOW_DOWN):
        self.numbers, self.since, self.error, self.count = numbers, since, error, 0

    def __call__(self, what, key):
        self.count += 1
        if self.count in self.numbers or (self.since is not None and self.count >= self.since):
            raise self.error


def changes_of_a_save(root):
    counting = FlatStore.before = Failing()
    save(root, 9)
    FlatStore.before = Failing()
    return counting.count


def test_what_fails_for_a_moment_is_tried_again(root):
    total = changes_of_a_save(root / "first")
    assert total > 10
    for number in range(1, total + 1):
        FlatStore.before = Failing([number, number + 1])
        save(root / str(number), 9)
        FlatStore.before = Failing()
        assert latest(root / str(number)) == 9.0
        assert objects(root / str(number)) == objects(root / "first")


def test_what_fails_for_good_loses_nothing(root):
    total = changes_of_a_save(root / "first")
    for again in (5, 6):  # over the latest one, and beside it
        for number in range(1, total + 1):
            here = afresh(root, f"{again}-{number}")
            save(here, 5)
            FlatStore.before = Failing(since=number)
            try:
                save(here, again, value=9.0)
            except CheckpointError as error:
                assert "SlowDown" in str(error)  # noqa: PT017
            FlatStore.before = Failing()
            found = place.find(here)
            assert found.notes == ()
            assert value_of(found.directory) in (5.0, 9.0)
            assert value_of(save(here, 7)) == 7.0
            assert not [n for n in objects(here) if uploads.INCOMPLETE_FILE in n or ".old" in n]


def save_in_child_that_dies(number, *args, **kwargs):
    """Save in a forked process that dies before its `number`-th change of the store.

    Returns:
        Whether the save finished before that.
    """
    child = os.fork()
    if child == 0:
        left = [number]

        def count(what, key):
            left[0] -= 1
            if not left[0]:
                os._exit(1)

        FlatStore.before = staticmethod(count)
        save(*args, **kwargs)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("iteration", [5, 6])  # over the latest one, and beside it
def test_a_death_at_any_change_leaves_a_good_latest_checkpoint(root, iteration):
    number, finished = 0, False
    while not finished:
        number += 1
        here = afresh(root, number)
        keep = io.Care(retention=Retention(here, 1))
        save(here, 4)
        save(here, 5)
        finished = save_in_child_that_dies(number, here, iteration, value=9.0, care=keep)
        found = place.find(here)
        assert found.notes == (), number  # the tracker was never wrong
        stored = value_of(found.directory)
        if iteration == 6:
            assert stored == (5.0 if found.iteration == 5 else 9.0), number
        assert stored == 9.0 or not finished
        assert stored in (5.0, 9.0)
        for _, directory in place.committed(here):
            value_of(directory)  # whatever counts is complete
        assert value_of(save(here, 7)) == 7.0  # and the next save works
        assert not [n for n in objects(here) if uploads.INCOMPLETE_FILE in n or ".old" in n]
    assert number > 15  # the steps that were meant to be interrupted were


def test_what_no_save_wrote_is_left_alone(root):
    (root / "iter_0000003" / "__0_0.distcp").write_bytes(b"somebody copies a checkpoint here")
    (root / "notes.txt").write_text("x")
    save(root, 5)
    assert (root / "iter_0000003" / "__0_0.distcp").is_file()
    assert (root / "notes.txt").is_file()
    assert place.find(root).iteration == 5


def test_a_store_that_cannot_be_written_to(root):
    FlatStore.before = Failing(since=1, error=PermissionError("Access Denied"))
    with pytest.raises(CheckpointError, match=r"--save: got flat://.* \(Access Denied.*the bucket"):
        place.check_writable(root)
    assert FlatStore.before.count == 2  # its beginning and its end: rights do not come with time
    FlatStore.before = Failing(since=1)
    with pytest.raises(CheckpointError, match="ThrottledError: SlowDown"):
        place.check_writable(root)
    FlatStore.before = Failing()
    place.check_writable(root)
    assert objects(root) == []


def test_a_store_that_does_not_answer_is_not_an_empty_one(root):
    save(root, 1)
    FlatStore.asked = Failing(since=1)
    for question in (place.find, place.committed, uploads.clean, lock.take):
        with pytest.raises((OSError, CheckpointError), match="SlowDown"):
            question(root)
    with pytest.raises(OSError, match="SlowDown"):
        (root / "iter_0000001").sizes()
    FlatStore.asked = Failing([1, 2, 4, 5])  # what is asked again is answered
    assert latest(root) == 1.0
    FlatStore.asked = staticmethod(lambda what, key: None)


# -- the lock --------------------------------------------------------------------------------------


def test_two_jobs(root, monkeypatch):
    monkeypatch.setattr(lock, "TOUCH_S", 0.01)
    monkeypatch.setattr(lock, "STALE_S", 60.0)  # the next touch ends the wait
    monkeypatch.setattr(lock, "_LOOK_S", 0.02)
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "here")
    first = lock.take(root)
    care = io.Care(first)
    save(root, 1, care=care)
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(CheckpointError, match=r"Another job saves there: .* on here.*remove flat:"):
        lock.take(root)
    first._ended.set()  # its machine is gone
    first._thread.join()
    monkeypatch.setattr(lock, "STALE_S", 0.3)
    second = lock.take(root)
    with pytest.raises(CheckpointError, match="Another job has taken it over: .* on elsewhere"):
        save(root, 2, care=care)
    save(root, 2, care=io.Care(second))
    first.release()
    second.release()
    assert latest(root) == 2.0
    assert not (root / lock.LOCK_FILE).exists()


def test_two_jobs_at_the_same_moment(root, monkeypatch):
    other = path_of(str(root)) / lock.LOCK_FILE
    monkeypatch.setattr(lock.time, "sleep", lambda s: other.write_text('{"token": "theirs"}'))
    with pytest.raises(CheckpointError, match="Another job claimed it at the same moment"):
        lock.take(root)


def test_a_save_of_a_job_that_lost_the_lock_does_not_count(root):
    held = lock.take(root)
    saving = io.Saving(root, 1, state(1), {}, PEERS, care=io.Care(held))
    saving.write()
    (root / lock.LOCK_FILE).write_text('{"token": "theirs"}')
    with pytest.raises(CheckpointError, match="Another job has taken it over"):
        saving.finish()
    assert place.find(root) is None
    held.release()
    assert (root / "iter_0000001" / ".incomplete").exists()  # another job's are none to remove
