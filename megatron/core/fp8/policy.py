"""Which recipe does this layer get, and why? One place answers.

An answer is made when a layer is built and never changes; whether FP8 is switched on right now is
`Fp8State.enabled`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.fp8_policy import GEMMS, PolicyRule
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.recipe import DelayedScaling, Recipe

_LAYER_IN_PATH = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
HIGH_PRECISION = "bf16"


@dataclass(frozen=True)
class Decision:
    """What a layer runs in.

    Attributes:
        recipe: Its FP8 recipe; None for high precision.
        wgrad: Whether the weight gradient runs in FP8 too.
        reason: Why the layer is not in FP8; empty if it is.
        wgrad_reason: Why the weight gradient is not in FP8; empty if it is.
        fprop: Whether the forward product runs in FP8.
        dgrad: Whether the input gradient does.
        rule: The rule of the policy that decided; empty for the run's own settings.
    """

    recipe: Recipe | None
    wgrad: bool = True
    reason: str = ""
    wgrad_reason: str = ""
    fprop: bool = True
    dgrad: bool = True
    rule: str = ""

    def runs(self, gemm: str) -> bool:
        """Whether a product (`fprop`, `dgrad`, `wgrad`) runs in FP8."""
        return self.recipe is not None and bool(getattr(self, gemm))

    def why(self, gemm: str) -> str:
        """What decided about a product; empty where the run's recipe is simply followed."""
        if self.recipe is None:
            return self.reason
        return self.wgrad_reason if gemm == "wgrad" and not self.wgrad else self.rule

    @property
    def is_mixed(self) -> bool:
        """Whether some products run in FP8 and others do not."""
        return self.recipe is not None and not (self.fprop and self.dgrad and self.wgrad)

    @property
    def summary(self) -> str:
        """The precision in a few words, the same for layers that run alike."""
        if self.recipe is None:
            return HIGH_PRECISION
        plain = [gemm for gemm in GEMMS if not self.runs(gemm)]
        without = f" without {' and '.join(plain)}" if plain else ""
        return f"{self.recipe.name} {self.recipe.format_name}{without}"


@dataclass(frozen=True)
class LayerRule:
    """A rule of `--fp8-policy`, with the recipe that it names.

    Attributes:
        rule: Which layers it is for, and its label.
        recipe: Their recipe; None for high precision.
    """

    rule: PolicyRule
    recipe: Recipe | None


@dataclass(frozen=True)
class Fp8Policy:
    """The rules of a run.

    Attributes:
        recipe: Recipe of every layer that nothing else is said about; None switches FP8 off.
        wgrad: Whether weight gradients run in FP8, where no rule says something else.
        num_layers: Transformer layers of the whole model, over all pipeline stages.
        first_in_bf16: Transformer layers at the start kept out of FP8.
        last_in_bf16: Transformer layers at the end kept out of FP8.
        excluded: Layers kept out of FP8 by the last component of their path.
        rules: What decides about single layers, the first that fits.
    """

    recipe: Recipe | None = None
    wgrad: bool = True
    num_layers: int | None = None
    first_in_bf16: int = 0
    last_in_bf16: int = 0
    excluded: tuple[str, ...] = ("output_layer",)
    rules: tuple[LayerRule, ...] = ()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe that a layer may get; none if FP8 is off."""
        if self.recipe is None:
            return ()
        named = (self.recipe, *(rule.recipe for rule in self.rules))
        return tuple(dict.fromkeys(recipe for recipe in named if recipe is not None))

    @property
    def delayed(self) -> DelayedScaling | None:
        """A recipe with delayed scaling that some layer may get; None if there is none.

        All of them differ in their format at most.
        """
        return next((one for one in self.recipes if isinstance(one, DelayedScaling)), None)

    def decide(self, path: str) -> Decision:
        """The answer for one layer.

        Args:
            path: Dotted module path; for an expert, that of its group. `layers.N` in it is the
                number of the transformer layer, from 0, over the whole model.

        Raises:
            PrecisionError: If the layer number is outside the model.
        """
        if self.recipe is None:
            return Decision(None, False, "FP8 is off (no --fp8-format)")
        if path.rpartition(".")[2] in self.excluded:
            return Decision(None, False, "this layer is always kept in high precision")
        total, number = self.num_layers, _number_from(path)
        if number is not None and total is not None and number > total:
            raise PrecisionError(
                complaint(
                    f"layer number of {path}",
                    number,
                    f"Transformer layers are numbered from 1 to {total}",
                    "Pass the layer's number in the whole model",
                )
            )
        kept = self._kept_in_bf16(number)
        if kept:
            return Decision(None, False, kept)
        rule = next((one for one in self.rules if one.rule.fits(path)), None)
        if rule is not None:
            return self._by_rule(rule)
        wgrad_reason = "" if self.wgrad else "--no-fp8-wgrad"
        return Decision(self.recipe, self.wgrad, "", wgrad_reason)

    def _by_rule(self, rule: LayerRule) -> Decision:
        label = rule.rule.label
        if rule.recipe is None:
            return Decision(None, False, label)
        told = dict(rule.rule.gemms)
        wgrad = told.get("wgrad", self.wgrad)
        wgrad_reason = "" if wgrad else label if "wgrad" in told else "--no-fp8-wgrad"
        fprop, dgrad = told.get("fprop", True), told.get("dgrad", True)
        if not (fprop or dgrad or wgrad):
            return Decision(None, False, label)
        return Decision(rule.recipe, wgrad, "", wgrad_reason, fprop, dgrad, label)

    def _kept_in_bf16(self, number: int | None) -> str:
        if number is None:
            return ""
        if number <= self.first_in_bf16:
            return f"--first-last-layers-bf16: among the first {self.first_in_bf16} layers"
        if self.num_layers is not None and number > self.num_layers - self.last_in_bf16:
            return f"--first-last-layers-bf16: among the last {self.last_in_bf16} layers"
        return ""


def _number_from(path: str) -> int | None:
    """Layer number, from 1, of a path such as `decoder.layers.0.mlp.linear_fc1`."""
    found = _LAYER_IN_PATH.search(path)
    return int(found.group(1)) + 1 if found else None
