"""Two jobs and one save directory."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from megatron.core.dist_checkpointing import lock as locks
from megatron.core.dist_checkpointing.lock import LOCK_FILE, Job, take
from megatron.core.errors import CheckpointError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(locks, "TOUCH_S", 0.02)
    monkeypatch.setattr(locks, "STALE_S", 0.3)
    monkeypatch.setattr(locks, "_LOOK_S", 0.01)


def holder_of(root):
    return json.loads((root / LOCK_FILE).read_text())


def child_with_lock(root):
    """A process that holds the lock until it is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        take(root)
        os.write(writer, b"x")
        time.sleep(600)
        os._exit(0)
    assert os.read(reader, 1) == b"x"
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_living_job_keeps_the_directory_and_a_killed_one_does_not(tmp_path):
    child = child_with_lock(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=f"process {child} on .*remove .*lock"):
            take(tmp_path)
    finally:
        kill(child)
    lock = take(tmp_path)  # at once
    lock.confirm()
    lock.release()
    assert os.listdir(tmp_path) == []


def elsewhere(root, **more):
    """Make the lock one of another machine."""
    (root / LOCK_FILE).write_text(json.dumps({**holder_of(root), "host": "other", **more}))


def test_on_another_machine_the_file_tells(tmp_path, monkeypatch):
    child = child_with_lock(tmp_path)
    try:
        elsewhere(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(locks, "STALE_S", 60.0)  # the next touch ends the wait
            with pytest.raises(CheckpointError, match="on other"):
                take(tmp_path)
    finally:
        kill(child)
    os.utime(tmp_path / LOCK_FILE, (time.time() + 60,) * 2)  # touched right now at the latest
    start = time.monotonic()
    take(tmp_path).release()  # nobody touches it any more
    assert time.monotonic() - start >= 0.3


def test_the_same_job_restarted_need_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "STALE_S", 60.0)
    before = take(tmp_path, Job("77", 0))
    elsewhere(tmp_path)
    now = take(tmp_path, Job("77", 1))
    with pytest.raises(CheckpointError, match="taken it over: process .*, job 77"):
        before.confirm()
    before.release()
    now.confirm()
    now.release()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_was_removed_or_spoilt(tmp_path):
    lock = take(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    lock.confirm()
    assert holder_of(tmp_path)["process"] == os.getpid()
    lock.release()
    (tmp_path / LOCK_FILE).write_text("{")
    take(tmp_path).release()
