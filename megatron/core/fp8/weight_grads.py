"""Weight gradients that are computed later than the input gradients beside them.

A linear layer's backward pass is two products: the gradient of its input, for which the rest of the
backward pass waits, and that of its weight, for which nobody does. A pipeline schedule with weight
passes runs the second one later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch


class WeightGradQueue:
    """What linear layers have put off.

    A layer that is built with a queue puts its product there while the queue is collecting, and
    computes it at once otherwise. The products of one weight run in the order in which they came,
    so sums are those of a backward pass in one piece, bitwise.

    Attributes:
        when_complete: Called with a weight when nothing of it is put off any more.
    """

    def __init__(self) -> None:
        self.when_complete: Callable[[torch.Tensor], None] = lambda _: None
        self._jobs: dict[Hashable, list[tuple[torch.Tensor, Callable[[], object]]]] = {}
        self._owed: Counter[torch.Tensor] = Counter()
        self._into: list[tuple[torch.Tensor, Callable[[], object]]] | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether a product handed over now is put off."""
        return self._into is not None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Put off the products of the backward pass inside the block.

        Args:
            key: Name of the pass, for `run`.
        """
        self._into = self._jobs.setdefault(key, [])
        try:
            yield
        finally:
            self._into = None

    def put(self, weight: torch.Tensor, job: Callable[[], object]) -> None:
        """Put off one product.

        Args:
            weight: Whose gradient it is.
            job: Computes it and adds it to the weight's `main_grad`.
        """
        if self._into is None:
            raise RuntimeError("WeightGradQueue: nothing is collected outside of collect().")
        self._into.append((weight, job))
        self._owed[weight] += 1

    def owes(self, weight: torch.Tensor) -> bool:
        """Whether a part of this weight's gradient is put off."""
        return self._owed[weight] > 0

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Compute what the pass `key` put off.

        Raises:
            KeyError: No such pass was collected, or it has run.
        """
        jobs = self._jobs.pop(key)
        jobs.reverse()
        while jobs:
            weight, job = jobs.pop()  # its operands are free as soon as it is done
            job()
            del job
            self._owed[weight] -= 1
            if not self._owed[weight]:
                del self._owed[weight]
                self.when_complete(weight)

    def clear(self) -> None:
        """Forget everything, after a step that was broken off."""
        self._jobs.clear()
        self._owed.clear()
