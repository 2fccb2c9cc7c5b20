"""FP8 for people with their own training loop: `autocast`, and `checkpoint` for recomputation.

Inside `autocast` the layers of `modules.py` compute in FP8. Scales follow the life cycle of
Transformer Engine:

* forward scales advance when the outermost context exits normally, if gradients are enabled;
* backward scales advance once for each outermost context, when the backward pass has left the
  module that ran first in it;
* under `no_grad` magnitudes are staged but scales stay, so they enter the next update;
* an inner context without a recipe takes the default one, it does not inherit the outer one's.

The framework's own training loop uses none of this: it calls `Fp8State.sync` once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.core.capability import fp8_gemm
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.amax import Snapshot
from megatron.core.fp8.policy import Fp8Policy
from megatron.core.fp8.recipe import DelayedScaling, Recipe
from megatron.core.fp8.state import Fp8State
from megatron.core.mesh import Axis


@dataclass(frozen=True)
class Frame:
    """What the innermost context says.

    Attributes:
        enabled: Whether layers run in FP8.
        recipe: Their recipe.
        axis: Ranks that share scales.
    """

    enabled: bool
    recipe: Recipe
    axis: Axis


def default_recipe() -> Recipe:
    """The recipe of a context that names none."""
    return DelayedScaling()


class Session:
    """The contexts that are open and the scaling states they have made."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.states: dict[Hashable, Fp8State] = {}
        self.axes: dict[Hashable, Axis] = {}
        self.first_module = False
        self.replaying = False
        self.regions: list[_Region] = []

    @property
    def frame(self) -> Frame | None:
        """The innermost context, if any."""
        return self.frames[-1] if self.frames else None

    def state(self, frame: Frame, device: torch.device) -> Fp8State:
        """The scaling state that layers share under a recipe and a group of ranks."""
        key = (frame.recipe, frame.axis.ranks, id(frame.axis.group), device)
        if key not in self.states:
            self.states[key] = Fp8State(Fp8Policy(recipe=frame.recipe), device=device)
            self.axes[key] = frame.axis
        return self.states[key]

    def claim_first(self) -> bool:
        """Whether the caller is the first module of its outermost context; true once."""
        first, self.first_module = self.first_module, False
        return first

    def update(self, direction: str) -> None:
        """Advance the scales of one direction, of every recipe and group."""
        for region in self.regions:
            region.capture()
        for key, state in self.states.items():
            if state.book is not None:
                state.book.sync(self.axes[key], direction)

    def update_backward(self) -> None:
        """Advance the backward scales."""
        self.update("backward")


SESSION = Session()


def is_fp8_enabled() -> bool:
    """Whether the innermost `autocast` is enabled."""
    return SESSION.frame is not None and SESSION.frame.enabled


def get_fp8_recipe() -> Recipe:
    """The recipe of the innermost `autocast`, or the default one."""
    return SESSION.frame.recipe if SESSION.frame is not None else default_recipe()


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 layers run here: always, in hardware or emulated.

    Args:
        return_reason: Also say how.
    """
    return (True, fp8_gemm().reason) if return_reason else True


class autocast:  # noqa: N801  (the name people know)
    """Context in which FP8 layers compute in FP8.

    Args:
        enabled: Run layers in FP8 at all.
        recipe: How scales are found; default `DelayedScaling()`.
        amax_group: Ranks that share delayed scales: an `Axis` or a process group. Default: all
            ranks, if torch.distributed is initialised.
        fp8_recipe: Other spelling of `recipe`.
        fp8_group: Other spelling of `amax_group`.
        amax_reduction_group: Other spelling of `amax_group`.

    Raises:
        ValueError: For a recipe that is none, or a value given under two spellings.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        amax_group: Any = None,
        *,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        amax_reduction_group: Any = None,
    ) -> None:
        chosen = _one("recipe", recipe, fp8_recipe)
        if chosen is not None and not isinstance(chosen, Recipe):
            raise ValueError(
                complaint(
                    "autocast(recipe=)",
                    repr(chosen),
                    "It is not an FP8 recipe",
                    "Use DelayedScaling(...) or another recipe of megatron.core.fp8",
                )
            )
        self.enabled = enabled
        self.recipe = chosen
        self.group = _one("amax_group", amax_group, fp8_group, amax_reduction_group)
        self._outside: tuple[int, bool] | None = None

    def __enter__(self) -> autocast:
        if self._outside is not None:
            raise RuntimeError("autocast: this instance is already open. Make a second one.")
        outermost = not SESSION.frames
        if outermost and self.enabled and _in_backward() and not SESSION.replaying:
            raise PrecisionError(_WRONG_CHECKPOINT)
        self._outside = (len(SESSION.frames), SESSION.first_module)
        SESSION.frames.append(
            Frame(self.enabled, self.recipe or default_recipe(), _axis_of(self.group))
        )
        if outermost:
            SESSION.first_module = True
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if self._outside is None:
            raise RuntimeError("autocast: this instance is not open. Use it in a with statement.")
        depth, SESSION.first_module = self._outside
        del SESSION.frames[depth:]
        self._outside = None
        # After an exception ranks may disagree on who is here, so nobody communicates.
        if self.enabled and depth == 0 and kind is None and torch.is_grad_enabled():
            SESSION.update("forward")


def _one(name: str, *values: Any) -> Any:
    given = [value for value in values if value is not None]
    if len(given) > 1:
        raise ValueError(
            complaint(f"autocast({name}=)", given, "It is given twice", "Use one spelling")
        )
    return given[0] if given else None


def _axis_of(group: Any) -> Axis:
    """The axis of a process group; all ranks for None."""
    if isinstance(group, Axis):
        return group
    if not dist.is_available() or not dist.is_initialized():
        return Axis.single("amax")
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if len(ranks) == 1:
        return Axis.single("amax", ranks[0])
    return Axis("amax", len(ranks), dist.get_rank(group), ranks, group or dist.group.WORLD)


# -- recomputation ------------------------------------------------------------------------------

_WRONG_CHECKPOINT = complaint(
    "activation recomputation",
    "an FP8 layer in a plain torch.utils.checkpoint",
    "It would be recomputed without the precision and the scales of its first forward",
    "Use megatron.core.fp8.checkpoint",
)


def _in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def refuse_foreign_recompute() -> None:
    """Raise if a layer that ran in FP8 is being recomputed outside `checkpoint`.

    Raises:
        PrecisionError: Naming the function to use.
    """
    if _in_backward() and not SESSION.replaying:
        raise PrecisionError(_WRONG_CHECKPOINT)


class _Region:
    """One checkpointed call: its context, and the scales of its first forward."""

    def __init__(self) -> None:
        self.frames = list(SESSION.frames)
        self.snapshots: dict[Hashable, Snapshot] | None = None

    def capture(self) -> None:
        """Note the scales, before anything changes them."""
        if self.snapshots is None:
            self.snapshots = {
                key: state.book.snapshot()
                for key, state in SESSION.states.items()
                if state.book is not None
            }

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first forward. States made inside it are seen because capture comes last."""
        SESSION.regions.append(self)
        try:
            yield
        finally:
            self.capture()
            SESSION.regions.remove(self)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the recomputation: earlier scales, nothing recorded, nothing updated."""
        before = (SESSION.frames, SESSION.first_module, SESSION.replaying)
        # A disabled outermost frame keeps contexts that fn opens from being outermost again.
        outermost = Frame(False, default_recipe(), Axis.single("amax"))
        SESSION.frames = list(self.frames) or [outermost]
        SESSION.first_module, SESSION.replaying = False, True
        try:
            with ExitStack() as stack:
                for key, snapshot in (self.snapshots or {}).items():
                    state = SESSION.states[key]
                    stack.enter_context(state.not_recording())
                    if state.book is not None:
                        stack.enter_context(state.book.replay(snapshot))
                yield
        finally:
            SESSION.frames, SESSION.first_module, SESSION.replaying = before


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `fn(*args, **kwargs)` without keeping activations; recompute them in backward.

    The recomputation runs in the FP8 context and with the scales of the first forward and records
    nothing, so gradients and scales are bitwise those of a plain call.

    Args:
        fn: Any function of tensors.
        args: Its arguments.
        kwargs: Its keywords. `use_reentrant` is accepted and changes nothing.

    Returns:
        What `fn` returns.
    """
    kwargs.pop("use_reentrant", None)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        region = _Region()
        return region.first(), region.again()

    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=contexts, **kwargs)
