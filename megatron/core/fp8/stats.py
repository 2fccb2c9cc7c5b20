"""What quantization does to the tensors of a running model, measured at the cast.

On the steps that are due, every cast of a linear layer is compared with the tensor it was made
from. Magnitude, scale and non-finite elements are those of the whole tensor; the rest is measured
on a sample. A step that is not due costs one comparison a cast.

Casts of a recomputed forward and of an evaluation are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch

from megatron.core.comm_log import CONTROL
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8 import kernels
from megatron.core.fp8.amax import Slot
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce_, gather_objects

_SUMS = ("elements", "saturated", "underflow", "signal", "noise", "nonfinite", "casts")
_Key = tuple[str, Role]
_Numbers = tuple[_Key, list[float], list[float]]


@dataclass(frozen=True)
class RoleStats:
    """What the casts of one tensor of one layer did in one step, over microbatches and ranks.

    Attributes:
        amax: Largest magnitude, of all elements; infinite if an element is. NaN is ignored.
        scale: The smallest multiplier in use, which is that of the block with the largest
            magnitudes; 0 if there was one that is no number.
        saturated: Share of elements beyond the format's largest value by more than rounding
            takes care of (of E4M3 beyond 464, not 448), 0 to 1.
        underflow: Share of elements that are not zero and became zero, 0 to 1.
        snr_db: Energy of the tensor over energy of its error, in decibels; infinite if the cast
            was exact, NaN if all elements are zero, minus infinite if the error is no number.
        elements: How many elements shares and energies were measured on. What several ranks hold
            alike counts once for each. 0 if only magnitude and scale are known, as of a cast that
            took place inside a library.
        nonfinite: How many elements, of all, are NaN or infinite. Shares and energies leave them
            out.
        casts: How many casts these are, over microbatches and ranks.
    """

    amax: float
    scale: float
    saturated: float
    underflow: float
    snr_db: float
    elements: int
    nonfinite: int = 0
    casts: int = 0


@dataclass(frozen=True)
class Tally:
    """What `RoleStats` is computed from; tallies of several casts can be added.

    Attributes:
        highest: `[2]`, fp64: magnitude and inverse scale, the largest of each.
        sums: `[7]`, fp64: elements, saturated, underflown, energies of tensor and error,
            non-finite, casts.
    """

    highest: torch.Tensor
    sums: torch.Tensor

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(torch.maximum(self.highest, other.highest), self.sums + other.sums)


def measure(x: torch.Tensor, made: QuantizedTensor, samples: int = 0) -> Tally:
    """Compare a cast with what it was made from. Does not wait for an accelerator.

    Args:
        x: `[rows, cols]`, any float type. Any shape if it has one scale.
        made: The same, quantized.
        samples: About how many elements to compare, evenly spread; 0 for all.
    """
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
        made = replace(made, data=made.data.reshape(x.shape))
    amax, nonfinite = _amax_and_nonfinite(x)
    values, quantized, limit = _sample(x, made, samples)
    finite = torch.isfinite(values)
    values = torch.where(finite, values, 0.0)
    quantized = torch.where(finite, quantized, 0.0)
    error = values - quantized
    sums = torch.stack(
        [
            finite.sum(),
            (values.abs() > limit).sum(),
            ((values != 0) & (quantized == 0)).sum(),
            values.square().sum(),
            error.square().sum(),
            nonfinite,
            torch.ones_like(nonfinite),
        ]
    )
    return Tally(torch.stack([amax.double(), _largest_inverse(made)]), sums.double())


def _largest_inverse(made: QuantizedTensor) -> torch.Tensor:
    """The largest inverse scale, fp64; infinite if one is not usable.

    Under a scale of the whole tensor that of a block may be 0: all its elements became zero.
    """
    inverse = made.scale_inv.reshape(-1)
    if not inverse.numel():
        return torch.zeros((), dtype=torch.float64, device=inverse.device)
    above = made.tensor_inv
    usable = torch.isfinite(inverse) & ((inverse > 0) if above is None else (inverse >= 0))
    largest = torch.where(usable, inverse, torch.inf).amax().double()
    return largest if above is None else largest * above.double()


def _limit(made: QuantizedTensor) -> torch.Tensor:
    """What each element may be before it counts as saturated, fp64; broadcasts.

    Half a step above the largest value, up to where rounding alone leads there: the scale of an
    FP4 block is rounded so coarsely that a block's largest element is often a little above.
    """
    fmt = made.fmt
    step = 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits)
    limit = made.expanded_scale_inv().double() * (fmt.max + step / 2)
    return limit if made.tensor_inv is None else limit * made.tensor_inv.double()


def _amax_and_nonfinite(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitude without NaN, and how many elements are NaN or infinite."""
    if x.device.type == "cpu" and x.numel():
        # One quick pass tells whether to count, which takes 20 times as long.
        low, high = torch.aminmax(x)
        if torch.isfinite(low) and torch.isfinite(high):
            return torch.maximum(-low, high), torch.zeros((), dtype=torch.int64)
    return kernels.amax(x), x.numel() - torch.isfinite(x).sum()


def _sample(
    x: torch.Tensor, made: QuantizedTensor, samples: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements of `x`, the same quantized, and from where they count as saturated."""
    rows, cols = x.shape
    if not samples or x.numel() <= samples:
        return x.double(), made.dequantize().double(), _limit(made)
    row, col = _places(rows, cols, samples, x.device)
    data, inverse = made.data, made.scale_inv
    codes = data if made.is_held else data.view(torch.uint8)
    taken = codes[row, col].view(data.dtype)
    if made.block is not None:
        inverse = inverse[row // made.block[0], col // made.block[1]].unsqueeze(0)
    block = None if made.block is None else (1, 1)
    few = replace(made, data=taken.unsqueeze(0), scale_inv=inverse, block=block)
    return x[row, col].double().unsqueeze(0), few.dequantize().double(), _limit(few)


@lru_cache(maxsize=64)
def _places(
    rows: int, cols: int, samples: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of about that many elements of a matrix, evenly spread."""
    step = rows * cols // samples
    while math.gcd(step, cols) > 1:  # or whole columns would never be looked at
        step += 1
    place = torch.arange(0, rows * cols, step, device=device)
    return place // cols, place % cols


def role_stats(highest: Sequence[float], sums: Sequence[float]) -> RoleStats:
    """The figures of a tally's numbers."""
    elements, saturated, underflow, signal, noise, nonfinite, casts = sums
    amax, inverse = highest
    if noise == 0:
        snr = math.inf if signal > 0 else math.nan
    else:
        comparable = signal > 0 and math.isfinite(noise)
        snr = 10.0 * math.log10(signal / noise) if comparable else -math.inf
    return RoleStats(
        amax=amax,
        scale=1.0 / inverse if inverse > 0 else 0.0,
        saturated=saturated / max(elements, 1.0),
        underflow=underflow / max(elements, 1.0),
        snr_db=snr,
        elements=int(elements),
        nonfinite=int(nonfinite),
        casts=int(casts),
    )


class Watched(Protocol):
    """A layer; `LinearPrecision` is one."""

    @property
    def active(self) -> bool:
        """Whether it runs in FP8."""


class StatsCollector:
    """Collects figures of every FP8 cast on the steps that are due.

    All ranks must agree on which steps are due; then all have the same figures of the whole model.

    Args:
        interval: Steps between two that are due. The first step of a run is due as well.
        samples: About how many elements of a tensor are compared; 0 for all.
        axis: Ranks that hold the same layers, or parts of them.
        pipeline: Ranks that hold other layers.
        device: Where figures are added up.

    Attributes:
        iteration: The running step.
        due: Whether figures are collected in it.
        latest_iteration: The step that `latest` tells about; 0 before the first.
        uncast: Layers that were to run in FP8 in that step, and of which no cast was seen on this
            rank or on the ranks of other stages that it talks to.
    """

    def __init__(
        self,
        interval: int,
        samples: int,
        axis: Axis | None = None,
        pipeline: Axis | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.interval, self.samples = interval, samples
        self._axis = axis or Axis.single("ranks")
        self._pipeline = pipeline or Axis.single("pp")
        self._device = torch.device(device)
        self.iteration = 0
        self.due = False
        self.latest_iteration = 0
        self.uncast: tuple[str, ...] = ()
        self._requested = False
        self._tallies: dict[_Key, Tally] = {}
        self._seen: set[str] = set()
        self._latest: dict[str, dict[Role, RoleStats]] = {}
        self._numbers: list[_Numbers] = []
        self._stages: dict[str, int] = {}
        self._layout: list[_Key] = []

    def begin_step(self, iteration: int) -> None:
        """Start a step, numbered from 1."""
        self.iteration = iteration
        self.due = self._requested or iteration == 1 or iteration % self.interval == 0
        self._requested = False
        self._tallies.clear()
        self._seen.clear()

    def request(self, wanted: bool = True) -> None:
        """Make the next step due, or not by request; on all ranks alike."""
        self._requested = wanted

    @torch.no_grad()
    def note(self, path: str, role: Role, x: torch.Tensor, made: QuantizedTensor) -> None:
        """Take note of a cast.

        A weight is looked at once a step: it is the same for all microbatches.

        Args:
            path: The layer.
            role: Which of its tensors.
            x: `[rows, cols]`, what was cast.
            made: The result.
        """
        if not self.due:
            return
        self._seen.add(path)
        key = (path, role)
        before = self._tallies.get(key)
        if before is None or role is not Role.WEIGHT:
            tally = measure(x, made, self.samples)
            self._tallies[key] = tally if before is None else before.plus(tally)

    @torch.no_grad()
    def note_magnitude(
        self, path: str, role: Role, amax: torch.Tensor, scale_inv: torch.Tensor
    ) -> None:
        """Take note of a tensor that is never whole in high precision, once a step.

        Args:
            path: The layer.
            role: Which of its tensors.
            amax: Its largest magnitude, one element.
            scale_inv: Inverses of the scales in use.
        """
        if not self.due:
            return
        self._seen.add(path)
        if (path, role) not in self._tallies:
            highest = torch.stack([amax.double(), scale_inv.double().amax()])
            self._tallies[path, role] = Tally(highest, highest.new_zeros(len(_SUMS)))

    @torch.no_grad()
    def note_slots(self, slots: Iterable[tuple[str, Role, Slot]]) -> None:
        """Take note of staged magnitudes and their scales, where no cast was seen.

        Those are of layers of a library that casts by itself, and of tensors that are never whole.

        Args:
            slots: Path and role of each, with its column.
        """
        if not self.due:
            return
        none: torch.Tensor | None = None
        for path, role, slot in slots:
            if (path, role) not in self._tallies:
                index = slot.index()
                staged = slot.book.history[0, index].double().nan_to_num(nan=0.0, posinf=math.inf)
                inverse = torch.where(staged > 0, slot.book.scale[index].double().reciprocal(), 0.0)
                if none is None:
                    none = staged.new_zeros(len(_SUMS))
                self._tallies[path, role] = Tally(torch.stack([staged, inverse]), none)

    def end_step(self, layers: Mapping[str, Watched]) -> None:
        """Combine what all ranks have seen. Collective on a step that is due.

        Args:
            layers: Every layer of this rank that may cast anything, at any step.

        Raises:
            PrecisionError: A layer that is not among the paths has.
        """
        if not self.due:
            return
        if not self._layout:
            self._layout = self._agree(layers)
        place = {key: index for index, key in enumerate(self._layout)}
        strangers = [key[0] for key in self._tallies if key not in place]
        if strangers:
            raise PrecisionError(
                complaint(
                    "FP8 statistics",
                    strangers[0],
                    "The layer was built after the first step that was measured",
                    "Build the whole model first",
                )
            )
        uncast = [p for p in layers if layers[p].active and p not in self._seen]
        highest, sums = self._packed(place)
        all_reduce_(highest, self._axis, "max", CONTROL)
        all_reduce_(sums, self._axis, "sum", CONTROL)
        numbers = zip(self._layout, highest.tolist(), sums.tolist(), strict=True)
        own = [(key, most, total) for key, most, total in numbers if any(total) or any(most)]
        self._numbers, self._latest, self.uncast = [], {}, ()
        for stage, (part, silent) in enumerate(gather_objects((own, uncast), self._pipeline)):
            for (path, role), most, total in part:
                self._latest.setdefault(path, {})[role] = role_stats(most, total)
                self._stages[path] = stage
            self._stages.update(dict.fromkeys(silent, stage))
            self._numbers += part
            self.uncast += tuple(silent)
        self.latest_iteration = self.iteration
        self._tallies.clear()

    def latest(self, path: str) -> Mapping[Role, RoleStats]:
        """What is known of a layer: a role has figures if it was cast in the newest due step."""
        return self._latest.get(path, {})

    @property
    def figures(self) -> Mapping[str, Mapping[Role, RoleStats]]:
        """The figures of every layer of the model, by path."""
        return self._latest

    def stage(self, path: str) -> int:
        """Index along the pipeline axis of the ranks that hold a layer with figures, or uncast."""
        return self._stages[path]

    def grouped(self, name: Callable[[str], str]) -> dict[str, dict[Role, RoleStats]]:
        """The figures of layers taken together.

        Args:
            name: From a layer's path, what it is counted as.
        """
        merged: dict[tuple[str, Role], tuple[list[float], list[float]]] = {}
        for (path, role), most, total in self._numbers:
            key = (name(path), role)
            before = merged.get(key)
            if before is None:
                merged[key] = (most, total)
            else:
                merged[key] = (
                    [max(pair) for pair in zip(before[0], most, strict=True)],
                    [a + b for a, b in zip(before[1], total, strict=True)],
                )
        out: dict[str, dict[Role, RoleStats]] = {}
        for (group, role), (most, total) in merged.items():
            out.setdefault(group, {})[role] = role_stats(most, total)
        return out

    def _agree(self, paths: Iterable[str]) -> list[_Key]:
        """The same order on all ranks; experts are not the same layers everywhere."""
        union: dict[str, None] = {}
        for part in gather_objects(list(paths), self._axis):
            union.update(dict.fromkeys(part))
        return [(path, role) for path in union for role in Role]

    def _packed(self, place: Mapping[_Key, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Every tally of this rank, one a row, zeros for what it has not seen."""
        size, device = len(place), self._device
        highest = torch.zeros(size, 2, dtype=torch.float64, device=device)
        sums = torch.zeros(size, len(_SUMS), dtype=torch.float64, device=device)
        if self._tallies:
            index = torch.tensor([place[key] for key in self._tallies], device=device)
            highest[index] = torch.stack([t.highest for t in self._tallies.values()])
            sums[index] = torch.stack([t.sums for t in self._tallies.values()])
        return highest, sums
