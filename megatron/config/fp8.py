"""What runs in FP8 or FP4, and how its scales are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.field import field

BLOCK_RECIPES = ("blockwise", "mxfp8")


def published_format(recipe: str) -> str:
    """The `--fp8-format` that a recipe is published and best known with."""
    return "e4m3" if recipe in BLOCK_RECIPES else "hybrid"


def recipe_of(c: Any) -> str | None:
    """The recipe of a run's linear layers, by its name in `--fp8-recipe` or `--fp4-recipe`.

    Args:
        c: A configuration, finished or not.

    Returns:
        None where nothing runs in fewer than 16 bits.
    """
    name = c.fp8_recipe if c.fp8_format is not None else c.fp4_recipe
    return None if c.fp8_format is None and c.fp4_format is None else str(name)


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 or FP4 of the linear layers inside the transformer."""

    fp8_format: str | None = field(
        choices=("e4m3", "hybrid"),
        help="Switch FP8 on: e4m3 everywhere, or hybrid with e5m2 for gradients.",
    )
    fp8_recipe: str = field(
        "delayed",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
        help="Scales from the history of maxima (delayed), from the tensor itself (tensorwise), for"
        " each 128 elements of a row and 128 x 128 of a weight (blockwise), or a power of two for"
        " each 32 elements (mxfp8).",
    )
    fp4_format: str | None = field(
        choices=("e2m1",),
        help="Switch FP4 on, instead of FP8: values with 16 codes, from 0 to 6.",
    )
    fp4_recipe: str = field(
        "nvfp4",
        choices=("nvfp4",),
        help="A scale for each 16 elements and one for the tensor; random rounding of gradients;"
        " Hadamard transforms of what the weight gradient is made of.",
    )
    fp8_margin: int = field(
        0, help="Delayed scaling: leave this many powers of two above the largest value."
    )
    fp8_amax_history_len: int = field(
        1, help="Delayed scaling: number of steps whose maxima are remembered.", units="steps"
    )
    fp8_amax_compute_algo: str = field(
        "most_recent",
        choices=("most_recent", "max"),
        help="Delayed scaling: take the newest maximum, or the largest of the history.",
    )
    fp8_wgrad: bool = field(
        True,
        flags=("--no-fp8-wgrad", "--disable-fp8-wgrad"),
        help="Compute weight gradients in FP8; without it they stay in the parameters' type.",
    )
    first_last_layers_bf16: bool = field(
        False, help="Keep the first and last transformer layers out of FP8 (with every recipe)."
    )
    num_layers_at_start_in_bf16: int = field(
        1, help="How many first layers --first-last-layers-bf16 keeps out of FP8."
    )
    num_layers_at_end_in_bf16: int = field(
        1, help="How many last layers --first-last-layers-bf16 keeps out of FP8."
    )
    fp8_warmup_iters: int = field(
        0,
        help="Train this many iterations without FP8 first, then switch it on in the same run.",
        units="iterations",
    )
    fp8_policy: str | None = field(
        None,
        help="YAML file of rules that choose recipe, format or high precision for single layers"
        " and products (docs/fp8-policy.md); or the rules themselves, as text of several lines.",
    )
    fp8_policy_text: str | None = field(
        None, help="What the file of --fp8-policy says.", derived=True
    )
    fp8_amax_reduction: str = field(
        "tp-cp-dp",
        choices=("tp", "tp-cp", "tp-cp-dp"),
        help="Which ranks agree on delayed-scaling maxima.",
    )
    fp8_emulation: str = field(
        "fast",
        choices=("fast", "exact"),
        help="Without FP8 hardware: accumulate through a bf16 product where that is within one"
        " bf16 unit (fast), or in fp32 with one rounding (exact).",
    )
    fp8_emulate_accumulation: str = field(
        "fp32",
        choices=("fp32", "hopper"),
        help="Without FP8 hardware: add the products of linear layers up in fp32, or as Hopper's"
        " tensor cores do, in 14 bits (to study what that does; slow).",
    )
    fp8_allow_fallback: bool = field(
        False, help="Go on when a layer cannot run in the precision that was asked for."
    )
