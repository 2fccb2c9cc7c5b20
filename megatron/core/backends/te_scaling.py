"""Delayed scaling of Transformer Engine's layers, kept in the project's own book.

Left alone, Transformer Engine updates histories whenever its outermost autocast ends, once per
microbatch, and reduces the maxima of every layer each time. The project updates once per optimizer
step, so that gradient accumulation does not change the arithmetic and a recomputed forward
quantizes with the scales of the first one. Two measures bring that about:

* A layer enters FP8 inside an autocast that is itself switched off (`fp8_region`): Transformer
  Engine updates only if the outermost context was enabled.
* The quantizers get views of the `AmaxBook`'s columns (`BookBinding`). They record maxima there and
  read scales there, so one synchronisation, one checkpoint entry and one set of statistics serve
  both backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.backends.te_calls import Library, autocast, grouped_columns
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.amax import BACKWARD_COLUMNS, FORWARD_COLUMNS, GroupView, Slots
from megatron.core.fp8.attention import AttentionTensor

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"


@contextmanager
def fp8_region(library: Library, recipe: Any, group: ProcessGroup | None) -> Iterator[None]:
    """Run Transformer Engine's modules in FP8 without letting it move any scale.

    Args:
        library: Transformer Engine.
        recipe: Its recipe object.
        group: Ranks that agree on delayed-scaling maxima; None if this process is alone.
    """
    with (
        autocast(library, enabled=False, recipe=recipe, group=group),
        autocast(library, enabled=True, recipe=recipe, group=group),
    ):
        # Reading the mark clears it. The module that finds it set would update the gradients'
        # scales in its backward pass.
        library.manager.is_first_fp8_module()
        yield


def check_quantizers(path: str, quantizers: list[Any], direction: str, columns: int) -> None:
    """Refuse a module whose quantizers do not fit its columns.

    Args:
        path: The layer.
        quantizers: The module's quantizers of one direction.
        direction: `forward` or `backward`.
        columns: Number of its columns in the book.

    Raises:
        PrecisionError: There are more or fewer.
    """
    if len(quantizers) != columns:
        raise PrecisionError(
            complaint(
                f"FP8 state of {path}",
                f"{len(quantizers)} {direction} quantizers",
                f"The book has {columns} columns for them",
                "Use a Transformer Engine release whose calls are checked",
            )
        )


class BookBinding:
    """Makes one module's quantizers work on the columns of a layer in the book.

    Args:
        slots: The layer's columns.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._bound: tuple[int, ...] = ()
        self._mirrored = -1

    def refresh(self, module: Any, recording: bool) -> None:
        """Bind the quantizers again if anything moved since the last forward.

        Args:
            module: A module whose FP8 state exists.
            recording: Whether forward casts record maxima. If not, they record into a tensor that
                nobody reads; those of the backward pass always count.
        """
        book = self.slots.book
        forward, backward = module.quantizers[FORWARD], module.quantizers[BACKWARD]
        key = (
            id(book.history),
            id(book.scale_in_use),
            id(forward),
            id(backward),
            int(recording),
        )
        if key != self._bound:
            self._bind(forward, "forward", recording)
            self._bind(backward, "backward", True)
            self._bound = key
        if book.generation != self._mirrored:
            self._mirror(module)
            self._mirrored = book.generation

    def _bind(self, quantizers: list[Any], direction: str, recording: bool) -> None:
        book = self.slots.book
        columns = book.columns(self.slots.path, direction)
        scale, staged = book.scale_in_use[columns], book.history[0, columns]
        check_quantizers(self.slots.path, quantizers, direction, scale.shape[0])
        if not recording:
            staged = torch.zeros_like(staged)
        for index, quantizer in enumerate(quantizers):
            quantizer.scale = scale[index].view(quantizer.scale.shape)
            quantizer.amax = staged[index].view(quantizer.amax.shape)

    def _mirror(self, module: Any) -> None:
        """Show the book's numbers where monitoring code looks for them, in `fp8_meta`."""
        views = {FORWARD: self.slots.forward, BACKWARD: self.slots.backward}
        with torch.no_grad():
            for direction, view in views.items():
                state = module.fp8_meta[direction]
                state.scale.copy_(view.scale)
                state.amax_history.copy_(view.amax_history)


class AttentionBinding:
    """Makes the quantizers of one attention module work on the columns of a layer in the book.

    Maxima go to a place of their own first: a fused kernel may overwrite a maximum where a cast
    keeps the larger one, and a step has several microbatches.

    Args:
        slots: The layer's columns.
        tensors: Those of them that the book has scales for.
    """

    def __init__(self, slots: Slots, tensors: Iterable[AttentionTensor]) -> None:
        self.slots = slots
        places = [tensor.value for tensor in tensors]
        self._places = {
            key: [column for direction, column in places if direction == key]
            for key in ("forward", "backward")
        }
        self._found: dict[str, torch.Tensor] = {}
        self._mirrored = -1

    def begin(self, module: Any) -> None:
        """Hand out scales before a forward pass, and places for maxima."""
        book = self.slots.book
        for direction, key in (("forward", FORWARD), ("backward", BACKWARD)):
            columns = book.columns(self.slots.path, direction)
            scale = book.scale_in_use[columns]
            check_quantizers(self.slots.path, module.quantizers[key], direction, scale.shape[0])
            if direction == "forward" or direction not in self._found:
                self._found[direction] = torch.zeros_like(scale)
            for column in self._places[direction]:
                quantizer = module.quantizers[key][column]
                quantizer.scale = scale[column].view(quantizer.scale.shape)
                quantizer.amax = self._found[direction][column].view(quantizer.amax.shape)
        if book.generation != self._mirrored:
            self._mirror(module)
            self._mirrored = book.generation

    def record(self, direction: str) -> None:
        """Take the maxima of a pass that has ended over into the book."""
        book = self.slots.book
        row = book.history[0, book.columns(self.slots.path, direction)]
        torch.maximum(row, self._found[direction], out=row)
        self._found[direction].zero_()

    def _mirror(self, module: Any) -> None:
        """Show the book's numbers in `fp8_meta`; with current scaling it has the last columns."""
        with torch.no_grad():
            for key, view in ((FORWARD, self.slots.forward), (BACKWARD, self.slots.backward)):
                state = module.fp8_meta[key]
                count = state.scale.numel()
                state.scale.copy_(view.scale[-count:])
                state.amax_history.copy_(view.amax_history[:, -count:])


class GroupBinding:
    """Makes the quantizers of a grouped module work on its experts' columns in the book.

    Maxima of weights go to a place of their own first: Transformer Engine quantizes the weight of
    every expert, and an expert without tokens is to record nothing.

    Args:
        slots: The experts' columns, next to each other.
    """

    def __init__(self, slots: tuple[Slots, ...]) -> None:
        self.slots, self.book = slots, slots[0].book
        self.forward, self.backward = GroupView(slots, "forward"), GroupView(slots, "backward")
        self._weights = torch.zeros(len(slots), device=self.book.device)
        self._bound: tuple[int, ...] = ()
        self._mirrored = -1

    def refresh(self, module: Any, recording: bool) -> None:
        """Bind the quantizers again if anything moved since the last forward.

        Args:
            module: A module whose FP8 state exists.
            recording: Whether forward casts record maxima; see `BookBinding.refresh`.
        """
        forward, backward = module.quantizers[FORWARD], module.quantizers[BACKWARD]
        key = (
            id(self.book.history),
            id(self.book.scale_in_use),
            id(forward),
            id(backward),
            int(recording),
        )
        if key != self._bound:
            self._bind(module, forward, self.forward, FORWARD_COLUMNS, recording)
            self._bind(module, backward, self.backward, BACKWARD_COLUMNS, True)
            self._bound = key
        if self.book.generation != self._mirrored:
            self._mirror(module)
            self._mirrored = self.book.generation

    def _bind(
        self,
        module: Any,
        quantizers: list[Any],
        view: GroupView,
        roles: tuple[str, ...],
        recording: bool,
    ) -> None:
        columns = view.columns
        scale, staged = self.book.scale_in_use[columns], self.book.history[0, columns]
        check_quantizers(self.slots[0].path, quantizers, view.direction, scale.shape[0])
        if not recording:
            staged = torch.zeros_like(staged)
        for offset, role in enumerate(roles):
            for i, place in enumerate(grouped_columns(module, role)):
                quantizer, column = quantizers[place], len(roles) * i + offset
                amax = self._weights[i] if role == "weight" else staged[column]
                quantizer.scale = scale[column].view(quantizer.scale.shape)
                quantizer.amax = amax.view(quantizer.amax.shape)

    def forget_weights(self) -> None:
        """Forget the weights' maxima: they are quantized anew."""
        self._weights.zero_()

    def record_weights(self, used: list[bool]) -> None:
        """Record the weights' maxima of the experts that had tokens."""
        offset, width = FORWARD_COLUMNS.index("weight"), len(FORWARD_COLUMNS)
        row = self.book.history[0, self.forward.columns][offset::width]
        counted = torch.tensor(used, device=row.device)
        torch.maximum(row, self._weights.where(counted, 0.0), out=row)

    def _mirror(self, module: Any) -> None:
        """Show the book's numbers where monitoring code looks for them, in `fp8_meta`."""
        with torch.no_grad():
            for direction, view, roles in (
                (FORWARD, self.forward, FORWARD_COLUMNS),
                (BACKWARD, self.backward, BACKWARD_COLUMNS),
            ):
                state, count = module.fp8_meta[direction], len(self.slots)
                places = [grouped_columns(module, role) for role in roles]
                order = [places[j][i] for i in range(count) for j in range(len(roles))]
                state.scale[order] = view.scale
                state.amax_history[:, order] = view.amax_history
