"""YAML as this project reads it: plain values, and every key once."""

from __future__ import annotations

from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """Plain values only; a key that stands twice is an error instead of the last one winning."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: D102
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} stands there twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_text(text: str) -> Any:
    """Return what a YAML text holds, None for nothing.

    Raises:
        ValueError: It is not YAML that can be read; says why in one line.
    """
    try:
        return yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        shown = " ".join(str(error).split()).replace('"<unicode string>", ', "")
        raise ValueError(f"It is not YAML that can be read: {shown}") from None
