"""One iteration: every microbatch forward and backward, then one update; and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.config import RunConfig
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.source import Source
from megatron.core.distributed.finalize import finalize_gradients
from megatron.core.mesh import Axis
from megatron.core.optimizer import StepResult
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedule import Action, Op, generate
from megatron.core.tensor_parallel.mappings import all_reduce_
from megatron.training.initialize import Runtime
from megatron.training.providers import Parts


@dataclass(frozen=True)
class StepOutcome:
    """What one iteration did, the same on every rank.

    Attributes:
        loss: Mean loss over the unmasked tokens of the whole batch.
        tokens: Number of those tokens.
        update: The optimizer's report.
    """

    loss: float
    tokens: float
    update: StepResult

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)


class TrainStep:
    """Runs iterations of training; the work that the schedule's runner asks for.

    Args:
        cfg: The configuration.
        runtime: Mesh and device.
        parts: Model, optimizer, scheduler, FP8 state.
        source: Training batches.

    Attributes:
        iteration: Number of the iteration that was started last, 0 before the first.
    """

    def __init__(self, cfg: RunConfig, runtime: Runtime, parts: Parts, source: Source) -> None:
        self.parts = parts
        self._mesh, self._device = runtime.mesh, runtime.device
        self._source = source
        self._batch_size = int(cfg.global_batch_size)
        # FP16 overflows on purpose while the loss scale is found, so it always skips.
        self._skip_non_finite = bool(cfg.check_for_nan_in_loss_and_grad or cfg.fp16)
        self._runner = Runner(self, self._root_gradient, before_backward=self._before_backward)
        self._actions = generate(cfg.num_microbatches, num_stages=cfg.pipeline_model_parallel_size)[
            self._mesh.pp.rank
        ]
        self._last_backward = [a for a in self._actions if a.op is Op.B][-1]
        self.iteration, self._consumed = 0, 0
        # [tokens, loss] summed over this rank's microbatches, later over the whole batch.
        self._sums = torch.zeros(2, device=self._device)
        self._loss, self._tokens, self._grad_norm = 0.0, 0.0, 0.0

    @property
    def current(self) -> str:
        """Which action is in progress, empty between iterations."""
        return str(self._runner.current or "")

    def run(self, iteration: int, consumed_samples: int) -> StepOutcome:
        """Run one iteration. Collective.

        Args:
            iteration: Its number, counted from 1; dropout depends on it.
            consumed_samples: Samples read before it; the data depend on it.
        """
        self.iteration, self._consumed = iteration, consumed_samples
        self._sums.zero_()
        self.parts.ddp.zero_grad_buffer()
        self._runner.run(self._actions)
        skip = self._skip_non_finite and not math.isfinite(self._loss)
        update = self.parts.optimizer.step(self._grad_norm, skip=skip)
        if update.success:
            self.parts.scheduler.step(self._batch_size)
        return StepOutcome(self._loss, self._tokens, update)

    # -- what the runner asks for ---------------------------------------------------------------

    def forward(self, microbatch: int) -> torch.Tensor:
        """Return the sum of the token losses of one microbatch."""
        self.parts.rng.position = (self.iteration, microbatch)
        batch = self._source.batch(self._consumed, microbatch, self._mesh.dp.rank)
        batch = batch.context_shard(self._mesh.cp).to(self._device)
        losses = token_losses(self.parts, batch)
        loss: torch.Tensor = (losses * batch.loss_mask).sum()
        self._sums += torch.stack([batch.loss_mask.sum(), loss.detach()])
        return loss

    def _root_gradient(self) -> torch.Tensor | None:
        scale = self.parts.optimizer.backward_scale
        return None if scale == 1.0 else torch.tensor(scale, device=self._device)

    def _before_backward(self, action: Action) -> None:
        if action == self._last_backward:
            self.parts.ddp.expect_last_backward()

    def sync_gradients(self) -> None:
        """Sum gradients, tokens and losses over the replicas and normalise by the tokens."""
        totals = finalize_gradients(self.parts.ddp, self._mesh, self._sums)
        self._tokens, loss = totals.tolist()
        self._loss = loss / max(self._tokens, 1.0)

    def sync_amax(self) -> None:
        """Make the scales of the next step, unless this step is not taken.

        A step that overflowed recorded infinities, which would freeze the scales for as long as
        they stay in the history.
        """
        self._grad_norm = self.parts.optimizer.measure()
        if math.isfinite(self._loss) and math.isfinite(self._grad_norm):
            self.parts.fp8.sync(self._mesh.amax)
        else:
            self.parts.fp8.discard()


def token_losses(parts: Parts, batch: Batch) -> torch.Tensor:
    """Run the model on a batch: fp32 losses `[b, s]`."""
    losses: torch.Tensor = parts.ddp(
        batch.tokens, batch.position_ids, batch.labels, document_starts=batch.document_starts
    )
    return losses


@torch.no_grad()
def parameters_are_finite(parts: Parts, world: Axis) -> bool:
    """Return whether every parameter on every rank is a number. Collective."""
    finite = [torch.isfinite(p).all() for p in parts.model.parameters()]
    flag = torch.stack(finite).all().float().reshape(1)
    return bool(all_reduce_(flag, world, "min").item())


@torch.no_grad()
def evaluate(
    cfg: RunConfig,
    runtime: Runtime,
    parts: Parts,
    source: Source,
    consumed_samples: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the token-weighted mean loss of ``--eval-iters`` batches. Collective.

    Dropout is off and FP8 records nothing: an evaluation leaves no trace in the training.

    Args:
        cfg: The configuration.
        runtime: Mesh and device.
        parts: Model and FP8 state.
        source: The batches.
        consumed_samples: Samples of this split that were read before.
        should_stop: Asked before every batch, on all ranks; ends the evaluation early.

    Returns:
        The loss, None when the evaluation was ended early.
    """
    mesh, device = runtime.mesh, runtime.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    parts.ddp.eval()
    try:
        with parts.fp8.not_recording():
            for iteration in range(cfg.eval_iters):
                if should_stop():
                    return None
                consumed = consumed_samples + iteration * cfg.global_batch_size
                for microbatch in range(cfg.num_microbatches):
                    batch = source.batch(consumed, microbatch, mesh.dp.rank)
                    batch = batch.context_shard(mesh.cp).to(device)
                    losses = token_losses(parts, batch)
                    loss = (losses * batch.loss_mask).sum()
                    sums += torch.stack([batch.loss_mask.sum(), loss])
    finally:
        parts.ddp.train()
    tokens, loss_sum = all_reduce_(sums, mesh.dp_cp).tolist()
    return float(loss_sum / max(tokens, 1.0))
