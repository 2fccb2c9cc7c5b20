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
    LOSS,
    OPTIMIZER,
    PARAMETER_GATHER,
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
        plain_bytes: What it would send without FP8.
        spent_bytes: How much of what it sends is there for FP8 alone: scales, magnitudes that ranks
            agree on, and whatever else would not be sent without it.
    """

    part: str
    kind: str
    axis: str
    ranks: int
    count: int
    payload_bytes: int
    sent_bytes: int
    plain_bytes: int
    spent_bytes: int


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
        total["plain"] += count * transfer.plain_bytes
        total["spent"] += count * transfer.spent_bytes
    order = sorted(totals, key=lambda k: (PARTS.index(k[0]), KINDS.index(k[1]), *k[2:]))
    sums = ("count", "payload", "sent", "plain", "spent")
    return tuple(Row(*key, *(totals[key][name] for name in sums)) for key in order)


def sent_bytes(rows: Iterable[Row]) -> int:
    """Return what a rank sends in a step."""
    return sum(row.sent_bytes for row in rows)


def as_dict(rows: Sequence[Row] | Sequence[Saving]) -> list[dict[str, Any]]:
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


# What is sent for which part of the step, or along which axes, and the flags that make it FP8.
_CONTROL = ("loss, norms, control", "")
_BY_PART = {
    GRADIENT_SYNC: ("gradients", "--grad-reduce-dtype"),
    PARAMETER_GATHER: ("parameters", "--fp8-param-gather"),
    AMAX: ("magnitudes", ""),
    LOSS: _CONTROL,
    OPTIMIZER: _CONTROL,
    CONTROL: _CONTROL,
}
_SHARDS = "sequence shards"
_CONTEXT = "context parallel"
_EXPERTS = "experts"
_GROUPS = {
    "tp": _SHARDS,
    "cp": _CONTEXT,
    "cp-a2a": _CONTEXT,
    "cp-p2p": _CONTEXT,
    "ep": _EXPERTS,
    "etp": _EXPERTS,
    "etp-ep": _EXPERTS,
}
_SWITCHES = {
    (_SHARDS, FORWARD): "--fp8-format with --sequence-parallel",
    (_SHARDS, BACKWARD): "--fp8-format with --sequence-parallel",
    (_CONTEXT, FORWARD): "--fp8-dot-product-attention, --no-fp8-cp-exchange",
    (_CONTEXT, BACKWARD): "--fp8-dot-product-attention, --no-fp8-cp-exchange",
    (_EXPERTS, FORWARD): "--moe-dispatch-fwd-dtype",
    (_EXPERTS, BACKWARD): "--moe-combine-bwd-dtype",
}


@dataclass(frozen=True)
class Saving:
    """What FP8 makes of everything that is sent for one purpose.

    Attributes:
        what: The purpose.
        sent_bytes: What this rank sends in a step.
        plain_bytes: What it would send without FP8.
        spent_bytes: How much of what it sends is there for FP8 alone: scales, magnitudes that ranks
            agree on, and whatever else would not be sent without it.
        switch: The flags that decide about FP8 here; may be empty.
    """

    what: str
    sent_bytes: int
    plain_bytes: int
    spent_bytes: int
    switch: str = ""

    @property
    def saved_bytes(self) -> int:
        """What FP8 saves; negative where it only costs."""
        return self.plain_bytes - self.sent_bytes


def _purpose(row: Row) -> tuple[str, str]:
    """What is sent, and the flags that decide about FP8."""
    if row.part in _BY_PART:
        return _BY_PART[row.part]
    group = _GROUPS.get(row.axis, "balancing losses")
    if row.axis.startswith("pipe-"):
        group = "pipeline"
    return f"{group}, {row.part}", _SWITCHES.get((group, row.part), "")


def savings(rows: Iterable[Row]) -> tuple[Saving, ...]:
    """Sum up what FP8 saves and what it costs, purpose by purpose.

    Args:
        rows: What `table` returned.

    Returns:
        One entry for each purpose for which something is sent, in the order of a step.
    """
    totals: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if not row.sent_bytes and not row.plain_bytes:
            continue
        total = totals.setdefault(_purpose(row), [0, 0, 0])
        for i, value in enumerate((row.sent_bytes, row.plain_bytes, row.spent_bytes)):
            total[i] += value
    return tuple(
        Saving(what, sent, plain, spent, switch)
        for (what, switch), (sent, plain, spent) in totals.items()
    )


def saving_lines(rows: Sequence[Row]) -> list[str]:
    """Return what FP8 saves on the wire as an aligned table; nothing where it has no part in it."""
    if all(row.sent_bytes == row.plain_bytes for row in rows):
        return []
    found = savings(rows)
    total = Saving(
        "all",
        sum(one.sent_bytes for one in found),
        sum(one.plain_bytes for one in found),
        sum(one.spent_bytes for one in found),
    )
    cells = [("FP8 on the wire", "sent", "without FP8", "saved", "", "spent for FP8", "switch")]
    for one in (*found, total):
        plain, saved = one.plain_bytes, one.saved_bytes
        cells.append(
            (
                one.what,
                readable(one.sent_bytes),
                readable(plain),
                readable(saved) if saved else "-",
                f"{saved / plain:.1%}" if saved and plain else "",
                readable(one.spent_bytes) if one.spent_bytes else "-",
                one.switch,
            )
        )
    return aligned(cells, numbers_from=1, numbers_to=6)


def aligned(
    cells: Sequence[Sequence[str]], numbers_from: int, numbers_to: int | None = None
) -> list[str]:
    """Return rows of cells as lines.

    Args:
        cells: The rows.
        numbers_from: The first column that is aligned to the right.
        numbers_to: The column behind the last such one; None if there is none.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) if numbers_to is None else numbers_to
    return [
        "  ".join(
            cell.rjust(width) if numbers_from <= i < last else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
