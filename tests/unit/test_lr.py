"""Learning rate and weight decay schedules against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from megatron.core.errors import CheckpointError
from megatron.core.optimizer.lr import LrSchedule, ParamScheduler, WdSchedule

GBS = 32
COSINE = LrSchedule(
    max_lr=1e-3, min_lr=1e-5, warmup_samples=10 * GBS, decay_samples=100 * GBS, style="cosine"
)


@pytest.mark.parametrize(
    ("step", "printed"),
    [
        (0, "0.000000E+00"),
        (1, "1.000000E-04"),
        (10, "1.000000E-03"),
        (11, "9.996985E-04"),
        (55, "5.050000E-04"),
        (100, "1.000000E-05"),
        (101, "1.000000E-05"),
    ],
)
def test_cosine_with_warmup(step, printed):
    assert f"{COSINE.value(step * GBS):.6E}" == printed


def test_linear_inverse_square_root_and_constant():
    linear = LrSchedule(max_lr=1.0, min_lr=0.2, decay_samples=100, style="linear")
    assert [linear.value(n) for n in (0, 50, 100, 101)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    root = LrSchedule(
        max_lr=1.0, min_lr=0.3, warmup_samples=4, decay_samples=100, style="inverse-square-root"
    )
    assert [root.value(n) for n in (2, 4, 16, 64, 101)] == pytest.approx([0.5, 1.0, 0.5, 0.3, 0.3])
    flat = LrSchedule(
        max_lr=1.0, warmup_init=0.5, warmup_samples=4, decay_samples=8, style="constant"
    )
    assert [flat.value(n) for n in (0, 2, 4, 1000)] == pytest.approx([0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_holds_then_decays(style, half):
    wsd = LrSchedule(
        max_lr=1.0, decay_samples=100, style="WSD", wsd_style=style, wsd_decay_samples=20
    )
    assert [wsd.value(n) for n in (1, 80)] == [1.0, 1.0]
    assert wsd.value(90) == pytest.approx(half)
    assert wsd.value(100) == pytest.approx(0.0)


def test_weight_decay_ramps():
    linear = WdSchedule(start=0.0, end=0.1, incr_samples=100, style="linear")
    assert [linear.value(n) for n in (0, 50, 100, 101)] == pytest.approx([0, 0.05, 0.1, 0.1])
    cosine = WdSchedule(start=0.0, end=0.1, incr_samples=100, style="cosine")
    assert cosine.value(25) == pytest.approx(0.1 * 0.5 * (math.cos(math.pi * 0.75) + 1))


def groups():
    return [{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"lr_mult": 2.0}]


def test_groups_are_written_from_the_start_and_after_every_step():
    own = groups()
    scheduler = ParamScheduler(own, COSINE, WdSchedule(0.1, 0.1, 1))
    assert [g["lr"] for g in own] == [0.0, 0.0, 0.0]
    assert [g["weight_decay"] for g in own] == [0.1, 0.0, 0.1]
    scheduler.step(10 * GBS)
    assert [g["lr"] for g in own] == pytest.approx([1e-3, 1e-3, 2e-3])
    assert scheduler.learning_rate() == pytest.approx(1e-3)


def resumed(saved: LrSchedule, own: LrSchedule, **policy: bool) -> ParamScheduler:
    before = ParamScheduler(groups(), saved, WdSchedule(0.1, 0.1, 100))
    before.step(20 * GBS)
    after = ParamScheduler(groups(), own, WdSchedule(0.1, 0.1, 200), **policy)
    after.load_state_dict(before.state_dict())
    return after


def test_resume_continues_where_it_stopped():
    after = resumed(COSINE, COSINE)
    assert after.num_samples == 20 * GBS
    assert after.groups[0]["lr"] == COSINE.value(20 * GBS)


def test_resume_with_another_lr_names_both_values():
    other = LrSchedule(max_lr=1e-4, decay_samples=100 * GBS, style="constant")
    old = LrSchedule(max_lr=6e-4, decay_samples=100 * GBS, style="constant")
    with pytest.raises(CheckpointError, match=r"--lr: got 0\.0001.*0\.0006.*override"):
        resumed(old, other)
    assert resumed(old, other, override=True).learning_rate() == 1e-4
    assert resumed(old, other, use_checkpoint=True).learning_rate() == 6e-4


def test_fields_without_influence_do_not_block_a_resume():
    long = LrSchedule(max_lr=1e-4, decay_samples=100 * GBS, style="constant")
    short = LrSchedule(max_lr=1e-4, decay_samples=10 * GBS, style="constant")
    assert resumed(short, long).learning_rate() == 1e-4
