"""What data-parallel replicas send each other in FP8."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class Fp8ReplicasConfig:
    """Gradients and parameters on their way between data-parallel replicas."""

    grad_reduce_dtype: str | None = field(
        choices=("fp32", "bf16", "fp8"),
        help="Type in which replicas send their gradients; fp8 keeps what rounding loses and sends"
        " it with the next step. Microbatches are added up in fp32 in any case.",
        fallback="fp32, or bf16 with --grad-reduce-in-bf16",
    )
    grad_reduce_error_feedback: bool = field(
        True,
        flags="--no-grad-reduce-error-feedback",
        help="With --grad-reduce-dtype fp8: send what rounding loses with the next step.",
    )
    ckpt_grad_residual: str = field(
        "each",
        choices=("each", "sum"),
        help="With --grad-reduce-dtype fp8: checkpoints hold what each replica keeps for the next"
        " step, with which as many replicas go on bit by bit (each), or the sum over replicas, a"
        " tensor as large as the model, with which the saving run goes on too (sum).",
    )
    fp8_param_gather: bool = field(
        False,
        help="Keep the weights of FP8 layers in FP8 only, beside the masters of the distributed"
        " optimizer, and gather them as bytes.",
    )
