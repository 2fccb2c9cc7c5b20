"""What watches over a run, in one object for the loop and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import RunConfig
from megatron.observe.bus import Bus
from megatron.observe.events import Message
from megatron.training.fallback import AutoFallback
from megatron.training.initialize import Runtime
from megatron.training.progress import Progress
from megatron.training.providers import Parts
from megatron.training.rollback import SpikeRollback
from megatron.training.step import StepOutcome


class Guards:
    """The guards that the configuration asks for; without any it does nothing.

    Args:
        cfg: The configuration.
        runtime: Mesh, device and backend.
        parts: What is trained.
        progress: The run's counters.
        bus: Receives what happens.

    Raises:
        PrecisionError: The backend cannot do what a guard would do.
    """

    def __init__(
        self, cfg: RunConfig, runtime: Runtime, parts: Parts, progress: Progress, bus: Bus
    ) -> None:
        self._parts, self._bus = parts, bus
        self._fallback: AutoFallback | None = None
        self._rollback: SpikeRollback | None = None
        if cfg.fp8_auto_fallback:
            self._fallback = AutoFallback(cfg, runtime, parts, progress, bus)
        if cfg.fp8_spike_rollback:
            self._rollback = SpikeRollback(cfg, runtime, parts, progress, bus, self._fallback)

    def start(self) -> None:
        """Prepare for the first iteration, after a checkpoint was loaded. Collective."""
        if self._rollback is not None:
            self._rollback.start()

    def after_step(self, outcome: StepOutcome, last_checkpoint: str) -> bool:
        """Judge an iteration that the counters have counted already. Collective.

        Args:
            outcome: What it did.
            last_checkpoint: Where the last good checkpoint is, for messages.

        Returns:
            Whether the run went back to an earlier iteration.

        Raises:
            TrainingError: The run should not go on.
        """
        if self._rollback is not None and self._rollback.after_step(outcome, last_checkpoint):
            return True
        if self._fallback is not None:
            self._fallback.after_step(outcome)
        return False

    def end_iteration(self, saved: bool) -> None:
        """Finish an iteration; `saved` says whether it has a checkpoint."""
        if self._rollback is not None:
            self._rollback.end_iteration(saved)

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, as plain values."""
        guards = {"rollback": self._rollback, "fallback": self._fallback}
        return {name: guard.state_dict() for name, guard in guards.items() if guard is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, after the FP8 state; a guard without state starts anew."""
        if self._fallback is not None:
            self._fallback.load_state_dict(state.get("fallback") or {})
        else:
            self._release()
        if self._rollback is not None:
            self._rollback.load_state_dict(state.get("rollback") or {})

    def _release(self) -> None:
        """Let layers run in FP8 again that a guard held back which is not there any more."""
        held = self._parts.fp8.suspended()
        if held:
            self._parts.fp8.suspend({})
            layers = ", ".join(held)
            what = f"NOTE: without --fp8-auto-fallback they run in FP8 again: {layers}"
            self._bus.emit(Message(what))
