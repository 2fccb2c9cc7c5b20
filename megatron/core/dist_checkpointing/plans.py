"""Which rank writes which block: agreed on once, and again when a rank's blocks change.

Blocks of a run change rarely, and a plan takes a time that grows with their number and with that of
the ranks. So a rank tells the first one only what is new, and keeps its part of what was agreed.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Sharded, volume
from megatron.core.dist_checkpointing.storage import ChecksumWriter, PlainPlanner
from megatron.core.errors import CheckpointError, complaint

T = TypeVar("T")
_SLACK_BYTES = 1 << 20  # index, manifest, container overhead


@dataclass(frozen=True)
class Agreed(Generic[T]):
    """What a rank has to do for a checkpoint.

    Attributes:
        part: The entries that it writes.
        result: What the first rank prepared for the plan.
        needed_bytes: About how large the whole checkpoint is.
    """

    part: SavePlan
    result: T
    needed_bytes: int


@dataclass(frozen=True)
class _Offer:
    """The entries that a rank has, and the length of those without a shape."""

    plan: SavePlan
    lengths: dict[str, int]


@dataclass(frozen=True)
class _Whole:
    """On the first rank: the parts of all, and the index to which they belong."""

    parts: list[SavePlan]
    index: Metadata
    needed_bytes: int


class Plans:
    """The plan of one kind of checkpoint, kept from save to save. Every rank has one.

    Args:
        peers: The ranks that save together.
        alone: Whether they are independent, and each writes all blocks that it has.
    """

    def __init__(self, peers: Peers, alone: bool = False) -> None:
        self._peers, self._alone = peers, alone
        self._known: dict[str, _Outline] = {}
        self._keys: list[str] = []
        self._part: SavePlan | None = None
        self._offers: list[_Offer | None] = [None] * peers.size
        self._whole: _Whole | None = None

    @property
    def index(self) -> Metadata | None:
        """The index of what was agreed, without the files; on the first rank only."""
        return None if self._whole is None else self._whole.index

    def agree(
        self,
        tensors: Mapping[str, Sharded],
        blobs: Mapping[str, bytes],
        root: Path,
        prepare: Callable[[int], T],
    ) -> Agreed[T]:
        """Give each entry to one of the ranks that have it. Collective.

        Args:
            tensors: Key -> this rank's blocks.
            blobs: Key -> bytes.
            root: The save directory, for messages.
            prepare: Called on the first rank with the bytes that are needed.

        Raises:
            CheckpointError: On every rank: entries do not fit together, or `prepare` failed.
        """
        offer = None
        if self._part is None or not self._is_known(tensors, blobs):
            offer = self._describe(tensors, blobs)
        part, result, needed = self._peers.share_out(offer, lambda o: self._plan(o, root, prepare))
        if offer is not None:
            self._known = {key: _Outline.of(shard) for key, shard in tensors.items()}
            self._keys = list(blobs)
        if part is not None:
            self._part = part
        return Agreed(cast(SavePlan, self._part), result, needed)

    def _is_known(self, tensors: Mapping[str, Sharded], blobs: Mapping[str, bytes]) -> bool:
        return (
            self._keys == list(blobs)
            and self._known.keys() == tensors.keys()
            and all(self._known[key].fits(shard) for key, shard in tensors.items())
        )

    def _describe(self, tensors: Mapping[str, Sharded], blobs: Mapping[str, bytes]) -> _Offer:
        planner = PlainPlanner(partial=self._alone)
        state = {**tensors, **{key: io.BytesIO(data) for key, data in blobs.items()}}
        planner.set_up_planner(state, is_coordinator=self._peers.leads)
        lengths = {key: len(data) for key, data in blobs.items()}
        return _Offer(planner.create_local_plan(), lengths)

    def _plan(
        self, offers: Sequence[_Offer | None], root: Path, prepare: Callable[[int], T]
    ) -> list[tuple[SavePlan | None, T, int]]:
        """On the first rank: divide the work if anything is new."""
        news = any(offer is not None for offer in offers)
        if news or self._whole is None:
            self._whole = None
            self._offers = [new or old for new, old in zip(offers, self._offers, strict=True)]
            try:
                self._whole = self._divide([offer for offer in self._offers if offer is not None])
            except ValueError as error:
                raise CheckpointError(save_failure(root, 0, str(error))) from error
        whole = self._whole
        result = prepare(whole.needed_bytes)
        parts = whole.parts if news else [None] * len(offers)
        return [(part, result, whole.needed_bytes) for part in parts]

    def _divide(self, offers: list[_Offer]) -> _Whole:
        planner = PlainPlanner(partial=self._alone)
        plans, index = planner.create_global_plan([offer.plan for offer in offers])
        lengths = {key: n for offer in offers for key, n in offer.lengths.items()}
        needed = sum(lengths.values()) + _SLACK_BYTES
        for entry in index.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                size = sum(volume(chunk.sizes) for chunk in entry.chunks)
                needed += size * entry.properties.dtype.itemsize
        return _Whole(ChecksumWriter(Path()).prepare_global_plan(plans), index, needed)


@dataclass(frozen=True)
class _Outline:
    """The blocks of a description, without what is in them."""

    source: weakref.ref[Sharded]
    boxes: tuple[Any, ...]

    @classmethod
    def of(cls, shard: Sharded) -> _Outline:
        return cls(weakref.ref(shard), _boxes(shard))

    def fits(self, shard: Sharded) -> bool:
        return self.source() is shard or self.boxes == _boxes(shard)


def _boxes(shard: Sharded) -> tuple[Any, ...]:
    return shard.size(), shard.dtype, [(p.offset, p.local.shape) for p in shard.pieces]


def save_failure(root: Path, needed_bytes: int, reason: str) -> str:
    """Return the text of an error that ends a save."""
    return complaint(
        "--save",
        root,
        f"The checkpoint of about {needed_bytes:,} bytes could not be written: {reason}",
        "Earlier checkpoints and the tracker are untouched; free space or fix the directory, "
        "then resume",
    )
