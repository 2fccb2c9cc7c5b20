"""Two checkpoints, tensor by tensor.

What is compared are global tensors, so that the layouts that saved them do not matter; nor does it
matter whether layers are stacked. One layer of one tensor is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.storage import Reader

_STACKED = re.compile(r"^(?P<stack>(?!fp8_state\.).*\blayers)\.(?P<rest>(?!\d+\.).+)$")
_NUMBER = re.compile(r"\blayers\.\d+\.")
_ELEMENTS = 1 << 22  # compared at once, in fp64


class Where(NamedTuple):
    """Where a tensor of one layer is stored: its key, and its row if layers are stacked."""

    key: str
    row: int | None

    def read(self, reader: Reader) -> Tensor:
        """Read it."""
        return reader.read(self.key) if self.row is None else reader.read_row(self.key, self.row)


def places(reader: Reader, wanted: Callable[[str], bool]) -> dict[str, Where]:
    """Return name -> place of the tensors of every single layer.

    Args:
        reader: The checkpoint.
        wanted: Of a stored key, whether it is looked at.
    """
    found: dict[str, Where] = {}
    for key, entry in reader.tensors.items():
        match = _STACKED.match(key)
        if not wanted(key):
            continue
        if match is None or not entry.shape:
            found[key] = Where(key, None)
            continue
        for row in range(entry.shape[0]):
            found[f"{match['stack']}.{row}.{match['rest']}"] = Where(key, row)
    return found


@dataclass
class TensorDifference:
    """How the values of one tensor, over all layers, differ.

    Attributes:
        name: The tensor, without the number of the layer.
        elements: Number of elements compared.
        different: How many of them differ by more than is allowed.
        max_abs: Largest absolute difference.
        max_rel: Largest difference over the larger of the two values.
        worst: The layer's tensor with the largest absolute difference.
        shapes: Both shapes, where they differ.
        dtypes: Both types, where they differ; equal values in two types are equal.
    """

    name: str
    elements: int = 0
    different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    worst: str = ""
    shapes: tuple[list[int], list[int]] | None = None
    dtypes: tuple[str, str] | None = None

    @property
    def equal(self) -> bool:
        """Whether all values are the same, as far as is allowed."""
        return not self.different and self.shapes is None


@dataclass(frozen=True)
class Comparison:
    """The outcome for all tensors.

    Attributes:
        tensors: Those that both have.
        missing: Those that only the first has.
        extra: Those that only the second has.
    """

    tensors: list[TensorDifference]
    missing: list[str]
    extra: list[str]

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.missing and not self.extra and all(t.equal for t in self.tensors)


def compare(
    first: Reader,
    second: Reader,
    wanted: Callable[[str], bool] = lambda key: True,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Comparison:
    """Compare the values of two checkpoints.

    Rows of the vocabulary that only one of them has are padding, and not compared.

    Args:
        first: One.
        second: The other.
        wanted: Of a stored key, whether it is compared.
        atol: Absolute difference that is no difference.
        rtol: The same, times the larger of the two values.
    """
    left, right = places(first, wanted), places(second, wanted)
    found: dict[str, TensorDifference] = {}
    for name in left:
        if name not in right:
            continue
        base = common_name(name)
        difference = found.setdefault(base, TensorDifference(base))
        one, other = left[name].read(first), right[name].read(second)
        if one.dtype != other.dtype:
            difference.dtypes = (_short(one.dtype), _short(other.dtype))
        if is_padded(name):
            rows = min(len(one), len(other))
            one, other = one[:rows], other[:rows]
        if one.shape != other.shape:
            difference.shapes = (list(one.shape), list(other.shape))
            continue
        _add(difference, name, one, other, (atol, rtol))
    return Comparison(
        [found[base] for base in sorted(found)],
        sorted({common_name(n) for n in set(left) - set(right)}),
        sorted({common_name(n) for n in set(right) - set(left)}),
    )


def common_name(name: str) -> str:
    """Return a tensor's name without the number of its layer; FP8 state keeps it."""
    return name if name.startswith(schema.FP8_PREFIX) else _NUMBER.sub("layers.", name)


def is_padded(name: str) -> bool:
    """Whether a tensor, or what the optimizer keeps of it, ends in padding of the vocabulary."""
    if name.startswith(schema.OPTIMIZER_PREFIX):
        name = name.removeprefix(schema.OPTIMIZER_PREFIX).partition(".")[2]
    return schema.padded_dim(name) == 0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _add(
    difference: TensorDifference, name: str, one: Tensor, other: Tensor, allowed: tuple[float, ...]
) -> None:
    """Count the differences of one layer's tensor. NaN equals NaN and nothing else."""
    difference.elements += one.numel()
    atol, rtol = allowed
    pairs = zip(
        torch.split(one.reshape(-1), _ELEMENTS),
        torch.split(other.reshape(-1), _ELEMENTS),
        strict=True,
    )
    for a, b in pairs:
        x, y = a.double(), b.double()
        same = (x == y) | (x.isnan() & y.isnan())
        if bool(same.all()):
            continue
        gap = torch.where(same, 0.0, (x - y).abs()).nan_to_num(torch.inf, torch.inf)
        larger = torch.maximum(x.abs(), y.abs())
        beyond = ~same & ~(gap <= atol + rtol * larger)
        difference.different += int(beyond.sum())
        relative = torch.where(gap > 0, gap / larger, 0.0).nan_to_num(torch.inf, torch.inf)
        difference.max_rel = max(difference.max_rel, float(relative.max()))
        if float(gap.max()) > difference.max_abs:
            difference.max_abs, difference.worst = float(gap.max()), name


def settings_differences(
    first: Mapping[str, object], second: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the settings that differ: name -> both values; None where there is none."""
    names = sorted({*first, *second})
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
