"""What happens to a flag this project does not declare: accepted, rewritten, refused or unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.config.megatron_flags import MEGATRON_FLAGS
from megatron.config.problems import Problem
from megatron.config.retired import (
    ACCEPTED,
    LAUNCHER_FLAGS,
    REFUSED,
    REFUSED_PATTERNS,
    REWRITTEN,
)
from megatron.config.values import nearest


@dataclass(frozen=True)
class Accepted:
    """The flag asks for what happens anyway.

    Attributes:
        notice: One line for the user.
    """

    notice: str


@dataclass(frozen=True)
class Rewritten:
    """The flag is another spelling of something.

    Attributes:
        tokens: What to read instead.
        notice: One line for the user.
    """

    tokens: tuple[str, ...]
    notice: str


def _accept(flag: str, values: Sequence[str]) -> Accepted | Problem:
    allowed, notice = ACCEPTED[flag]
    if allowed and any(value not in allowed for value in values):
        return Problem(
            (flag,),
            " ".join(values),
            f"Only {', '.join(allowed)} is possible here",
            "Remove it" if len(allowed) == 1 else f"Choose one of {', '.join(allowed)}",
        )
    return Accepted(f"{' '.join((flag, *values))}: {notice}")


def _launcher(flag: str, values: Sequence[str], world_size: int) -> Accepted | Problem:
    spelling = flag.replace("--nproc-per-node", "--nproc_per_node")
    if flag == "--nproc-per-node" and values == [str(world_size)]:
        return Accepted(f"{spelling} {values[0]}: read by the launcher already")
    return Problem(
        (spelling,),
        " ".join(values) or "set",
        f"It belongs to the launcher, and this run has {world_size} process(es)",
        f"Write it before the script: torchrun {spelling} ... pretrain_gpt.py",
    )


def _refuse(flag: str, values: Sequence[str]) -> Problem:
    got = " ".join(values) or "set"
    if flag in REFUSED:
        why, fix = REFUSED[flag]
        return Problem((flag,), got, why, fix)
    for pattern, subject, fix in REFUSED_PATTERNS:
        if re.match(pattern, flag[2:]):
            why = f"Megatron-LM has this flag, but {subject[0].lower()}{subject[1:]}"
            return Problem((flag,), got, f"{why} not in this release", fix or "Remove it")
    return Problem(
        (flag,),
        got,
        "Megatron-LM has this flag, but this project has nothing that it could set",
        "Remove it",
    )


def arity(flag: str) -> str | None:
    """Return how many values an undeclared flag takes: "0", "1", "*", or None when unknown."""
    if flag in LAUNCHER_FLAGS:
        return "0" if flag == "--standalone" else "1"
    if flag in MEGATRON_FLAGS:
        return MEGATRON_FLAGS[flag]
    if flag in REWRITTEN:
        return "1" if "*" in REWRITTEN[flag] else "0"
    return "0" if flag in ACCEPTED else None


def judge(
    flag: str, values: Sequence[str], *, known: Iterable[str], world_size: int = 1
) -> Accepted | Rewritten | Problem:
    """Decide about a flag that no field declares.

    Args:
        flag: The flag, with dashes.
        values: The values that follow it.
        known: The flags that fields declare, to find the nearest name.
        world_size: Number of processes, to recognise a launcher flag that already did its work.

    Returns:
        What to do with it.
    """
    if flag in REWRITTEN:
        tokens = tuple(
            piece for part in REWRITTEN[flag] for piece in (values if part == "*" else (part,))
        )
        return Rewritten(tokens, f"{' '.join((flag, *values))}: read as {' '.join(tokens)}")
    if flag in ACCEPTED:
        return _accept(flag, values)
    if flag in LAUNCHER_FLAGS:
        return _launcher(flag, values, world_size)
    if flag in MEGATRON_FLAGS:
        return _refuse(flag, values)
    guess = nearest(flag, known)
    return Problem(
        (flag,),
        " ".join(values) or "set",
        "There is no such flag",
        f"Did you mean {guess}?" if guess else "docs/flags.md lists every flag",
    )
