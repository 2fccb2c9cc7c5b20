"""Agreement among ranks, so that a failure on one is the same clear error on all.

Every file operation of a checkpoint may fail on one rank only. If that rank raised alone, the
others would wait in the next collective until its timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.core import wire
from megatron.core.errors import CheckpointError, on_every_rank
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import gather_objects

T = TypeVar("T")
U = TypeVar("U")


class Peers:
    """The ranks that save or load together; identity operations when there is only one."""

    def __init__(self, axis: Axis) -> None:
        """Use the ranks of ``axis``, normally the whole world."""
        self.rank = axis.rank
        self.size = axis.size
        self.group = axis.group
        self._axis = axis

    @property
    def leads(self) -> bool:
        """Whether this rank makes the decisions."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        return gather_objects(value, self._axis)

    def gather_to_first(self, value: T) -> list[T] | None:
        """Return every rank's value, in rank order, on the first rank, None on the others."""
        return [value] if self.size == 1 else wire.gather_to_first(value, self._axis)

    def agree(self, problem: str | None) -> None:
        """Raise the first problem that any rank has on all of them.

        Raises:
            CheckpointError: Some rank passed a text.
        """
        problems = self.gather(problem)
        for rank, text in enumerate(problems):
            if text is not None:
                shared = all(other == text for other in problems)
                told = text if shared else f"rank {rank} has a problem. {text}"
                raise on_every_rank(CheckpointError(told))

    def decide(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank and give its result, or its failure, to all.

        Raises:
            CheckpointError: The first rank could not do it.
        """
        outcome: list[object] = [None, None]
        if self.leads:
            try:
                outcome = [work(), None]
            except (CheckpointError, OSError) as error:
                outcome = [None, str(error)]
        if self.size > 1:
            outcome = wire.broadcast_object(outcome, self._axis)
        if outcome[1] is not None:
            raise on_every_rank(CheckpointError(str(outcome[1])))
        return outcome[0]  # type: ignore[return-value]

    def share_out(self, value: T, work: Callable[[list[T]], list[U]]) -> U:
        """Let the first rank turn everybody's values into one result for each.

        Raises:
            CheckpointError: On every rank, when the first one could not do it.
        """
        if self.size == 1:
            return self.decide(lambda: work([value])[0])
        values = self.gather_to_first(value)
        outcomes: list[tuple[U | None, str | None]] | None = None
        if values is not None:
            try:
                outcomes = [(result, None) for result in work(values)]
            except (CheckpointError, OSError) as error:
                outcomes = [(None, str(error))] * self.size
        result, problem = wire.scatter_from_first(outcomes, self._axis)
        if problem is not None:
            raise on_every_rank(CheckpointError(problem))
        return result  # type: ignore[no-any-return]

    def attempt(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; when it fails on one, all raise that failure.

        Raises:
            CheckpointError: It failed somewhere.
        """
        result: T | None = None
        problem: str | None = None
        try:
            result = work()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        self.agree(problem)
        return result  # type: ignore[return-value]
