"""Alerts about FP8 casts: what raises one, what does not, and how often."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron.core.fp8 import Role
from megatron.core.fp8.stats import RoleStats
from megatron.observe.lines import alert_line
from megatron.training.fp8_alerts import FIRST_PAUSE, Alerts, Limits

LIMITS = Limits(amax_ratio=32.0, saturation=0.01, underflow=0.25)
GOOD = RoleStats(2.0, 224.0, 0.0, 0.0, 31.0, 4096, casts=1)
LAYERS = [f"decoder.layers.{i}.mlp.linear_fc1" for i in range(5)]


def figures(base=GOOD, role=Role.INPUT, **changed):
    """Five like layers; `changed` by the number of a layer, as `l3={...}`."""
    return {
        path: {role: replace(base, **changed.get(f"l{i}", {}))} for i, path in enumerate(LAYERS)
    }


def kinds(found):
    return [(alert.kind, alert.path, alert.role) for alert in found]


def after_calm(looks=6, limits=LIMITS, base=GOOD):
    alerts = Alerts(limits)
    for iteration in range(looks):
        assert alerts.look(iteration, figures(base)) == []
    return alerts


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("saturation", {"saturated": 0.02}),
        ("underflow", {"underflow": 0.3}),
        ("degenerate scale", {"scale": 0.0}),
        ("degenerate scale", {"scale": 3.4e38}),
        ("not finite", {"nonfinite": 7}),
    ],
)
def test_what_raises_an_alert(kind, changed):
    found = after_calm().look(50, figures(l3=changed))
    assert kinds(found) == [(kind, LAYERS[3], "input")]
    assert found[0].iteration == 50
    assert alert_line(found[0]).startswith(f"WARNING: FP8 {kind} at iteration 50: {LAYERS[3]} ")


def test_a_magnitude_far_above_its_own_past_and_above_like_layers():
    found = after_calm().look(50, figures(l3={"amax": 100.0}))
    assert kinds(found) == [("amax jump", LAYERS[3], "input"), ("outlier", LAYERS[3], "input")]
    assert found[0].value == found[1].value == 50.0
    assert "50 times its recent median 2" in found[0].what
    # All layers at once are no outliers, and 20 times is within the limit.
    everywhere = {f"l{i}": {"amax": 100.0} for i in range(5)}
    (jump,) = after_calm().look(50, figures(**everywhere))
    assert jump.kind == "amax jump"
    assert len(jump.others) == 4
    assert after_calm().look(50, figures(l3={"amax": 40.0})) == []
    assert after_calm(looks=3).look(50, figures(**everywhere)) == []  # too little is known


@pytest.mark.parametrize(
    "changed",
    [
        {"saturated": 0.01},
        {"amax": 0.0, "scale": 1.0, "snr_db": math.nan},  # all zero
        {"snr_db": math.inf},
    ],
)
def test_what_does_not(changed):
    alerts = after_calm()
    assert alerts.look(50, figures(l3=changed)) == []
    assert alerts.look(60, figures(l3=changed)) == []


def test_a_scale_of_1_that_fits_is_none_of_the_start():
    fits = replace(GOOD, scale=1.0, amax=448.0)
    assert after_calm(base=fits).look(50, figures(fits)) == []


def test_limits_of_zero_mean_never():
    alerts = Alerts(Limits(0.0, 0.0, 0.0))
    for iteration in range(6):
        alerts.look(iteration, figures())
    bad = {"amax": 1e9, "saturated": 0.9, "underflow": 0.9}
    assert alerts.look(50, figures(l1=bad)) == []


def test_the_first_scale_of_delayed_scaling_says_nothing_until_it_stays():
    start = replace(GOOD, scale=1.0, amax=1e-4, underflow=1.0)
    alerts = Alerts(LIMITS)
    assert alerts.look(1, figures(start)) == []
    (alert,) = alerts.look(50, figures(start))
    assert alert.kind == "degenerate scale"
    assert "still 1" in alert.what
    alerts = Alerts(LIMITS)
    alerts.look(1, figures(start))
    assert alerts.look(50, figures()) == []


def test_the_same_trouble_is_told_ever_more_rarely():
    alerts, told = Alerts(LIMITS), []
    for look in range(1, 60):
        if alerts.look(look, figures(l2={"saturated": 0.5})):
            told.append(look)
    assert told == [1, 1 + FIRST_PAUSE, 1 + 3 * FIRST_PAUSE, 1 + 7 * FIRST_PAUSE]
    # Another layer in trouble is news.
    found = alerts.look(60, figures(l2={"saturated": 0.5}, l4={"saturated": 0.3}))
    assert kinds(found) == [("saturation", LAYERS[4], "input")]


def test_many_layers_make_one_alert_that_names_the_worst():
    bad = {f"l{i}": {"saturated": 0.1 + 0.1 * i} for i in range(5)}
    (alert,) = after_calm().look(9, figures(**bad))
    assert (alert.path, alert.value) == (LAYERS[4], 0.5)
    line = alert_line(replace(alert, where="pp1"))
    assert line.count("\n") == 0
    assert line.endswith(
        f"[pp1] {LAYERS[4]} input: 50.0% of the elements are beyond the format's largest value"
        f" (limit 0.01); also {LAYERS[0]} input, {LAYERS[1]} input, {LAYERS[2]} input and 1 more"
    )


def test_the_first_tensor_that_is_not_finite_comes_first():
    forward = figures(l2={"nonfinite": 1}, l3={"nonfinite": 99})
    backward = figures(role=Role.GRAD_OUTPUT, l0={"nonfinite": 500}, l1={"nonfinite": 5})
    both = {path: {**forward[path], **backward[path]} for path in LAYERS}
    (alert,) = Alerts(LIMITS).look(4, both)
    assert (alert.path, alert.role) == (LAYERS[2], "input")
    (alert,) = Alerts(LIMITS).look(4, backward)  # gradients come from the last layer
    assert (alert.path, alert.role) == (LAYERS[1], "grad_output")
    search = replace(LIMITS, gradients_may_overflow=True)
    assert Alerts(search).look(4, backward) == []
