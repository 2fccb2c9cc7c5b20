"""Where a run's tensors belong in a checkpoint, found out once.

Parameters and optimizer state are written in place, so that a description of them stays right from
one save to the next. To make it takes a time that grows with their number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.shard import Sharded
from megatron.core.mesh import ParallelState
from megatron.core.shards import FlatRange

T = TypeVar("T")


class State(Protocol):
    """What is described of an optimizer."""

    def named_state(self) -> Any:
        """Yield (parameter name, kind -> local tensor)."""

    @property
    def owned_ranges(self) -> Mapping[str, FlatRange]:
        """Which elements flat tensors hold, by parameter name."""

    @property
    def lends_copies(self) -> bool:
        """Whether some tensors of ``named_state`` are made anew each time."""


class Descriptions:
    """Descriptions of live tensors, kept until the tensors are others.

    Copies that are made for one save are described anew: kept, they would stay in memory.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[list[Any], Any]] = {}

    def model(
        self,
        model: nn.Module,
        mesh: ParallelState,
        stacking: schema.Stacking,
        in_fp8: Mapping[str, tuple[Tensor, FlatRange]],
    ) -> tuple[dict[str, Sharded], list[str]]:
        """Return the entries of a model, and the keys of those that have no content.

        Args:
            model: See `schema.model_state`, as for all others.
            mesh: See there.
            stacking: See there.
            in_fp8: See there; copies.
        """

        def describe() -> tuple[dict[str, Sharded], list[str]]:
            tensors = schema.model_state(model, mesh, stacking, in_fp8)
            return tensors, schema.extra_state_keys(tensors)

        if in_fp8:
            return describe()
        live = itertools.chain(model.parameters(), model.buffers())
        tensors, empty = self._of("model", live, describe)
        return dict(tensors), empty

    def optimizer(
        self, optimizer: State, model: nn.Module, mesh: ParallelState, stacking: schema.Stacking
    ) -> dict[str, Sharded]:
        """Return the entries of an optimizer.

        Args:
            optimizer: Whose state it is.
            model: See `schema.optimizer_state`, as for all others.
            mesh: See there.
            stacking: See there.
        """
        named = list(optimizer.named_state())

        def describe() -> dict[str, Sharded]:
            return schema.optimizer_state(named, model, mesh, stacking, optimizer.owned_ranges)

        if optimizer.lends_copies:
            return describe()
        live = (tensor for _, tensors in named for tensor in tensors.values())
        return self._of("optimizer", live, describe)

    def _of(self, name: str, tensors: Iterable[Tensor], describe: Callable[[], T]) -> T:
        # What is kept keeps its tensors alive, so another one cannot lie at the same address.
        marks = [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors]
        before = self._kept.get(name)
        if before is not None and before[0] == marks:
            return before[1]  # type: ignore[no-any-return]
        described = describe()
        self._kept[name] = marks, described
        return described
