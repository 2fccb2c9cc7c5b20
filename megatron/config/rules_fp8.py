"""Rules about when and where FP8 runs: the warm-up and the policy of single layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import fp8_policy
from megatron.config.draft import Draft
from megatron.config.fp8 import recipe_of
from megatron.config.problems import Problem, rule


@rule
def fp8_starts_before_the_end(c: Draft) -> Iterator[Problem]:
    """--fp8-warmup-iters is less than --train-iters, so that FP8 runs at all."""
    if recipe_of(c) is None or not c.counts("fp8_warmup_iters", "train_iters"):
        return
    if c.fp8_warmup_iters >= c.train_iters:
        yield Problem(
            ("--fp8-warmup-iters", "--train-iters"),
            f"{c.fp8_warmup_iters} and {c.train_iters}",
            "FP8 starts after the last iteration",
            "Lower --fp8-warmup-iters, or leave --fp8-format or --fp4-format out",
        )


@rule
def fp8_policy_can_be_followed(c: Draft) -> Iterator[Problem]:
    """Every rule of --fp8-policy can be read, and decides at least one linear layer."""
    if recipe_of(c) is not None:
        yield from fp8_policy.problems(c)
