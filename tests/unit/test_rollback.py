"""A spike is rolled back: afterwards the run is one that never had the data."""

from __future__ import annotations

import pytest
import torch

from megatron.config.schema import SPECS
from megatron.core.errors import TrainingError
from megatron.observe.events import IntervalEnd, Message, Rollback, StepEnd
from megatron.observe.lines import rollback_line
from tests.spikes import BATCH, RUN, Samples, different, run, state

DELAYED = {"bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 4,
           "fp8_amax_compute_algo": "max"}  # fmt: skip
# The samples of iteration 15.
SPOILT = range(14 * BATCH, 15 * BATCH)


@pytest.mark.parametrize(
    "fields",
    [{}, DELAYED, {"fp8_spike_rollback_memory": "device", "optimizer": "sgd", "lr": 0.5}],
    ids=["fp32", "delayed", "sgd"],
)
def test_a_spoilt_batch_leaves_no_trace(fields):
    spoilt, seen = run(Samples(SPOILT), **fields)
    (event,) = seen.kinds(Rollback)
    assert (event.iteration, event.back_to, event.count) == (15, 14, 1)
    assert (event.first_sample, event.end_sample) == (SPOILT[0], SPOILT[-1] + 1)
    assert f"samples {SPOILT[0]} to {SPOILT[-1]} are left out" in rollback_line(event)
    clean, quiet = run(Samples(without=[(SPOILT[0], SPOILT[-1] + 1)]), **fields)
    assert not quiet.kinds(Rollback)
    assert different(state(spoilt), state(clean)) == []
    assert spoilt.progress.skipped_ranges == [[SPOILT[0], SPOILT[-1] + 1]]
    assert spoilt.progress.consumed_train_samples == 25 * BATCH
    assert (spoilt.progress.iteration, clean.progress.iteration) == (24, 24)


def test_a_run_without_a_spike_is_the_run_without_the_guards():
    watched = {
        **DELAYED,
        "fp8_auto_fallback": True,
        "fp8_stats_interval": 5,
        "fp8_spike_rollback_interval": 3,
    }
    off = {name: SPECS[name].default for name in RUN if name.startswith("fp8_spike_rollback")}
    with_guards, seen = run(Samples(), **watched)
    assert not seen.kinds(Rollback)
    without, _ = run(Samples(), **{**DELAYED, **off})
    assert different(state(with_guards), state(without)) == []


def test_everything_read_since_the_snapshot_is_left_out():
    spoilt, seen = run(Samples(SPOILT), fp8_spike_rollback_interval=6)
    (event,) = seen.kinds(Rollback)
    assert (event.iteration, event.back_to) == (15, 12)
    left_out = (12 * BATCH, 15 * BATCH)
    assert (event.first_sample, event.end_sample) == left_out
    clean, _ = run(Samples(without=[left_out]), fp8_spike_rollback_interval=6)
    assert different(state(spoilt), state(clean)) == []
    assert spoilt.progress.skipped_train_samples == 3 * BATCH


def test_a_loss_that_is_no_number_and_a_second_spike_at_the_same_snapshot():
    bad = [13 * BATCH, *range(14 * BATCH, 15 * BATCH)]
    samples = Samples(bad[1:], broken=bad[:1])
    twice, seen = run(samples, **DELAYED, fp8_spike_rollback_interval=6)
    first, second = seen.kinds(Rollback)
    assert "loss nan is not finite" in first.reason
    assert (first.iteration, first.back_to) == (14, 12)
    assert (first.first_sample, first.end_sample) == (12 * BATCH, 14 * BATCH)
    # The next batch is that of iteration 15, which has the number 13 now.
    assert (second.iteration, second.back_to, second.count) == (13, 12, 2)
    assert (second.first_sample, second.end_sample) == (14 * BATCH, 15 * BATCH)
    clean, _ = run(
        Samples(without=[(12 * BATCH, 15 * BATCH)]), **DELAYED, fp8_spike_rollback_interval=6
    )
    assert different(state(twice), state(clean)) == []
    assert twice.progress.nan_iterations == 0
    assert twice.progress.skipped_ranges == [[12 * BATCH, 15 * BATCH]]


def test_too_many_spikes_stop_the_run_with_what_was_left_out(tmp_path):
    save = {"save": str(tmp_path), "save_interval": 10}
    with pytest.raises(TrainingError, match="--fp8-spike-rollback-limit: got 2 rollbacks") as error:
        run(Samples(range(14 * BATCH, 40 * BATCH)), **save, fp8_spike_rollback_limit=2)
    assert f"({14 * BATCH} to {16 * BATCH - 1})" in str(error.value)
    assert "iter_0000010" in str(error.value)


def test_the_log_leaves_the_lost_steps_out_of_its_means():
    _, seen = run(Samples(SPOILT), fp8_spike_rollback_interval=6)
    assert [step.iteration for step in seen.kinds(StepEnd)] == [*range(1, 16), *range(13, 25)]
    lines = [(one.last.iteration, one.iterations) for one in seen.kinds(IntervalEnd)]
    # At 15 the spike was part of the mean; the repeated iteration 15 has three steps to show.
    assert lines == [(1, 1), (5, 5), (10, 5), (15, 5), (15, 3), (20, 5)]
    repeated = seen.kinds(IntervalEnd)[4]
    assert repeated.losses["lm loss"] < seen.kinds(IntervalEnd)[3].losses["lm loss"] - 0.3


def test_the_last_iterations_read_from_the_start_again():
    spoilt, _ = run(Samples(SPOILT, count=24 * BATCH))
    clean, _ = run(Samples(without=[(SPOILT[0], SPOILT[-1] + 1)], start_again_at=23 * BATCH))
    assert different(state(spoilt), state(clean)) == []


def test_evaluation_is_repeated_on_the_same_data():
    fields = {"eval_interval": 3, "eval_iters": 1, "fp8_spike_rollback_interval": 6}
    spoilt, _ = run(Samples(SPOILT), **fields)
    clean, _ = run(Samples(without=[(12 * BATCH, 15 * BATCH)]), **fields)
    assert spoilt.progress.consumed_valid_samples == clean.progress.consumed_valid_samples


def test_a_checkpoint_is_never_one_of_a_branch_that_was_left(tmp_path):
    save = {"save": str(tmp_path), "save_interval": 4}
    _, seen = run(Samples(SPOILT), **save)
    (event,) = seen.kinds(Rollback)
    assert (event.iteration, event.back_to) == (15, 14)
    _, seen = run(Samples(SPOILT), **save, fp8_spike_rollback_interval=100)
    (event,) = seen.kinds(Rollback)
    assert event.back_to == 12  # of the last checkpoint


BF16 = {**DELAYED, "fp8_spike_rollback_precision": "bf16",
        "fp8_spike_rollback_precision_iters": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("stop", "fields"), [(12, DELAYED), (16, BF16)], ids=["before", "in between, bf16"]
)
def test_a_resumed_run_decides_and_reads_alike(tmp_path, fields, stop):
    # A second spike behind the first: the resumed run still knows of one rollback.
    samples = Samples([*SPOILT, *range(19 * BATCH, 20 * BATCH)])
    straight, seen = run(samples, **fields, save=str(tmp_path / "a"), save_interval=4)
    parts = {"save": str(tmp_path / "b"), "load": str(tmp_path / "b"), "save_interval": 4}
    run(samples, **fields, **parts, exit_interval=stop)
    resumed, after = run(samples, **fields, **parts)
    events = seen.kinds(Rollback)
    assert [event.count for event in events] == [1, 2]
    assert after.kinds(Rollback) == events[1 if stop == 16 else 0 :]
    assert different(state(straight), state(resumed)) == []
    assert straight.progress == resumed.progress


def test_bf16_for_a_while_and_scales_that_are_up_to_date_afterwards():
    fields = {**DELAYED, "fp8_spike_rollback_precision": "bf16"}
    held, seen = run(Samples(SPOILT), **fields)
    assert seen.kinds(Rollback)[0].without_fp8_until == 14 + 100
    row = held.parts.fp8.rows()[0]
    assert (row.delivered, row.is_fallback) == ("bf16", False)
    assert row.reason == "loss spike: until iteration 114"
    short, seen = run(Samples(SPOILT), **fields, fp8_spike_rollback_precision_iters=4)
    assert "FP8 is on again from iteration 19" in [m.text for m in seen.kinds(Message)]
    assert short.parts.fp8.rows()[0].delivered.startswith("fp8")
    history = held.parts.fp8.book.history
    assert (history[1:, ::3] > 0).any()
    same, _ = run(Samples(SPOILT), **DELAYED)
    # Ten BF16 steps: other roundings, about the same magnitudes.
    scales = (held.parts.fp8.book.scale, same.parts.fp8.book.scale)
    torch.testing.assert_close(*scales, rtol=0.5, atol=0)
    assert not torch.equal(*scales)
