"""Rules about a global batch that changes during the run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.batch_size import BatchSchedule, replicas_step, schedule_of
from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule
from megatron.config.schema import flag_of

# The schedule of a step is a list of them.
MOST_MICROBATCHES = 100_000


def _named(c: Draft) -> tuple[str, object]:
    """Return the flag that plans the batch sizes, and what it says."""
    if c.step_batch_size_schedule is not None:
        return flag_of("step_batch_size_schedule"), c.step_batch_size_schedule
    if c.rampup_batch_size is not None:
        return flag_of("rampup_batch_size"), " ".join(map(str, c.rampup_batch_size))
    return flag_of("global_batch_size"), c.given.get("global_batch_size", c.global_batch_size)


def plan_of(c: Draft) -> BatchSchedule | None:
    """Return the plan of batch sizes, None if another rule has something to say about it."""
    if not c.counts("micro_batch_size", "global_batch_size", "seq_length"):
        return None
    try:
        return schedule_of(c)
    except ValueError:
        return None


@rule
def one_plan_of_batch_sizes(c: Draft) -> Iterator[Problem]:
    """--step-batch-size-schedule stands alone: no ramp, no --global-batch-size, no rounding."""
    if c.step_batch_size_schedule is None:
        return
    for name in ("rampup_batch_size", "global_batch_size", "decrease_batch_size_if_needed"):
        if c.given.get(name):
            yield Problem(
                (flag_of("step_batch_size_schedule"), flag_of(name)),
                f"{c.step_batch_size_schedule} and {c.given[name]}",
                "The schedule names every batch size of the run",
                f"Remove {flag_of(name)}",
            )


@rule
def batch_plan_is_readable(c: Draft) -> Iterator[Problem]:
    """A plan of batch sizes can be read and leads to the final size."""
    planned = c.rampup_batch_size is not None or c.step_batch_size_schedule is not None
    if not planned or not c.counts("micro_batch_size", "global_batch_size", "seq_length"):
        return
    try:
        schedule_of(c)
    except ValueError as error:
        flag, got = _named(c)
        fix = "Write it like 16 8 300000, START a number of INCREMENTs below --global-batch-size"
        if c.step_batch_size_schedule is not None:
            fix = "Write it like '0:768 250B:1536 500B:3072'"
        yield Problem((flag,), got, str(error), fix)


@rule
def batch_plan_counts_samples(c: Draft) -> Iterator[Problem]:
    """A batch that changes needs a duration in samples."""
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if c.values[name] is not None and c.train_samples is None:
            yield Problem(
                (flag_of(name), "--train-samples"),
                f"{_named(c)[1]} and nothing",
                "Steps of different sizes make no measure of a run's length",
                "Give --train-samples instead of --train-iters, and lengths of the learning-rate"
                " schedule in samples",
            )


@rule
def every_batch_fills_the_replicas(c: Draft) -> Iterator[Problem]:
    """Every global batch of the run is a multiple of microbatch size * replicas."""
    plan = plan_of(c)
    if plan is None:
        return
    step = replicas_step(c)
    wrong = [size for size in plan.sizes if size % step or not size]
    if not wrong:
        return
    flag, got = _named(c)
    where = f"{c.micro_batch_size} with {c.data_parallel_size} replicas"
    if c.decrease_batch_size_if_needed:
        why = f"Rounded down to a multiple of {step}, a batch of the run has no sample left"
        fix = f"Use batches of at least {step}"
    elif plan.constant:
        below = wrong[0] // step * step
        near = [str(n) for n in (below, below + step) if n > 0]
        why = "Every replica runs the same number of whole microbatches"
        fix = f"Set {flag} {' or '.join(near)}"
    else:
        sizes = ", ".join(map(str, wrong[:4])) + (", ..." if len(wrong) > 4 else "")
        why = f"Every replica runs whole microbatches, so no batch of the run can be {sizes}"
        fix = f"Use sizes that are multiples of {step}"
        if c.step_batch_size_schedule is None:
            fix += ", or --decrease-batch-size-if-needed"
    yield Problem((flag, "--micro-batch-size"), f"{got} and {where}", why, fix)


@rule
def every_step_can_be_planned(c: Draft) -> Iterator[Problem]:
    """A step has at most 100,000 microbatches."""
    plan = plan_of(c)
    if plan is None:
        return
    most = max(plan.sizes) // replicas_step(c)
    if most > MOST_MICROBATCHES:
        flag, _ = _named(c)
        yield Problem(
            (flag, "--micro-batch-size"),
            f"{most} microbatches a step",
            f"A step is planned one by one, for at most {MOST_MICROBATCHES}",
            f"Lower {flag} or raise --micro-batch-size",
        )
