"""Checkpoints that cannot be read or written, and runs that go wrong: nothing is lost, no hang."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron.training.step import TrainStep
from tests.e2e.launch import launch, wait_for
from tests.e2e.refusals import (
    FP8,
    LONG,
    MOCK,
    PP2,
    TP2,
    accepted,
    changed,
    cut,
    file_size_limit,
    messages,
    overwrite,
    refused,
    snapshot,
)

# --------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def ckpt(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def resume(root, *more):
    args = changed(MOCK, "--train-iters", 4, "--lr-decay-iters", 4)
    return [*args, "--override-opt-param-scheduler", "--load", root, "--save", root, *more,
            "--save-interval", "1"]  # fmt: skip


def shard(root):
    return root / "iter_0000002" / "__0_0.distcp"


def test_checkpoints_of_another_model(saved):
    before = snapshot(saved)
    wider = changed(resume(saved), "--hidden-size", 64)
    refused(wider, 1, "--load: got", "--hidden-size is 32 in the checkpoint and 64 in this run")
    deeper = changed(resume(saved), "--num-layers", 3)
    refused(deeper, 1, "--load: got", "--num-layers is 2 in the checkpoint and 3 in this run")
    assert snapshot(saved) == before


DAMAGED = {
    "missing": (lambda r: shard(r).unlink(), "__0_0.distcp is missing"),
    "cut": (lambda r: cut(shard(r), 100), "bytes instead of"),
    "altered": (lambda r: overwrite(shard(r), 999, b"\x81"), "other content than was written"),
    "index": (
        lambda r: (r / "iter_0000002" / ".metadata").write_bytes(b"x"),
        ".metadata has 1 bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_checkpoint(damage, ckpt):
    break_it, says = DAMAGED[damage]
    break_it(ckpt)
    before = snapshot(ckpt)
    another = f"newest other complete checkpoint is {ckpt / 'iter_0000001'}"
    strict = [*resume(ckpt), "--no-ckpt-fallback"]
    refused(strict, 1, f"--load: got {ckpt / 'iter_0000002'}", says, another)
    assert snapshot(ckpt) == before
    if damage == "cut":
        named = changed(resume(ckpt), "--load", ckpt / "iter_0000002")
        refused(named, 1, f"--load: got {ckpt / 'iter_0000002'}", says)
        assert snapshot(ckpt) == before
    if damage == "index":
        (ckpt / "iter_0000001" / ".metadata").write_bytes(b"x")
        refused(resume(ckpt), 1, "--load: got", "None of its 2 checkpoints can be loaded")
    if damage == "altered":
        done = accepted(resume(ckpt), "iteration 2 is left out", says, "at iteration 1")
        assert len(done.losses()) == 3  # of 4 iterations
        assert "iteration 2 is left out" not in accepted(resume(ckpt), "nothing is left").out


@pytest.mark.parametrize("file", ["manifest.json", ".metadata"])
def test_damage_that_nothing_else_would_notice(file, ckpt):
    """Without the list of files, the readers themselves have to."""
    (ckpt / "iter_0000002" / "manifest.json").unlink()
    (ckpt / "iter_0000002" / file).write_bytes(b"junk")
    # Neither a model nor a size is given: the settings come from the checkpoint.
    for args in (resume(ckpt), ["--load", ckpt, "--device", "cpu"]):
        refused([*args, "--ckpt-step", "2"], 1, file)


def test_what_is_loaded_with_a_word(ckpt):
    (ckpt / "latest_checkpointed_iteration.txt").unlink()
    odd = (ckpt / "iter_0000002").rename(ckpt / "iter_0000009")
    (odd / "manifest.json").unlink()
    accepted(
        resume(ckpt),
        "latest_checkpointed_iteration.txt is missing. Loading the newest complete checkpoint",
        f"{odd} holds iteration 2, and that is what counts",
        f"{odd} has no manifest.json: its files were not checked",
    )


@pytest.mark.parametrize("text", ["", "77", "seven"])
def test_a_tracker_that_names_no_checkpoint(text, ckpt):
    (ckpt / "latest_checkpointed_iteration.txt").write_text(text)
    one_more = changed(resume(ckpt), "--train-iters", 3)
    done = accepted(one_more, "Falling back to the newest complete checkpoint, iteration 2")
    assert len(done.losses()) == 1
    for directory in ckpt.glob("iter_*"):
        shutil.rmtree(directory)
    (ckpt / "latest_checkpointed_iteration.txt").write_text(text)
    refused(resume(ckpt), 1, "--load: got", "There is no complete checkpoint to fall back to")


def test_nothing_to_load(tmp_path):
    load = ["--load", tmp_path / "nowhere"]
    accepted(
        [*MOCK, *load],
        f"WARNING: could not find the metadata file {tmp_path / 'nowhere'}",
        "will not load any checkpoints and will start from random",
    )
    refused(
        [*MOCK, *load, "--exit-on-missing-checkpoint"],
        1,
        "--exit-on-missing-checkpoint: got --load",
        "There is no checkpoint",
    )
    (tmp_path / "file").touch()
    refused([*MOCK, "--load", tmp_path / "file"], 1, "--load: got", "It is a file")


def test_a_run_that_is_finished_says_so(saved):
    before = snapshot(saved)
    accepted([*MOCK, "--load", saved, "--save", saved, "--save-interval", "1"], "nothing is left")
    assert snapshot(saved) == before


def test_another_schedule_than_the_checkpoints(saved):
    longer = changed(resume(saved), "--lr-decay-iters", 9)
    longer.remove("--override-opt-param-scheduler")
    refused(longer, 1, "got 36 samples. The checkpoint was trained with 8 samples", "Pass --over")


def test_an_iteration_that_was_not_saved(saved):
    refused([*resume(saved), "--ckpt-step", "9"], 1, "--ckpt-step: got 9", "(1, 2)")


@pytest.mark.parametrize("below", ["", "sub"])
def test_an_unwritable_save_directory_is_found_before_training(below, tmp_path):
    (tmp_path / "file").write_text("precious")
    save = tmp_path / "file" / below if below else tmp_path / "file"
    done = refused([*MOCK, "--save", save, "--save-interval", "1"], 1, f"--save: got {save}")
    assert not done.losses()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_warning_before_checkpoints_of_another_run_are_replaced(ckpt):
    accepted([*MOCK, "--save", ckpt, "--save-interval", "9"], "WARNING: --save:", "up to iteration")


def test_a_disk_that_is_full_during_a_save(ckpt):
    before = snapshot(ckpt)
    assert max(len(content) for content in before.values()) > 150_000
    with file_size_limit(100_000):
        refused(resume(ckpt), 1, "--save: got", "File too large", "Earlier checkpoints")
    assert snapshot(ckpt) == before
    accepted(resume(ckpt), "successfully loaded checkpoint")


# --------------------------------------------------------------------------- while it is running


@pytest.mark.parametrize(
    ("layout", "number"),
    [([], signal.SIGKILL), ([], signal.SIGTERM), (TP2, signal.SIGKILL), (PP2, signal.SIGKILL)],
    ids=["dp2", "dp2 SIGTERM", "tp2", "pp2"],
)
def test_a_rank_that_dies(layout, number):
    died = []

    def kill(pids, log):
        wait_for(log, "iteration        3/")
        os.kill(pids[1], number)
        died.append(pids[1])

    # It ends long before the time limit of a collective, ten minutes.
    done = launch(2, [*MOCK, *LONG, *layout], during=kill)
    (pid,) = died
    assert done.codes == [1, -number], done.out
    assert "Traceback" not in done.out
    (line,) = [m for m in messages(done.out) if "got no answer" in m]
    # The action is there unless the loss was noticed between two of them.
    where = r"\[rank 0 .*, iteration \d+(, \S+)?\]"
    assert re.match(rf"{where} rank 1 tp\d pp\d dp\d \(process {pid}\): got", line), line


def test_ctrl_c_leaves_without_a_traceback():
    def interrupt(pids, log):
        wait_for(log, "iteration        2/")
        # While they are stopped, so that none ends before all have got theirs.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            for pid in pids.values():
                os.kill(pid, number)

    done = launch(2, [*MOCK, *LONG], during=interrupt)
    # The second rank may find the first one gone before it gets its own signal.
    assert 130 in done.codes, done.out
    assert set(done.codes) <= {130, 1}, done.out
    assert "] interrupted" in done.out
    assert "Traceback" not in done.out, done.out


def poison(monkeypatch, iteration):
    """Make one weight NaN before an iteration, on all ranks."""
    run = TrainStep.run

    def poisoned(self, number, consumed_samples):
        if number == iteration:
            with torch.no_grad():
                next(self.parts.model.parameters()).view(-1)[5] = float("nan")
        return run(self, number, consumed_samples)

    monkeypatch.setattr(TrainStep, "run", poisoned)


@pytest.mark.parametrize(
    "more",
    [TP2, PP2, ["--fp16"], [*TP2, *FP8]],
    ids=["tp2", "pp2", "dp2 fp16", "tp2 fp8"],
)
def test_weights_that_are_no_numbers(more, tmp_path, monkeypatch):
    poison(monkeypatch, 3)
    args = [*MOCK, *LONG, *more]
    good = tmp_path / "iter_0000002"
    done = refused(
        [*args, "--save", tmp_path, "--save-interval", "1"],
        1,
        "iteration 5] loss: got nan or inf. Iterations 3 to 5 were not finite",
        f"Last good checkpoint: {good}",
    )
    assert len(done.lines("WARNING: no checkpoint at iteration")) == 2
    # A plain --load does not take up the broken weights.
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(p.name for p in tmp_path.glob("iter_*"))[-1] == good.name


def test_weights_that_are_no_numbers_without_a_checkpoint(monkeypatch):
    poison(monkeypatch, 1)
    refused([*MOCK, *LONG], 1, "Last good checkpoint: none", "Start again with")
