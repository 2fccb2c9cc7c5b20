"""The rank pool itself: results, failures, deaths and hangs."""

from __future__ import annotations

import multiprocessing.connection
import os
import time

import pytest
import torch.distributed as dist
from distpool import RankError, run_ranks


def test_results_come_in_rank_order_and_closures_work():
    base = 10
    assert run_ranks(lambda rank, world, factor: base + rank * factor, 3, 2) == [10, 12, 14]


def fail(rank, world):
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def test_the_failing_rank_is_shown_first():
    with pytest.raises(RankError, match=r"(?s)\A--- rank 1 of 2 ---.*broken on purpose"):
        run_ranks(fail, 2)


def die(rank, world):
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_a_dead_rank_is_reported():
    with pytest.raises(RankError, match="rank 0 died, exit code 3"):
        run_ranks(die, 2)


def fail_late(rank, world, how):
    if rank == 1:
        dist.destroy_process_group()  # the other one notices, long before this one ends
        time.sleep(0.5)
        if how == "dies":
            os._exit(7)
        raise ValueError("broken on purpose")
    dist.barrier()


@pytest.mark.parametrize(("how", "said"), [("dies", "died, exit code 7"), ("raises", "of 2 ---")])
def test_the_cause_is_shown_before_what_followed_from_it(how, said):
    with pytest.raises(RankError, match=f"--- rank 1 {said}") as caught:
        run_ranks(fail_late, 2, how, detail=False)
    assert [rank for rank, _ in caught.value.failures] == [1, 0]
    assert "gloo" in caught.value.failures[1][1]


def sleep_forever(rank, world, begun):
    begun.touch()
    time.sleep(600)


def test_a_hung_rank_shows_its_stack(tmp_path, monkeypatch):
    """The time limit passes once the rank is there, and not before."""
    begun, wait = tmp_path / "begun", multiprocessing.connection.wait

    def once_begun(connections, timeout):
        while not begun.exists():
            assert wait(connections, 0.01) == []
        return wait(connections, timeout)

    monkeypatch.setattr(multiprocessing.connection, "wait", once_begun)
    with pytest.raises(RankError, match=r"(?s)still running after 0.3 s.*sleep_forever"):
        run_ranks(sleep_forever, 1, begun, timeout=0.3)


def test_ranks_are_independent_of_earlier_calls():
    for _ in range(2):
        assert run_ranks(lambda rank, world: dist.get_world_size(), 2) == [2, 2]
