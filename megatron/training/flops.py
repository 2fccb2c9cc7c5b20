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


def terms_per_token(shape: Shape) -> dict[str, float]:
    """Return forward and backward FLOPs of one token, by part of the model."""
    h, q, kv = shape.hidden_size, shape.query_size, shape.kv_size
    matrices = 3 if shape.gated else 2
    dense_layers = shape.num_layers - shape.num_moe_layers
    expert_width = shape.moe_ffn_hidden_size * shape.moe_topk + shape.shared_expert_size
    return {
        "mlp": 6.0 * h * matrices * shape.ffn_hidden_size * dense_layers,
        "experts": 6.0 * h * matrices * expert_width * shape.num_moe_layers,
        "attention_projections": 6.0 * shape.num_layers * (h * (q + 2 * kv) + q * h),
        # Scores and their product with the values: 2 GEMMs x 3 passes x 2 FLOPs x half a square.
        "attention_core": 6.0 * shape.num_layers * q * shape.seq_length,
        "logits": 6.0 * h * shape.vocab_rows,
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
