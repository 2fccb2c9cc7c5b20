"""Rows of the tables that say how this project's tensors and HuggingFace's correspond."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import schema

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


class Place(NamedTuple):
    """Which of the tensors of a row: of which layer and which expert, None where there is none."""

    layer: int | None = None
    expert: int | None = None

    def of(self, template: str) -> str:
        """Return a name with the numbers filled in."""
        return template.format(i=self.layer, e=self.expert)


OUTSIDE = Place()


@dataclass(frozen=True)
class Row:
    """One tensor of ours and what it is called elsewhere.

    Attributes:
        name: Our parameter's name, with ``{i}`` for the layer and ``{e}`` for the expert.
        names: HuggingFace names, with the same.
        shapes: Their shapes.
        join: HuggingFace tensors -> our tensor (of one layer, of one expert).
        split: Our tensor -> HuggingFace tensors.
        layers: Which layers have it; None for all, if it is in layers.
        num_experts: How many experts have it; 0 if it is no expert's.
        dtype: The type that it keeps whatever the others are converted to; None for theirs.
    """

    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Join
    split: Split
    layers: tuple[int, ...] | None = None
    num_experts: int = 0
    dtype: torch.dtype | None = None

    @property
    def per_layer(self) -> bool:
        """Whether there is one such tensor in every layer, or in several."""
        return "{i}" in self.name

    @property
    def key(self) -> str:
        """The stored key, where layers are stacked."""
        return schema.address(self.name.format(i=0, e=0)).key

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of our tensor (of one layer, of one expert), without vocabulary padding."""
        meta = [torch.empty(s, device="meta") for s in self.shapes]
        return tuple(self.join(meta).shape)

    def stored(
        self, place: Place, stacking: schema.Stacking
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return the stored key of one tensor, its row in what is stored, and how many rows."""
        address = schema.address(place.of(self.name), stacking.layers_differ)
        axes = (
            (address.layer, stacking.num_layers),
            (address.expert, stacking.num_experts),
        )
        used = [(index, extent) for index, extent in axes if index is not None]
        return address.key, tuple(i for i, _ in used), tuple(n for _, n in used)


def every_tensor(rows: Sequence[Row], num_layers: int) -> Iterator[tuple[Row, Place]]:
    """Yield all tensors: first those outside the layers, then layer by layer, expert by expert."""
    for layer in (None, *range(num_layers)):
        yield from tensors_of(rows, layer)


def tensors_of(rows: Sequence[Row], layer: int | None) -> Iterator[tuple[Row, Place]]:
    """Yield the tensors of one layer, expert by expert; those outside the layers for None."""
    for row in rows:
        if layer is None:
            if not row.per_layer:
                yield row, OUTSIDE
        elif row.per_layer and (row.layers is None or layer in row.layers):
            for expert in range(row.num_experts) if row.num_experts else (None,):
                yield row, Place(layer, expert)


def same(tensors: Sequence[Tensor]) -> Tensor:
    """Take over a tensor."""
    return tensors[0]


def alone(tensor: Tensor) -> Sequence[Tensor]:
    """Hand on a tensor; the inverse of ``same``."""
    return [tensor]


def halves(tensor: Tensor) -> Sequence[Tensor]:
    """Cut rows into two equal parts; the inverse of ``stack`` for two."""
    return tensor.chunk(2, dim=0)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Put the rows of tensors below each other."""
    return torch.cat(list(tensors), dim=0)


def plain_row(name: str, theirs: str, shape: tuple[int, ...]) -> Row:
    """A tensor that is the same on both sides."""
    return Row(name, (theirs,), (shape,), same, alone)


def gated_row(name: str, gate: str, up: str, shape: tuple[int, int]) -> Row:
    """A gated MLP's first weight, ``[gate; up]`` of the given shape each."""
    return Row(name, (gate, up), (shape, shape), stack, halves)
