"""A global batch that changes during a run: its flags, and the plan that follows from them."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any

from megatron.config.field import field

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class BatchSizeConfig:
    """How the global batch grows. Both plans count samples and need --train-samples."""

    rampup_batch_size: tuple[int, ...] | None = field(
        nargs="*",
        help="START INCREMENT SAMPLES: begin with START sequences a step and add INCREMENT, at"
        " equal distances, until --global-batch-size is reached after SAMPLES sequences.",
    )
    step_batch_size_schedule: str | None = field(
        help="Batch sizes by tokens read, e.g. '0:768 250B:1536'; K, M, B and T are allowed."
        " Replaces --global-batch-size.",
    )
    decrease_batch_size_if_needed: bool = field(
        False,
        help="Round a batch that does not fit the replicas down to the next size that does.",
    )


@dataclass(frozen=True)
class BatchSchedule:
    """The size of the global batch as a function of the samples read before it.

    Attributes:
        starts: Sample from which on each size counts, ascending, the first 0.
        sizes: The sizes.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def constant(self) -> bool:
        """Whether there is one size only."""
        return len(self.sizes) == 1

    @property
    def largest(self) -> int:
        """The largest size."""
        return max(self.sizes)

    def size(self, consumed: int) -> int:
        """Return the size of the step that `consumed` samples precede."""
        return self.sizes[bisect.bisect_right(self.starts, consumed) - 1]

    def steps(self, consumed: int, end: int) -> int:
        """Return how many whole steps lie between two numbers of samples."""
        count = 0
        while consumed < end:
            stage = bisect.bisect_right(self.starts, consumed) - 1
            size = self.sizes[stage]
            last = stage + 1 == len(self.starts)
            until = end if last else min(end, self.starts[stage + 1])
            # The step that reaches the next stage still has this one's size.
            here = (until - consumed) // size if until == end else -(-(until - consumed) // size)
            if not here or consumed + here * size > end:
                return count + (end - consumed) // size
            count, consumed = count + here, consumed + here * size
        return count

    def text(self) -> str:
        """Say in words which size counts from which sample on."""
        shown = [f"{s} from sample {at}" for at, s in zip(self.starts, self.sizes, strict=True)]
        return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def ramp(start: int, increment: int, samples: int, final: int) -> BatchSchedule:
    """Return the plan of ``--rampup-batch-size``.

    The size after ``c`` samples is ``start + int(c / (samples / increments)) * increment``, in
    double precision as in Megatron-LM, and `final` after `samples`.
    """
    count = (final - start) // increment
    each = samples / count
    starts = [0]
    for step in range(1, count + 1):
        at = math.ceil(step * each)
        while int(at / each) < step:
            at += 1
        while at > starts[-1] + 1 and int((at - 1) / each) >= step:
            at -= 1
        starts.append(at)
    sizes = [start + k * increment for k in range(count)] + [final]
    return BatchSchedule(tuple(starts), tuple(sizes))


def _number(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    value = float(text[:-1] if factor > 1 else text) * factor
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return int(value)


def parse_steps(text: str, seq_length: int) -> BatchSchedule:
    """Return the plan of ``--step-batch-size-schedule``.

    Args:
        text: ``TOKENS:SIZE`` entries, separated by blanks or commas.
        seq_length: Tokens of a sample; thresholds are rounded down to whole samples.

    Raises:
        ValueError: The text is not such a plan; the message is a sentence without its full stop.
    """
    entries = []
    for word in text.replace(",", " ").split():
        threshold, colon, size = word.partition(":")
        try:
            entry = (_number(threshold) // seq_length, _number(size))
        except ValueError:
            colon = ""
        if not colon:
            raise ValueError(f"{word} is not a number of tokens, a colon and a batch size")
        entries.append(entry)
    entries.sort(key=lambda entry: entry[0])
    if not entries or entries[0][0]:
        raise ValueError("It has to say with which size the run begins, at token 0")
    starts, sizes = zip(*entries, strict=True)
    for before, after in zip(starts[:-1], starts[1:], strict=True):
        if before == after:
            raise ValueError(f"Two sizes begin at sample {after} of {seq_length} tokens")
    if min(sizes) < 1:
        raise ValueError("A batch has at least one sample")
    return BatchSchedule(starts, sizes)


def replicas_step(c: Any) -> int:
    """Return the samples that all replicas read with one microbatch each."""
    return int(c.micro_batch_size * c.data_parallel_size)


def schedule_of(c: Any) -> BatchSchedule:
    """Return the plan of a configuration, finished or in the making.

    Raises:
        ValueError: The flags make no plan; the message is a sentence without its full stop.
    """
    # What was asked for: rounding the last size must not move the others.
    final = c.given.get("global_batch_size") or c.global_batch_size
    plan = BatchSchedule((0,), (final,))
    if c.step_batch_size_schedule is not None:
        plan = parse_steps(c.step_batch_size_schedule, c.seq_length)
    elif c.rampup_batch_size is not None:
        if len(c.rampup_batch_size) != 3 or min(c.rampup_batch_size) < 1:
            raise ValueError("It takes three positive numbers: START INCREMENT SAMPLES")
        start, increment, samples = c.rampup_batch_size
        if start >= final or (final - start) % increment:
            raise ValueError(
                f"From {start}, steps of {increment} do not lead up to --global-batch-size {final}"
            )
        if samples < (final - start) // increment:
            raise ValueError("The ramp has more sizes than samples")
        plan = ramp(start, increment, samples, final)
    if c.decrease_batch_size_if_needed:
        step = replicas_step(c)
        plan = BatchSchedule(plan.starts, tuple(size // step * step for size in plan.sizes))
    return plan
