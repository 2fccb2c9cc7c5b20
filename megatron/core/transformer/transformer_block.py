"""The stack of layers, its final norm, and which activations are kept for the backward pass.

Shape legend: s local sequence, b microbatch, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.build import Build


@dataclass(frozen=True)
class TransformerBlockSubmodules:
    """Every layer, first to last, and the norm after the last one."""

    layers: Sequence[ModuleSpec]
    final_layernorm: ModuleSpec


class TransformerBlock(nn.Module):
    """All layers of a model and the final norm.

    Args:
        build: Configuration, mesh, path and the rest that the parts need.
        submodules: Their specifications.
    """

    def __init__(self, *, build: Build, submodules: TransformerBlockSubmodules) -> None:
        super().__init__()
        config = build.config
        self._rng, self._fp8 = build.rng, build.fp8
        self.layers = nn.ModuleList(
            build_module(spec, build=build.at(f"layers.{i}"), layer_number=i + 1)
            for i, spec in enumerate(submodules.layers)
        )
        self.final_layernorm = build_module(
            submodules.final_layernorm, config.hidden_size, build=build.at("final_layernorm")
        )
        self.recompute = list(recompute_plan(config, len(self.layers)))

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Run every layer and the final norm.

        Args:
            hidden: `[s or s/tp, b, h]`.
            rotation: Rotary positions of the whole local sequence, or None.
            cache: Keys and values of earlier tokens, in generation.
            document_starts: `[b, S]`, where documents start in the whole sequence, or None.

        Returns:
            The shape of `hidden`.
        """
        for first, last, recomputed in self.recompute:
            run = partial(
                self._run,
                first,
                last,
                rotation=rotation,
                cache=cache,
                document_starts=document_starts,
            )
            if recomputed and self.training and cache is None:
                hidden = checkpoint(run, hidden, rng=self._rng, fp8=self._fp8)
            else:
                hidden = run(hidden)
        normed: Tensor = self.final_layernorm(hidden)
        return normed

    def _run(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        *,
        rotation: Rotation | None,
        cache: KVCache | None,
        document_starts: Tensor | None,
    ) -> Tensor:
        for layer in self.layers[first:last]:
            hidden = layer(hidden, rotation, cache, document_starts)
        return hidden


def recompute_plan(config: RunConfig, num_layers: int) -> Iterator[tuple[int, int, bool]]:
    """Cut the layers into runs `(first, last, recomputed)` that together cover all of them.

    With `uniform` every run of `--recompute-num-layers` layers keeps only its input; with `block`
    the first that many layers do so one by one, and the rest keep everything.
    """
    if config.recompute_granularity != "full":
        yield 0, num_layers, False
        return
    size = config.recompute_num_layers
    if config.recompute_method == "uniform":
        for first in range(0, num_layers, size):
            yield first, min(first + size, num_layers), True
        return
    count = min(size, num_layers)
    for i in range(count):
        yield i, i + 1, True
    if count < num_layers:
        yield count, num_layers, False
