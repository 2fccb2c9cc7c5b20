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
    """

    kind: str
    axis: str
    ranks: int
    payload_bytes: int
    part: str = ""
    place: str = ""

    @property
    def sent_bytes(self) -> int:
        """What one rank sends with the usual ring algorithm; nothing for `recv`.

        Source: Chan et al., "Collective communication: theory, practice, and experience", 2007.
        """
        return self.payload_bytes * _TRIPS[self.kind](self.ranks) // self.ranks


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

    def add(self, kind: str, axis: str, ranks: int, payload_bytes: int, part: str = "") -> None:
        """Note one transfer."""
        self.counts[Transfer(kind, axis, ranks, payload_bytes, part, self.place())] += 1

    def clear(self) -> None:
        """Forget everything."""
        self.counts.clear()
