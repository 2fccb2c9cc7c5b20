"""What FP8 gradient reductions keep for the next step, as entries of a checkpoint.

Each replica keeps what rounding took away of its own gradients. Stored are either a tensor for each
parameter and replica, with which the same number of replicas goes on bit by bit, or a tensor for
each parameter: the sum over replicas, with which the run that saves goes on as well.

What counts is the sum. Whoever cannot go on with the parts adds them up: the owner of an element
adds the sum to its own gradients, which never travel. So any layout goes on with either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megatron.core.comm_log import GRADIENT_SYNC
from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.shard import Sharded, whole
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.distributed.ddp import DistributedDataParallel
from megatron.core.mesh import Axis, ParallelState
from megatron.core.shards import FlatRange, replica_axis
from megatron.core.tensor_parallel.mappings import all_reduce_

PREFIX = schema.FP8_PREFIX + "grad_residual."
SUM = "sum"
_SCALE = PREFIX + "loss_scale"


class Residual:
    """The residuals of a model's gradients.

    Args:
        ddp: The model with its gradient buffers.
        mesh: The process mesh.
        keep_sum: Whether checkpoints hold the sum over replicas only.
    """

    def __init__(
        self, ddp: DistributedDataParallel, mesh: ParallelState, keep_sum: bool = False
    ) -> None:
        self._ddp, self._mesh, self._keep_sum = ddp, mesh, keep_sum
        self._names = {p: n for n, p in ddp.module.named_parameters() if p.requires_grad}

    # -- save -----------------------------------------------------------------------------------

    def save(self, stacking: schema.Stacking) -> dict[str, Sharded]:
        """Return what is kept. Collective.

        Args:
            stacking: Which tensors are stored together.
        """
        if self._keep_sum:
            self._add_up()
            kept = self._ddp.residuals()
            here = {p: self._summed_here(p) for p in kept}
            parts = {p: (kept[p][own.start : own.stop], own) for p, own in here.items()}
            entries = self._entries(SUM, parts, stacking)
        else:
            kept, entries = self._ddp.residuals(), {}
            for mark, params in self._by_mark(kept).items():
                parts = {p: (kept[p], _all(p)) for p in params}
                entries.update(self._entries(mark, parts, stacking))
        if entries:
            entries[_SCALE] = whole(torch.tensor(self._ddp.loss_scale, dtype=torch.float64))
        return entries

    def _add_up(self) -> None:
        """Leave the sum of what is kept of an element with one rank."""
        self._ddp.add_up_residuals()
        for param, kept in self._ddp.residuals().items():
            own, _ = self._ddp.residual_owner(param)
            for axis in self._partial_axes(param) if own.size else ():
                part = kept[own.start : own.stop]
                part.copy_(all_reduce_(part.clone(), axis, part=GRADIENT_SYNC))
            here = self._summed_here(param)
            kept[: here.start].zero_()
            kept[here.stop :].zero_()

    def _summed_here(self, param: nn.Parameter) -> FlatRange:
        """The elements whose sum over all that keep something of them belongs to this rank."""
        own, copies = self._ddp.residual_owner(param)
        first = not any(axis.rank for axis in (copies, *self._partial_axes(param)))
        return own if first else FlatRange(0, 0)

    # -- load -----------------------------------------------------------------------------------

    def load(self, reader: Reader, stacking: schema.Stacking) -> tuple[int, bool]:
        """Read what replicas kept.

        Args:
            reader: The checkpoint.
            stacking: Which tensors are stored together.

        Returns:
            How many tensors this rank has read, and whether any had to be added up.
        """
        marks = _marks(reader.tensors)
        if not marks:
            return 0, False
        scale = torch.ones((), dtype=torch.float64)
        reader.load({_SCALE: whole(scale)})
        self._ddp.loss_scale = float(scale)
        kept, count = self._ddp.residuals(fresh=True), 0
        stored = {p: marks.get(self._key(p, stacking), set()) for p in kept}
        as_saved = {p for p in kept if stored[p] == self._all_marks(p)}
        for mark, params in self._by_mark(as_saved).items():
            entries = self._entries(mark, {p: (kept[p], _all(p)) for p in params}, stacking)
            reader.load(entries)
            count += len(entries)
        sums = {p: self._summed_here(p) for p in kept if p not in as_saved}
        for mark in sorted(set().union(*(stored[p] for p in sums))):
            addends = {
                p: (torch.zeros_like(kept[p][own.start : own.stop]), own)
                for p, own in sums.items()
                if mark in stored[p]
            }
            entries = self._entries(mark, addends, stacking)
            reader.load(entries)
            count += len(entries)
            for param, (addend, own) in addends.items():
                kept[param][own.start : own.stop].add_(addend)
        return count, bool(sums)

    # -- names ----------------------------------------------------------------------------------

    def _partial_axes(self, param: nn.Parameter) -> list[Axis]:
        """Axes over which the gradient is summed after the replicas, see `finalize_gradients`."""
        axes = {"sequence_parallel": self._mesh.tp, "shared_embedding": self._mesh.embedding}
        found = [axis for mark, axis in axes.items() if getattr(param, mark, False)]
        return [axis for axis in found if axis.size > 1]

    def _all_axes(self, param: nn.Parameter) -> list[Axis]:
        return [replica_axis(param, self._mesh), *self._partial_axes(param)]

    def _mark(self, param: nn.Parameter) -> str:
        """Who keeps it, among all that keep something of the same elements."""
        return "-".join(str(axis.rank) for axis in self._all_axes(param))

    def _all_marks(self, param: nn.Parameter) -> set[str]:
        ranks = itertools.product(*(range(axis.size) for axis in self._all_axes(param)))
        return {"-".join(map(str, one)) for one in ranks}

    def _by_mark(self, params: Iterable[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
        found: dict[str, list[nn.Parameter]] = {}
        for param in params:
            found.setdefault(self._mark(param), []).append(param)
        return found

    def _key(self, param: nn.Parameter, stacking: schema.Stacking) -> str:
        return schema.stored_key(self._names[param], param, stacking)

    def _entries(
        self,
        mark: str,
        parts: Mapping[nn.Parameter, tuple[Tensor, FlatRange]],
        stacking: schema.Stacking,
    ) -> dict[str, Sharded]:
        some = {p: part for p, part in parts.items() if part[1].size}
        tensors = [(self._names[p], tensor, p) for p, (tensor, _) in some.items()]
        ranges = {self._names[p]: own for p, (_, own) in some.items()}
        entries = schema.sharded_state(tensors, self._mesh, stacking, ranges)
        return {f"{PREFIX}{mark}.{key}": shard for key, shard in entries.items()}


def _all(param: nn.Parameter) -> FlatRange:
    return FlatRange(0, param.numel())


def _marks(keys: Iterable[str]) -> dict[str, set[str]]:
    """Stored key of a parameter -> whose parts there are."""
    found: dict[str, set[str]] = {}
    for key in keys:
        if key.startswith(PREFIX) and key != _SCALE:
            mark, _, own = key.removeprefix(PREFIX).partition(".")
            found.setdefault(own, set()).add(mark)
    return found
