"""Saving behind the run's back: the same files, complete later, and every way in which it ends."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch

from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.dist_checkpointing.writing import ShareWriter
from megatron.training.checkpoint_config import read_common
from megatron.training.step import TrainStep
from tests.e2e.launch import launch
from tests.e2e.refusals import LONG, MOCK, accepted, changed, refused

SHARDED = ["--bf16", "--fp8-format", "hybrid", "--use-distributed-optimizer"]
TRACKER = "latest_checkpointed_iteration.txt"


def writers_wait(monkeypatch, wait):
    """Make the writers of later launches call a function before they write."""
    write = ShareWriter._write

    def late(self):
        wait()
        return write(self)

    monkeypatch.setattr(ShareWriter, "_write", late)


def before_the_fifth_iteration(monkeypatch, act):
    run = TrainStep.run

    def acted(self, iteration, consumed_samples):
        if iteration == 5:
            act()
        return run(self, iteration, consumed_samples)

    monkeypatch.setattr(TrainStep, "run", acted)


def content(directory):
    reader = Reader(directory)
    common = read_common(reader)
    plain = {k: common[k] for k in ("iteration", "progress", "opt_param_scheduler", "fp8")}
    random_state = {k: reader.read_blob(k) for k in reader.blobs if k.startswith("rng_state")}
    return {key: reader.read(key) for key in reader.tensors}, plain, random_state


def test_what_is_written_is_the_state_of_the_moment(tmp_path, monkeypatch):
    args = [*changed(MOCK, "--train-iters", 8, "--lr-decay-iters", 8), *SHARDED]
    args += ["--save-interval", "3", "--keep-last", "2", "--keep-every", "3"]
    accepted([*args, "--save", tmp_path / "sync"])
    # Nothing is written before the weights are others.
    later = threading.Event()
    before_the_fifth_iteration(monkeypatch, later.set)
    writers_wait(monkeypatch, lambda: later.wait(100))
    done = accepted([*args, "--save", tmp_path / "behind", "--async-save"])
    lines = done.out.splitlines()
    asked, saved, fourth = (
        next(i for i, line in enumerate(lines) if re.search(part, line))
        for part in ("scheduled an async .* iteration +3 ", "saved .* iteration +3 ", "n +4/")
    )
    assert asked < fourth < saved
    for name in ("iter_0000003", "iter_0000006", "iter_0000008"):
        (first, *plain), (second, *other) = (
            content(tmp_path / kind / name) for kind in ("sync", "behind")
        )
        assert plain == other
        assert set(first) == set(second)
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert sorted(os.listdir(tmp_path / "behind")) == sorted(os.listdir(tmp_path / "sync"))


@pytest.mark.parametrize("behind", [[], ["--async-save"]], ids=["sync", "async"])
def test_the_last_of_good_ones_is_enough(tmp_path, behind):
    args = [*changed(MOCK, "--train-iters", 6, "--lr-decay-iters", 6), "--save", tmp_path]
    done = accepted([*args, "--save-interval", "2", "--keep-last", "1", *behind])
    # Lines that people look for.
    for n in (2, 4, 6):
        begun = f"saving checkpoint at iteration {n:7d} to {tmp_path} in torch_dist format"
        saved = (
            f"successfully saved checkpoint from iteration {n:7d} to {tmp_path} [ t 1/1, p 1/1 ]"
        )
        assert (len(done.lines(begun)), len(done.lines(saved))) == (1, 1)
    assert {p.name for p in tmp_path.glob("iter_*")} == {"iter_0000006"}


def test_a_writer_that_fails_ends_the_run_on_all_ranks(tmp_path, monkeypatch):
    write = ShareWriter._write

    def full(self):
        if os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device")
        return write(self)

    monkeypatch.setattr(ShareWriter, "_write", full)
    args = [*MOCK, *LONG, "--save", tmp_path, "--save-interval", "2", "--async-save"]
    done = refused(args, 1, "--save: got", "No space left on device (rank 1)", "Earlier")
    assert len(done.lines("No space left on device (rank 1)")) == 1  # told once
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("seconds", "deadline"), [(0.4, 200), (3600.0, 3)], ids=["in time", "too late"]
)
def test_a_signal_while_a_checkpoint_is_written(seconds, deadline, tmp_path, monkeypatch):
    args = [*MOCK, "--save", tmp_path, "--save-interval", "4", "--async-save",
            "--exit-signal-handler", "--exit-signal-deadline", deadline]  # fmt: skip
    args = changed(args, "--lr-decay-iters", 100000)
    accepted(args)

    def interrupt():
        if os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGUSR2)

    more = changed(args, "--train-iters", 100000, "--load", tmp_path)
    with monkeypatch.context() as patch:
        before_the_fifth_iteration(patch, interrupt)
        writers_wait(patch, lambda: time.sleep(seconds))
        done = launch(2, [str(a) for a in more])  # does not wait for an hour
    assert done.codes == [0, 0], done.out
    assert done.lines("exiting program after receiving SIGUSR2.")
    last = int(re.findall(r"iteration +(\d+)/", done.out)[-1])
    tracked = int((tmp_path / TRACKER).read_text())
    if seconds < 1:
        assert tracked == last
    else:
        assert tracked == 2
        assert done.lines("the checkpoint of iteration 4 is given up")
        again = accepted(changed(more, "--train-iters", 3), "at iteration 2")
        assert len(again.losses()) == 1
