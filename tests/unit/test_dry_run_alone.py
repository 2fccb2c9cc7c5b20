"""A dry run under a launcher: the first rank works alone, and fails without waiting for others."""

from __future__ import annotations

import pytest

import pretrain_gpt
from megatron.core.errors import DataError
from megatron.training import dry_run, failures

TINY = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
TINY += ["--seq-length", "8", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]


@pytest.mark.parametrize(("rank", "code"), [(0, 1), (1, 0)])
def test_only_the_first_rank_fails_and_at_once(rank, code, monkeypatch, capsys):
    def refuse(*_):
        raise DataError("this corpus is broken")

    def meet(*_):
        raise AssertionError("nobody else has this problem")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(dry_run, "dry_run", refuse)
    monkeypatch.setattr(failures, "_said_by_first_rank", meet)
    assert pretrain_gpt.main([*TINY, "--global-batch-size", "2", "--dry-run"]) == code
    shown = capsys.readouterr().err
    assert ("[rank 0] this corpus is broken" in shown) == (rank == 0)
