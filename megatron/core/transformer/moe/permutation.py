"""Tokens to rows sorted by expert, and back. One gather either way, in forward and in backward.

A token has a slot for each expert it chose; a slot becomes a row if its expert is among those asked
for. A token gets the sum of its rows back, added in fp32 in the order of its slots, so the result
does not depend on how the rows were spread over ranks, nor on the order of atomic additions.

Shape legend: T tokens, k slots a token, R rows, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core import paper


@dataclass(frozen=True)
class RowPlan:
    """Which slot each row comes from.

    Attributes:
        slot_of_row: `[R]`, `token * k + slot`; T * k in a row that only fills up.
        row_of_slot: `[T, k]`; R where a slot has no row.
        counts: Rows of each expert.
        has_padding: Whether some rows only fill up.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    counts: list[int]
    has_padding: bool

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.slot_of_row.shape[0])


@torch.no_grad()
def plan_rows(
    experts: Tensor,
    first: int,
    last: int,
    rows_per_expert: int | None = None,
    num_experts: int | None = None,
) -> RowPlan:
    """Sort the slots of some experts: by expert, then by token.

    Args:
        experts: `[T, k]`, the expert of each slot; numbers outside `first` to `last` have no row.
        first: The first expert asked for.
        last: The expert after the last one.
        rows_per_expert: Fill the rows of each expert up to this number.
        num_experts: Experts of the layer, default `last`; on paper each is chosen equally often.
    """
    count, slots = last - first, experts.numel()
    local = experts.reshape(-1) - first
    local = torch.where((local >= 0) & (local < count), local, count)
    counts = torch.zeros(count + 1, dtype=torch.long, device=experts.device)
    counts = counts.scatter_add_(0, local, torch.ones_like(local))[:count]
    rows_of = paper.counts(counts, slots * count // (num_experts or last))
    num_rows = sum(rows_of)
    slot_of_row = local.argsort(stable=True)[:num_rows]
    place = torch.arange(num_rows, device=experts.device)
    if rows_per_expert is not None:
        expert = local[slot_of_row]
        place = place - (counts.cumsum(0) - counts)[expert] + expert * rows_per_expert
        rows_of, num_rows = [rows_per_expert] * count, rows_per_expert * count
        padded = torch.full((num_rows,), slots, dtype=torch.long, device=experts.device)
        padded[place] = slot_of_row
        row_of_slot = _inverse(slot_of_row, place, slots, num_rows).view(experts.shape)
        return RowPlan(padded, row_of_slot, rows_of, has_padding=True)
    row_of_slot = _inverse(slot_of_row, place, slots, num_rows).view(experts.shape)
    return RowPlan(slot_of_row, row_of_slot, rows_of, has_padding=False)


def _inverse(slot_of_row: Tensor, place: Tensor, slots: int, num_rows: int) -> Tensor:
    row_of_slot = torch.full((slots,), num_rows, dtype=torch.long, device=place.device)
    row_of_slot[slot_of_row] = place
    return row_of_slot


@torch.no_grad()
def plan_regrouping(counts: list[list[int]], device: torch.device) -> RowPlan:
    """Sort rows that came in batches, each sorted by expert, by expert alone.

    Args:
        counts: For each batch, its rows of each expert.
        device: Where the rows are.

    Returns:
        A plan in which every row is a token with one slot.
    """
    num_experts = len(counts[0])
    sizes = torch.tensor(counts, dtype=torch.long).reshape(-1)
    experts = torch.arange(num_experts).repeat(len(counts)).repeat_interleave(sizes)
    order = experts.argsort(stable=True)
    place = torch.arange(order.numel())
    row_of_slot = _inverse(order, place, order.numel(), order.numel()).unsqueeze(1)
    total = [sum(batch[i] for batch in counts) for i in range(num_experts)]
    return RowPlan(order.to(device), row_of_slot.to(device), total, has_padding=False)


def to_rows(x: Tensor, plan: RowPlan) -> Tensor:
    """Copy tokens `x [T, h]` to their rows `[R, h]`; rows that only fill up are zero."""
    return _to_rows(x, plan)


def to_tokens(rows: Tensor, plan: RowPlan) -> Tensor:
    """Sum the rows `[R, h]` of each token to `[T, h]`."""
    return _to_tokens(rows, plan)


def weights_of_rows(weights: Tensor, plan: RowPlan) -> Tensor:
    """The slots' weights `[T, k]` in the order of the rows, `[R]`; 0 in rows that only fill up."""
    flat = weights.reshape(-1)
    if plan.has_padding:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat.index_select(0, plan.slot_of_row)


def _take(x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, has_padding: bool) -> Tensor:
    token_of_row = slot_of_row.div(row_of_slot.shape[1], rounding_mode="floor")
    if has_padding:
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.index_select(0, token_of_row)


def _sum(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    total = padded.index_select(0, row_of_slot[:, 0])
    if row_of_slot.shape[1] == 1:
        return total
    total = total.to(torch.promote_types(rows.dtype, torch.float32))
    for slot in range(1, row_of_slot.shape[1]):
        total += padded.index_select(0, row_of_slot[:, slot])
    return total.to(rows.dtype)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: RowPlan) -> Tensor:
        ctx.save_for_backward(plan.row_of_slot)
        return _take(x, plan.slot_of_row, plan.row_of_slot, plan.has_padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _sum(grads[0], *ctx.saved_tensors), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: RowPlan) -> Tensor:
        # Saved behind all that is exchanged: a recomputed forward ends with the last tensor that
        # was saved, and must end at the same place on every rank.
        ctx.save_for_backward(plan.slot_of_row, plan.row_of_slot)
        ctx.has_padding = plan.has_padding
        return _sum(rows, plan.row_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slot_of_row, row_of_slot = ctx.saved_tensors
        return _take(grads[0], slot_of_row, row_of_slot, ctx.has_padding), None


_to_rows: Callable[..., Tensor] = _ToRows.apply
_to_tokens: Callable[..., Tensor] = _ToTokens.apply
