"""What FP8 gradient reductions keep for the next step, as entries of a checkpoint.

Each replica keeps what rounding took away of its own gradients. What counts is the sum: before it
is saved the replicas add theirs up, and from then on the owner of each element keeps the sum and
adds it to its own gradients, which never travel. So a checkpoint has one tensor for each parameter,
in its global shape, and any number of replicas may go on with it; and a run that saved goes on as
one that was resumed does.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.comm_log import GRADIENT_SYNC
from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.shard import Sharded
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.distributed.ddp import DistributedDataParallel
from megatron.core.mesh import Axis, ParallelState
from megatron.core.shards import FlatRange
from megatron.core.tensor_parallel.mappings import all_reduce_

PREFIX = schema.FP8_PREFIX + "grad_residual."


class Residual:
    """The residuals of a model's gradients.

    Args:
        ddp: The model with its gradient buffers.
        mesh: The process mesh.
    """

    def __init__(self, ddp: DistributedDataParallel, mesh: ParallelState) -> None:
        self._ddp, self._mesh = ddp, mesh
        self._params = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}

    def settle(self, stacking: schema.Stacking) -> dict[str, Sharded]:
        """Add up what the replicas keep and return it. Collective; `hand_out` when it is saved.

        Args:
            stacking: Which tensors are stored together.
        """
        self._ddp.settle_residual()
        for axis, mark in self._partial_sums():
            held = [t for p in self._marked(mark) if (t := self._tensor(p)) is not None]
            for tensor in held if axis.size > 1 else ():
                tensor.copy_(all_reduce_(tensor.clone(), axis, part=GRADIENT_SYNC))
        return self._entries(stacking)

    def load(self, reader: Reader, stacking: schema.Stacking) -> int:
        """Read what replicas kept, as far as this run can use it.

        Args:
            reader: The checkpoint.
            stacking: Which tensors are stored together.

        Returns:
            How many tensors were read.
        """
        self._ddp.expect_residual()
        found = {k: s for k, s in self._entries(stacking).items() if k in reader.tensors}
        reader.load(found)
        self.hand_out()
        return len(found)

    def hand_out(self) -> None:
        """Leave each sum with one rank, which sends it with the next step."""
        for axis, mark in self._partial_sums():
            for param in self._marked(mark) if axis.rank else ():
                tensor = self._tensor(param)
                if tensor is not None:
                    tensor.zero_()
        self._ddp.hand_out_residual()

    def _partial_sums(self) -> tuple[tuple[Axis, str], ...]:
        """Axes over which gradients are summed after the replicas, see `finalize_gradients`."""
        return (self._mesh.tp, "sequence_parallel"), (self._mesh.embedding, "shared_embedding")

    def _marked(self, mark: str) -> list[nn.Parameter]:
        return [p for p in self._params.values() if getattr(p, mark, False)]

    def _tensor(self, param: nn.Parameter) -> torch.Tensor | None:
        found = self._ddp.residual(param)
        return None if found is None else found[0]

    def _entries(self, stacking: schema.Stacking) -> dict[str, Sharded]:
        tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        ranges: dict[str, FlatRange] = {}
        for name, param in self._params.items():
            found = self._ddp.residual(param)
            if found is not None and found[1].size:
                tensors.append((name, found[0], param))
                ranges[name] = found[1]
        entries = schema.sharded_state(tensors, self._mesh, stacking, ranges)
        return {PREFIX + key: shard for key, shard in entries.items()}
