"""Ranks that share scales are compared bit by bit, and a rank that differs is found."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from distpool import run_ranks

from megatron.core.comm_log import CommLog
from megatron.core.errors import PrecisionError
from megatron.core.fp8 import AmaxBook, DelayedScaling
from megatron.core.fp8.agreement import check_agreement
from megatron.core.mesh import Axis


def compare(rank, size, change=None):
    """What a rank hears after `change(book, rank)`, and how often ranks had to talk."""
    log = CommLog()
    axis = Axis("tp", size, rank, tuple(range(size)), dist.group.WORLD, log)
    book = AmaxBook(DelayedScaling(amax_history_len=4))
    for path in ("decoder.layers.0.a", "decoder.layers.1.a"):
        book.register(path)
    book.history[0] = 3.0 + rank  # agreed on in the synchronisation
    book.history[2, 1] = float("nan")  # the same on all ranks, and no difference
    book.sync(axis)
    log.clear()
    if change is not None:
        change(book, rank)
    try:
        check_agreement(book, axis, f"rank {rank}")
    except PrecisionError as error:
        return str(error)
    return sum(log.counts.values())


def one_scale(book, rank):
    if rank == 1:
        book.scale[5] *= 1 + 2**-22
        book.scale[3] *= 2


def one_history(book, rank):
    if rank == 0:
        book.history[[1, 3], 4] = book.history[[3, 1], 4]


def test_ranks_that_agree_talk_once():
    assert run_ranks(compare, 2) == [1, 1]


@pytest.mark.parametrize(
    ("change", "name", "count"),
    [(one_scale, "decoder.layers.1.a.input", 2), (one_history, "decoder.layers.1.a.weight", 1)],
)
def test_a_rank_that_differs_is_named_on_every_rank(change, name, count):
    found = run_ranks(compare, 2, change)
    assert found[0] == found[1]
    assert found[0].startswith(f"FP8 scale of {name}: got [rank 0] ")
    assert "[rank 1] " in found[0]
    assert f"{count} of 10 tensors differ" in found[0]
