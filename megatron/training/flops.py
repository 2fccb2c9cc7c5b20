"""Floating-point operations of one training iteration.

Model FLOPs: what the mathematics needs, forward and backward (twice the forward), with causal
attention counted as half of the full square. Of a layer's experts, those that a token goes to
count. Recomputed activations, padding of sequences, routers and element-wise work do not; rows that
pad the vocabulary do, because the output layer multiplies with them. Source: matrix shapes of the
layers; 2 FLOPs a multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import RunConfig
from megatron.config.moe import moe_layers

CORE = "self_attention.core_attention"


@dataclass(frozen=True)
class Shape:
    """Sizes that decide how much a model computes.

    Attributes:
        seq_length: Tokens of a sequence.
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        query_size: Heads times channels of a head.
        kv_size: Query groups times channels of a head.
        vocab_rows: Rows of the output layer.
        ffn_hidden_size: Inner width of a dense MLP.
        gated: Whether the MLP has a gate (three matrices instead of two).
        num_moe_layers: How many of the layers have experts instead of a dense MLP.
        moe_ffn_hidden_size: Inner width of one expert.
        moe_topk: Experts that see a token.
        shared_expert_size: Inner width of the expert that sees every token.
    """

    seq_length: int
    num_layers: int
    hidden_size: int
    query_size: int
    kv_size: int
    vocab_rows: int
    ffn_hidden_size: int
    gated: bool = False
    num_moe_layers: int = 0
    moe_ffn_hidden_size: int = 0
    moe_topk: int = 0
    shared_expert_size: int = 0

    @classmethod
    def of(cls, cfg: RunConfig) -> Shape:
        """Read the sizes from a finished configuration."""
        return cls(
            seq_length=cfg.seq_length,
            num_layers=cfg.num_layers,
            hidden_size=cfg.hidden_size,
            query_size=cfg.kv_channels * cfg.num_attention_heads,
            kv_size=cfg.kv_channels * cfg.num_query_groups,
            vocab_rows=cfg.padded_vocab_size,
            ffn_hidden_size=cfg.ffn_hidden_size,
            gated=cfg.swiglu,
            num_moe_layers=sum(moe_layers(cfg)),
            moe_ffn_hidden_size=cfg.moe_ffn_hidden_size or 0,
            moe_topk=cfg.moe_router_topk,
            shared_expert_size=cfg.moe_shared_expert_intermediate_size or 0,
        )


def forward_per_token(shape: Shape) -> dict[str, float]:
    """Return the FLOPs of one token in the forward pass of one layer, by the end of its path."""
    h, q, kv = shape.hidden_size, shape.query_size, shape.kv_size
    inward = 2.0 * h * (2 if shape.gated else 1)
    widths = {
        "mlp": shape.ffn_hidden_size,
        "experts": shape.moe_ffn_hidden_size * shape.moe_topk,
        "shared_experts": shape.shared_expert_size,
    }
    return {
        "self_attention.linear_qkv": 2.0 * h * (q + 2 * kv),
        "self_attention.linear_proj": 2.0 * q * h,
        # Scores and their product with the values: 2 GEMMs x 2 FLOPs x half a square.
        CORE: 2.0 * q * shape.seq_length,
        **{f"{name}.linear_fc1": inward * width for name, width in widths.items()},
        **{f"{name}.linear_fc2": 2.0 * h * width for name, width in widths.items()},
        "output_layer": 2.0 * h * shape.vocab_rows,
    }


def terms_per_token(shape: Shape) -> dict[str, float]:
    """Return forward and backward FLOPs of one token, by part of the model."""
    forward = forward_per_token(shape)
    dense_layers = shape.num_layers - shape.num_moe_layers

    def of(*parents: str) -> float:
        return sum(v for name, v in forward.items() if name.split(".")[0] in parents)

    core = forward[CORE]
    return {
        "mlp": 3.0 * of("mlp") * dense_layers,
        "experts": 3.0 * of("experts", "shared_experts") * shape.num_moe_layers,
        "attention_projections": 3.0 * (of("self_attention") - core) * shape.num_layers,
        "attention_core": 3.0 * core * shape.num_layers,
        "logits": 3.0 * of("output_layer"),
    }


def flops_per_sequence(shape: Shape) -> float:
    """Return forward and backward FLOPs of one sequence."""
    return shape.seq_length * sum(terms_per_token(shape).values())


def flops_per_iteration(cfg: RunConfig, batch_size: int | None = None) -> float:
    """Return the FLOPs of one optimizer step over all ranks.

    Args:
        cfg: The configuration.
        batch_size: Global batch of the step, if it changes during the run.
    """
    return float((batch_size or cfg.global_batch_size) * flops_per_sequence(Shape.of(cfg)))
