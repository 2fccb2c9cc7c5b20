"""Keys and values of the tokens seen so far, for generation.

Shape legend: t cached positions, b sequences, g local key/value groups, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.errors import DataError, complaint


class KVCache:
    """One buffer for keys and one for values per layer, filled from the front.

    Layers write at the same positions during one forward pass; `advance` moves on afterwards.

    Args:
        capacity: Longest sequence that fits, in tokens.

    Attributes:
        length: Positions filled by completed forward passes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions and return everything up to them.

        Args:
            layer_number: Which layer's buffers.
            key: `[new, b, g, d]`.
            value: The same shape.

        Returns:
            Keys and values `[t + new, b, g, d]`; views of the buffers.

        Raises:
            DataError: The buffers are full.
        """
        end = self.length + key.shape[0]
        if end > self.capacity:
            raise DataError(
                complaint(
                    "generation",
                    f"{end} tokens",
                    f"The cache holds {self.capacity}",
                    "Generate fewer tokens or make the cache larger",
                )
            )
        if layer_number not in self._layers:
            shape = (self.capacity, *key.shape[1:])
            self._layers[layer_number] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._layers[layer_number]
        keys[self.length : end] = key
        values[self.length : end] = value
        return keys[:end], values[:end]

    def advance(self, new: int) -> None:
        """Count `new` positions as filled, once every layer has extended its buffers."""
        self.length += new

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions of the next tokens: `[b, new]` like `tokens`."""
        end = self.length + tokens.shape[1]
        ids = torch.arange(self.length, end, device=tokens.device)
        return ids.expand(tokens.shape[0], -1)
