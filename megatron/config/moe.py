"""Mixture-of-experts layers: how many experts, how tokens choose them, how they travel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron.config.field import field

AUXILIARY_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
TRAVEL_TYPES = ("bf16", "mxfp8", "blockwise")

# Sums of lists of zeros and ones, each perhaps repeated: ([0]*3+[1]*58).
_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Layers whose MLP is one of many experts, chosen for each token by a router."""

    num_experts: int | None = field(
        help="Experts of a mixture-of-experts layer.", fallback="no such layers"
    )
    moe_layer_freq: str = field(
        "1",
        help="Which layers have experts: every N-th from the first on, or a pattern with a 1 for"
        " each such layer, as in '([0]*1+[1]*31)'.",
    )
    moe_ffn_hidden_size: int | None = field(
        help="Width of one expert between its two matrices.", fallback="ffn_hidden_size"
    )
    moe_router_topk: int = field(2, help="Experts that each token goes to.")
    moe_router_score_function: str = field(
        "softmax",
        choices=("softmax", "sigmoid", "sqrtsoftplus"),
        help="How the router's logits become weights of the experts.",
    )
    moe_router_pre_softmax: bool = field(
        False, help="Softmax over all experts and then choose, instead of over the chosen ones."
    )
    moe_router_topk_scaling_factor: float | None = field(
        help="Multiplies the weights of the chosen experts.", fallback="1"
    )
    moe_router_num_groups: int | None = field(
        help="Groups of experts; a token chooses groups first, then experts in them.",
        fallback="no groups",
    )
    moe_router_group_topk: int | None = field(
        help="Groups that each token may use; read with --moe-router-num-groups.",
        fallback="no groups",
    )
    moe_router_enable_expert_bias: bool = field(
        False,
        help="Balance the experts by a bias on the choice (not on the weights), moved after every"
        " step against the experts' load.",
    )
    moe_router_bias_update_rate: float = field(1e-3, help="How far that bias moves in one step.")
    moe_router_dtype: str = field(
        "fp32", choices=("fp32", "fp64"), help="Precision in which the router computes."
    )
    moe_router_load_balancing_type: tuple[str, ...] = field(
        ("aux_loss",),
        nargs="*",
        choices=(*AUXILIARY_LOSSES, "sinkhorn", "none"),
        help="How the experts' load is balanced: by losses (one or several), by an assignment"
        " (sinkhorn) or not at all.",
    )
    moe_aux_loss_coeff: tuple[float, ...] = field(
        (0.0,), nargs="*", help="Weight of each balancing loss, in the order of their types."
    )
    moe_z_loss_coeff: float | None = field(
        help="Weight of the loss that keeps the router's logits small.", fallback="no such loss"
    )
    moe_input_jitter_eps: float | None = field(
        help="Multiply the router's input by random numbers in 1 - x to 1 + x while training.",
        fallback="no jitter",
    )
    moe_router_force_load_balancing: bool = field(
        False, help="Choose experts at random, for benchmarks only: nothing is learned."
    )
    moe_token_dispatcher_type: str = field(
        "allgather",
        choices=("allgather", "alltoall"),
        help="How tokens travel: every rank gathers all of them, or receives only its experts'.",
    )
    moe_dispatch_fwd_dtype: str = field(
        "bf16",
        choices=TRAVEL_TYPES,
        help="What tokens travel to their experts in: the model's type (bf16, whatever it is), or"
        " FP8 with a power-of-two scale for each 32 (mxfp8) or 128 (blockwise) elements.",
    )
    moe_combine_bwd_dtype: str = field(
        "bf16",
        choices=TRAVEL_TYPES,
        help="The same for the gradients that travel to the experts in the backward pass.",
    )
    moe_shared_expert_intermediate_size: int | None = field(
        help="Width of an expert that every token passes.", fallback="no shared expert"
    )
    moe_shared_expert_gate: bool = field(
        False, help="Multiply the shared expert's output by a learned gate of the token."
    )
    moe_expert_capacity_factor: float | None = field(
        help="Drop tokens of an expert beyond this many times its even share.",
        fallback="no token is dropped",
    )
    moe_token_drop_policy: str = field(
        "probs",
        choices=("probs", "position"),
        help="Which tokens are dropped: those with the lowest weight, or the latest.",
    )
    moe_pad_expert_input_to_capacity: bool = field(
        False, help="Give every expert inputs of one size, filled up with zeros."
    )
    moe_per_layer_logging: bool = field(
        False, help="Write balancing losses and loads of each layer to TensorBoard and the like."
    )


def layer_pattern(freq: str, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts.

    Args:
        freq: ``--moe-layer-freq``.
        num_layers: Layers of the whole model.

    Raises:
        ValueError: It cannot be read, or describes another number of layers; says which.
    """
    text = freq.replace(" ", "")
    if text.isdecimal():
        if int(text) < 1:
            raise ValueError("A number N means every N-th layer, so it is at least 1")
        return tuple(i % int(text) == 0 for i in range(num_layers))
    terms: list[tuple[list[bool], int]] = []
    for term in text.removeprefix("(").removesuffix(")").split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError("It is neither a number nor a pattern of zeros and ones")
        terms.append(([digit == "1" for digit in match[1].split(",")], int(match[2] or 1)))
    described = sum(len(kinds) * times for kinds, times in terms)
    if described != num_layers:
        raise ValueError(f"It describes {described} layers, and the model has {num_layers}")
    return tuple(kind for kinds, times in terms for kind in kinds * times)


def moe_layers(c: Any) -> tuple[bool, ...]:
    """Return which layers of a finished configuration have experts.

    Args:
        c: Anything with the settings' names.
    """
    if c.num_experts is None:
        return (False,) * c.num_layers
    return layer_pattern(c.moe_layer_freq, c.num_layers)


def auxiliary_losses(c: Any) -> dict[str, float]:
    """Return the balancing losses in use, by type, with their weights; those of weight 0 left out.

    Args:
        c: Anything with the settings' names.
    """
    pairs = zip(c.moe_router_load_balancing_type, c.moe_aux_loss_coeff, strict=False)
    return {kind: coeff for kind, coeff in pairs if kind in AUXILIARY_LOSSES and coeff}
