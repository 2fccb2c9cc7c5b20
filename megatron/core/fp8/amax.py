"""`AmaxBook`: every delayed-scaling history and scale of a model in one buffer.

Layout. `history` is `[L, N]`, `scale` is `[N]`: first the forward columns of every layer (input,
weight, output), then the backward columns (output gradient, input gradient), each layer's columns
next to each other. Row 0 of a history stages the running step's magnitudes; after an update row 0
is zero, row 1 the oldest and row L-1 the newest magnitude.

A synchronisation is one MAX all-reduce of row 0 and one vectorised update, for all layers at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.core.comm_log import AMAX
from megatron.core.errors import CheckpointError, PrecisionError, complaint
from megatron.core.fp8.recipe import DelayedScaling, Role
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce

FORWARD_COLUMNS = ("input", "weight", "output")
BACKWARD_COLUMNS = ("grad_output", "grad_input")
_SAVED = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True)
class ScalingView:
    """Live view of one layer's scaling state in one direction.

    Attributes:
        book: The book that owns the numbers.
        path: The layer.
        direction: `forward` or `backward`.
    """

    book: AmaxBook
    path: str
    direction: str

    @property
    def amax_history(self) -> torch.Tensor:
        """fp32 `[L, columns]`; row 0 is the staging row, the last row the newest."""
        return self.book.history[:, self.book.columns(self.path, self.direction)]

    @property
    def scale(self) -> torch.Tensor:
        """fp32 `[columns]`: multiplies when a tensor is quantized."""
        return self.book.scale[self.book.columns(self.path, self.direction)]

    @property
    def scale_inv(self) -> torch.Tensor:
        """fp32 `[columns]`: multiplies when a tensor is read back. A copy."""
        return self.scale.reciprocal()


@dataclass(frozen=True)
class Slot:
    """One tensor's column."""

    book: AmaxBook
    path: str
    direction: str
    column: int

    def index(self) -> int:
        """Position in the book's buffers."""
        start: int = self.book.columns(self.path, self.direction).start
        return start + self.column

    @property
    def scale(self) -> torch.Tensor:
        """The scale in use, fp32, one element; live."""
        return self.book.scale_in_use[self.index()]

    def record(self, amax: torch.Tensor) -> None:
        """Stage a magnitude (fp32, one element): the row keeps the largest."""
        row = self.book.history[0, self.index()]
        torch.maximum(row, amax, out=row)


@dataclass(frozen=True)
class Slots:
    """The columns of one layer."""

    book: AmaxBook
    path: str

    def of(self, role: Role, gemm: int = 0) -> Slot:
        """The column of one tensor role."""
        if role is Role.GRAD_OUTPUT:
            return Slot(self.book, self.path, "backward", len(BACKWARD_COLUMNS) * gemm)
        offset = 0 if role is Role.INPUT else 1
        return Slot(self.book, self.path, "forward", len(FORWARD_COLUMNS) * gemm + offset)

    @property
    def forward(self) -> ScalingView:
        """View under the name `scaling_fwd`."""
        return ScalingView(self.book, self.path, "forward")

    @property
    def backward(self) -> ScalingView:
        """View under the name `scaling_bwd`."""
        return ScalingView(self.book, self.path, "backward")


@dataclass(frozen=True)
class GroupView:
    """Live view of the scaling state of several layers in one direction, next to each other.

    Attributes:
        slots: The layers, in the order of their columns.
        direction: `forward` or `backward`.
    """

    slots: tuple[Slots, ...]
    direction: str

    @property
    def columns(self) -> slice:
        """Where the columns are in the book."""
        book = self.slots[0].book
        first = book.columns(self.slots[0].path, self.direction)
        last = book.columns(self.slots[-1].path, self.direction)
        return slice(first.start, last.stop)

    @property
    def amax_history(self) -> torch.Tensor:
        """fp32 `[L, columns]`; row 0 is the staging row, the last row the newest."""
        return self.slots[0].book.history[:, self.columns]

    @property
    def scale(self) -> torch.Tensor:
        """fp32 `[columns]`: multiplies when a tensor is quantized."""
        return self.slots[0].book.scale[self.columns]

    @property
    def scale_inv(self) -> torch.Tensor:
        """fp32 `[columns]`: multiplies when a tensor is read back. A copy."""
        return self.scale.reciprocal()


@dataclass(frozen=True)
class Snapshot:
    """Scales at one moment.

    Attributes:
        generation: The book's generation then.
        scale: fp32 `[N]`, a copy.
    """

    generation: int
    scale: torch.Tensor


@dataclass
class _Entry:
    """Column numbers of one layer, counted within each direction."""

    forward: slice
    backward: slice
    limits: tuple[float, float]  # largest values of the formats of each direction
    names: Mapping[tuple[str, int], str] = field(default_factory=dict)


class AmaxBook:
    """All delayed-scaling state of one process.

    Args:
        recipe: Formats, history length and update rule.
        device: Where the buffers live.
    """

    def __init__(self, recipe: DelayedScaling, device: torch.device | str = "cpu") -> None:
        self.recipe = recipe
        self.device = torch.device(device)
        #: Counts updates of forward scales: what was cast with them is stale when it changed.
        self.generation = 0
        self._replayed: Snapshot | None = None
        self._snapshot: Snapshot | None = None
        self._entries: dict[str, _Entry] = {}
        self._free: dict[tuple[int, ...], list[_Entry]] = {}
        self._counts = {"forward": 0, "backward": 0}
        self._built = (0, 0)
        self._allocate(recipe.amax_history_len, (0, 0))

    # -- layout ---------------------------------------------------------------------------------

    def register(
        self,
        path: str,
        fwd_columns: int = len(FORWARD_COLUMNS),
        bwd_columns: int = len(BACKWARD_COLUMNS),
        recipe: DelayedScaling | None = None,
        names: Mapping[tuple[str, int], str] | None = None,
    ) -> Slots:
        """Give a layer its columns.

        Register every layer before taking views: a later registration moves the buffers.

        Args:
            path: The layer.
            fwd_columns: Tensors of its forward pass.
            bwd_columns: Tensors of its backward pass.
            recipe: Its recipe, which may have other formats than the book's.
            names: Of columns, by direction and number, where they are not those of products.

        Raises:
            PrecisionError: If the path is taken.
        """
        if path in self._entries:
            raise PrecisionError(
                complaint(
                    "FP8 layer",
                    repr(path),
                    "This path already has scales and two layers may not share them",
                    "Build each layer with its own path",
                )
            )
        limits = self._limits_of(recipe or self.recipe)
        free = self._free.get((fwd_columns, bwd_columns))
        if free:
            self._entries[path] = replace(free.pop(), limits=limits, names=names or {})
            self._grow()
            self._write_limits(self._entries[path], self._fp8_max)
            self.reset(path)
            return Slots(self, path)
        first_fwd, first_bwd = self._counts["forward"], self._counts["backward"]
        self._entries[path] = _Entry(
            slice(first_fwd, first_fwd + fwd_columns),
            slice(first_bwd, first_bwd + bwd_columns),
            limits,
            names or {},
        )
        self._counts["forward"] += fwd_columns
        self._counts["backward"] += bwd_columns
        return Slots(self, path)

    def release(self, path: str) -> None:
        """Take a layer out; its columns serve the next layer of the same kind."""
        entry = self._entries.pop(path)
        widths = tuple(span.stop - span.start for span in (entry.forward, entry.backward))
        self._free.setdefault(widths, []).append(entry)

    def reset(self, path: str) -> None:
        """Give a layer the state of one that never ran."""
        for direction in ("forward", "backward"):
            columns = self.columns(path, direction)
            self.history[:, columns] = 0.0
            self.scale[columns] = 1.0

    def paths(self) -> list[str]:
        """Layers in the order of their columns."""
        return list(self._entries)

    def columns(self, path: str, direction: str) -> slice:
        """Where a layer's columns of one direction are in the buffers."""
        entry = self._entries[path]
        if direction == "forward":
            return entry.forward
        start = self._counts["forward"]
        return slice(start + entry.backward.start, start + entry.backward.stop)

    @property
    def history(self) -> torch.Tensor:
        """fp32 `[L, N]`."""
        self._grow()
        return self._history

    @property
    def scale(self) -> torch.Tensor:
        """fp32 `[N]`."""
        self._grow()
        return self._scale

    @property
    def scale_in_use(self) -> torch.Tensor:
        """The scales that casts take: the current ones, or those being replayed."""
        if self._replayed is not None and self._replayed.generation != self.generation:
            return self._replayed.scale
        return self.scale

    @property
    def generation_in_use(self) -> int:
        """The generation that `scale_in_use` belongs to."""
        return self.generation if self._replayed is None else self._replayed.generation

    def snapshot(self) -> Snapshot:
        """The scales of now, for a later replay."""
        if self._snapshot is None or self._snapshot.generation != self.generation:
            self._snapshot = Snapshot(self.generation, self.scale.clone())
        return self._snapshot

    @contextmanager
    def replay(self, snapshot: Snapshot) -> Iterator[None]:
        """Cast with earlier scales inside the block."""
        before, self._replayed = self._replayed, snapshot
        try:
            yield
        finally:
            self._replayed = before

    def _allocate(self, length: int, counts: tuple[int, int]) -> None:
        total = sum(counts)
        self._history = torch.zeros(length, total, dtype=torch.float32, device=self.device)
        self._scale = torch.ones(total, dtype=torch.float32, device=self.device)
        limits = torch.ones(total)
        for entry in self._entries.values():
            self._write_limits(entry, limits)
        self._fp8_max = limits.to(self.device)
        self._built = counts

    @staticmethod
    def _limits_of(recipe: DelayedScaling) -> tuple[float, float]:
        return recipe.format_of(Role.INPUT).max, recipe.format_of(Role.GRAD_OUTPUT).max

    def _write_limits(self, entry: _Entry, limits: torch.Tensor) -> None:
        start = self._counts["forward"]
        limits[entry.forward] = entry.limits[0]
        limits[start + entry.backward.start : start + entry.backward.stop] = entry.limits[1]

    def _grow(self) -> None:
        """Bring the buffers up to the registered number of columns, keeping their contents."""
        counts = (self._counts["forward"], self._counts["backward"])
        if counts == self._built:
            return
        old_history, old_scale, (old_fwd, old_bwd) = self._history, self._scale, self._built
        self._allocate(old_history.shape[0], counts)
        kept = [
            (slice(0, old_fwd), slice(0, old_fwd)),
            (slice(counts[0], counts[0] + old_bwd), slice(old_fwd, old_fwd + old_bwd)),
        ]
        for new, old in kept:
            self._history[:, new] = old_history[:, old]
            self._scale[new] = old_scale[old]

    # -- update ---------------------------------------------------------------------------------

    def sync(self, axis: Axis | None = None, direction: str = "both") -> None:
        """Agree on the staged magnitudes and derive the next scales.

        Collective over `axis`. A NaN magnitude is skipped if any rank has a number; gloo's MAX by
        itself would keep or lose it depending on the rank.

        Args:
            axis: Ranks that share scales.
            direction: `forward`, `backward` or `both` columns.
        """
        history, scale = self.history, self.scale
        if not scale.numel():
            return
        if axis is not None and axis.size > 1 and self.recipe.reduce_amax:
            span = self._span(direction)
            staged = history[0, span]
            encoded = torch.where(torch.isnan(staged), torch.full_like(staged, -1.0), staged)
            reduced = all_reduce(encoded.contiguous(), axis, op="max", part=AMAX)
            history[0, span] = torch.where(
                reduced < 0, torch.full_like(reduced, float("nan")), reduced
            )
        span = self._span(direction)
        self._update(history[:, span], scale[span], self._fp8_max[span])
        if direction != "backward":
            self.generation += 1

    def _span(self, direction: str) -> slice:
        forward = self._counts["forward"]
        spans = {
            "forward": slice(0, forward),
            "backward": slice(forward, None),
            "both": slice(0, None),
        }
        return spans[direction]

    def _update(self, history: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor) -> None:
        """New scales and the roll, in place on views of the buffers."""
        recipe = self.recipe
        staged = history[0].clone()
        algorithm = recipe.amax_compute_algo
        if callable(algorithm):
            amax = algorithm(history)
        elif algorithm == "most_recent":
            amax = staged
        else:
            # fmax semantics: a NaN is no candidate.
            amax = history.nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=0)
        fresh = recipe.update_scale(amax, scale, fp8_max)
        rolled = history.roll(-1, 0)
        rolled[0] = 0.0
        if recipe.fused:
            idle = staged == 0
            fresh = torch.where(idle, scale, fresh)
            rolled = torch.where(idle, history, rolled)
        scale.copy_(fresh)
        history.copy_(rolled)

    # -- questions ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """`path.column` of every column, in buffer order; empty for a column without a layer."""
        out = [""] * sum(self._counts.values())
        for path, entry in self._entries.items():
            for direction, known in (
                ("forward", FORWARD_COLUMNS),
                ("backward", BACKWARD_COLUMNS),
            ):
                span = self.columns(path, direction)
                for i, column in enumerate(range(span.start, span.stop)):
                    gemm = i // len(known)
                    suffix = f"[{gemm}]" if span.stop - span.start > len(known) else ""
                    name = f"{known[i % len(known)]}{suffix}"
                    out[column] = f"{path}.{entry.names.get((direction, i), name)}"
        return out

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self, paths: Iterable[str] | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Scales and histories by layer path (default all), as copies on the CPU."""
        history, scale = self.history, self.scale
        if paths is None:  # one transfer from the device instead of one for each layer
            history, scale = history.cpu(), scale.cpu()
        out: dict[str, dict[str, torch.Tensor]] = {}
        for path in self._entries if paths is None else paths:
            out[path] = {}
            for which, direction in _SAVED.items():
                columns = self.columns(path, direction)
                out[path][f"scale_{which}"] = scale[columns].cpu().clone()
                out[path][f"amax_history_{which}"] = history[:, columns].cpu().clone()
        return out

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], *, required: Iterable[str] | None = None
    ) -> list[str]:
        """Take over scales and histories.

        A history of another length is adjusted: a longer book pads zero rows at the end, a shorter
        one keeps the staging row and the newest rows.

        Args:
            state: What `state_dict` returned, perhaps with more layers than this process has.
            required: Layers that must be present; default all registered ones.

        Returns:
            Messages for the log.

        Raises:
            CheckpointError: If a required layer is missing or has another number of columns.
        """
        wanted = list(self._entries if required is None else required)
        refuse_missing(wanted, state)
        # On the CPU, and to the device in one transfer; a CPU's buffers are written in place.
        history, scale = self.history.cpu(), self.scale.cpu()
        lengths = set()
        for path in wanted:
            for which, direction in _SAVED.items():
                columns, saved = self.columns(path, direction), state[path][f"amax_history_{which}"]
                width = columns.stop - columns.start
                if saved.shape[1] != width:
                    raise CheckpointError(
                        complaint(
                            f"FP8 state of {path}",
                            f"{saved.shape[1]} columns",
                            f"The layer has {width}",
                            "Load a checkpoint of this model",
                        )
                    )
                lengths.add(saved.shape[0])
                history[:, columns] = fit_history(saved.cpu(), history.shape[0])
                scale[columns] = state[path][f"scale_{which}"].cpu()
        self.history.copy_(history)
        self.scale.copy_(scale)
        self.generation += 1
        now = self.history.shape[0]
        return [
            f"FP8 state: saved with an amax history of {length}, running {now}; scales are kept,"
            f" {'the newest rows are kept' if length > now else 'zero rows are added'}."
            for length in sorted(lengths - {now})
        ]

    def rescale(self, path: str, forward_max: float, backward_max: float) -> None:
        """Convert a layer's scales that were made for formats with other largest values."""
        limits = self._entries[path].limits
        for direction, old, new in (
            ("forward", forward_max, limits[0]),
            ("backward", backward_max, limits[1]),
        ):
            if old != new:
                self.scale[self.columns(path, direction)] *= new / old


def refuse_missing(wanted: Iterable[str], saved: Collection[str]) -> None:
    """Require scales for every layer.

    Args:
        wanted: Layers of the model.
        saved: Layers of the checkpoint.

    Raises:
        CheckpointError: If layers are missing, all listed.
    """
    missing = [path for path in wanted if path not in saved]
    if missing:
        raise CheckpointError(
            complaint(
                "FP8 state",
                f"{len(saved)} layers, without {', '.join(sorted(missing, key=_natural))}",
                "Every FP8 layer of the model needs its scales",
                "Load a checkpoint of this model, or start with fresh FP8 state",
            )
        )


def fit_history(history: torch.Tensor, length: int) -> torch.Tensor:
    """A history of another length: the staging row, the newest rows, zero rows at the end.

    Args:
        history: `[L, N]`.
        length: The wanted number of rows.

    Returns:
        `[length, N]`.
    """
    have = history.shape[0]
    if have == length:
        return history
    if have > length:
        newest = history[have - (length - 1) :] if length > 1 else history[:0]
        return torch.cat([history[:1], newest])
    padding = history.new_zeros(length - have, history.shape[1])
    return torch.cat([history, padding])


def _natural(path: str) -> list[Any]:
    """Sort key that puts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]
