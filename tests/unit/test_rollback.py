"""A spike is rolled back: afterwards the run is one that never had the data."""

from __future__ import annotations

import pytest

from megatron.core.errors import TrainingError
from megatron.observe.events import IntervalEnd, Message, Rollback, StepEnd
from megatron.observe.lines import rollback_line
from tests.spikes import BATCH, Samples, different, run, state

DELAYED = {"bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 4,
           "fp8_amax_compute_algo": "max"}  # fmt: skip
# The samples of iteration 15.
SPOILT = range(14 * BATCH, 15 * BATCH)


@pytest.mark.parametrize(
    "fields",
    [{}, DELAYED, {"fp8_spike_rollback_memory": "device", "optimizer": "sgd"}],
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
