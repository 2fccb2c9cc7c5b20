"""Rules about attention in FP8."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.fp8 import published_format
from megatron.config.fp8_attention import ATTENTION_RECIPES, why_no_attention
from megatron.config.fp8_policy import attention_recipes
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of


@rule
def fp8_attention_is_asked_for(c: Draft) -> Iterator[Problem]:
    """What belongs to FP8 attention is given only with --fp8-dot-product-attention."""
    if c.fp8_dot_product_attention:
        return
    names = ("fp8_dpa_bwd", "fp8_cp_exchange")
    changed = tuple(flag_of(n) for n in names if c.values[n] != SPECS[n].default)
    if changed:
        yield Problem(
            changed,
            "no --fp8-dot-product-attention",
            "Attention is not in FP8",
            f"Add --fp8-dot-product-attention, or remove {' and '.join(changed)}",
        )


@rule
def fp8_attention_has_a_recipe(c: Draft) -> Iterator[Problem]:
    """FP8 attention needs --fp8-format and a recipe with one scale for a tensor."""
    if not c.fp8_dot_product_attention or c.broken & {"fp8_format", "fp8_recipe"}:
        return
    if c.fp4_format is not None and c.fp8_format is None:
        yield Problem(
            ("--fp8-dot-product-attention", "--fp4-format"),
            c.fp4_format,
            "Attention has no products in FP4",
            "Remove one of them, or use --fp8-format instead of --fp4-format",
        )
        return
    if c.fp8_format is None:
        yield Problem(
            ("--fp8-dot-product-attention",),
            "no --fp8-format",
            "Without --fp8-format nothing runs in FP8",
            f"Add --fp8-format {published_format(c.fp8_recipe)}, or remove it",
        )
        return
    for recipe in attention_recipes(c):
        why = why_no_attention(recipe)
        if not why:
            continue
        origin = "--fp8-recipe" if c.fp8_policy is None else "--fp8-policy"
        yield Problem(
            ("--fp8-dot-product-attention", origin),
            recipe,
            why,
            f"Use --fp8-recipe {' or '.join(ATTENTION_RECIPES)}, or leave attention in high"
            " precision (a rule `{module: '*.core_attention', recipe: bf16}` of --fp8-policy)",
        )


@rule
def fp8_attention_shares_scales_along_a_sequence(c: Draft) -> Iterator[Problem]:
    """With context parallelism, the ranks of a sequence agree on the scales of FP8 attention."""
    if not c.fp8_dot_product_attention or not c.counts("context_parallel_size"):
        return
    if c.fp8_amax_reduction == "tp" and c.context_parallel_size > 1:
        yield Problem(
            ("--fp8-amax-reduction", "--fp8-dot-product-attention"),
            f"tp with --context-parallel-size {c.context_parallel_size}",
            "Keys and values of all context-parallel ranks are parts of one tensor with one scale",
            "Use --fp8-amax-reduction tp-cp or tp-cp-dp",
        )
