"""Every transfer between ranks goes through here: no other file calls torch.distributed for one.

Three things happen here and nowhere else. FP8 tensors travel as their bytes, because gloo and older
NCCL refuse FP8 types. A transfer is noted if the axis has a log. And ranks that exist on paper only
(`PaperGroup`) get nothing and send nothing: their transfers are noted, and tensors stay as they
are.

All axes have more than one rank here. With `background` a call returns at once, and nobody may
touch the tensors before `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.mesh import Axis, PaperGroup

# torch 2.13 renamed these two and deprecates the old names; 2.12 and older have only the old ones.
_all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

FP8_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


class Pending(Protocol):
    """A transfer on its way. Nobody may touch its tensors before `wait`."""

    def wait(self) -> Any:
        """Return when its result can be used."""

    def is_completed(self) -> bool:
        """Whether it has taken place."""


class _Done:
    """A transfer that is complete."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always."""
        return True


_DONE = _Done()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The tensor as a type that every transport carries."""
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x


def _moves(kind: str, axis: Axis, x: torch.Tensor, part: str = "") -> bool:
    """Note a transfer; return whether anything is to move."""
    return note(kind, axis, x.numel() * x.element_size(), part)


def note(kind: str, axis: Axis, payload_bytes: int, part: str = "") -> bool:
    """Note a transfer whose steps (`swap`) are not noted; return whether anything is to move."""
    if axis.log is not None:
        axis.log.add(kind, axis.name, axis.size, payload_bytes, part)
    return not isinstance(axis.group, PaperGroup)


def all_reduce(
    x: torch.Tensor,
    axis: Axis,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    part: str = "",
    background: bool = False,
) -> Pending:
    """Reduce the contiguous `x` in place."""
    if not _moves("all_reduce", axis, x, part):
        return _DONE
    return dist.all_reduce(x, op=op, group=axis.group, async_op=background) or _DONE


def all_gather(
    out: torch.Tensor, x: torch.Tensor, axis: Axis, *, part: str = "", background: bool = False
) -> Pending:
    """Concatenate every rank's `x [n, ...]` into `out [n * axis.size, ...]`, both contiguous."""
    if not _moves("all_gather", axis, out, part):
        return _DONE
    out, x = as_bytes(out), as_bytes(x)
    return _all_gather_single(out, x, group=axis.group, async_op=background) or _DONE


def reduce_scatter(
    out: torch.Tensor, x: torch.Tensor, axis: Axis, *, part: str = "", background: bool = False
) -> Pending:
    """Sum the flat `x [n * axis.size]` and keep this rank's part in `out [n]`."""
    if not _moves("reduce_scatter", axis, x, part):
        return _DONE
    return _reduce_scatter_single(out, x, group=axis.group, async_op=background) or _DONE


def all_to_all(
    out: torch.Tensor,
    x: torch.Tensor,
    axis: Axis,
    *,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
    part: str = "",
    background: bool = False,
) -> Pending:
    """Send rows of `x` to every rank and receive rows of `out`, in rank order.

    Args:
        out: What arrives.
        x: What is sent.
        axis: Ranks that take part.
        received: Rows from each rank; equal numbers by default.
        sent: Rows to each rank; equal numbers by default.
        part: What it is for.
        background: Return at once.
    """
    if not _moves("all_to_all", axis, x, part):
        return _DONE
    work = dist.all_to_all_single(
        as_bytes(out),
        as_bytes(x),
        None if received is None else list(received),
        None if sent is None else list(sent),
        group=axis.group,
        async_op=background,
    )
    return work or _DONE


def broadcast(x: torch.Tensor, axis: Axis, src: int) -> None:
    """Overwrite `x` with the value of index `src` of the axis."""
    if _moves("broadcast", axis, x):
        dist.broadcast(as_bytes(x), src=axis.ranks[src], group=axis.group)


def send(x: torch.Tensor, axis: Axis, to: int) -> Pending:
    """Start to send the contiguous `x` to the global rank `to`."""
    if not _moves("send", axis, x):
        return _DONE
    return dist.isend(x, dst=to, group=axis.group) or _DONE


def receive(x: torch.Tensor, axis: Axis, source: int) -> Pending:
    """Start to receive the contiguous `x` from the global rank `source`."""
    if not _moves("recv", axis, x):
        return _DONE
    return dist.irecv(x, src=source, group=axis.group) or _DONE


def exchange(
    x: torch.Tensor, arriving: torch.Tensor, axis: Axis, to: int, source: int, tag: int = 0
) -> Sequence[Pending]:
    """Start to send `x` to one global rank and to receive `arriving` from another, as one."""
    moves = [_moves(kind, axis, t) for kind, t in (("send", x), ("recv", arriving))]
    return _exchange(x, arriving, axis, to, source, tag) if all(moves) else ()


def _exchange(
    x: torch.Tensor, arriving: torch.Tensor, axis: Axis, to: int, source: int, tag: int = 0
) -> Sequence[Pending]:
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, as_bytes(x), to, axis.group, tag),
            dist.P2POp(dist.irecv, as_bytes(arriving), source, axis.group, tag),
        ]
    )


class Swap:
    """Step k of a transfer in which every rank has something for every other.

    In step k, from 1 to `axis.size - 1`, rank r sends to r + k and receives from r - k, so every
    rank is busy with one message each way. All ranks start the same steps in the same order. Not
    noted: see `note`.

    Args:
        x: Contiguous; what index `axis.rank + step` gets. Nobody may write to it before `wait`.
        arriving: Contiguous; what index `axis.rank - step` sends.
        axis: Ranks that take part.
        step: `k`.
    """

    def __init__(self, x: torch.Tensor, arriving: torch.Tensor, axis: Axis, step: int) -> None:
        to, source = (axis.ranks[(axis.rank + k) % axis.size] for k in (step, -step))
        self._tensors = (x, arriving)  # a transport need not keep them alive
        self._works = _exchange(x, arriving, axis, to, source)

    def wait(self) -> None:
        """Return when what arrives can be read and what was sent can be written to."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether it has taken place."""
        return all(work.is_completed() for work in self._works)


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable value; ranks on paper have the same as this one. Not noted."""
    values: list[Any] = [value] * axis.size
    if not isinstance(axis.group, PaperGroup):
        dist.all_gather_object(values, value, group=axis.group)
    return values


def gather_to_first(value: Any, axis: Axis) -> list[Any] | None:
    """Return every rank's picklable value on the first rank, None on the others. Not noted."""
    if isinstance(axis.group, PaperGroup):
        return [value] * axis.size
    values: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    dist.gather_object(value, values, dst=axis.ranks[0], group=axis.group)
    return values


def scatter_from_first(values: list[Any] | None, axis: Axis) -> Any:
    """Return this rank's one of the picklable values of the first rank. Not noted."""
    if isinstance(axis.group, PaperGroup):
        return None if values is None else values[axis.rank]
    own: list[Any] = [None]
    dist.scatter_object_list(own, values, src=axis.ranks[0], group=axis.group)
    return own[0]


def broadcast_object(value: Any, axis: Axis) -> Any:
    """Return the picklable value of the first rank. Not noted."""
    values = [value]
    if not isinstance(axis.group, PaperGroup):
        dist.broadcast_object_list(values, src=axis.ranks[0], group=axis.group)
    return values[0]
