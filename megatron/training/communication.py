"""What a training step sends: a log of transfers as a table, by part of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.comm_log import (
    AMAX,
    BACKWARD,
    CONTROL,
    FORWARD,
    GRADIENT_SYNC,
    KINDS,
    PARTS,
    Transfer,
)
from megatron.core.pipeline_parallel.schedule import Action, Op

_PART_OF = {
    Op.F: FORWARD,
    Op.SEND_F: FORWARD,
    Op.RECV_F: FORWARD,
    Op.GRAD_SYNC: GRADIENT_SYNC,
    Op.AMAX_SYNC: AMAX,
}


@dataclass(frozen=True)
class Row:
    """Transfers of one kind along one axis for one part of the step.

    Attributes:
        part: What they are for.
        kind: `all_reduce`, `all_gather`, ...
        axis: Name of the axis.
        ranks: Ranks of the axis.
        count: How many there are.
        payload_bytes: All of them together, see `Transfer`.
        sent_bytes: What this rank sends.
    """

    part: str
    kind: str
    axis: str
    ranks: int
    count: int
    payload_bytes: int
    sent_bytes: int


def part_of(transfer: Transfer) -> str:
    """Return the part of the step; where the caller did not say, the action in progress does."""
    if transfer.part or not transfer.place:
        return transfer.part or CONTROL
    return _PART_OF.get(Action.parse(transfer.place).op, BACKWARD)


def table(
    counts: Mapping[Transfer, int], times: Callable[[Transfer], int] = lambda _: 1
) -> tuple[Row, ...]:
    """Sum up a log.

    Args:
        counts: `CommLog.counts`; places are schedule actions or empty.
        times: How often what was noted once takes place in a step.

    Returns:
        Rows in the order of a step, then by kind and axis.
    """
    totals: dict[tuple[str, str, str, int], Counter[str]] = {}
    for transfer, noted in counts.items():
        count = noted * times(transfer)
        if not count:
            continue
        # Two channels of one pipeline, for edges from even and from odd ranks.
        axis = transfer.axis.removesuffix("-odd")
        key = (part_of(transfer), transfer.kind, axis, transfer.ranks)
        total = totals.setdefault(key, Counter())
        total["count"] += count
        total["payload"] += count * transfer.payload_bytes
        total["sent"] += count * transfer.sent_bytes
    order = sorted(totals, key=lambda k: (PARTS.index(k[0]), KINDS.index(k[1]), *k[2:]))
    return tuple(
        Row(*key, totals[key]["count"], totals[key]["payload"], totals[key]["sent"])
        for key in order
    )


def sent_bytes(rows: Iterable[Row]) -> int:
    """Return what a rank sends in a step."""
    return sum(row.sent_bytes for row in rows)


def as_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain values."""
    return [asdict(row) for row in rows]


def readable(num_bytes: float) -> str:
    """Return a number of bytes as people read it, e.g. `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the rows as an aligned table."""
    if not rows:
        return ["nothing is sent: there is one rank"]
    head = ("part", "kind", "axis", "ranks", "count", "payload", "sent by a rank")
    cells = [
        (
            row.part if not i or rows[i - 1].part != row.part else "",
            row.kind,
            row.axis,
            str(row.ranks),
            str(row.count),
            readable(row.payload_bytes),
            readable(row.sent_bytes),
        )
        for i, row in enumerate(rows)
    ]
    return aligned([head, *cells], numbers_from=3)


def aligned(cells: Sequence[Sequence[str]], numbers_from: int) -> list[str]:
    """Return rows of cells as lines; columns from `numbers_from` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i >= numbers_from else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
