"""What was sent between ranks: how often, along which axis, how many bytes, for what.

A log hangs on the axes of a mesh (`ParallelState.recording`), and `wire.py` notes every transfer of
an axis that has one. Without a log nothing is noted and nothing is looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
GRADIENT_SYNC, AMAX, OPTIMIZER = "gradient sync", "amax", "optimizer"
PARAMETER_GATHER, LOSS, CONTROL = "parameter gather", "loss", "control"
PARTS = (FORWARD, BACKWARD, LOSS, GRADIENT_SYNC, AMAX, OPTIMIZER, PARAMETER_GATHER, CONTROL)

# How often the payload leaves a rank, times the number of ranks, for a ring of `n` ranks.
_TRIPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "send": lambda n: n,
    "recv": lambda n: 0,
}
KINDS = tuple(_TRIPS)


@dataclass(frozen=True)
class Packing:
    """What the bytes of a transfer stand for, line by line.

    Attributes:
        sent: Bytes of a line on the wire.
        scales: How many of them are scales, or something else that is there for FP8 alone.
        plain: Bytes of the line in the type that it is sent in without FP8; 0 for what is sent
            because of FP8 only.
    """

    sent: int = 1
    scales: int = 0
    plain: int = 1


AS_IT_IS = Packing()
# What is sent because of FP8 only.
BECAUSE_OF_FP8 = Packing(sent=1, scales=1, plain=0)


@dataclass(frozen=True)
class Transfer:
    """One kind of transfer.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send` or
            `recv`.
        axis: Name of the axis.
        ranks: Ranks of the axis.
        payload_bytes: Of the whole tensor: what a gather makes, what a scatter starts from.
        part: What it is for, one of `PARTS`; empty where the caller did not say, which is inside
            a forward or backward pass.
        place: What the log's owner said was going on.
        packing: What the bytes stand for.
    """

    kind: str
    axis: str
    ranks: int
    payload_bytes: int
    part: str = ""
    place: str = ""
    packing: Packing = AS_IT_IS

    @property
    def sent_bytes(self) -> int:
        """What one rank sends with the usual ring algorithm; nothing for `recv`.

        Source: Chan et al., "Collective communication: theory, practice, and experience", 2007.
        """
        return self._sent(self.payload_bytes)

    @property
    def plain_bytes(self) -> int:
        """What one rank would send without FP8."""
        return self._sent(self.payload_bytes * self.packing.plain // self.packing.sent)

    @property
    def spent_bytes(self) -> int:
        """How much of `sent_bytes` is there for FP8 alone."""
        return self._sent(self.payload_bytes * self.packing.scales // self.packing.sent)

    def _sent(self, payload: int) -> int:
        return payload * _TRIPS[self.kind](self.ranks) // self.ranks


class CommLog:
    """Counts transfers of one rank.

    Args:
        place: Asked at every transfer what is going on, e.g. the schedule's action.

    Attributes:
        counts: How often each kind of transfer took place.
    """

    def __init__(self, place: Callable[[], str] = str) -> None:
        self.place = place
        self.counts: Counter[Transfer] = Counter()

    def add(
        self,
        kind: str,
        axis: str,
        ranks: int,
        payload_bytes: int,
        part: str = "",
        packing: Packing = AS_IT_IS,
    ) -> None:
        """Note one transfer."""
        place = self.place()
        if part == AMAX:
            packing = BECAUSE_OF_FP8
        self.counts[Transfer(kind, axis, ranks, payload_bytes, part, place, packing)] += 1

    def clear(self) -> None:
        """Forget everything."""
        self.counts.clear()


class PackedLog(CommLog):
    """Notes transfers in another log, with what their bytes stand for.

    Args:
        log: The other log.
        packing: Of all transfers noted here.
    """

    def __init__(self, log: CommLog, packing: Packing) -> None:
        self._log, self._packing = log, packing

    def add(
        self,
        kind: str,
        axis: str,
        ranks: int,
        payload_bytes: int,
        part: str = "",
        packing: Packing = AS_IT_IS,
    ) -> None:
        """See the base class."""
        self._log.add(kind, axis, ranks, payload_bytes, part, self._packing)
