"""Decide, on every rank alike, that a run ends before its last iteration."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core.comm_log import CONTROL
from megatron.core.mesh import Axis
from megatron.core.paper import numbers
from megatron.core.tensor_parallel.mappings import all_reduce_

# SIGTERM comes from schedulers and launchers, the others from `sbatch --signal`.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class ExitWatch:
    """Watches for the reasons to stop early: a signal, a time limit, an iteration interval.

    Use it as a context manager; signal handlers are installed inside only, and only with
    ``--exit-signal-handler``. A signal that reaches one rank stops all of them at the same
    iteration.

    Args:
        cfg: The run's configuration.
        world: All ranks.
        device: Where the ranks' flags are reduced.
        started: `time.monotonic()` at the start of the process.
    """

    def __init__(self, cfg: RunConfig, world: Axis, device: torch.device, started: float) -> None:
        self._handle_signals = cfg.exit_signal_handler
        self._signals = {*_SIGNALS, signal.Signals[cfg.exit_signal]}
        self._deadline_s: float | None = cfg.exit_signal_deadline
        self._received_at: float | None = None
        self._minutes = cfg.exit_duration_in_mins
        self._interval = cfg.exit_interval
        self._world, self._device, self._started = world, device, started
        self._received, self._stopping = 0, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> ExitWatch:
        """Install the handlers."""
        if self._handle_signals:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the previous handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received_at is None:
            self._received_at = time.monotonic()
        self._received = max(self._received, number)

    def seconds_left(self) -> float | None:
        """Return how long this rank may still take; None without a deadline or a signal."""
        if self._deadline_s is None or not self._stopping:
            return None
        if self._received_at is None:  # it reached other ranks only
            self._received_at = time.monotonic()
        return self._deadline_s - (time.monotonic() - self._received_at)

    def interrupted(self) -> bool:
        """Return whether a signal has reached any rank. Collective."""
        if not self._handle_signals:
            return False
        flag = torch.tensor([float(self._received)], device=self._device)
        return bool(all_reduce_(flag, self._world, "max", CONTROL).item())

    def reason(self, iteration: int) -> str | None:
        """Return why the run should end after `iteration`, None to go on. Collective.

        The text is the one that log readers look for.
        """
        if self._handle_signals or self._minutes is not None:
            elapsed = (time.monotonic() - self._started) / 60.0
            flags = torch.tensor([float(self._received), elapsed], device=self._device)
            number, minutes = numbers(all_reduce_(flags, self._world, "max", CONTROL))
            if number:
                self._stopping = True
                return f"exiting program after receiving {signal.Signals(int(number)).name}."
            if self._minutes is not None and minutes > self._minutes:
                return f"exiting program after {minutes:.2f} minutes"
        if self._interval and iteration % self._interval == 0:
            return f"exiting program at iteration {iteration}"
        return None
