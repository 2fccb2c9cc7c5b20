"""Which corpora a run reads when ``--data-path`` and ``--split`` alone cannot say it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.field import field

PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
CORPORA = ("data_path", *PER_SPLIT)
_KEYS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class DataMixConfig:
    """Corpora per split, long lists of them, and what happens when they change."""

    train_data_path: tuple[str, ...] | None = field(
        nargs="*", help="Like --data-path, for training only; instead of --data-path and --split."
    )
    valid_data_path: tuple[str, ...] | None = field(
        nargs="*", help="Like --data-path, for validation only."
    )
    test_data_path: tuple[str, ...] | None = field(
        nargs="*", help="Like --data-path, for the test at the end only."
    )
    data_args_path: str | None = field(
        help="File with what --data-path would say, separated by blanks or lines."
    )
    per_split_data_args_path: str | None = field(
        help='JSON file with the keys "train", "valid" and "test": what --train-data-path and its'
        " siblings would say, each a list, a text or null."
    )
    multiple_validation_sets: bool = field(
        False,
        help="Evaluate every corpus of --valid-data-path (without weights) by itself and log each"
        " loss under its name.",
    )
    validation_set_names: tuple[str, ...] | None = field(
        nargs="*",
        help="Names of the validation sets in the log.",
        fallback="the last part of each path",
    )
    num_dataset_builder_threads: int = field(
        1, help="Index files that one process builds at the same time."
    )
    data_mix_change: str = field(
        "refuse",
        choices=("refuse", "continue"),
        help="What happens when a checkpoint was trained on another mix of data: refuse it, or"
        " continue each corpus where it stopped.",
    )


def read_list(path: str) -> tuple[str, ...]:
    """Return the words of ``--data-args-path``.

    Raises:
        ValueError: The file cannot be read or is empty; the message says which.
    """
    words = tuple(_text(path).split())
    if not words:
        raise ValueError("The file is empty")
    return words


def read_splits(path: str) -> dict[str, tuple[str, ...] | None]:
    """Return the three lists of ``--per-split-data-args-path``, by field name.

    Raises:
        ValueError: The file cannot be read or does not hold them; the message says why.
    """
    try:
        content = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"The file is not JSON: {error}") from None
    if not isinstance(content, dict) or set(content) - set(_KEYS):
        raise ValueError('The file holds one object with the keys "train", "valid" and "test"')
    return {name: _words(key, content.get(key)) for key, name in zip(_KEYS, PER_SPLIT, strict=True)}


def _words(key: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(i, str | int | float) for i in items):
        raise ValueError(f'"{key}" is a list of prefixes and weights, a text with them, or null')
    return tuple(map(str, items)) or None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The file cannot be read ({error})") from None


def per_split(c: Any) -> bool:
    """Return whether the splits have corpora of their own."""
    return any(getattr(c, name) is not None for name in PER_SPLIT)


def naming_flag(c: Any, name: str) -> str:
    """Return the flag that named the corpora of `name`, one of `CORPORA`: its own or a file's."""
    file = "data_args_path" if name == "data_path" else "per_split_data_args_path"
    given = file if getattr(c, file) else name
    return f"--{given.replace('_', '-')}"


def corpora_flag(c: Any) -> str:
    """Return the flag that names the corpora to train on, empty without any."""
    if c.data_path:
        return "--data-path"
    return "--train-data-path" if per_split(c) else ""
