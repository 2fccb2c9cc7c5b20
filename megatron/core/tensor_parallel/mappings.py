"""Collectives along one mesh axis: plain ones, and pairs that autograd can differentiate.

Every function is the identity on an axis of size 1. Reducing FP8 tensors is an error, since a sum
of codes means nothing. `part` says in the axis' log what a transfer is for (see `comm_log`).

On a CPU, gathering and reduce-scattering are messages between each two ranks. For what a linear
layer moves (0.25 to 2 MiB a rank, 2 and 4 ranks on one machine), gloo's own reduce-scatter took 1.7
to 2.7 times as long, its gather 0.7 to 1.5 times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import wire
from megatron.core.errors import MeshError, complaint
from megatron.core.mesh import Axis
from megatron.core.wire import FP8_DTYPES, Pending, as_bytes

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _reduce_op(x: torch.Tensor, op: str) -> dist.ReduceOp.RedOpType:
    if op not in _REDUCE_OPS:
        raise MeshError(
            complaint("reduction", op, "Unknown operation", f"Use {', '.join(_REDUCE_OPS)}")
        )
    if x.dtype in FP8_DTYPES or (x.dtype == torch.bool and op == "sum"):
        raise MeshError(
            complaint(
                f"{op} reduction",
                x.dtype,
                "Values of this type cannot be added or compared on the wire",
                "Convert to fp32 or an integer type first",
            )
        )
    return _REDUCE_OPS[op]


def check_divisible(x: torch.Tensor, axis: Axis, dim: int) -> None:
    """Refuse a tensor that does not split evenly.

    Raises:
        MeshError: Names the shape.
    """
    if x.dim() == 0 or x.shape[dim] % axis.size:
        raise MeshError(
            complaint(
                f"shape along dim {dim}",
                tuple(x.shape),
                f"It cannot be split into {axis.size} equal parts along {axis.name}",
                f"Make the extent a multiple of {axis.size}",
            )
        )


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable value, in rank order, on every rank. For small things only."""
    if axis.size == 1:
        return [value]
    return wire.gather_objects(value, axis)


def all_reduce_(x: torch.Tensor, axis: Axis, op: str = "sum", part: str = "") -> torch.Tensor:
    """Reduce `x` over `axis` in place and return it. `x` must be contiguous."""
    reduce_op = _reduce_op(x, op)
    if axis.size > 1:
        wire.all_reduce(x, axis, reduce_op, part=part)
    return x


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", part: str = "") -> torch.Tensor:
    """Reduce `x` over `axis`; `x` keeps its value.

    Args:
        x: Any shape, the same on every rank.
        axis: Ranks that take part.
        op: `sum`, `max` or `min`. `max` may lose a NaN: test for NaN separately.
        part: What it is for, in the axis' log.

    Returns:
        The reduced tensor; `x` itself on an axis of size 1.
    """
    if axis.size == 1:
        _reduce_op(x, op)
        return x
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis, op, part)


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """Concatenate every rank's `x` along `dim`, in axis order.

    Args:
        x: `[..., n, ...]`, the same shape on every rank.
        axis: Ranks that take part.
        dim: The dimension that grows.

    Returns:
        `[..., n * axis.size, ...]`, contiguous for `dim` 0.
    """
    if axis.size == 1:
        return x
    if x.dim() == 0:
        check_divisible(x, axis, dim)
    dim = dim % x.dim()
    local = x.contiguous()
    out = torch.empty(
        (axis.size * local.shape[0], *local.shape[1:]), dtype=x.dtype, device=x.device
    )
    if x.device.type == "cpu":
        for step in start_gather_steps(local, out, axis):
            step.wait()
    else:
        wire.all_gather(out, local, axis)
    if dim == 0:
        return out
    parts = as_bytes(out).view(axis.size, *as_bytes(local).shape)
    joined = parts.movedim(0, dim).flatten(dim, dim + 1)
    return joined.view(x.dtype) if x.dtype in FP8_DTYPES else joined


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """Sum `x` over `axis` and keep this rank's part along `dim`.

    Args:
        x: `[..., n, ...]`, the same shape on every rank.
        axis: Ranks that take part.
        dim: The dimension that shrinks.

    Returns:
        `[..., n / axis.size, ...]`. On a CPU the addends come in rank order and are added in fp32
        or wider, with one rounding.

    Raises:
        MeshError: If `n` is not a multiple of the axis size.
    """
    _reduce_op(x, "sum")
    if axis.size == 1:
        return x
    check_divisible(x, axis, dim)
    dim = dim % x.dim()
    parts = (*x.shape[:dim], axis.size, x.shape[dim] // axis.size, *x.shape[dim + 1 :])
    local = x.reshape(parts).movedim(dim, 0).contiguous()
    if x.device.type == "cpu":
        return PairwiseSum(local[0], axis, local.unbind()).finish()
    out = torch.empty(local.shape[1:], dtype=x.dtype, device=x.device)
    wire.reduce_scatter(out.view(-1), local.view(-1), axis)
    return out


def start_gather_steps(local: torch.Tensor, out: torch.Tensor, axis: Axis) -> list[Pending]:
    """Start to concatenate every rank's `local`, each part on its own.

    Args:
        local: `[n, ...]`, contiguous.
        out: `[n * axis.size, ...]`, contiguous; this rank's part is filled at once.
        axis: Ranks that take part, more than one.

    Returns:
        The steps; when number i (from 0) has been waited for, the part of index
        `(axis.rank - 1 - i) % axis.size` is there.
    """
    parts = as_bytes(out).view(axis.size, *as_bytes(local).shape)
    parts[axis.rank].copy_(as_bytes(local))
    if not wire.note("all_gather", axis, parts.nbytes):
        return []
    return [
        wire.Swap(local, parts[(axis.rank - step) % axis.size], axis, step)
        for step in range(1, axis.size if local.numel() else 1)
    ]


class PairwiseSum:
    """A reduce-scatter whose addends are sent one by one, as soon as they exist.

    Args:
        like: A tensor of the shape and type of the result.
        axis: Ranks that take part, more than one.
        addends: What every rank gets from this one, by index: all at once, instead of `send`.
    """

    def __init__(
        self, like: torch.Tensor, axis: Axis, addends: Sequence[torch.Tensor] | None = None
    ) -> None:
        self._axis, self._like = axis, like
        self._parts = [like] * axis.size
        self._steps: list[Pending] = []
        self._moves = wire.note("reduce_scatter", axis, like.nbytes * axis.size)
        if addends is not None:
            for index in self.order():
                self.send(index, addends[index])

    def order(self) -> list[int]:
        """Indices of the ranks in the order in which `send` serves them; this one is last."""
        rank, size = self._axis.rank, self._axis.size
        return [(rank + step) % size for step in range(1, size + 1)]

    def send(self, index: int, addend: torch.Tensor) -> None:
        """Start to send the contiguous `addend` to rank `index` of the axis, or keep it here."""
        axis = self._axis
        step = (index - axis.rank) % axis.size
        if not step or not self._moves:
            self._parts[index] = addend
            return
        arriving = torch.empty_like(self._like)
        self._parts[(axis.rank - step) % axis.size] = arriving
        if addend.numel():
            self._steps.append(wire.Swap(addend, arriving, axis, step))

    def finish(self) -> torch.Tensor:
        """Wait for every addend and return their sum, added in rank order."""
        for step in self._steps:
            step.wait()
        first, second, *others = self._parts
        if not others:
            return first + second  # 16-bit types are added in fp32 and rounded once
        wide = first.dtype
        if wide.is_floating_point:
            wide = torch.promote_types(wide, torch.float32)
        total = first.to(wide, copy=True)
        for addend in (second, *others):
            total += addend
        return total.to(first.dtype)


def start_all_reduce(x: torch.Tensor, axis: Axis, part: str = "") -> Pending:
    """Start to sum the contiguous `x` over an axis of more than one rank, in place."""
    return wire.all_reduce(x, axis, part=part, background=True)


def start_reduce_scatter(out: torch.Tensor, x: torch.Tensor, axis: Axis, part: str = "") -> Pending:
    """Start to sum the flat `x` over an axis of more than one rank, keeping this rank's part.

    Args:
        out: `[n / axis.size]`; may be this rank's part of `x`.
        x: `[n]`.
        axis: Ranks that take part.
        part: What it is for, in the axis' log.
    """
    return wire.reduce_scatter(out, x, axis, part=part, background=True)


def start_all_gather(out: torch.Tensor, x: torch.Tensor, axis: Axis, part: str = "") -> Pending:
    """Start to concatenate every rank's flat `x` on an axis of more than one rank.

    Args:
        out: `[n * axis.size]`.
        x: `[n]`; may be this rank's part of `out`.
        axis: Ranks that take part.
        part: What it is for, in the axis' log.
    """
    return wire.all_gather(out, x, axis, part=part, background=True)


def broadcast(x: torch.Tensor, axis: Axis, src: int = 0) -> torch.Tensor:
    """Overwrite `x` in place with the value of index `src` of the axis, and return it."""
    if axis.size > 1:
        wire.broadcast(x, axis, src)
    return x


def split(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """This rank's part of `x` along `dim`, contiguous. No communication.

    Raises:
        MeshError: If the extent is not a multiple of the axis size.
    """
    if axis.size == 1:
        return x
    check_divisible(x, axis, dim)
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size).contiguous()


_Op = Callable[[torch.Tensor, Axis], torch.Tensor]


def _identity(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)


def _gather_last(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return all_gather(x, axis, dim=-1)


def _split_last(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return split(x, axis, dim=-1)


class _Pair(torch.autograd.Function):
    """One collective forward, its adjoint backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, forward: _Op, adjoint: _Op) -> torch.Tensor:
        ctx.axis, ctx.adjoint = axis, adjoint
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.adjoint(grad, ctx.axis), None, None, None


_differentiable: Callable[..., torch.Tensor] = _Pair.apply


def with_adjoint(x: torch.Tensor, axis: Axis, forward: _Op, adjoint: _Op) -> torch.Tensor:
    """Return `forward(x, axis)`, whose gradient goes back through `adjoint(gradient, axis)`.

    Both are the identity on an axis of size 1, where neither is called.
    """
    return x if axis.size == 1 else _differentiable(x, axis, forward, adjoint)


def copy_to_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a parallel region with a replicated tensor: identity; backward sums over the axis."""
    return with_adjoint(x, axis, _identity, all_reduce)


def reduce_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a parallel region with partial sums: sum over the axis; backward is the identity."""
    return with_adjoint(x, axis, all_reduce, _identity)


def gather_along_first_dim(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sequence shards to the whole sequence, for a consumer whose input gradient is partial.

    `[s/axis, ...] -> [s, ...]`; backward sums over the axis and scatters.
    """
    return with_adjoint(x, axis, all_gather, reduce_scatter)


def reduce_scatter_along_first_dim(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Partial sums of the whole sequence to sequence shards: `[s, ...] -> [s/axis, ...]`."""
    return with_adjoint(x, axis, reduce_scatter, all_gather)


def scatter_along_first_dim(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A replicated sequence to sequence shards; backward gathers: `[s, ...] -> [s/axis, ...]`."""
    return with_adjoint(x, axis, split, all_gather)


def gather_replicated_along_first_dim(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The inverse of `scatter_along_first_dim`, for a consumer whose input gradient is whole.

    `[s/axis, ...] -> [s, ...]`; backward takes this rank's part.
    """
    return with_adjoint(x, axis, all_gather, split)


def scatter_to_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A replicated tensor to shards of its last dimension; backward gathers."""
    return with_adjoint(x, axis, _split_last, _gather_last)


def gather_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Shards of the last dimension to the whole, for a replicated consumer; backward splits."""
    return with_adjoint(x, axis, _gather_last, _split_last)
