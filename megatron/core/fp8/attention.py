"""`AttentionPrecision`: how the products inside one layer's attention compute.

Six tensors are quantized, each with one scale: Q, K and V together (`qkv`), the softmax output
(`s`), the result (`o`), and in the backward pass the result's gradient (`do`), that of the scores
(`dp`) and those of Q, K and V together (`dqkv`). Softmax and sums are fp32.

With delayed scaling all six have columns in the book. With current scaling `qkv` and `do` are
scaled by their own magnitude; `s` and `dp`, which never exist as a whole, take the scale that the
step before left; `o` and `dqkv` stay in high precision.

Source: the tensors, their columns and the rules follow NVIDIA Transformer Engine's fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from megatron.config.fp8_attention import ATTENTION_RECIPES, why_no_attention
from megatron.core.comm_log import AMAX
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8 import kernels
from megatron.core.fp8.amax import AmaxBook, Slot, Slots
from megatron.core.fp8.formats import Fp8Format
from megatron.core.fp8.gemm import kernel_name
from megatron.core.fp8.policy import Decision
from megatron.core.fp8.precision import LayerPrecision, PrecisionRow, dtype_name
from megatron.core.fp8.recipe import DelayedScaling, Float8CurrentScaling, Recipe, Role
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import all_reduce

if TYPE_CHECKING:
    from megatron.core.fp8.state import Fp8State

#: Columns of an attention layer in a book: those of three products.
FORWARD_WIDTH, BACKWARD_WIDTH = 9, 6
NOT_ASKED_FOR = "attention runs in FP8 with --fp8-dot-product-attention only"


class AttentionTensor(Enum):
    """A tensor that FP8 attention quantizes: direction and column of its scale."""

    QKV = ("forward", 2)
    OUTPUT = ("forward", 3)
    SOFTMAX = ("forward", 8)
    GRAD_QKV = ("backward", 0)
    GRAD_OUTPUT = ("backward", 3)
    GRAD_SCORES = ("backward", 5)

    @property
    def role(self) -> Role:
        """The role that decides the format."""
        return Role.INPUT if self.value[0] == "forward" else Role.GRAD_OUTPUT


COLUMN_NAMES = {
    AttentionTensor.QKV: "qkv",
    AttentionTensor.OUTPUT: "o",
    AttentionTensor.SOFTMAX: "s",
    AttentionTensor.GRAD_QKV: "dqkv",
    AttentionTensor.GRAD_OUTPUT: "do",
    AttentionTensor.GRAD_SCORES: "dp",
}
# Made piece by piece, so that a scale has to be known before.
_IN_PIECES = (AttentionTensor.SOFTMAX, AttentionTensor.GRAD_SCORES)
_BY_THEMSELVES = (AttentionTensor.QKV, AttentionTensor.GRAD_OUTPUT)

_PRODUCTS = {
    "qk": (AttentionTensor.QKV, AttentionTensor.QKV),
    "pv": (AttentionTensor.SOFTMAX, AttentionTensor.QKV),
    "backward": (AttentionTensor.GRAD_OUTPUT, AttentionTensor.QKV),
}


@dataclass(frozen=True)
class AttentionChoice:
    """What a run asks for.

    Attributes:
        enabled: Whether attention runs in FP8 where the layer's recipe does.
        backward: Whether its backward products do, too.
    """

    enabled: bool = False
    backward: bool = True


def delayed_part(recipe: Recipe) -> DelayedScaling:
    """The delayed scaling of `s` and `dp` under a recipe: itself, or one of the newest magnitude.

    Args:
        recipe: Delayed or current scaling.
    """
    if isinstance(recipe, DelayedScaling):
        return recipe
    return DelayedScaling(
        fp8_format=recipe.fp8_format, amax_history_len=1, amax_compute_algo="most_recent"
    )


def register_attention(book: AmaxBook, path: str, recipe: DelayedScaling) -> Slots:
    """Give an attention layer its columns, with limits of the recipe's formats."""
    names = {tensor.value: name for tensor, name in COLUMN_NAMES.items()}
    return book.register(path, FORWARD_WIDTH, BACKWARD_WIDTH, recipe=recipe, names=names)


class Pieces:
    """Casts the pieces of one tensor with one scale.

    Attributes:
        scale: fp32, one element, a copy.
        amax: Largest magnitude of the pieces so far; None before the first.
    """

    def __init__(self, scale: torch.Tensor, fmt: Fp8Format) -> None:
        self.scale, self.fmt = scale, fmt
        self.amax: torch.Tensor | None = None
        self._inverse = scale.reciprocal()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` quantized and read back, in fp32."""
        rounded, amax = kernels.round_to_grid(x, self.scale, self.fmt, want_amax=True)
        if amax is not None:
            self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        return rounded.float().mul_(self._inverse)


class AttentionPrecision(LayerPrecision):
    """Precision of one layer's attention: no recipe where it stays in high precision.

    Attributes:
        choice: What the run asks for.
    """

    _GEMMS = 3

    def __init__(
        self,
        path: str,
        decision: Decision,
        state: Fp8State,
        choice: AttentionChoice,
        slots: Slots | None = None,
    ) -> None:
        super().__init__(path, decision, state, slots)
        self.choice = choice

    # -- what runs ------------------------------------------------------------------------------

    def quantizes(self, tensor: AttentionTensor) -> bool:
        """Whether the recipe quantizes a tensor."""
        always = (*_IN_PIECES, *_BY_THEMSELVES)
        return isinstance(self._recipe, DelayedScaling) or tensor in always

    def is_delayed(self, tensor: AttentionTensor) -> bool:
        """Whether a tensor's scale comes from the book."""
        return isinstance(self._recipe, DelayedScaling) or tensor in _IN_PIECES

    @property
    def _recipe(self) -> Recipe:
        if self.decision.recipe is None:
            raise TypeError(f"{self.path}: attention in high precision has no scales.")
        return self.decision.recipe

    def _slot(self, tensor: AttentionTensor) -> Slot:
        if self.slots is None:
            raise TypeError(f"{self.path}: attention in high precision has no scales.")
        return Slot(self.slots.book, self.path, *tensor.value)

    def together(
        self, tensor: AttentionTensor, parts: Sequence[torch.Tensor], axis: Axis | None = None
    ) -> list[QuantizedTensor]:
        """Quantize tensors with one scale for all of them.

        Args:
            tensor: What they are.
            parts: Any shapes, any float type.
            axis: Ranks that hold the rest of them; with current scaling they agree on the scale.
        """
        recipe, fmt = self._recipe, self._recipe.format_of(tensor.role)
        if isinstance(recipe, Float8CurrentScaling):
            amax = torch.stack([kernels.amax(x) for x in parts]).amax()
            if axis is not None and axis.size > 1:
                amax = all_reduce(amax.view(1), axis, op="max", part=AMAX).view(())
            scale = recipe.scale(amax, fmt.max)
            made = [self._cast(x, scale, fmt)[0] for x in parts]
            self._note(tensor, parts, made)
            return made
        slot = self._slot(tensor)
        made = []
        for x in parts:
            quantized, largest = self._cast(x, slot.scale, fmt, want_amax=True)
            made.append(quantized)
            self._record(slot, largest)
        self._note(tensor, parts, made)
        return made

    def _note(
        self,
        tensor: AttentionTensor,
        parts: Sequence[torch.Tensor],
        made: Sequence[QuantizedTensor],
    ) -> None:
        if self.state.stats is not None and self.state.recording:
            for x, quantized in zip(parts, made, strict=True):
                path = f"{self.path}.{COLUMN_NAMES[tensor]}"
                self.state.stats.note(path, tensor.role, x, quantized)

    def _cast(
        self, x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format, *, want_amax: bool = False
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """As `Quantizer.cast`; the result owns its inverse scale."""
        if self.state.hardware:
            data, _, amax = kernels.cast_once(x, scale, fmt, want_amax=want_amax)
        else:
            data, amax = kernels.round_to_grid(x, scale, fmt, want_amax=want_amax)
        return QuantizedTensor(data, scale.reciprocal(), fmt), amax

    def pieces(self, tensor: AttentionTensor) -> Pieces:
        """A cast for the pieces of `s` or `dp`, with the scale that is in use now."""
        fmt = self._recipe.format_of(tensor.role)
        return Pieces(self._slot(tensor).scale.clone(), fmt)

    def again(self, scale: torch.Tensor, tensor: AttentionTensor) -> Pieces:
        """The cast that `pieces` gave earlier."""
        return Pieces(scale, self._recipe.format_of(tensor.role))

    def record(self, tensor: AttentionTensor, pieces: Pieces) -> None:
        """Note the magnitude of all pieces."""
        self._record(self._slot(tensor), pieces.amax)

    def _record(self, slot: Slot, amax: torch.Tensor | None) -> None:
        if amax is not None and self.state.recording:
            slot.record(amax)

    # -- the table ------------------------------------------------------------------------------

    def rows(self) -> list[PrecisionRow]:
        """The lines of this layer's attention in the precision table."""
        if self.decision.recipe is None:
            plain = dtype_name(self.state.params_dtype)
            row = PrecisionRow(
                self.path, "all", plain, plain, "softmax attention", self.decision.reason
            )
            return [row]
        return [self.row(product) for product in _PRODUCTS]

    def row(self, product: str) -> PrecisionRow:
        """The line of one product: `qk`, `pv`, or `backward` for the four of the backward pass."""
        recipe, plain = self._recipe, dtype_name(self.state.params_dtype)
        if product == "backward" and not self.choice.backward:
            return PrecisionRow(
                self.path, product, plain, plain, "softmax attention", "--no-fp8-dpa-bwd"
            )
        first, second = (recipe.format_of(tensor.role) for tensor in _PRODUCTS[product])
        name = f"fp8 {first.name}x{second.name} {recipe.name}"
        if not self.active:
            planned = self.held_back or self.state.waits(self.decision.rule)
            reason = planned or "FP8 is switched off at this step"
            return PrecisionRow(
                self.path, product, name, plain, "softmax attention", reason, bool(planned)
            )
        kernel = kernel_name(first, second, emulation="exact", device=self.state.device)
        reasons = [self.decision.rule] if self.decision.rule else []
        if self.state.hardware:
            reasons.append("torch has no attention in FP8")
        return PrecisionRow(self.path, product, name, name, kernel, "; ".join(reasons))


def decide_attention(decision: Decision, choice: AttentionChoice) -> Decision:
    """What a layer's attention runs in.

    Args:
        decision: The policy's answer for it.
        choice: What the run asks for.

    Raises:
        PrecisionError: The recipe has no FP8 attention.
    """
    recipe = decision.recipe
    if recipe is None:
        return decision
    if not choice.enabled:
        return Decision(None, False, NOT_ASKED_FOR)
    why = why_no_attention(recipe.name)
    if why:
        raise PrecisionError(
            complaint(
                "--fp8-dot-product-attention",
                recipe.name,
                why,
                f"Use the recipe {' or '.join(ATTENTION_RECIPES)} for this layer, or leave its"
                " attention in high precision",
            )
        )
    return Decision(recipe, rule=decision.rule)  # rules for single products are for linear layers
