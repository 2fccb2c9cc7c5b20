"""Recipes and precision of layers on Transformer Engine: translated, checked, refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron.config.alignment import alignment_of, expert_alignment_of, nearest_multiples
from megatron.core.backends import te_calls
from megatron.core.backends.te_calls import Library
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.attention import AttentionPrecision
from megatron.core.fp8.nvfp4 import NVFP4BlockScaling
from megatron.core.fp8.precision import LinearPrecision, PrecisionRow
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from megatron.core.mesh import Axis

if TYPE_CHECKING:
    from megatron.core.build import Build


class TePrecision(LinearPrecision):
    """Precision of a layer whose products Transformer Engine computes."""

    version: tuple[int, int] = (0, 0)

    def row(self, gemm: str = "fprop") -> PrecisionRow:
        """The line of one matrix product, with Transformer Engine as its kernel."""
        row = super().row(gemm)
        kernel = f"Transformer Engine {self.version[0]}.{self.version[1]} {row.delivered}"
        return replace(row, kernel=kernel)


def te_precision(build: Build, library: Library, *, is_expert: bool = False) -> TePrecision:
    """Decide a layer's precision and check that Transformer Engine can deliver it.

    Args:
        build: Precision and path.
        library: Transformer Engine.
        is_expert: Whether the layer belongs to one expert.

    Raises:
        PrecisionError: A setting has no counterpart in Transformer Engine.
    """
    native = build.fp8.for_linear(build.path, is_expert=is_expert)
    decision = native.decision
    if decision.is_mixed:
        origin = decision.rule or "--no-fp8-wgrad"
        raise PrecisionError(
            complaint(
                origin,
                f"{build.path} on Transformer Engine in {decision.summary}",
                "Transformer Engine 2.0 removed the choice of precision for single products, and"
                f" {library.version[0]}.{library.version[1]} is installed",
                f"Leave {'it' if decision.rule else origin} out, or use --transformer-impl native",
            )
        )
    if decision.recipe is not None:
        able, reason = te_calls.recipe_support(library, decision.recipe.name)
        if not able:
            raise PrecisionError(
                complaint(
                    decision.rule or f"--{decision.recipe.family}-recipe",
                    decision.recipe.name,
                    f"Transformer Engine cannot run it here: {reason}",
                    "Choose another recipe, or use --transformer-impl native, which emulates it",
                )
            )
        _check_type(build, decision.recipe)
    precision = TePrecision(build.path, decision, native.state, native.slots)
    precision.version = library.version
    build.fp8.layers[build.path] = precision
    return precision


def _check_type(build: Build, recipe: Recipe) -> None:
    """Refuse parameters of a type that the library's kernels for a recipe do not take."""
    mixes = isinstance(recipe, NVFP4BlockScaling) and not recipe.disable_rht
    if mixes and build.params_dtype != torch.bfloat16:
        raise PrecisionError(
            complaint(
                "--fp4-recipe",
                f"{recipe.name} with {build.config.params_dtype} parameters",
                "Transformer Engine's Hadamard transform takes bfloat16 only",
                "Add --bf16, or use --transformer-impl native",
            )
        )


class TeAttentionPrecision(AttentionPrecision):
    """Precision of attention that Transformer Engine computes."""

    version: tuple[int, int] = (0, 0)

    def row(self, product: str) -> PrecisionRow:
        """The line of one product, with Transformer Engine as its kernel."""
        row = super().row(product)
        delivered = not row.is_fallback and row.delivered.startswith("fp8")
        reason = self.decision.rule if delivered else row.reason
        kernel = f"Transformer Engine {self.version[0]}.{self.version[1]} {row.delivered}"
        return replace(row, kernel=kernel, reason=reason)


def te_attention_precision(build: Build, library: Library) -> TeAttentionPrecision:
    """Decide the precision inside a layer's attention; check that Transformer Engine has it.

    Args:
        build: Precision and path.
        library: Transformer Engine.

    Raises:
        PrecisionError: It has no such attention here, or cannot send it as asked.
    """
    native = build.fp8.for_attention(build.path)
    recipe = native.decision.recipe
    if recipe is not None:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        able, reason = te_calls.attention_support(library, recipe.name, capability)
        if not able:
            raise PrecisionError(
                complaint(
                    "--fp8-dot-product-attention",
                    f"--fp8-recipe {recipe.name} on Transformer Engine",
                    f"Here {reason}",
                    "Remove it, or use --transformer-impl native, which emulates it",
                )
            )
        if build.mesh.cp.size > 1 and not build.config.fp8_cp_exchange:
            raise PrecisionError(
                complaint(
                    "--no-fp8-cp-exchange",
                    "attention on Transformer Engine",
                    "Its FP8 attention sends what it has quantized as bytes",
                    "Remove it",
                )
            )
    precision = TeAttentionPrecision(
        build.path, native.decision, native.state, native.choice, native.slots
    )
    precision.version = library.version
    build.fp8.attention_layers[build.path] = precision
    return precision


def te_recipe(library: Library, recipe: Recipe, amax_axis: Axis, *, attention: bool = False) -> Any:
    """Transformer Engine's object for a recipe of the project, one for each recipe and axis size.

    Args:
        library: Transformer Engine.
        recipe: The project's recipe.
        amax_axis: Ranks that agree on delayed-scaling maxima. For an axis of one the recipe must
            not ask for a reduction: without a group Transformer Engine would take all processes.
        attention: Whether it is for the products inside attention.

    Raises:
        PrecisionError: Transformer Engine has no such recipe.
    """
    key = (recipe, amax_axis.size > 1, attention)
    if key not in library.recipes:
        library.recipes[key] = _translate(library, recipe, amax_axis.size > 1, attention)
    return library.recipes[key]


def _translate(library: Library, recipe: Recipe, reduce_amax: bool, attention: bool) -> Any:
    if isinstance(recipe, NVFP4BlockScaling):
        return te_calls.nvfp4_recipe(
            library,
            disable_rht=recipe.disable_rht,
            disable_stochastic_rounding=recipe.disable_stochastic_rounding,
            disable_2d_quantization=recipe.disable_2d_quantization,
        )
    fp8_format = recipe.fp8_format.name.lower()
    if isinstance(recipe, DelayedScaling):
        return te_calls.delayed_recipe(
            library,
            fp8_format=fp8_format,
            margin=recipe.margin,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
            reduce_amax=recipe.reduce_amax and reduce_amax,
            attention=attention,
        )
    if isinstance(recipe, Float8CurrentScaling):
        return te_calls.current_recipe(
            library,
            fp8_format=fp8_format,
            power_2_scale=recipe.power_2_scale,
            amax_epsilon=recipe.amax_epsilon,
            attention=attention,
        )
    if isinstance(recipe, Float8BlockScaling):
        return te_calls.block_recipe(
            library,
            fp8_format=fp8_format,
            power_of_two=not recipe.use_f32_scales,
            weight_dim=recipe.w_block_scaling_dim,
        )
    if isinstance(recipe, MXFP8BlockScaling):
        return te_calls.mx_recipe(library, fp8_format=fp8_format)
    raise PrecisionError(
        complaint(
            "FP8 recipe",
            recipe,
            "The Transformer Engine backend has no translation of it",
            "Use one of the recipes of --fp8-recipe or --fp4-recipe",
        )
    )


def row_alignment(precision: LinearPrecision, *, grouped: bool = False) -> int:
    """Multiple in which the library wants tokens now; 1 for any number.

    Args:
        precision: Of the layer.
        grouped: Whether it is one of several experts.
    """
    recipe = precision.decision.recipe
    if recipe is None or not precision.active:
        return 1
    return (expert_alignment_of if grouped else alignment_of)(recipe.name)


def check_widths(precision: LinearPrecision, weight: torch.Tensor) -> None:
    """Refuse widths that the library's FP8 products do not take, before the first step.

    Args:
        precision: Of the layer.
        weight: This rank's `[out, in]`.

    Raises:
        PrecisionError: Names the layer, the width and the nearest ones that fit.
    """
    recipe = precision.decision.recipe
    if recipe is None:
        return
    multiple = alignment_of(recipe.name)
    for what, size in zip(("outputs", "inputs"), weight.shape, strict=True):
        if size % multiple:
            near = " or ".join(str(n) for n in nearest_multiples(size, multiple))
            raise PrecisionError(
                complaint(
                    precision.path,
                    f"{size} {what} on each rank",
                    f"{recipe.family.upper()} products of Transformer Engine with the recipe"
                    f" {recipe.name} need multiples of {multiple}",
                    f"Make it {near}, or use --transformer-impl native, which takes any size",
                )
            )
