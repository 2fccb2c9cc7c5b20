"""What watches over a run, in one object for the loop and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import RunConfig
from megatron.observe.bus import Bus
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
        self._rollback: SpikeRollback | None = None
        if cfg.fp8_spike_rollback:
            self._rollback = SpikeRollback(cfg, runtime, parts, progress, bus)

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
        return self._rollback is not None and self._rollback.after_step(outcome, last_checkpoint)

    def end_iteration(self, saved: bool) -> None:
        """Finish an iteration; `saved` says whether it has a checkpoint."""
        if self._rollback is not None:
            self._rollback.end_iteration(saved)

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, as plain values."""
        return {} if self._rollback is None else {"rollback": self._rollback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; a guard that had no state starts anew."""
        if self._rollback is not None:
            self._rollback.load_state_dict(state.get("rollback") or {})
