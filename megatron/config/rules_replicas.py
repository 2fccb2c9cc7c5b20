"""Rules about what data-parallel replicas send each other in FP8."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule


@rule
def gradients_travel_in_one_type(c: Draft) -> Iterator[Problem]:
    """--grad-reduce-in-bf16 is short for --grad-reduce-dtype bf16, not for another type."""
    if c.grad_reduce_in_bf16 and c.grad_reduce_dtype != "bf16":
        yield Problem(
            ("--grad-reduce-dtype", "--grad-reduce-in-bf16"),
            f"{c.grad_reduce_dtype} with --grad-reduce-in-bf16",
            "Gradients travel in one type, and the second flag is short for --grad-reduce-dtype"
            " bf16",
            "Remove one of them",
        )


@rule
def feedback_is_about_fp8_gradients(c: Draft) -> Iterator[Problem]:
    """--no-grad-reduce-error-feedback belongs to --grad-reduce-dtype fp8."""
    if not c.grad_reduce_error_feedback and c.grad_reduce_dtype != "fp8":
        yield Problem(
            ("--no-grad-reduce-error-feedback", "--grad-reduce-dtype"),
            f"--grad-reduce-dtype {c.grad_reduce_dtype}",
            "Only gradients that travel in FP8 leave anything behind that could be sent later",
            "Add --grad-reduce-dtype fp8, or remove --no-grad-reduce-error-feedback",
        )


@rule
def residuals_are_kept_of_fp8_gradients(c: Draft) -> Iterator[Problem]:
    """--ckpt-grad-residual is about what --grad-reduce-dtype fp8 keeps for the next step."""
    keeps = c.grad_reduce_dtype == "fp8" and c.grad_reduce_error_feedback
    if c.was_given("ckpt_grad_residual") and not keeps:
        yield Problem(
            ("--ckpt-grad-residual", "--grad-reduce-dtype"),
            f"{c.ckpt_grad_residual} with --grad-reduce-dtype {c.grad_reduce_dtype}"
            + ("" if c.grad_reduce_error_feedback else " and --no-grad-reduce-error-feedback"),
            "This run keeps nothing of its gradients",
            "Remove --ckpt-grad-residual, or reduce gradients in FP8 with error feedback",
        )


@rule
def fp8_weights_have_masters(c: Draft) -> Iterator[Problem]:
    """--fp8-param-gather needs FP8, --use-distributed-optimizer, and --bf16 or --fp16."""
    if not c.fp8_param_gather:
        return
    if c.fp4_format is not None and not c.fp8_format:
        yield Problem(
            ("--fp8-param-gather", "--fp4-format"),
            f"--fp8-param-gather with --fp4-format {c.fp4_format}",
            "FP4 layers cut their weights into blocks with two levels of scales, of the whole"
            " 16-bit weight",
            "Remove --fp8-param-gather",
        )
    elif not c.fp8_format:
        yield Problem(
            ("--fp8-param-gather", "--fp8-format"),
            "--fp8-param-gather without --fp8-format",
            "Only the weights of FP8 layers can rest in FP8",
            "Add --fp8-format, or remove --fp8-param-gather",
        )
    if not c.use_distributed_optimizer:
        yield Problem(
            ("--fp8-param-gather", "--use-distributed-optimizer"),
            "--fp8-param-gather without --use-distributed-optimizer",
            "Weights in FP8 are made from the masters that a distributed optimizer spreads over"
            " the replicas; without it nothing is gathered",
            "Add --use-distributed-optimizer, or remove --fp8-param-gather",
        )
    if not (c.bf16 or c.fp16):
        yield Problem(
            ("--fp8-param-gather", "--bf16"),
            "parameters in float32",
            "A float32 parameter is its own master, which has to stay as it is",
            "Add --bf16, or remove --fp8-param-gather",
        )
