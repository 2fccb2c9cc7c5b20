"""What counts as a spike."""

from __future__ import annotations

import math

import pytest

from megatron.core.fp8.guards import Watch

NOISE = [0.0, 0.01, -0.02, 0.015, -0.005, 0.02, -0.01, 0.005]


def filled(count=32, level=2.0, **fields):
    watch = Watch(**{"window": 32, "deviations": 10.0, "ratio": 1.2, **fields})
    for i in range(count):
        watch.accept(level + NOISE[i % len(NOISE)])
    return watch


def test_both_bounds_have_to_be_exceeded():
    watch = filled()
    # MAD of the noise is 0.01: 10 of them are 0.1, the ratio asks for 0.4.
    assert watch.judge(2.39) is None
    spike = watch.judge(2.41)
    assert spike.count == 32
    assert spike.limit == pytest.approx(2.4, abs=0.01)
    assert "2.41" in spike.describe("loss")
    assert "last 32" in spike.describe("loss")
    loose = filled(deviations=100.0)
    assert loose.judge(2.9) is None
    assert loose.judge(3.1) is not None


def test_figures_that_hardly_scatter_need_the_ratio():
    watch = Watch(16, deviations=10.0, ratio=1.2)
    for _ in range(16):
        watch.accept(2.0)
    assert watch.judge(2.1) is None
    assert watch.judge(2.5) is not None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_a_spike_from_the_first_step_and_never_part_of_the_past(value):
    watch = filled(count=0)
    spike = watch.judge(value)
    assert spike.describe("loss") == f"loss {value} is not finite"
    watch.accept(value)
    assert watch.state_dict() == {"past": []}


def test_nothing_else_is_one_before_there_is_a_past():
    assert filled(count=15).judge(100.0) is None
    assert filled(count=16).judge(100.0) is not None
    short = filled(count=4, window=4)
    assert short.judge(100.0) is not None


def test_a_few_outliers_and_a_falling_loss_hide_nothing():
    watch = filled()
    for _ in range(8):
        watch.accept(5.0)
    assert watch.judge(3.0) is not None
    falling = Watch(64, deviations=10.0, ratio=1.2)
    for i in range(200):
        assert falling.judge(10.0 * 0.97**i) is None
        falling.accept(10.0 * 0.97**i)


def test_a_resumed_watch_decides_alike():
    watch, resumed = filled(), Watch(32, 10.0, 1.2)
    resumed.load_state_dict(watch.state_dict())
    assert resumed.judge(2.41) == watch.judge(2.41)
    shorter = Watch(8, 10.0, 1.2)
    shorter.load_state_dict(watch.state_dict())
    assert shorter.state_dict()["past"] == watch.state_dict()["past"][-8:]
