"""Who is to blame: ranks that are gone, stopped, busy, or waiting for each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training import watch
from megatron.training.initialize import Process
from megatron.training.watch import Watch, doing

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, True)


@pytest.fixture
def other():
    """A process that does nothing, in the place of another rank."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watched(store):
    """Make the watch of a rank; the list is what it told."""
    made = []

    def make(rank, processes, **more):
        told = []
        one = Watch(rank, processes, lambda: f"rank {rank}, 0F1", told.append, store, **more)
        one.start()
        made.append(one)
        return one, told

    yield make
    for one in made:
        one.leave()


def two(other_pid=None):
    """Two ranks, the second one this process too unless it is given."""
    pids = (os.getpid(), other_pid or os.getpid())
    machine = Process.own().machine
    return [Process(machine, pid, f"rank {i} tp{i} pp0 dp0") for i, pid in enumerate(pids)]


def told_in_time(told):
    deadline = time.monotonic() + 100
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    return told


def test_a_process_that_ends_without_a_word_is_named_at_once(watched, other):
    one, told = watched(0, two(other.pid))
    other.kill()
    (text,) = told_in_time(told)
    assert text.startswith(f"rank 1 tp1 pp0 dp0 (process {other.pid}): got no answer. The process")
    one.blame("Connection closed")
    assert len(told) == 1  # this rank has said it


def test_one_that_has_left_is_not(watched, store, other):
    _, told = watched(0, two(other.pid))
    dist.PrefixStore("watch", store).set("left/1", "")
    other.kill()
    other.wait()
    time.sleep(0.2)
    assert told == []


def test_a_stopped_process_is_named(watched, other, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    monkeypatch.setattr(watch, "_ANSWER_S", 0.1)
    os.kill(other.pid, signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    one, told = watched(0, two(other.pid))
    one.blame("Timed out")
    assert f"(process {other.pid}): got no answer. Timed out. It does not react" in told[0]
    assert "is stopped, as by SIGSTOP" in told[0]


def test_one_that_leaves_with_its_own_message_is_no_frozen_one(watched, other, store, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    one, told = watched(0, two(other.pid))
    dist.PrefixStore("watch", store).set("left/1", "")
    one.blame("Connection closed")
    assert "The process has ended: Connection closed" in told[0]


def test_one_on_another_machine_that_is_silent_is_named(watched, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    monkeypatch.setattr(watch, "_ANSWER_S", 0.1)
    far = Process("node7 ns", 1, "rank 1 tp1 pp0 dp0")
    one, told = watched(0, [two()[0], far])
    one.blame("Connection reset")
    assert "It does not react at all: it is on node7." in told[0]


def test_a_rank_that_is_still_at_work_is_named_with_its_place(watched, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    watched(1, two())
    one, told = watched(0, two())
    one.blame("Timed out")
    assert told[0].startswith("rank 1 tp1 pp0 dp0 (process")
    assert "It is still at work: rank 1, 0F1, watch.py:" in told[0]


def test_ranks_that_wait_for_each_other(watched, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    monkeypatch.setattr(watch, "doing", lambda: {"waits": True, "line": "wire.py:1 in send"})
    watched(1, two())
    one, told = watched(0, two())
    one.blame("Timed out")
    assert "ranks: got no answer" in told[0]
    assert "All of them wait: rank 1, 0F1, wire.py:1 in send" in told[0]


def test_the_first_verdict_is_that_of_all_ranks(watched, store, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    dist.PrefixStore("watch", store).set("verdict", "rank 7 is to blame")
    other, _ = watched(1, two())
    one, told = watched(0, two())
    one.blame("Timed out")
    assert told == ["rank 7 is to blame"]


def test_without_a_store_it_still_says_what_it_knows(watched, monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    one, told = watched(0, two())

    def gone(*_):
        raise RuntimeError("no server")

    monkeypatch.setattr(one, "_store", type("Gone", (), dict.fromkeys(
        ("set", "get", "check", "compare_set"), gone
    ))())  # fmt: skip
    one.blame("Timed out")
    assert "rank 1 tp1 pp0 dp0" in told[0]


def test_what_a_process_is_doing():
    found = doing()
    assert found["waits"] is False  # the asking thread does not count
    assert found["line"].endswith("in doing")
