"""What a configuration must satisfy: collects the rules and runs all of them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import (
    rules_batch,
    rules_data,
    rules_fim,
    rules_fp8,
    rules_fp8_attention,
    rules_fp8_stats,
    rules_guards,
    rules_mix,
    rules_model,
    rules_moe,
    rules_overlap,
    rules_parallel,
    rules_pipeline,
    rules_replicas,
    rules_saving,
    rules_training,
)
from megatron.config.draft import Draft
from megatron.config.problems import RULES, ConfigError, Problem, Rule, rule
from megatron.config.schema import flag_of

__all__ = ["RULES", "ConfigError", "Problem", "Rule", "check", "rule"]

# The order in which problems are listed and documented.
_LISTED = (
    rules_model,
    rules_fp8,
    rules_fp8_attention,
    rules_guards,
    rules_moe,
    rules_parallel,
    rules_replicas,
    rules_overlap,
    rules_pipeline,
    rules_batch,
    rules_training,
    rules_fp8_stats,
    rules_data,
    rules_mix,
    rules_fim,
    rules_saving,
)
_MODULES = [m.__name__ for m in _LISTED]
RULES.sort(key=lambda one: _MODULES.index(one.__module__))


def check(draft: Draft, more: Sequence[Rule] = ()) -> list[Problem]:
    """Run every rule and return all problems.

    Args:
        draft: A derived configuration.
        more: Rules about what is outside the configuration.

    Returns:
        The problems, in rule order, without those about values that could not be read at all.
    """
    silent = {flag_of(name) for name in draft.broken}
    found = [problem for one in (*RULES, *more) for problem in one(draft)]
    return [problem for problem in found if not silent & set(problem.flags)]
