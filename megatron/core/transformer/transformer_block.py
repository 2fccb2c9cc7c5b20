"""The stack of layers, its final norm, and which activations are kept for the backward pass.

Shape legend: s local sequence, b microbatch, h hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.config.placement import Stage, whole_model
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


class Layers(nn.Module):
    """Layers by their number in the whole model, of which this rank may hold a part.

    Args:
        layers: Number (from 0) and layer, in order.
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in layers:
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        """The layer of that number."""
        return self._modules[str(number)]  # type: ignore[return-value]

    def __len__(self) -> int:
        """Number of layers that this rank holds."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        return iter(self._modules.values())  # type: ignore[arg-type]


class TransformerBlock(nn.Module):
    """The layers of a model and the final norm, or what pipeline stages hold of them.

    Args:
        build: Configuration, mesh, path and the rest that the parts need.
        submodules: The specifications of the whole model.
        stages: The pipeline stages of this rank; default the whole model in one.
    """

    def __init__(
        self,
        *,
        build: Build,
        submodules: TransformerBlockSubmodules,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__()
        config = build.config
        self._rng, self._fp8, self._auxiliary = build.rng, build.fp8, build.auxiliary
        stages = stages or (whole_model(len(submodules.layers)),)
        self.layers = Layers(
            (
                i,
                build_module(
                    submodules.layers[i], build=build.at(f"layers.{i}"), layer_number=i + 1
                ),
            )
            for stage in stages
            for i in range(stage.first_layer, stage.last_layer)
        )
        self.final_layernorm: nn.Module | None = None
        if any(stage.loss for stage in stages):
            self.final_layernorm = build_module(
                submodules.final_layernorm, config.hidden_size, build=build.at("final_layernorm")
            )
        self.stages = tuple(stages)
        self.recompute = {s.index: list(recompute_plan(config, s.num_layers)) for s in stages}

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
        stage: Stage | None = None,
    ) -> Tensor:
        """Run the layers of a stage, and the final norm after the last one.

        Args:
            hidden: `[s or s/tp, b, h]`.
            rotation: Rotary positions of the whole local sequence, or None.
            cache: Keys and values of earlier tokens, in generation.
            document_starts: `[b, S]`, where documents start in the whole sequence, or None.
            stage: Which of this rank's stages; default the first.

        Returns:
            The shape of `hidden`.
        """
        stage = stage or self.stages[0]
        for start, end, recomputed in self.recompute[stage.index]:
            run = partial(
                self._run,
                stage.first_layer + start,
                stage.first_layer + end,
                rotation=rotation,
                cache=cache,
                document_starts=document_starts,
            )
            if recomputed and self.training and cache is None:
                hidden = checkpoint(
                    run, hidden, rng=self._rng, fp8=self._fp8, also=(self._auxiliary,)
                )
            else:
                hidden = run(hidden)
        if not stage.loss or self.final_layernorm is None:
            return hidden
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
        for number in range(first, last):
            hidden = self.layers[number](hidden, rotation, cache, document_starts)
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
