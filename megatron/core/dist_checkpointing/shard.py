"""One class that makes any rectangular shard a citizen of ``torch.distributed.checkpoint``.

A shard says: "these local blocks sit at these offsets of a tensor with this global shape". That is
enough for a tensor-parallel slice, a layer of a stacked weight, the two halves of a gated MLP or a
range of optimizer state, and it is all that saving and resharding ever need to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.errors import CheckpointError


class Piece(NamedTuple):
    """A local block and the place of its first element in the global tensor.

    ``make`` supplies the values when the block is written; ``local`` is then a ``meta`` tensor, so
    that a model larger than memory can be written block by block.
    """

    local: Tensor
    offset: tuple[int, ...]
    make: Callable[[], Tensor] | None = None

    def values(self) -> Tensor:
        """Return the values of the block."""
        return self.local if self.make is None else self.make()

    def chunk(self) -> ChunkStorageMetadata:
        """Return the block as the checkpoint library describes it."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.local.size())


class Sharded(torch.Tensor):
    """The local blocks of one global tensor.

    It has no storage of its own: ``.size()`` is the global shape, the data stay in the blocks.
    Those are views, so that loading writes straight into the tensors they were cut from.

    Attributes:
        pieces: The local blocks with their offsets.
        padded_dim: The axis whose extent may differ between saving and loading because its end is
            padding (vocabulary rows), or None.
    """

    pieces: tuple[Piece, ...]
    padded_dim: int | None
    _places: dict[tuple[int, ...], int]  # offset -> which piece: there may be thousands

    @staticmethod
    def __new__(
        cls,
        global_shape: Sequence[int],
        pieces: Iterable[Piece],
        padded_dim: int | None = None,
    ) -> Sharded:
        """Describe ``pieces`` as parts of a tensor of ``global_shape``.

        Args:
            cls: The class.
            global_shape: The shape over all ranks.
            pieces: At least one block, all of one dtype, inside the global shape.
            padded_dim: See the class.

        Raises:
            CheckpointError: A block does not fit.
        """
        blocks = tuple(Piece(p.local.detach(), tuple(p.offset), p.make) for p in pieces)
        shape = torch.Size(global_shape)
        _check_pieces(shape, blocks)
        first = blocks[0].local
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.device
        )
        self.pieces = blocks
        self._places = {blocks[i].offset: i for i in reversed(range(len(blocks)))}
        self.padded_dim = padded_dim
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything happens in ``__new__``, as for every wrapper tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Allow ``detach``; a description of a tensor cannot be computed with."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} called on a shard description, which holds no values itself")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        blocks = ", ".join(f"{tuple(p.local.shape)}@{p.offset}" for p in self.pieces)
        return f"Sharded({tuple(self.size())} {self.dtype}: {blocks})"

    # The three methods of DCP's checkpointable protocol.
    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        """Offer one write item a block; DCP keeps one of the replicas that offer the same."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk(),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the blocks this rank wants when it loads."""
        return [piece.chunk() for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Find the block that starts at ``index.offset``."""
        wanted = tuple(index.offset) if index.offset is not None else None
        if wanted not in self._places:
            raise CheckpointError(f"{index.fqn}: this rank holds no block at offset {wanted}.")
        return self.block(wanted)

    def block(self, offset: tuple[int, ...]) -> Tensor:
        """Return the values of the block that starts there."""
        return self.pieces[self._places[offset]].values()


def _check_pieces(shape: torch.Size, pieces: tuple[Piece, ...]) -> None:
    if not pieces:
        raise CheckpointError(f"A shard of shape {tuple(shape)} needs at least one block.")
    for piece in pieces:
        block = tuple(piece.local.shape)
        same_rank = len(block) == len(piece.offset) == len(shape)
        if not same_rank or any(
            o < 0 or o + b > s for o, b, s in zip(piece.offset, block, shape, strict=True)
        ):
            raise CheckpointError(
                f"A block of shape {block} at offset {piece.offset} does not fit in {tuple(shape)}."
            )
        if piece.local.dtype != pieces[0].local.dtype:
            raise CheckpointError(
                f"The blocks of one tensor have different dtypes: {piece.local.dtype} and "
                f"{pieces[0].local.dtype}."
            )


def whole(tensor: Tensor, padded_dim: int | None = None) -> Sharded:
    """Describe a tensor that this rank holds entirely (replicas are saved once)."""
    return Sharded(tensor.shape, [Piece(tensor, (0,) * tensor.dim())], padded_dim)


def stack(shard: Sharded, row: int, num_rows: int) -> Sharded:
    """Put a tensor into row ``row`` of a tensor stacked over ``num_rows`` layers or experts."""
    pieces = [Piece(p.local.unsqueeze(0), (row, *p.offset)) for p in shard.pieces]
    padded = None if shard.padded_dim is None else shard.padded_dim + 1
    return Sharded((num_rows, *shard.size()), pieces, padded)


def merge(key: str, shards: Sequence[Sharded]) -> Sharded:
    """Join the blocks that several modules hold of one global tensor.

    Raises:
        CheckpointError: They disagree about the global shape.
    """
    shapes = {tuple(s.size()) for s in shards}
    if len(shapes) > 1:
        raise CheckpointError(
            f"{key}: the layers have different shapes {sorted(shapes)}, so they cannot be stacked."
        )
    pieces = [p for s in shards for p in s.pieces]
    return Sharded(shards[0].size(), pieces, shards[0].padded_dim)


def overlap(
    a_offset: Sequence[int], a_shape: Sequence[int], b_offset: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Intersect two boxes.

    Returns:
        (offset, shape) of the common box in global coordinates, or None when they are disjoint.
        Boxes without axes (scalars) always meet.
    """
    start = tuple(max(x, y) for x, y in zip(a_offset, b_offset, strict=True))
    end = tuple(
        min(x + m, y + n) for x, m, y, n in zip(a_offset, a_shape, b_offset, b_shape, strict=True)
    )
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return None if any(n <= 0 for n in shape) else (start, shape)


def volume(shape: Sequence[int]) -> int:
    """Return the number of elements of a box."""
    return math.prod(shape)
