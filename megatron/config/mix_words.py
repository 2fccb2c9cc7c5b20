"""How corpora and their weights are written: ``prefix ...`` or ``weight prefix ...``."""

from __future__ import annotations

import math
from collections.abc import Sequence


class MixError(ValueError):
    """The words name no mix.

    Attributes:
        why: Why, a sentence without its full stop.
        fix: What to do, likewise.
    """

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why, fix)
        self.why, self.fix = why, fix


def number(word: str) -> float | None:
    """Return a word's value, None if it is no number."""
    try:
        return float(word)
    except ValueError:
        return None


def read_mix(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Return prefixes, and their weights if there are any.

    Args:
        words: At least one.

    Raises:
        MixError: Weights and prefixes do not pair up, or a weight is no positive number.
    """
    numbers = [number(word) for word in words]
    plain = all(value is None for value in numbers)
    if plain or (len(words) % 2 and None not in numbers):  # an odd number of numbers are names
        return tuple(words), None
    if len(words) % 2:
        raise MixError(
            f"Weights and prefixes come in pairs, and these are {len(words)} words",
            "Write either prefixes only or weight-prefix pairs; a corpus whose name is a number"
            " is written with its folder, ./7",
        )
    weights = tuple(value for value in numbers[::2] if value is not None)
    if len(weights) < len(words) // 2:
        raise MixError(
            "Every other word must be a weight, the first included, once one of them is one",
            "Write either prefixes only or weight-prefix pairs",
        )
    if not (math.isfinite(sum(weights)) and min(weights) > 0):
        raise MixError(
            "Weights are shares of the training samples and must be positive, as must be their"
            " sum, and finite",
            "Leave out a corpus that should not be read",
        )
    return tuple(words[1::2]), weights
