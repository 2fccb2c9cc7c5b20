"""Scaling state of experts for checkpoints: one entry for a group of experts, in any distribution.

Experts are numbered over the whole model and the last component of an expert's path is its number.
The experts of one matrix form a group, whose tensors have a leading dimension of experts. A process
that holds some of them saves those rows, and another loads the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

NUMBERS = "numbers"


def stack_experts(layers: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """Gather single experts into groups.

    Args:
        layers: Path of each expert -> name -> tensor.

    Returns:
        Path of each group -> `numbers` (of the experts, in order) and name -> `[experts, ...]`.
    """
    members: dict[str, dict[int, Mapping[str, torch.Tensor]]] = {}
    for path, state in layers.items():
        group, _, number = path.rpartition(".")
        members.setdefault(group, {})[int(number)] = state
    stacked: dict[str, dict[str, Any]] = {}
    for group, experts in members.items():
        numbers = sorted(experts)
        first = experts[numbers[0]]
        stacked[group] = {
            NUMBERS: numbers,
            **{name: torch.stack([experts[n][name] for n in numbers]) for name in first},
        }
    return stacked


def take_experts(
    groups: Mapping[str, Mapping[str, Any]], paths: Iterable[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """The entries of single experts, as far as the groups have them.

    Args:
        groups: What `stack_experts` returned, perhaps by processes that hold other experts.
        paths: The experts wanted.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in paths:
        group, _, number = path.rpartition(".")
        entry = groups.get(group)
        if entry is None or int(number) not in entry[NUMBERS]:
            continue
        row = entry[NUMBERS].index(int(number))
        found[path] = {name: value[row] for name, value in entry.items() if name != NUMBERS}
    return found
