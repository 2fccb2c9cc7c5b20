"""What a configuration must satisfy, one small function a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.config.draft import Draft
from megatron.config.problems import ConfigError, Problem
from megatron.config.schema import flag_of

__all__ = ["RULES", "ConfigError", "Problem", "check", "rule"]

Rule = Callable[[Draft], Iterator[Problem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule; the first line of its docstring is its entry in the documentation."""
    RULES.append(function)
    return function


def check(draft: Draft) -> list[Problem]:
    """Run every rule and return all problems.

    Args:
        draft: A derived configuration.

    Returns:
        The problems, in rule order, without those about values that could not be read at all.
    """
    silent = {flag_of(name) for name in draft.broken}
    found = [problem for one in RULES for problem in one(draft)]
    return [problem for problem in found if not silent & set(problem.flags)]
