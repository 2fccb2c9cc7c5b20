"""Global batches that change: which size counts when, and what a run makes of it."""

from __future__ import annotations

import random

import pytest

from megatron.config import make_config
from megatron.config.batch_size import BatchSchedule, parse_steps, ramp
from megatron.config.schema import SPECS
from megatron.observe.events import Message, StepEnd
from tests.spikes import RUN, Samples, different, run, state


def by_formula(consumed, start, increment, samples, final):
    if consumed > samples:
        return final
    each = samples / ((final - start) // increment)
    return start + int(consumed / each) * increment


def count_one_by_one(plan, consumed, end):
    steps = 0
    while consumed + plan.size(consumed) <= end:
        consumed, steps = consumed + plan.size(consumed), steps + 1
    return steps


def test_a_ramp_follows_the_formula_at_every_sample():
    draw = random.Random(3)
    for _ in range(60):
        start, increment = draw.randint(1, 9), draw.randint(1, 7)
        final = start + increment * draw.randint(1, 30)
        samples = draw.randint((final - start) // increment, 2000)
        plan = ramp(start, increment, samples, final)
        for consumed in range(samples + 3):
            want = by_formula(consumed, start, increment, samples, final)
            assert plan.size(consumed) == want
        begin, end = draw.randint(0, samples), draw.randint(0, 2 * samples)
        assert plan.steps(begin, end) == count_one_by_one(plan, begin, end)


def test_steps_of_a_long_ramp_are_counted_at_once():
    plan = ramp(16, 8, 10**12, 1024)
    assert plan.steps(0, 10**12) > 10**9
    assert plan.steps(10**12, 10**12 + 1023) == 0


def test_a_schedule_by_tokens():
    plan = parse_steps("2.4K:320,0:16  1M:1K", seq_length=100)
    assert plan == BatchSchedule((0, 24, 10_000), (16, 320, 1000))
    assert [plan.size(n) for n in (0, 23, 24, 9_999, 10_000)] == [16, 16, 320, 320, 1000]
    cfg = make_config(step_batch_size_schedule="0:4 2K:8", train_samples=80, seq_length=128)
    assert (cfg.global_batch_size, cfg.train_iters) == (8, 4 + 8)


def test_sizes_that_do_not_fit_the_replicas_are_rounded_down_if_asked():
    fields = {"rampup_batch_size": (3, 1, 12), "global_batch_size": 7, "train_samples": 60}
    cfg = make_config(2, **fields, decrease_batch_size_if_needed=True)
    assert cfg.batches().sizes == (2, 4, 4, 6, 6)
    assert (cfg.global_batch_size, cfg.with_batch(4).num_microbatches) == (6, 2)
    assert any("decreasing --global-batch-size from 7 to 6" in line for line in cfg.notices)


RAMP = {
    "micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": (2, 2, 16),
    "train_samples": 80, "train_iters": None, "log_interval": 1, "lr_warmup_samples": 8,
    **{name: SPECS[name].default for name in RUN if name.startswith("fp8_spike_rollback")},
    "eval_interval": 5, "eval_iters": 1,
}  # fmt: skip


class Counted(Samples):
    """Remembers which samples were read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def steps_of(recorder):
    fields = ("iteration", "global_batch_size", "consumed_samples", "learning_rate")
    return [tuple(getattr(e, name) for name in fields) for e in recorder.kinds(StepEnd)]


def train(**fields):
    samples = Counted()
    trainer, recorder = run(samples, **{**RAMP, **fields})
    return trainer, recorder, samples


def test_a_run_grows_its_batch_and_resumes_inside_the_ramp(tmp_path):
    whole, recorder, samples = train(eval_interval=None)
    assert sorted(samples.read) == list(range(76))  # the rest is no whole step
    steps = steps_of(recorder)
    assert [size for _, size, _, _ in steps] == [2, 2, 2, 4, 4, 6] + 7 * [8]
    consumed = [2, 4, 6, 10, 14, 20]
    assert [done for _, _, done, _ in steps][:6] == consumed
    schedule = whole.parts.scheduler
    assert [rate for *_, rate in steps] == [schedule.lr.value(done) for _, _, done, _ in steps]
    assert schedule.num_samples == steps[-1][2]
    said = [event.text for event in recorder.kinds(Message)]
    assert "global batch size is 4 from iteration 4, sample 6" in said

    saved = {"save": str(tmp_path), "save_interval": 100, "eval_interval": None}
    train(**saved, exit_interval=5)
    resumed, again, rest = train(**saved, load=str(tmp_path))
    assert steps_of(again) == steps[5:]
    assert sorted(rest.read) == list(range(14, 76))
    assert different(state(whole), state(resumed)) == []


def test_another_final_size_on_resume_keeps_the_number_of_samples(tmp_path):
    """The run ends after --train-samples, however many iterations that takes from here on."""
    saved = {"save": str(tmp_path), "save_interval": 100, "rampup_batch_size": None}
    train(**saved, exit_interval=5, global_batch_size=4)
    _, recorder, _ = train(**saved, load=str(tmp_path), global_batch_size=10)
    assert [done for _, _, done, _ in steps_of(recorder)] == [30, 40, 50, 60, 70, 80]
    assert recorder.kinds(StepEnd)[0].train_iters == 11


def test_evaluation_uses_the_final_batch(tmp_path):
    trainer, _, _ = train(eval_iters=2, train_samples=30)
    assert trainer.progress.consumed_valid_samples == 2 * 2 * 8


@pytest.mark.parametrize("experts", [None, 2])
def test_a_step_of_a_stage_is_that_of_a_run_of_its_size(experts):
    """Losses that are averaged over microbatches count the microbatches of their own step."""
    fields = {"train_samples": 80, "eval_interval": None, "exit_interval": 2, "clip_grad": 0.0}
    if experts:
        fields |= {"num_experts": experts, "moe_z_loss_coeff": 0.1, "add_bias_linear": False}
    grown, recorder, _ = train(**fields, rampup_batch_size=(4, 4, 16))
    plain, _, _ = train(**fields, rampup_batch_size=None, global_batch_size=4)
    assert [size for _, size, _, _ in steps_of(recorder)] == [4, 4]
    assert different(state(grown), state(plain)) == []
