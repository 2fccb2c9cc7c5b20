"""Attention in FP8, and how its keys and values travel."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field

#: Recipes with a scale for a whole tensor: what attention kernels in FP8 take.
ATTENTION_RECIPES = ("delayed", "tensorwise")

_WHY_NOT = {
    "blockwise": "No attention kernel takes a scale for each block, Transformer Engine's neither",
    "mxfp8": "Transformer Engine has such a kernel for compute capability 10 only, and the native"
    " backend does not emulate it",
    "nvfp4": "Attention has no FP4 kernel, Transformer Engine refuses it too",
}


def why_no_attention(recipe: str) -> str:
    """Why a recipe has no FP8 attention; empty if it has."""
    if recipe in ATTENTION_RECIPES:
        return ""
    return _WHY_NOT.get(recipe, "FP8 attention takes one scale for a tensor")


@dataclass(frozen=True, kw_only=True)
class Fp8AttentionConfig:
    """FP8 of the matrix products inside attention."""

    fp8_dot_product_attention: bool = field(
        False,
        help="Run the matrix products of attention in FP8 too; softmax stays in fp32. With"
        " --fp8-recipe delayed or tensorwise.",
    )
    fp8_dpa_bwd: bool = field(
        True,
        flags="--no-fp8-dpa-bwd",
        help="Run the backward products of FP8 attention in FP8; without it they stay in high"
        " precision.",
    )
    fp8_cp_exchange: bool = field(
        True,
        flags="--no-fp8-cp-exchange",
        help="Send what FP8 attention has quantized between context-parallel ranks as FP8 bytes;"
        " without it the same values travel in bf16, to the same result.",
    )
