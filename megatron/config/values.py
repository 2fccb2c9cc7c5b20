"""Plain values to typed values: one conversion for the command line, YAML and Python."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable
from typing import Any

from megatron.config.field import Spec
from megatron.config.problems import Problem

_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_SPLIT = re.compile(rf"[\s'\"\[\]()]*{_NUMBER}([\s,/:;]+{_NUMBER})*[\s'\"\[\]()]*")
_KIND_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text that is not empty",
    bool: "true or false",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that resembles ``name`` most, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _number(kind: type, value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError
    if kind is int:
        if isinstance(value, float):
            raise ValueError
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _scalar(spec: Spec, value: Any) -> Any:
    if spec.kind is bool:
        if not isinstance(value, bool):
            raise ValueError
        return value
    if spec.kind is str:
        if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
            raise ValueError
        text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        if not text:  # most often an unset variable of a launch script
            raise ValueError
        return dict(spec.setting.aliases).get(text, text)
    return _number(spec.kind, value)


def coerce(spec: Spec, value: Any) -> Any:
    """Convert a value to a field's type.

    Args:
        spec: The field.
        value: Text from the command line, a YAML value or a Python value.

    Returns:
        The typed value; a tuple for a list field.

    Raises:
        ValueError: The value has another type or is none of the choices. The message says what
            was expected.
    """
    choices = spec.setting.choices
    wanted = _KIND_WORDS[spec.kind]
    if value is None:
        if spec.optional:
            return None
        raise ValueError(f"It takes {wanted}")
    try:
        if spec.many:
            if isinstance(value, str):
                value = value.split()
            one = isinstance(value, int | float) and spec.kind is not str
            items = (value,) if one else tuple(value)
            result: Any = tuple(_scalar(spec, item) for item in items)
        else:
            result = _scalar(spec, value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"It takes {wanted}{' (or several)' if spec.many else ''}") from None
    if choices:
        for item in result if spec.many else (result,):
            if item not in choices:
                raise ValueError(f"The choices are {', '.join(str(c) for c in choices)}")
    return result


def coerce_problem(spec: Spec, value: Any, why: str, origin: str = "") -> Problem:
    """Build the problem for a value that :func:`coerce` refused."""
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    guess = nearest(words, [str(c) for c in spec.setting.choices])
    fix = f"Did you mean {guess}?" if guess else "Give one of these values"
    if not spec.setting.choices:
        fix = "Give such a value or leave it out"
    alone = spec.many and isinstance(value, list | tuple) and len(value) == 1
    got = repr(value[0] if alone else value)
    return Problem((spec.flag,), f"{got}{origin}", why, fix)


def split_weights(text: str) -> list[float]:
    """Read ``--split``: the weights of training, validation and test documents.

    Args:
        text: One to three non-negative numbers.

    Returns:
        As many weights as were given; their sum is positive.

    Raises:
        ValueError: The text is not such a list, or all numbers are 0. The message says which.
    """
    if not _SPLIT.fullmatch(text):
        raise ValueError("It is not a list of non-negative numbers")
    weights = [float(word) for word in re.findall(_NUMBER, text)]
    if len(weights) > 3:
        raise ValueError("There are three splits: train, valid and test")
    if not sum(weights):
        raise ValueError("All shares are 0")
    return weights


def yaml_value(value: Any) -> str:
    """Write a plain value the way YAML 1.1 reads it back (every reader, so floats keep a dot)."""
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        if not e:
            return mantissa
        sign = "" if exponent.startswith(("-", "+")) else "+"
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(yaml_value(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)
