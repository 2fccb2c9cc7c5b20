"""`Fp8State`: everything about FP8 that changes while a model trains, in one explicit object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from megatron.core.capability import has_fp8_hardware
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.amax import AmaxBook, refuse_missing
from megatron.core.fp8.expert_state import stack_experts, take_experts
from megatron.core.fp8.formats import Format
from megatron.core.fp8.gemm import EMULATIONS
from megatron.core.fp8.policy import Fp8Policy
from megatron.core.fp8.precision import LinearPrecision, PrecisionRow
from megatron.core.fp8.ranges import Ranges
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from megatron.core.fp8.stats import StatsCollector
from megatron.core.mesh import Axis


def recipe_from_config(fp8: Any) -> Recipe | None:
    """The recipe that the `fp8_*` fields describe; None if FP8 is off.

    Args:
        fp8: Anything with the fields of the FP8 configuration section.

    Raises:
        PrecisionError: If the recipe has no native implementation.
    """
    if not fp8.fp8_format:
        return None
    fmt = Format.E4M3 if fp8.fp8_format == "e4m3" else Format.HYBRID
    if fp8.fp8_recipe == "delayed":
        return DelayedScaling(
            margin=fp8.fp8_margin,
            fp8_format=fmt,
            amax_history_len=fp8.fp8_amax_history_len,
            amax_compute_algo=fp8.fp8_amax_compute_algo,
        )
    if fp8.fp8_recipe == "tensorwise":
        return Float8CurrentScaling(fp8_format=fmt)
    if fp8.fp8_recipe == "blockwise":
        return Float8BlockScaling(fp8_format=fmt)
    if fp8.fp8_recipe == "mxfp8":
        return MXFP8BlockScaling(fp8_format=fmt)
    raise PrecisionError(
        complaint(
            "--fp8-recipe",
            fp8.fp8_recipe,
            "The native backend has no such recipe",
            "Use delayed, tensorwise, blockwise or mxfp8",
        )
    )


class Fp8State:
    """FP8 of one model.

    Attributes:
        policy: Decides the recipe of each layer when it is built.
        recipe: The run's recipe; None if FP8 is off.
        book: Histories and scales; None unless scaling is delayed.
        expert_book: Those of the experts, which other ranks share; None as `book`.
        enabled: Whether forwards started now run in FP8. May be switched between steps.
        held: Why the whole model is held in high precision for now; empty if it is not. May be
            changed between steps, alike on all ranks.
        recording: Whether casts record magnitudes. Off in evaluation and in recomputation.
        emulation: `fast` or `exact`, where there is no FP8 hardware.
        generation: Counts synchronisations; weights are quantized anew after each.
        stats: Measures casts; None, the default, to measure nothing.
        ranges: Names layers for profilers; None, the default, not to.
    """

    def __init__(
        self,
        policy: Fp8Policy,
        *,
        device: torch.device | str = "cpu",
        params_dtype: torch.dtype = torch.bfloat16,
        emulation: str = "fast",
    ) -> None:
        if emulation not in EMULATIONS:
            raise PrecisionError(
                complaint(
                    "--fp8-emulation",
                    emulation,
                    "Unknown emulation",
                    f"Use {' or '.join(EMULATIONS)}",
                )
            )
        self.policy, self.recipe = policy, policy.recipe
        self.device, self.params_dtype = torch.device(device), params_dtype
        self.emulation = emulation
        self.hardware = has_fp8_hardware(self.device)
        self.enabled = self.recipe is not None
        self.held = ""
        self.recording = True
        self.generation = 0
        self.stats: StatsCollector | None = None
        self.ranges: Ranges | None = None
        self.book: AmaxBook | None = None
        self.expert_book: AmaxBook | None = None
        if isinstance(self.recipe, DelayedScaling):
            self.book = AmaxBook(self.recipe, self.device)
            self.expert_book = AmaxBook(self.recipe, self.device)
        self.layers: dict[str, LinearPrecision] = {}

    @classmethod
    def disabled(
        cls, device: torch.device | str = "cpu", params_dtype: torch.dtype = torch.bfloat16
    ) -> Fp8State:
        """A state in which every layer runs in high precision."""
        return cls(Fp8Policy(), device=device, params_dtype=params_dtype)

    @classmethod
    def from_config(cls, config: Any, device: torch.device | str = "cpu") -> Fp8State:
        """The state that a run's configuration describes.

        Args:
            config: Anything with the fields of the run configuration.
            device: Where the layers run.
        """
        edges = config.first_last_layers_bf16
        policy = Fp8Policy(
            recipe=recipe_from_config(config),
            wgrad=config.fp8_wgrad,
            num_layers=config.num_layers,
            first_in_bf16=config.num_layers_at_start_in_bf16 if edges else 0,
            last_in_bf16=config.num_layers_at_end_in_bf16 if edges else 0,
        )
        return cls(
            policy,
            device=device,
            params_dtype=getattr(torch, config.params_dtype),
            emulation=config.fp8_emulation,
        )

    # -- building -------------------------------------------------------------------------------

    @property
    def books(self) -> list[AmaxBook]:
        """The books there are: of dense layers and of experts, or none."""
        return [book for book in (self.book, self.expert_book) if book is not None]

    def for_linear(
        self,
        path: str,
        layer_number: int | None = None,
        num_layers: int | None = None,
        *,
        is_expert: bool = False,
    ) -> LinearPrecision:
        """Decide the precision of one linear layer and give it its scales.

        Args:
            path: Module path, unique in the model; of an expert, its number in the whole model
                is the last component.
            layer_number: Transformer layer, numbered from 1 over the whole model; default from
                `layers.N` in the path.
            num_layers: Transformer layers of the whole model; default from the configuration.
            is_expert: Whether the layer belongs to one expert, whose scales only the ranks that
                hold this expert share.
        """
        decision = self.policy.decide(path, layer_number, num_layers)
        slots = None
        book = self.expert_book if is_expert else self.book
        if book is not None and isinstance(decision.recipe, DelayedScaling):
            slots = book.register(path)
        precision = LinearPrecision(path, decision, self, slots)
        self.layers[path] = precision
        return precision

    def forget(self, path: str) -> None:
        """Give back the scales of a layer that is gone."""
        layer = self.layers.pop(path, None)
        if layer is not None and layer.slots is not None:
            layer.slots.book.release(path)

    def rows(self) -> list[PrecisionRow]:
        """The precision table: three lines a layer, in the order of construction."""
        return [row for layer in self.layers.values() for row in layer.rows()]

    # -- running --------------------------------------------------------------------------------

    def sync(self, axis: Axis | None = None, expert_axis: Axis | None = None) -> None:
        """Derive the next step's scales; call once per optimizer step on every rank.

        Args:
            axis: Ranks that share the scales of dense layers.
            expert_axis: Ranks that share the scales of this rank's experts.
        """
        for book, ranks in ((self.book, axis), (self.expert_book, expert_axis)):
            if book is not None:
                if self.stats is not None:
                    self.stats.note_book(book)
                book.sync(ranks)
        self.generation += 1

    def discard(self) -> None:
        """Forget the magnitudes of a step that is not taken; call it instead of `sync`.

        Scales and histories stay as they were: an overflow must not freeze a scale for as long as
        its infinity is in the history.
        """
        for book in self.books:
            book.history[0].zero_()
        self.generation += 1

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Casts inside the block leave no trace, as in evaluation."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for a forward and for its recomputation.

        The recomputation sees the switch and the scales of the first forward and records nothing.
        """
        captured: dict[str, Any] = {}

        @contextmanager
        def first() -> Iterator[None]:
            captured["enabled"] = self.enabled
            captured["scales"] = [(book, book.snapshot()) for book in self.books]
            yield

        @contextmanager
        def again() -> Iterator[None]:
            enabled, self.enabled = self.enabled, captured["enabled"]
            try:
                with self.not_recording(), ExitStack() as stack:
                    for book, snapshot in captured["scales"]:
                        stack.enter_context(book.replay(snapshot))
                    yield
            finally:
                self.enabled = enabled

        return first(), again()

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Recipe and scaling state by layer path: plain values and CPU tensors.

        Experts are under `experts`, see `stack_experts`; each process has its own.
        """
        recipe, experts = self.recipe, self.expert_book
        return {
            "recipe": recipe.name if recipe else "none",
            "format": recipe.fp8_format.name.lower() if recipe else "none",
            "layers": self.book.state_dict() if self.book is not None else {},
            "experts": stack_experts(experts.state_dict()) if experts is not None else {},
            "suspended": self.suspended(),
        }

    def suspended(self) -> dict[str, str]:
        """Layers held in high precision for now, with the reason."""
        return {path: layer.suspended for path, layer in self.layers.items() if layer.suspended}

    def suspend(self, held: Mapping[str, str]) -> None:
        """Hold these layers in high precision, with their reasons, and no others."""
        for path, layer in self.layers.items():
            layer.suspended = str(held[path]) if path in held else ""

    def renew(self) -> None:
        """Say that scales were written from outside: whatever was cast with them is cast anew."""
        for book in self.books:
            book.generation += 1
        self.generation += 1

    def load_state_dict(self, state: Mapping[str, Any] | None) -> list[str]:
        """Take over a saved state where it fits this run's recipe.

        Args:
            state: What `state_dict` returned; None or empty for a checkpoint without FP8.

        Returns:
            Messages for the log: what was adjusted or dropped, and what that means.

        Raises:
            CheckpointError: If layers are missing, all listed.
        """
        self.suspend((state or {}).get("suspended") or {})
        saved = (state or {}).get("recipe", "none")
        wanted = self.recipe.name if self.recipe else "none"
        if saved != wanted:
            return [_dropped(saved, wanted, self.book is not None)]
        if self.book is None or self.expert_book is None or state is None:
            return []
        experts = take_experts(state.get("experts", {}), self.expert_book.paths())
        layers = {**state["layers"], **experts}
        refuse_missing([path for book in self.books for path in book.paths()], layers)
        messages = []
        for book in self.books:
            messages += [m for m in book.load_state_dict(layers) if m not in messages]
        old, new = Format[state["format"].upper()], self.book.recipe.fp8_format
        if old is not new:
            for book in self.books:
                book.rescale(old.forward.max, old.backward.max)
            messages.append(
                f"FP8 state: saved with format {old.name.lower()}, running {new.name.lower()};"
                " scales were converted."
            )
        return messages


def _dropped(saved: str, wanted: str, delayed: bool) -> str:
    after = (
        "the first step quantizes with scale 1 and every later one with fresh scales"
        if delayed
        else "this recipe needs no state"
    )
    if saved == "none":
        return f"FP8 state: the checkpoint has none; {after}."
    if wanted == "none":
        return f"FP8 state: saved with recipe {saved}, this run is not in FP8; it is ignored."
    return f"FP8 state: saved with recipe {saved}, this run uses {wanted}; it is dropped, {after}."
