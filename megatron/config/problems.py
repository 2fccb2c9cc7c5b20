"""Configuration mistakes as values, and the one error that carries all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One configuration mistake.

    Attributes:
        flags: The flags that are involved, the wrong one first.
        got: What was given.
        why: Why it cannot work, a sentence without its full stop.
        fix: What to do, a sentence without its full stop.
    """

    flags: tuple[str, ...]
    got: object
    why: str
    fix: str

    def __str__(self) -> str:
        """Return ``<flags>: got X. <why>. <fix>.`` on one line."""
        names = ", ".join(self.flags)
        fix = self.fix if self.fix.endswith("?") else f"{self.fix.rstrip('.')}."
        return f"{names}: got {self.got}. {self.why.rstrip('.')}. {fix}"


class ConfigError(Exception):
    """The configuration cannot work; lists every problem that was found.

    Attributes:
        problems: All of them.
    """

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} configuration problem{'s' if count != 1 else ''}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle by problems, so that the error survives a trip between processes."""
        return (type(self), (self.problems,))


Rule = Callable[[Any], Iterator[Problem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule; the first line of its docstring is its entry in the documentation."""
    RULES.append(function)
    return function
