"""When a unit leaves FP8, tries again and stays: decisions from planted figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.core.fp8.fallback import FALLEN, FP8, PROBATION, Fallback, Limits
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.stats import RoleStats

LIMITS = Limits(
    amax_ratio=10.0, saturation=0.001, underflow=0.25, grad_norm_ratio=4.0, patience=3,
    probe_interval=20,
)  # fmt: skip
GOOD = RoleStats(amax=2.0, scale=100.0, saturated=0.0, underflow=0.01, snr_db=31.0, elements=64)
CLIPPED = replace(GOOD, saturated=0.01, snr_db=12.0)


def figures(**units):
    """Figures of units `a` and `b`, healthy unless given."""
    held = {"a": GOOD, "b": GOOD, **units}
    return {name: {Role.INPUT: one, Role.WEIGHT: GOOD} for name, one in held.items() if one}


def play(fallback, steps, first=1):
    """Feed figures of consecutive steps; return `(step, unit, after, rule)` of every decision."""
    made = []
    for iteration, seen in enumerate(steps, first):
        norm = 1.0
        if isinstance(seen, tuple):
            norm, seen = seen
        for one in fallback.step(iteration, norm, seen):
            made.append((iteration, one.layer, one.after, one.rule))
    return made


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (CLIPPED, "saturation"),
        (replace(GOOD, underflow=0.3), "underflow"),
        (replace(GOOD, amax=21.0), "amax variation"),
    ],
)
def test_a_rule_that_is_broken_often_enough_makes_a_unit_fall(bad, rule):
    fallback = Fallback(LIMITS)
    healthy = [figures()] * 4
    assert play(fallback, [*healthy, figures(a=bad), figures(a=bad)]) == []
    assert fallback.wants_figures  # of every step from here on
    assert play(fallback, [figures(a=bad)], first=7) == [(7, "a", FALLEN, rule)]
    assert list(fallback.fallen) == ["a"]
    assert "fell back at iteration 7" in fallback.fallen["a"]
    assert rule in fallback.fallen["a"] or "amax 21" in fallback.fallen["a"]
    assert not fallback.wants_figures


def test_trouble_has_to_come_within_twice_the_patience():
    rare = [figures(a=CLIPPED), *[figures()] * 5] * 3
    assert play(Fallback(LIMITS), rare) == []
    every_other = [figures(a=CLIPPED), figures()] * 3
    assert play(Fallback(LIMITS), every_other) == [(5, "a", FALLEN, "saturation")]


def test_what_does_not_count():
    zero = replace(GOOD, amax=0.0, underflow=0.9)
    assert play(Fallback(LIMITS), [figures(b=zero)] * 9) == []
    off = replace(LIMITS, amax_ratio=0, saturation=0, underflow=0, grad_norm_ratio=0)
    bad = replace(GOOD, saturated=1.0, underflow=1.0)
    jumps = [figures(a=replace(bad, amax=10.0**n)) for n in range(9)]
    assert play(Fallback(off), [(10.0**n, one) for n, one in enumerate(jumps)]) == []
    # Steps that were not measured and units without a cast are no looks.
    gaps = [figures(a=CLIPPED), None, figures(a=None)] * 2
    assert play(Fallback(LIMITS), gaps) == []


def test_probation_and_intervals_that_grow():
    fallback = Fallback(LIMITS)
    made = play(fallback, [figures(a=CLIPPED)] * 3)
    assert made == [(3, "a", FALLEN, "saturation")]
    assert play(fallback, [figures(a=None)] * 20, first=4) == [(23, "a", PROBATION, "probe")]
    assert fallback.wants_figures
    # One look with trouble ends it, and the next pause is twice as long.
    assert play(fallback, [figures(a=CLIPPED)], first=24) == [(24, "a", FALLEN, "saturation")]
    assert play(fallback, [figures(a=None)] * 40, first=25) == [(64, "a", PROBATION, "probe")]
    assert play(fallback, [figures()] * 3, first=65) == [(67, "a", FP8, "healthy")]
    assert fallback.fallen == {}
    assert not fallback.wants_figures
    # Back in FP8 it has the same patience as before, and the pause is longer still.
    assert play(fallback, [figures(a=CLIPPED)] * 3, first=68) == [(70, "a", FALLEN, "saturation")]
    assert play(fallback, [figures(a=None)] * 80, first=71) == [(150, "a", PROBATION, "probe")]


def test_spikes_of_the_gradient_norm_cost_the_unit_with_the_lowest_snr():
    fallback = Fallback(LIMITS)
    noisy = figures(b=replace(GOOD, snr_db=20.0))
    assert play(fallback, [(1.0 + n % 3 / 10, noisy) for n in range(16)]) == []
    made = play(fallback, [(9.0, None), (1.0, None), (9.0, None)], first=17)
    assert (made, fallback.wants_figures) == ([], False)
    assert play(fallback, [(9.0, None)], first=20) == []
    assert fallback.wants_figures
    assert play(fallback, [(1.0, noisy)], first=21) == [(21, "b", FALLEN, "gradient norm")]
    assert not fallback.wants_figures
    # Spikes far apart are forgotten.
    forgetful = Fallback(LIMITS)
    calm = [(1.0, None)] * 64
    assert play(forgetful, [*calm, (9.0, None), *calm, (9.0, None), *calm, (9.0, None)]) == []
    assert not forgetful.wants_figures


def test_a_resumed_run_decides_alike():
    def steps(first, last):
        """Trouble in a and b at times that meet every rule."""
        made = []
        for n in range(first, last):
            a = CLIPPED if n % 7 in (1, 2, 4) else GOOD
            b = replace(GOOD, amax=100.0) if n % 11 > 7 else replace(GOOD, snr_db=9.0)
            made.append((30.0 if n % 13 == 0 else 1.0 + n % 3 / 10, figures(a=a, b=b)))
        return made

    limits = replace(LIMITS, probe_interval=5)
    whole = Fallback(limits)
    decisions = play(whole, steps(1, 121))
    assert {one[3] for one in decisions} >= {"saturation", "amax variation", "probe", "healthy"}
    for stop in range(2, 120, 9):
        before, after = Fallback(limits), Fallback(limits)
        made = play(before, steps(1, stop))
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert made + play(after, steps(stop, 121), first=stop) == decisions
        assert after.state_dict() == whole.state_dict()
