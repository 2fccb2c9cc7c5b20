"""A stopwatch that can be halted, for wall time without evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the wall time during which it runs.

    Args:
        clock: Source of time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Run from now on; does nothing when it runs already."""
        if self._since is None:
            self._since = self._clock()

    def stop(self) -> None:
        """Halt; does nothing when it is halted already."""
        if self._since is not None:
            self._total_s += self._clock() - self._since
            self._since = None

    def elapsed_s(self) -> float:
        """Return the seconds so far."""
        running = 0.0 if self._since is None else self._clock() - self._since
        return self._total_s + running

    def reset(self) -> None:
        """Go back to zero, without changing whether it runs."""
        self._total_s = 0.0
        if self._since is not None:
            self._since = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Halt inside the context."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()
