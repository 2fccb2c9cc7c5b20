"""After a loss spike: back to the last snapshot, without the data since then.

A loss that jumps was spoilt by its own batch, or by an update a few steps before. So what is left
out is everything that was read since the snapshot. The iteration number goes back with the weights
and `consumed_train_samples` does not: the run goes on as one that never had these data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from megatron.config import RunConfig
from megatron.core.comm_log import CONTROL
from megatron.core.errors import PrecisionError, TrainingError, complaint, on_every_rank
from megatron.core.fp8.guards import Watch
from megatron.core.tensor_parallel.mappings import all_reduce_
from megatron.observe.bus import Bus
from megatron.observe.events import Message, Rollback
from megatron.training.initialize import Runtime
from megatron.training.progress import Progress
from megatron.training.providers import Parts
from megatron.training.snapshot import Snapshot
from megatron.training.step import StepOutcome


class Deciding(Protocol):
    """What a snapshot needs of another guard."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""


class SpikeRollback:
    """Watches the loss, takes snapshots, and returns to the last one.

    Every rank has one, sees the same losses and therefore decides alike.

    Args:
        cfg: The configuration.
        runtime: Mesh, device and backend.
        parts: What is trained.
        progress: The run's counters.
        bus: Receives what happens.
        others: What else decides from what it has seen, and has to go back as well.

    Raises:
        PrecisionError: The backend cannot leave FP8 for a while as asked.
    """

    def __init__(
        self,
        cfg: RunConfig,
        runtime: Runtime,
        parts: Parts,
        progress: Progress,
        bus: Bus,
        others: Deciding | None = None,
    ) -> None:
        self._cfg, self._runtime, self._parts = cfg, runtime, parts
        self._progress, self._bus, self._others = progress, bus, others
        self._losses = Watch(
            cfg.fp8_spike_rollback_window,
            cfg.fp8_spike_rollback_deviations,
            cfg.fp8_spike_rollback_ratio,
        )
        self._rollbacks = 0
        self._without_fp8_until = 0
        self._snapshot = Snapshot(parts, on_device=cfg.fp8_spike_rollback_memory == "device")
        if cfg.fp8_spike_rollback_precision == "bf16":
            _refuse_stale_scales(runtime, parts)

    def start(self) -> None:
        """Take the first snapshot and say what snapshots cost. Collective."""
        cfg, world = self._cfg, self._runtime.mesh.world
        size = torch.tensor([float(self._snapshot.num_bytes)], dtype=torch.float64)
        most = all_reduce_(size.to(self._runtime.device), world, "max", CONTROL).item()
        place = "device" if cfg.fp8_spike_rollback_memory == "device" else "host"
        self._bus.emit(
            Message(
                f"spike rollback: a snapshot every {cfg.fp8_spike_rollback_interval} iterations and"
                f" with every checkpoint, up to {most / 2**20:.2f} MB of {place} memory on a rank"
            )
        )
        self._take()

    def after_step(self, outcome: StepOutcome, last_checkpoint: str) -> bool:
        """Judge an iteration that the counters have counted already. Collective if it was bad.

        Args:
            outcome: What it did.
            last_checkpoint: Where the last good checkpoint is, for a message.

        Returns:
            Whether the run has gone back.

        Raises:
            TrainingError: It would have to go back once too often.
        """
        reason = self._judge(outcome)
        if reason:
            self._go_back(reason, outcome, last_checkpoint)
            return True
        self._losses.accept(outcome.loss)
        if self._without_fp8_until and self._progress.iteration >= self._without_fp8_until:
            self._without_fp8_until = 0
            self._hold()
            following = self._progress.iteration + 1
            self._bus.emit(Message(f"FP8 is on again from iteration {following}"))
        return False

    def end_iteration(self, saved: bool) -> None:
        """Take a snapshot if it is time for one.

        Args:
            saved: Whether the iteration has a checkpoint. With a snapshot of the same moment no
                checkpoint is ever left from what was rolled back.
        """
        if saved or self._progress.iteration % self._cfg.fp8_spike_rollback_interval == 0:
            self._take()

    def _judge(self, outcome: StepOutcome) -> str:
        """Say what is wrong with an iteration; empty if nothing is.

        Gradients that overflow are part of the search for a dynamic loss scale.
        """
        spike = self._losses.judge(outcome.loss)
        if spike is not None:
            return spike.describe("loss")
        if not math.isfinite(outcome.update.grad_norm) and not self._cfg.fp16:
            return f"gradient norm {outcome.update.grad_norm} is not finite"
        return ""

    def _go_back(self, reason: str, outcome: StepOutcome, last_checkpoint: str) -> None:
        cfg, progress, spiked = self._cfg, self._progress, self._progress.iteration
        if self._rollbacks >= cfg.fp8_spike_rollback_limit:
            text = complaint(
                "--fp8-spike-rollback-limit",
                f"{self._rollbacks} rollbacks and another spike",
                f"At iteration {spiked} {reason}. Last good checkpoint: "
                f"{last_checkpoint or 'none'}",
                "Lower the learning rate or look at the samples that were left out "
                f"({_spans(progress.skipped_ranges)}), or raise the limit to go on like this",
            )
            raise on_every_rank(TrainingError(text))
        kept = self._snapshot.restore()
        first, end = progress.go_back(kept["progress"])
        self._losses.load_state_dict(kept["losses"])
        self._without_fp8_until = kept["without_fp8_until"]
        self._rollbacks += 1
        if cfg.fp8_spike_rollback_precision == "bf16":
            self._without_fp8_until = progress.iteration + cfg.fp8_spike_rollback_precision_iters
        self._hold()
        if self._others is not None:
            self._others.load_state_dict(kept["others"])
        self._bus.rewind(progress.iteration)
        self._bus.emit(
            Rollback(
                iteration=spiked,
                back_to=progress.iteration,
                reason=reason,
                loss=outcome.loss,
                grad_norm=outcome.update.grad_norm,
                first_sample=first,
                end_sample=end,
                without_fp8_until=self._without_fp8_until,
                count=self._rollbacks,
                limit=cfg.fp8_spike_rollback_limit,
            )
        )

    def _take(self) -> None:
        self._snapshot.take(
            {
                "progress": self._progress.to_dict(),
                "losses": self._losses.state_dict(),
                "without_fp8_until": self._without_fp8_until,
                "others": {} if self._others is None else self._others.state_dict(),
            }
        )

    def _hold(self) -> None:
        """Keep FP8 off as long as it has to be."""
        until = self._without_fp8_until
        self._parts.fp8.held = f"loss spike: until iteration {until}" if until else ""

    # -- checkpoint -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, as plain values."""
        return {
            "losses": self._losses.state_dict(),
            "rollbacks": self._rollbacks,
            "without_fp8_until": self._without_fp8_until,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._losses.load_state_dict(state.get("losses", {}))
        self._rollbacks = int(state.get("rollbacks", 0))
        self._without_fp8_until = int(state.get("without_fp8_until", 0))
        self._hold()


def _spans(ranges: list[list[int]]) -> str:
    return ", ".join(f"{first} to {end - 1}" for first, end in ranges)


def _refuse_stale_scales(runtime: Runtime, parts: Parts) -> None:
    """Refuse to leave FP8 where its scales would be out of date afterwards."""
    if runtime.backend.name == "transformer_engine" and parts.fp8.books:
        raise PrecisionError(
            complaint(
                "--fp8-spike-rollback-precision",
                "bf16 with delayed scaling on transformer_engine",
                "Transformer Engine records no magnitudes while FP8 is off",
                "Use --fp8-spike-rollback-precision same, or --transformer-impl native",
            )
        )
