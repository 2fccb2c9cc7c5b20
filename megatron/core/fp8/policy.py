"""Which recipe does this layer get, and why? One place answers.

An answer is made when a layer is built and never changes; whether FP8 is switched on right now is
`Fp8State.enabled`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.recipe import Recipe

_LAYER_IN_PATH = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Decision:
    """What a layer runs in.

    Attributes:
        recipe: Its FP8 recipe; None for high precision.
        wgrad: Whether the weight gradient runs in FP8 too.
        reason: Why the layer is not in FP8; empty if it is.
        wgrad_reason: Why the weight gradient is not in FP8; empty if it is.
    """

    recipe: Recipe | None
    wgrad: bool = True
    reason: str = ""
    wgrad_reason: str = ""


@dataclass(frozen=True)
class Fp8Policy:
    """The rules of a run.

    Attributes:
        recipe: Recipe of every layer that is not excluded; None switches FP8 off.
        wgrad: Whether weight gradients run in FP8.
        num_layers: Transformer layers of the whole model, over all pipeline stages.
        first_in_bf16: Transformer layers at the start kept out of FP8.
        last_in_bf16: Transformer layers at the end kept out of FP8.
        excluded: Layers kept out of FP8 by the last component of their path.
    """

    recipe: Recipe | None = None
    wgrad: bool = True
    num_layers: int | None = None
    first_in_bf16: int = 0
    last_in_bf16: int = 0
    excluded: tuple[str, ...] = ("output_layer",)

    def decide(
        self, path: str, layer_number: int | None = None, num_layers: int | None = None
    ) -> Decision:
        """The answer for one layer.

        Args:
            path: Dotted module path.
            layer_number: Number of the transformer layer, from 1, over the whole model. Default:
                read from `layers.N` (from 0) in the path.
            num_layers: Number of transformer layers of the model; default `self.num_layers`.

        Raises:
            PrecisionError: If the layer number is outside the model.
        """
        if self.recipe is None:
            return Decision(None, False, "FP8 is off (no --fp8-format)")
        if path.rpartition(".")[2] in self.excluded:
            return Decision(None, False, "this layer is always kept in high precision")
        total = num_layers if num_layers is not None else self.num_layers
        number = layer_number if layer_number is not None else _number_from(path)
        if number is not None and (number < 1 or (total is not None and number > total)):
            raise PrecisionError(
                complaint(
                    f"layer number of {path}",
                    number,
                    f"Transformer layers are numbered from 1 to {total or 'the last'}",
                    "Pass the layer's number in the whole model",
                )
            )
        kept = self._kept_in_bf16(number, total)
        if kept:
            return Decision(None, False, kept)
        wgrad_reason = "" if self.wgrad else "--no-fp8-wgrad"
        return Decision(self.recipe, self.wgrad, "", wgrad_reason)

    def _kept_in_bf16(self, number: int | None, total: int | None) -> str:
        if number is None:
            return ""
        if number <= self.first_in_bf16:
            return f"--first-last-layers-bf16: among the first {self.first_in_bf16} layers"
        if total is not None and number > total - self.last_in_bf16:
            return f"--first-last-layers-bf16: among the last {self.last_in_bf16} layers"
        return ""


def _number_from(path: str) -> int | None:
    """Layer number, from 1, of a path such as `decoder.layers.0.mlp.linear_fc1`."""
    found = _LAYER_IN_PATH.search(path)
    return int(found.group(1)) + 1 if found else None
