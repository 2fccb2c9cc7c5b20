"""The way from the code that has something to say to the sinks that show it.

Code emits events; the bus adds up steps, makes one summary a log interval (one small reduction
over the ranks) and hands everything to this rank's sinks. A sink that fails is left out from then
on and reported as an incident: reporting must never stop a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron.core.comm_log import CONTROL
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce_
from megatron.observe.events import Event, Incident, IntervalEnd, StepEnd
from megatron.observe.timers import Stopwatch


class Sink(Protocol):
    """Shows or stores events."""

    name: str

    def handle(self, event: Event) -> None:
        """Take note of one event; kinds that do not concern the sink are ignored."""

    def close(self) -> None:
        """Flush and let go of files."""


class Bus:
    """Hands events to sinks and sums steps up. Every rank has one and emits the same steps.

    Args:
        sinks: This rank's sinks.
        log_interval: Steps between two summaries. The first step is summed up as well.
        world: All ranks, for the reduction of a summary.
        device: Where that reduction takes place.
        clock: Source of time in seconds.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        log_interval: int,
        world: Axis,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sinks = list(sinks)
        self._log_interval = log_interval
        self._world, self._device = world, device
        self._watch = Stopwatch(clock)
        self._steps: list[StepEnd] = []
        self._seen_any = False

    def start(self) -> None:
        """Start the clock of the first interval."""
        self._watch.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside (evaluation, checkpoint) out of the time per iteration."""
        with self._watch.paused():
            yield

    def is_due(self, iteration: int) -> bool:
        """Return whether the step of that number ends with a summary."""
        return not self._seen_any or iteration % self._log_interval == 0

    def emit(self, event: Event) -> None:
        """Hand an event to the sinks; a step may bring a summary along. Collective for steps."""
        self._deliver(event)
        if isinstance(event, StepEnd):
            due = self.is_due(event.iteration)
            self._seen_any = True
            self._steps.append(event)
            if due:
                self._deliver(self._summary())
            if event.iteration % self._log_interval == 0:
                self._steps.clear()
                self._watch.reset()

    def rewind(self, iteration: int) -> None:
        """Leave the steps after an iteration out of the next summary: they will run again."""
        self._steps = [step for step in self._steps if step.iteration <= iteration]

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            self._guard(sink, sink.close)
        self._sinks.clear()

    def _summary(self) -> IntervalEnd:
        """Sum up the steps since the last log line."""
        steps, world = self._steps, self._world
        count = len(steps)
        own = self._watch.elapsed_s() / count
        # Slowest and fastest rank in one reduction: the minimum is the negated maximum.
        times = torch.tensor([own, -own], dtype=torch.float64, device=self._device)
        slowest, fastest = all_reduce_(times, world, "max", CONTROL).tolist()
        taken = [s for s in steps if not s.skipped]
        names = dict.fromkeys(name for s in taken for name in s.losses)
        elapsed = max(slowest * count, 1e-9)
        return IntervalEnd(
            last=steps[-1],
            iterations=count,
            losses={n: sum(s.losses[n] for s in taken) / len(taken) for n in names},
            seconds_per_iteration=slowest,
            fastest_seconds_per_iteration=-fastest,
            tflops_per_rank=sum(s.flops for s in steps) / elapsed / 1e12 / world.size,
            tokens_per_second=sum(s.tokens for s in steps) / elapsed,
            skipped_iterations=sum(s.skipped for s in steps),
            nan_iterations=sum(s.nan for s in steps),
        )

    def _deliver(self, event: Event) -> None:
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: sink.handle(event))  # type: ignore[misc]

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        """Run one sink's code; when it fails, drop the sink and tell the others."""
        try:
            call()
        except Exception as error:  # a sink may fail in any way; it is reported
            if sink in self._sinks:
                self._sinks.remove(sink)
            what = f"{type(error).__name__}: {error}. This output stops here; training goes on."
            self._deliver(Incident(what, where=f"sink {sink.name}"))
