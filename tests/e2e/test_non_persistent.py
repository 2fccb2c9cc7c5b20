"""Checkpoints that the next one replaces, and which of all kinds a run continues from."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.refusals import FP8, MOCK, accepted, changed

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
SHARDED = ["--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce"]


@pytest.mark.parametrize(("kind", "layout"), [("local", TP2), ("global", SHARDED)])
def test_the_newest_of_all_kinds_is_loaded(tmp_path, kind, layout):
    save = ["--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", "2"]
    often = ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", kind]
    if kind == "local":
        often += ["--non-persistent-local-ckpt-dir", tmp_path / "node"]
    args = [*changed(MOCK, "--train-iters", 6, "--lr-decay-iters", 6), *FP8, *layout]
    straight = accepted(args)
    first = accepted([*args, *save, *often, "--exit-interval", "4", "--async-save"])
    shutil.rmtree(tmp_path / "ckpt" / "iter_0000004")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    root = tmp_path / "node" if kind == "local" else tmp_path / "ckpt" / "non_persistent"
    kept = {path.name for path in root.rglob("iter_*")}
    assert kept == ({"iter_0000003"} if kind == "global" else {"iter_0000001", "iter_0000003"})
    second = accepted([*args, *save, *often], f"from {root} at iteration 3")
    assert first.losses()[:3] + second.losses() == straight.losses()
    if layout == TP2:
        # One rank's share is gone: the newest that all have is another one.
        (own,) = root.glob("*/rank_00001")
        for path in own.glob("iter_*"):
            shutil.rmtree(path)
        (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
        third = accepted([*args, *save, *often], f"from {tmp_path / 'ckpt'} at iteration 2")
        assert third.losses() == straight.losses()[2:]
