"""A layer that FP8 does harm to falls back, tries again and returns, in a real run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.config import make_config
from megatron.core.errors import PrecisionError
from megatron.core.fp8.fallback import FALLEN, FP8, PROBATION
from megatron.core.fp8.recipe import Role
from megatron.observe.events import (
    Fp8Stats,
    Message,
    PrecisionChange,
    PrecisionTable,
    Rollback,
)
from megatron.observe.lines import change_line, precision_table
from megatron.training.fp8_watch import collector
from megatron.training.guards import Guards
from megatron.training.initialize import Launch, start
from megatron.training.progress import Progress
from megatron.training.providers import setup_model
from tests.spikes import (
    BATCH,
    LOUD,
    LOUD_LAYER,
    RUN,
    Loud,
    Samples,
    alternating,
    different,
    run,
    state,
)

DELAYED = {"bf16": True, "fp8_format": "hybrid"}

PLANTED = [
    (19, FALLEN, "saturation"),
    (25, PROBATION, "probe"),
    (27, FALLEN, "saturation"),
    (39, PROBATION, "probe"),
    (42, FP8, "healthy"),
]


def decisions(seen):
    changes = seen.kinds(PrecisionChange)
    assert {one.layer for one in changes} <= {LOUD_LAYER}
    return [(one.iteration, one.after, one.rule) for one in changes]


@pytest.fixture(scope="module")
def straight():
    return run(Samples(), prepare=Loud(LOUD_LAYER, alternating), **LOUD)


def test_a_planted_layer_falls_back_is_tried_and_returns(straight):
    made, seen = straight
    assert decisions(seen) == PLANTED
    first, probe, second, *_ = seen.kinds(PrecisionChange)
    assert (first.probe_at, second.probe_at) == (25, 27 + 12)
    assert first.figures["share"] > 0.9
    assert change_line(first).startswith(
        f"PRECISION of {LOUD_LAYER}: fp8 -> high precision after iteration 19 (saturation of 9"
    )
    assert "tries FP8 again after iteration 25" in change_line(first)
    assert probe.probe_at == 0
    tables = [precision_table(one.lines, one.changed) for one in seen.kinds(PrecisionTable)]
    assert len(tables) == 1 + len(PLANTED)
    assert tables[1].splitlines()[0] == "precision: 3 of 5 linear layers in FP8"
    assert (
        tables[1]
        .splitlines()[1]
        .startswith(f"  {LOUD_LAYER}: bf16, fell back at iteration 19: saturation")
    )
    assert tables[2] == "precision: 4 of 5 linear layers in FP8"
    assert made.parts.fp8.suspended() == {}


def test_magnitudes_are_known_when_it_returns(straight):
    # What the layer sees has grown sixteenfold while it was held back. Without what was recorded
    # meanwhile the first step on probation would saturate.
    made, _ = straight
    stats = made.parts.fp8.stats.latest(LOUD_LAYER)[Role.INPUT]
    assert stats.saturated < 0.01
    assert stats.amax > 2**12
    slots = made.parts.fp8.layers[LOUD_LAYER].slots
    scale = slots.of(Role.INPUT).scale
    assert 448 / 2 < float(scale) * stats.amax < 448 * 2


def test_resumed_runs_decide_alike(tmp_path, straight):
    """The stops are after a first look with trouble, on the first probation, and on the second."""
    folder = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 100}
    made, seen = [], []
    for stop in (17, 26, 41, None):
        part, events = run(
            Samples(), prepare=Loud(LOUD_LAYER, alternating), **LOUD, **folder, exit_interval=stop
        )
        made.append(part)
        seen += decisions(events)
    assert seen == PLANTED
    assert made[0].parts.fp8.suspended() == made[1].parts.fp8.suspended() == {}
    assert different(state(made[-1]), state(straight[0])) == []
    assert made[-1].guards.state_dict() == straight[0].guards.state_dict()


def test_the_first_scales_of_delayed_scaling_say_nothing():
    fields = {"fp8_auto_fallback_patience": 1, "fp8_auto_fallback_underflow": 0.01}
    _, seen = run(Samples(), **{**LOUD, **fields, "exit_interval": 1})
    assert seen.kinds(Fp8Stats)
    underflow = [one.underflow for one in seen.kinds(Fp8Stats)[0].figures]
    assert max(underflow) > 0.03
    assert decisions(seen) == []


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        (LOUD, "--fp8-auto-fallback"),
        ({**DELAYED, "fp8_spike_rollback_precision": "bf16"}, "--fp8-spike-rollback-precision"),
    ],
)
def test_what_a_library_cannot_do_is_refused_when_auto_has_chosen_it(fields, flag):
    runtime = start(make_config(**{**RUN, **fields}), Launch())
    parts = setup_model(runtime.config, runtime)
    parts.fp8.stats = collector(runtime)
    Guards(runtime.config, runtime, parts, Progress(), None)
    other = replace(runtime, backend=SimpleNamespace(name="transformer_engine"))
    with pytest.raises(PrecisionError, match=f"{flag}: got .*transformer_engine"):
        Guards(runtime.config, other, parts, Progress(), None)


def test_without_the_flag_the_layers_of_a_checkpoint_run_in_fp8_again(tmp_path):
    folder = {"save": str(tmp_path), "load": str(tmp_path), "save_interval": 100}
    loud = Loud(LOUD_LAYER, alternating)
    fallen, _ = run(Samples(), prepare=loud, **LOUD, **folder, exit_interval=20)
    assert list(fallen.parts.fp8.suspended()) == [LOUD_LAYER]
    fields = {k: v for k, v in LOUD.items() if not k.startswith("fp8_auto_fallback")}
    bare, seen = run(Samples(), prepare=loud, **fields, **folder, exit_interval=21)
    assert bare.parts.fp8.suspended() == {}
    note = f"NOTE: without --fp8-auto-fallback they run in FP8 again: {LOUD_LAYER}"
    assert note in [one.text for one in seen.kinds(Message)]


def test_a_rollback_takes_decisions_back_too():
    """The spike is after the fall, the snapshot before it."""
    fields = {**LOUD, "train_iters": 30, "fp8_spike_rollback": True, "lr": 1e-2,
              "fp8_spike_rollback_interval": 18, "fp8_spike_rollback_deviations": 4.0,
              "fp8_spike_rollback_window": 8}  # fmt: skip
    spoilt = range(22 * BATCH, 23 * BATCH)
    loud = Loud(LOUD_LAYER, alternating)
    made, seen = run(Samples(spoilt), prepare=loud, **fields)
    (event,) = seen.kinds(Rollback)
    assert (event.iteration, event.back_to) == (23, 18)
    assert decisions(seen) == [PLANTED[0], *PLANTED[:3]]
    clean, quiet = run(Samples(without=[(18 * BATCH, 23 * BATCH)]), prepare=loud, **fields)
    assert decisions(quiet) == PLANTED[:3]
    assert different(state(made), state(clean)) == []
    assert made.parts.fp8.suspended() == clean.parts.fp8.suspended() != {}


def test_other_recipes_and_rules():
    """With a scale of its own for every tensor nothing saturates, but magnitudes still jump."""
    fields = {**LOUD, "fp8_recipe": "tensorwise", "fp8_auto_fallback_patience": 2}
    late = Loud(LOUD_LAYER, lambda iteration: 64 if iteration > 21 else 1)
    made, seen = run(Samples(), prepare=late, **{**fields, "fp8_stats_interval": 4})
    # Four looks make a usual magnitude: 4, 8, .. 20; trouble at 24 and 25. Later 64 is usual.
    assert decisions(seen) == [
        (25, FALLEN, "amax variation"),
        (31, PROBATION, "probe"),
        (33, FP8, "healthy"),
    ]
    torch.testing.assert_close(made.parts.fp8.suspended(), {})
