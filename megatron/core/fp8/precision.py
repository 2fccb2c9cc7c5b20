"""`LinearPrecision`: how one linear layer computes, fixed when the layer is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch

from megatron.core.fp8.amax import GroupView, Slots
from megatron.core.fp8.gemm import Operand, kernel_name
from megatron.core.fp8.hardware import GEMMS, OPERANDS
from megatron.core.fp8.nvfp4 import NVFP4BlockScaling, NVFP4Quantizer
from megatron.core.fp8.policy import Decision
from megatron.core.fp8.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    Quantizer,
)
from megatron.core.fp8.recipe import (
    BlockRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Recipe,
    Role,
)
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis

if TYPE_CHECKING:
    from megatron.core.fp8.state import Fp8State

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class PrecisionRow:
    """One line of the precision table.

    Attributes:
        path: The layer.
        gemm: `fprop`, `dgrad` or `wgrad`.
        requested: What the configuration asks for here.
        delivered: What runs.
        kernel: What computes it.
        reason: Why it is not FP8, or why it is not what was requested; may be empty.
        by_policy: Whether the run's own rules hold it in high precision at this step, so that it is
            no fallback.
    """

    path: str
    gemm: str
    requested: str
    delivered: str
    kernel: str
    reason: str = ""
    by_policy: bool = False

    @property
    def is_fallback(self) -> bool:
        """Whether less runs than was asked for."""
        return self.requested != self.delivered and not self.by_policy


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a high-precision type in the table."""
    return _SHORT.get(dtype, "?")


@dataclass
class _CachedWeight:
    """A quantized weight and what it was made from."""

    weight: ReferenceType[torch.Tensor]
    source: tuple[Any, ...]
    scales: tuple[int, int]
    row: QuantizedTensor
    col: QuantizedTensor
    amax: torch.Tensor | None
    recorded: bool


class LayerPrecision:
    """What a module computes in: the policy's answer, and whether it holds now.

    Attributes:
        path: The module's path.
        decision: The policy's answer.
        state: The run's FP8 state.
        slots: The module's columns in a book; None without delayed scaling.
        suspended: Why the module is held in high precision for now; empty if it is not. May be
            changed between steps, alike on all ranks.
        fp8_meta: Scaling state under Transformer Engine's keys: `scaling_fwd` and `scaling_bwd`
            with live `amax_history` and `scale`, present with `slots` only.
    """

    _GEMMS = 1

    def __init__(self, path: str, decision: Decision, state: Fp8State, slots: Slots | None) -> None:
        self.path, self.decision, self.state, self.slots = path, decision, state, slots
        self.suspended = ""
        self.fp8_meta = self._meta()

    def _meta(self) -> dict[str, Any]:
        recipe = self.decision.recipe
        meta: dict[str, Any] = {
            "fp8_checkpoint": recipe is not None,
            "recipe": recipe,
            "num_gemms": self._GEMMS,
            "fp8_group": None,
        }
        if recipe is not None:
            meta["fp8_max_fwd"] = recipe.format_of(Role.INPUT).max
            meta["fp8_max_bwd"] = recipe.format_of(Role.GRAD_OUTPUT).max
        if self.slots is not None:
            meta["scaling_fwd"] = self.slots.forward
            meta["scaling_bwd"] = self.slots.backward
        return meta

    @property
    def active(self) -> bool:
        """Whether a forward started now runs in FP8."""
        return self.decision.recipe is not None and self.state.enabled and not self.held_back

    @property
    def held_back(self) -> str:
        """Why the module is held in high precision for now; empty if it is not."""
        return self.suspended or self.state.held


class LinearPrecision(LayerPrecision):
    """Precision of one linear layer.

    While it is suspended, magnitudes are recorded all the same, see `calibrate`.

    Attributes:
        measured_weight: The weight whose magnitude was recorded last while the layer was held back.
        gradients_differ: Whether tensor-parallel ranks hold different output gradients. If they
            round at random, they then do so with different numbers.
    """

    def __init__(
        self, path: str, decision: Decision, state: Fp8State, slots: Slots | None = None
    ) -> None:
        super().__init__(path, decision, state, slots)
        self.gradients_differ = False
        self.measured_weight: tuple[int, ...] = ()
        self._quantizers: dict[Role, Quantizer] = {}
        if decision.recipe is not None:
            self._quantizers = {role: self._quantizer(decision.recipe, role) for role in Role}
        self._cached: _CachedWeight | None = None

    def _quantizer(self, recipe: Recipe, role: Role) -> Quantizer:
        hardware = self.state.products(recipe).hardware
        if isinstance(recipe, DelayedScaling) and self.slots is not None:
            return DelayedQuantizer(
                recipe.format_of(role),
                role,
                self.slots.of(role),
                lambda: self.state.recording,
                hardware=hardware,
            )
        if isinstance(recipe, Float8CurrentScaling):
            return CurrentQuantizer(recipe, role, hardware=hardware)
        if isinstance(recipe, BlockRecipe):
            fold = self.state.emulation == "fast"
            return BlockQuantizer(recipe, role, fold=fold, hardware=hardware)
        if isinstance(recipe, NVFP4BlockScaling):
            return NVFP4Quantizer(recipe, role)
        raise TypeError(f"No quantizer for {recipe!r}.")

    # -- what runs ------------------------------------------------------------------------------

    @property
    def wants_fp32_norm(self) -> bool:
        """Whether a fused normalisation should hand its fp32 output to `linear`, unrounded.

        With delayed scaling the cast sees the fp32 value; with current scaling it sees the value
        rounded to the parameters' type.
        """
        return self.active and self._quantizers[Role.INPUT].wants_fp32

    def quantizer(self, role: Role) -> Quantizer:
        """The quantizer of one tensor.

        Raises:
            KeyError: If the layer was not built for FP8.
        """
        return self._quantizers[role]

    def rounding_seed(self) -> int:
        """Seed of the random roundings in the backward of a forward that starts now; 0 for none."""
        recipe = self.decision.recipe
        if recipe is None or not (recipe.is_random and self.active):
            return 0
        return self.state.rounding_seed(self.path, self.gradients_differ)

    def rowwise(
        self, role: Role, x: torch.Tensor, *, axis: Axis | None = None, seed: int = 0
    ) -> QuantizedTensor:
        """As `Quantizer.rowwise` of the seeded quantizer; the state's collector takes note."""
        made = self._quantizers[role].seeded(seed).rowwise(x, axis=axis)
        self._note(role, x, made)
        return made

    def both(
        self, role: Role, x: torch.Tensor, *, axis: Axis | None = None, seed: int = 0
    ) -> tuple[QuantizedTensor, Operand]:
        """As `Quantizer.both` of the seeded quantizer; the collector takes note."""
        made, kept = self._quantizers[role].seeded(seed).both(x, axis=axis)
        self._note(role, x, made)
        return made, kept

    def column(self, role: Role, kept: Operand, *, seed: int = 0) -> QuantizedTensor:
        """As `Quantizer.column`; the collector takes note where it is the tensor's only cast."""
        quantizer = self._quantizers[role].seeded(seed)
        made = quantizer.column(kept)
        if isinstance(kept, torch.Tensor) and not self.decision.dgrad and not quantizer.mixes:
            self._note(role, kept.t(), made)
        return made

    def _note(self, role: Role, x: torch.Tensor, made: QuantizedTensor) -> None:
        if self.state.stats is not None and self.state.recording:
            self.state.stats.note(self.path, role, x, made)

    def quantize_weight(
        self, weight: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> tuple[QuantizedTensor, QuantizedTensor]:
        """The weight as both operands, `[out, in]` and `[in, out]`, quantized at most once.

        The cached result is valid for the same tensor, at the same version, quantized with the
        scales now in use; anything else quantizes again. A magnitude that was seen while recording
        was off is recorded at the first use while it is on.

        Args:
            weight: `[out, in]`.
            is_first_microbatch: A hint. True: quantize in any case. False: a result made with
                earlier scales will do. Neither can bring back an old weight.
        """
        resting = getattr(weight, "fp8_weight", None)
        if resting is not None and resting.rests:
            if self.state.stats is not None and self.state.recording:
                self.state.stats.note_magnitude(self.path, Role.WEIGHT, *resting.figures())
            operands: tuple[QuantizedTensor, QuantizedTensor] = resting.operands()
            return operands
        source = (weight.data_ptr(), weight._version, weight.dtype)
        scales = (
            self.state.generation,
            self.slots.book.generation_in_use if self.slots else 0,
        )
        quantizer, cached = self._quantizers[Role.WEIGHT], self._cached
        valid = (
            cached is not None
            and cached.weight() is weight
            and cached.source == source
            and (cached.scales == scales or is_first_microbatch is False)
            and is_first_microbatch is not True
        )
        if cached is None or not valid:
            values = weight.detach()
            row, kept, amax = quantizer.cast_both(values)
            col = quantizer.column(kept)
            cached = _CachedWeight(ref(weight), source, scales, row, col, amax, recorded=False)
            self._cached = cached
        if self.state.recording and not cached.recorded:
            quantizer.record(cached.amax)
            cached.recorded = True
        self._note(Role.WEIGHT, weight, cached.row)
        return cached.row, cached.col

    # -- the table ------------------------------------------------------------------------------

    def rows(self) -> list[PrecisionRow]:
        """The three lines of this layer in the precision table."""
        return [self.row(gemm) for gemm in GEMMS]

    def row(self, gemm: str = "fprop") -> PrecisionRow:
        """The line of one matrix product."""
        decision, plain = self.decision, dtype_name(self.state.params_dtype)
        if decision.recipe is None or not decision.runs(gemm):
            reason = decision.why(gemm)
            return PrecisionRow(self.path, gemm, plain, plain, f"{plain} GEMM", reason)
        first, second = (decision.recipe.format_of(role) for role in OPERANDS[gemm])
        name = f"{decision.recipe.family} {first.name}x{second.name} {decision.recipe.name}"
        wanted, instead = name, ""
        if self.state.replaced is not None:
            wanted, instead = f"{name} on {self.state.replaced[0]}", self.state.replaced[1]
        if not self.active:
            planned = self.held_back or self.state.waits(decision.rule)
            reason = planned or "FP8 is switched off at this step"
            return PrecisionRow(
                self.path, gemm, wanted, plain, f"{plain} GEMM", reason, bool(planned)
            )
        verdict = self.state.products(decision.recipe)
        if verdict.hardware:
            reason = "; ".join(filter(None, (instead, decision.rule)))
            return PrecisionRow(self.path, gemm, wanted, name, verdict.kernel(gemm), reason)
        kernel = kernel_name(
            first,
            second,
            emulation=self.state.emulation,
            device=self.state.device,
            exact_in_bf16=decision.recipe.exact_in_bf16,
            split=gemm != "fprop" or isinstance(decision.recipe, BlockRecipe),
        )
        surprising = self.state.hardware or self.state.device.type == "cuda"
        reasons = (instead, decision.rule, verdict.reason if surprising else "")
        return PrecisionRow(self.path, gemm, wanted, name, kernel, "; ".join(filter(None, reasons)))


def group_rows(experts: Sequence[LinearPrecision], path: str) -> list[PrecisionRow]:
    """The lines of a group of experts in the precision table: one layer, since all are alike.

    Args:
        experts: Its layers; none for something else than a group.
        path: The group's path.
    """
    return [replace(row, path=path) for row in experts[0].rows()] if experts else []


def group_meta(experts: Sequence[LinearPrecision]) -> dict[str, Any]:
    """Scaling state of layers that run together, under Transformer Engine's keys.

    Args:
        experts: The layers, built one after the other.

    Returns:
        As `LinearPrecision.fp8_meta`, with the columns of all layers: `[L, 3 * layers]` forward
        and `[L, 2 * layers]` backward.
    """
    meta = {**experts[0].fp8_meta, "num_gemms": len(experts)}
    slots = tuple(expert.slots for expert in experts if expert.slots is not None)
    if slots:
        meta["scaling_fwd"] = GroupView(slots, "forward")
        meta["scaling_bwd"] = GroupView(slots, "backward")
    return meta
