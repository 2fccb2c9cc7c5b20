"""FP8 scales and histories as entries of a checkpoint.

The state is a tree of plain values and tensors. Its tensors are stored under their paths, in the
tree a reference stands for each. Everything under ``experts`` belongs to groups of experts: there a
tensor has a row for each expert that this rank holds, and what is stored has a row for every one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.config import RunConfig
from megatron.core.dist_checkpointing.schema import FP8_PREFIX
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.mesh import ParallelState

_TENSOR = "tensor:"
_EXPERTS = "experts"
_NUMBERS = "numbers"  # of the experts that a group's rows belong to


@dataclass(frozen=True)
class Places:
    """Where this rank's FP8 tensors are stored.

    Replicas that agree on their maxima share one entry. With a narrower ``--fp8-amax-reduction``
    each replica has scales of its own, and its own entry.

    Attributes:
        replica: Number of this rank's replica of the dense layers, 0 if they agree.
        expert_replica: The same for its experts.
        num_experts: Experts of a layer.
    """

    replica: int
    expert_replica: int
    num_experts: int

    @classmethod
    def of(cls, cfg: RunConfig, mesh: ParallelState) -> Places:
        """Return the places of a rank."""
        axis = {"tp": mesh.dp_cp, "tp-cp": mesh.dp}.get(cfg.fp8_amax_reduction)
        alone = mesh.edp.rank if cfg.fp8_amax_reduction == "tp" else 0
        return cls(axis.rank if axis is not None else 0, alone, cfg.num_experts or 0)

    def prefix(self, path: str) -> str:
        """Return what precedes a tensor's path in its key."""
        expert = path.startswith(f"{_EXPERTS}.")
        replica = self.expert_replica if expert else self.replica
        return FP8_PREFIX + (f"replica{replica}." if replica else "")


def split(state: Mapping[str, Any], places: Places) -> tuple[dict[str, Any], dict[str, Sharded]]:
    """Separate the tensors of the state from its plain values.

    Returns:
        (the tree with a reference in place of each tensor, key -> this rank's part).
    """
    tensors: dict[str, Sharded] = {}

    def walk(node: Any, path: str, numbers: list[int] | None) -> Any:
        if isinstance(node, Tensor):
            key = places.prefix(path) + path
            tensors[key] = whole(node) if numbers is None else _rows(node, numbers, places)
            return _TENSOR + path
        if isinstance(node, Mapping):
            own = node.get(_NUMBERS) if path.startswith(f"{_EXPERTS}.") else None
            inner = {k: v for k, v in node.items() if own is None or k != _NUMBERS}
            return {k: walk(v, f"{path}.{k}" if path else str(k), own) for k, v in inner.items()}
        return node

    return walk(state, "", None), tensors


def _rows(tensor: Tensor, numbers: list[int], places: Places) -> Sharded:
    """Describe `[experts of this rank, ...]` as part of `[experts, ...]`."""
    rest = (0,) * (tensor.dim() - 1)
    pieces = [Piece(tensor[i : i + 1], (n, *rest)) for i, n in enumerate(numbers)]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        pieces = [Piece(tensor, (numbers[0], *rest))]
    return Sharded((places.num_experts, *tensor.shape[1:]), pieces)


def merge(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the trees of several ranks, which know different layers."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = merge([merged[key], value])
            else:
                merged.setdefault(key, value)
    return merged


def join(tree: Mapping[str, Any], reader: Reader, places: Places) -> Mapping[str, Any]:
    """Return the state as it was before ``split``, whose tensors are read when they are asked for.

    A rank reads the layers that it asks for only. Groups of experts have all experts.
    """

    @functools.lru_cache(maxsize=16)  # a group is asked for once for each of its experts
    def read(path: str) -> Tensor:
        own = places.prefix(path) + path
        return reader.read(own if own in reader.tensors else FP8_PREFIX + path)

    return _Stored(tree, "", read)


class _Stored(Mapping[str, Any]):
    """A node of the tree."""

    def __init__(self, node: Mapping[str, Any], path: str, read: Callable[[str], Tensor]) -> None:
        self._node, self._path, self._read = node, path, read

    def __getitem__(self, key: str) -> Any:
        value = self._node.get(key)
        path = f"{self._path}.{key}" if self._path else key
        if isinstance(value, Mapping):
            return _Stored(value, path, self._read)
        if isinstance(value, str) and value.startswith(_TENSOR):
            return self._read(value.removeprefix(_TENSOR))
        if key == _NUMBERS and value is None and self._path.startswith(f"{_EXPERTS}."):
            first = next(iter(self._node))
            return range(len(self[first]))
        return self._node[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._node
        if self._path.startswith(f"{_EXPERTS}."):
            yield _NUMBERS

    def __len__(self) -> int:
        return sum(1 for _ in self)
