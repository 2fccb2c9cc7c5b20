"""`Fp8State`: everything about FP8 that changes while a model trains, in one explicit object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron.config import fp8_policy
from megatron.config.fp8 import published_format
from megatron.core.capability import fp8_gemm, has_fp8_hardware
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8 import resume, watched
from megatron.core.fp8.accumulation import emulation_of, refuse_hardware
from megatron.core.fp8.amax import AmaxBook, refuse_missing
from megatron.core.fp8.attention import (
    AttentionChoice,
    AttentionPrecision,
    decide_attention,
    delayed_part,
    register_attention,
)
from megatron.core.fp8.expert_state import stack_experts, take_experts
from megatron.core.fp8.formats import Format
from megatron.core.fp8.gemm import EMULATIONS
from megatron.core.fp8.hardware import Verdict, verdict
from megatron.core.fp8.nvfp4 import NVFP4BlockScaling
from megatron.core.fp8.policy import HIGH_PRECISION, Fp8Policy, LayerRule
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

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import RngStreams


def recipe_from_config(
    fp8: Any, name: str | None = None, fp8_format: str | None = None
) -> Recipe | None:
    """The recipe that the `fp8_*` or `fp4_*` fields describe; None if both are off.

    Args:
        fp8: Anything with the fields of the FP8 configuration section.
        name: Another recipe than theirs.
        fp8_format: Another format than theirs.

    Raises:
        PrecisionError: If the recipe has no native implementation.
    """
    if not (fp8.fp8_format or fp8.fp4_format):
        return None
    name = name or (fp8.fp8_recipe if fp8.fp8_format else fp8.fp4_recipe)
    if name == "nvfp4":
        return NVFP4BlockScaling()
    fmt_name = fp8_format or fp8.fp8_format or published_format(name)
    fmt = Format.E4M3 if fmt_name == "e4m3" else Format.HYBRID
    if name == "delayed":
        return DelayedScaling(
            margin=fp8.fp8_margin,
            fp8_format=fmt,
            amax_history_len=fp8.fp8_amax_history_len,
            amax_compute_algo=fp8.fp8_amax_compute_algo,
        )
    if name == "tensorwise":
        return Float8CurrentScaling(fp8_format=fmt)
    if name == "blockwise":
        return Float8BlockScaling(fp8_format=fmt)
    if name == "mxfp8":
        return MXFP8BlockScaling(fp8_format=fmt)
    raise PrecisionError(
        complaint(
            "--fp8-recipe",
            name,
            "The native backend has no such recipe",
            "Use delayed, tensorwise, blockwise or mxfp8, or --fp4-recipe nvfp4",
        )
    )


def rules_from_config(fp8: Any) -> tuple[LayerRule, ...]:
    """The rules of `--fp8-policy`, with their recipes.

    Args:
        fp8: Anything with the fields of the FP8 configuration section.
    """
    return tuple(
        LayerRule(
            rule,
            None
            if rule.recipe == fp8_policy.PLAIN
            else recipe_from_config(fp8, rule.recipe, rule.fp8_format),
        )
        for rule in fp8_policy.read(fp8.fp8_policy_text).rules
    )


class Fp8State:
    """FP8 of one model.

    Attributes:
        policy: Decides the recipe of each layer when it is built.
        recipe: Recipe of the layers that no rule is about; None if FP8 is off.
        book: Histories and scales; None unless some layer may have delayed scaling.
        expert_book: Those of the experts, which other ranks share; None as `book`.
        attention: What the run asks for inside attention.
        attention_book: Those of attention layers whose recipe has no history otherwise; or None.
        enabled: Whether forwards started now run in FP8. May be switched between steps.
        held: Why the whole model is held in high precision for now; empty if it is not. May be
            changed between steps, alike on all ranks.
        recording: Whether casts record magnitudes. Off in evaluation and in recomputation.
        emulation: `fast`, `exact` or `hopper`, where there is no FP8 hardware.
        replaced: The layer backend that was asked for and why it cannot run, if this is another.
        generation: Counts synchronisations; weights are quantized anew after each.
        rng: Where seeds of random roundings come from, with the position in training. None, as in
            a loop of your own: from torch's default generator.
        warmup_iters: Iterations at the start of the run that are not in FP8.
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
        warmup_iters: int = 0,
        attention: AttentionChoice | None = None,
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
        #: Whether this device multiplies FP8 at all; see `products`.
        self.hardware = has_fp8_hardware(self.device)
        if self.hardware:
            refuse_hardware(emulation, self.device)
        self.enabled = self.recipe is not None
        self.held = ""
        self.warmup_iters = warmup_iters if self.enabled else 0
        self.recording = True
        self.replaced: tuple[str, str] | None = None
        self.generation = 0
        self.rng: RngStreams | None = None
        self.stats: StatsCollector | None = None
        self.ranges: Ranges | None = None
        self.book: AmaxBook | None = None
        self.expert_book: AmaxBook | None = None
        if policy.delayed is not None:
            self.book = AmaxBook(policy.delayed, self.device)
            self.expert_book = AmaxBook(policy.delayed, self.device)
        self.layers: dict[str, LinearPrecision] = {}
        self._kinds: dict[str, str] = {}  # by layer, experts of one matrix as one
        self.attention = attention or AttentionChoice()
        self.attention_book: AmaxBook | None = None
        self.attention_layers: dict[str, AttentionPrecision] = {}

    @classmethod
    def disabled(cls, params_dtype: torch.dtype = torch.bfloat16) -> Fp8State:
        """A state in which every layer runs in high precision."""
        return cls(Fp8Policy(), params_dtype=params_dtype)

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
            rules=rules_from_config(config),
        )
        return cls(
            policy,
            device=device,
            params_dtype=getattr(torch, config.params_dtype),
            emulation=emulation_of(config),
            warmup_iters=config.fp8_warmup_iters,
            attention=AttentionChoice(config.fp8_dot_product_attention, config.fp8_dpa_bwd),
        )

    def products(self, recipe: Recipe) -> Verdict:
        """Whether a recipe's products run in hardware here, and why not."""
        if not self.hardware:
            return Verdict(False, fp8_gemm().reason)
        return verdict(recipe, self.device, self.params_dtype)

    # -- building -------------------------------------------------------------------------------

    @property
    def books(self) -> list[AmaxBook]:
        """The books there are: of dense layers, of experts, of attention alone; or none."""
        every = (self.book, self.expert_book, self.attention_book)
        return [book for book in every if book is not None]

    def for_linear(self, path: str, *, is_expert: bool = False) -> LinearPrecision:
        """Decide the precision of one linear layer and give it its scales.

        Args:
            path: Module path, unique in the model; of an expert, its number in the whole model
                is the last component.
            is_expert: Whether the layer belongs to one expert, whose scales only the ranks that
                hold this expert share.
        """
        layer = path.rpartition(".")[0] if is_expert else path
        decision = self.policy.decide(layer)
        slots = None
        book = self.expert_book if is_expert else self.book
        if book is not None and isinstance(decision.recipe, DelayedScaling):
            slots = book.register(path, recipe=decision.recipe)
        precision = LinearPrecision(path, decision, self, slots)
        precision.gradients_differ = is_expert  # of other tokens, or other columns
        self.layers[path] = precision
        self._kinds[layer] = decision.summary
        return precision

    def for_attention(self, path: str) -> AttentionPrecision:
        """Decide the precision inside one layer's attention and give it its scales.

        Args:
            path: Module path, unique in the model.

        Raises:
            PrecisionError: The layer's recipe has no FP8 attention.
        """
        decision = decide_attention(self.policy.decide(path), self.attention)
        slots = None
        if decision.recipe is not None:
            book = self.book if isinstance(decision.recipe, DelayedScaling) else None
            if book is None:
                if self.attention_book is None:
                    self.attention_book = AmaxBook(delayed_part(decision.recipe), self.device)
                book = self.attention_book
            slots = register_attention(book, path, delayed_part(decision.recipe))
        precision = AttentionPrecision(path, decision, self, self.attention, slots)
        self.attention_layers[path] = precision
        self._kinds[path] = decision.summary
        return precision

    def forget(self, path: str) -> None:
        """Give back the scales of a layer that is gone."""
        layer = self.layers.pop(path, None)
        self._kinds.pop(path, None)
        if layer is not None and layer.slots is not None:
            layer.slots.book.release(path)

    def rows(self) -> list[PrecisionRow]:
        """The precision table: three lines a layer, in the order of construction."""
        return [row for layer in self.layers.values() for row in layer.rows()]

    # -- running --------------------------------------------------------------------------------

    def begin(self, iteration: int) -> bool:
        """Switch FP8 on or off as `warmup_iters` wants it.

        Args:
            iteration: Number, from 1, of the iteration that starts, or was the last one; 0 before
                the first.

        Returns:
            Whether this switched FP8 on.
        """
        if not self.warmup_iters:
            return False
        before, self.enabled = self.enabled, iteration > self.warmup_iters
        return self.enabled and not before

    @property
    def is_warming_up(self) -> bool:
        """Whether FP8 is off because the run has not come to it yet."""
        return bool(self.warmup_iters) and not self.enabled

    def waits(self, rule: str = "") -> str:
        """Why a layer that is to run in FP8 does not yet, for the table; empty if it is time.

        Args:
            rule: What gave the layer its recipe.
        """
        if not self.is_warming_up:
            return ""
        count = self.warmup_iters
        behind = f"; {rule}" if rule else ""
        return f"in FP8 from iteration {count + 1} (--fp8-warmup-iters {count}){behind}"

    def sync(self, axis: Axis | None = None, expert_axis: Axis | None = None) -> None:
        """Derive the next step's scales; call once per optimizer step on every rank.

        Nothing was recorded in a warm-up, and nothing is agreed on.

        Args:
            axis: Ranks that share the scales of dense layers.
            expert_axis: Ranks that share the scales of this rank's experts.
        """
        if not self.is_warming_up:
            if self.stats is not None:
                self.stats.note_slots(watched.slots(self))
            for book in self.books:
                book.sync(expert_axis if book is self.expert_book else axis)
        self.generation += 1

    def discard(self) -> None:
        """Forget the magnitudes of a step that is not taken; call it instead of `sync`.

        Scales and histories stay as they were: an overflow must not freeze a scale for as long as
        its infinity is in the history.
        """
        for book in self.books:
            book.history[0].zero_()
        self.generation += 1

    def rounding_seed(self, path: str, sharded: bool) -> int:
        """Seed of a layer's random roundings at the current position in training.

        Args:
            path: The layer's.
            sharded: Whether tensor-parallel ranks round different tensors.
        """
        if self.rng is None:
            return int(torch.randint(2**62, ()))
        return self.rng.seed_of(f"{path}.rounding", "tp" if sharded else "replicated")

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

        The recomputation sees the switch, the scales and the random numbers of the first forward
        and records nothing.
        """
        captured: dict[str, Any] = {}

        @contextmanager
        def first() -> Iterator[None]:
            captured["enabled"] = self.enabled
            captured["numbers"] = self._same_numbers()
            captured["scales"] = [(book, book.snapshot()) for book in self.books]
            yield

        @contextmanager
        def again() -> Iterator[None]:
            enabled, self.enabled = self.enabled, captured["enabled"]
            try:
                with self.not_recording(), captured["numbers"](), ExitStack() as stack:
                    for book, snapshot in captured["scales"]:
                        stack.enter_context(book.replay(snapshot))
                    yield
            finally:
                self.enabled = enabled

        return first(), again()

    def _same_numbers(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which seeds are those that would be drawn now."""
        if self.rng is not None:
            return partial(self.rng.at, self.rng.position)
        recipes = (layer.decision.recipe for layer in self.layers.values())
        if any(recipe is not None and recipe.is_random for recipe in recipes):
            return partial(_generator_at, torch.get_rng_state())
        return nullcontext

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Recipe and scaling state by layer path: plain values and CPU tensors.

        Experts are under `experts`, see `stack_experts`; each process has its own. `precision` says
        how each layer runs.
        """
        recipe, experts, attention = self.recipe, self.expert_book, self.attention_book
        return {
            "recipe": recipe.name if recipe else "none",
            "format": recipe.format_name if recipe else "none",
            "precision": dict(self._kinds) if recipe else {},
            "layers": self.book.state_dict() if self.book is not None else {},
            "experts": stack_experts(experts.state_dict()) if experts is not None else {},
            "suspended": self.suspended(),
            **({"attention": attention.state_dict()} if attention is not None else {}),
        }

    def suspended(self) -> dict[str, str]:
        """Layers held in high precision for now, with the reason."""
        held = {path: layer.suspended for path, layer in self.layers.items()}
        held |= {path: layer.suspended for path, layer in self.attention_layers.items()}
        return {path: reason for path, reason in held.items() if reason}

    def suspend(self, held: Mapping[str, str]) -> None:
        """Hold these layers in high precision, with their reasons, and no others."""
        layers: list[LinearPrecision | AttentionPrecision] = list(self.layers.values())
        for layer in [*layers, *self.attention_layers.values()]:
            layer.suspended = str(held[layer.path]) if layer.path in held else ""

    def renew(self) -> None:
        """Say that scales were written from outside: whatever was cast with them is cast anew."""
        for book in self.books:
            book.generation += 1
        self.generation += 1

    def load_state_dict(self, state: Mapping[str, Any] | None) -> list[str]:
        """Take over a saved state, layer by layer, where it fits this run.

        Args:
            state: What `state_dict` returned; None or empty for a checkpoint without FP8.

        Returns:
            Messages for the log: what was adjusted or dropped, and what that means.

        Raises:
            CheckpointError: If layers are missing, all listed.
        """
        state = state or {}
        self.suspend(state.get("suspended") or {})
        if self.recipe is None:
            return resume.ignored(state)
        before = resume.precision_before(state, self._kinds)
        if "precision" not in state:  # written before attention could run in FP8
            before |= dict.fromkeys(self.attention_layers, HIGH_PRECISION)
        kept = []
        for book in self.books:
            grouped = book is self.expert_book
            layers = {p: p.rpartition(".")[0] if grouped else p for p in book.paths()}
            resume.refuse_unknown(layers.values(), before)
            had = {
                path
                for path, layer in layers.items()
                if resume.recipe_of(before[layer]) == resume.recipe_of(self._kinds[layer])
            }
            kept.append((book, [p for p in layers if p in had], layers))
            for path in layers:
                if path not in had:
                    book.reset(path)
        messages = self._load_books(state, before, kept)
        return messages + resume.sentences(before, self._kinds)

    def _load_books(
        self,
        state: Mapping[str, Any],
        before: Mapping[str, str],
        kept: list[tuple[AmaxBook, list[str], dict[str, str]]],
    ) -> list[str]:
        """Take over scales and histories; see `load_state_dict`.

        Args:
            state: The saved state.
            before: How each layer ran.
            kept: For each book: its layers that have saved scales, and layer of every path.
        """
        if not any(paths for _, paths, _ in kept):
            return []
        wanted = [path for _, paths, _ in kept for path in paths]
        experts = take_experts(state.get("experts", {}), wanted)
        saved = {**state["layers"], **state.get("attention", {}), **experts}
        refuse_missing(wanted, saved)
        messages: list[str] = []
        for book, paths, layers in kept:
            found = book.load_state_dict(saved, required=paths)
            messages += [message for message in found if message not in messages]
            for path in paths:
                fmt = Format[resume.format_of(before[layers[path]]).upper()]
                book.rescale(path, fmt.forward.max, fmt.backward.max)
        return messages


@contextmanager
def _generator_at(state: torch.Tensor) -> Iterator[None]:
    """Torch's default generator in an earlier state."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)
