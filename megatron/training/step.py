"""One iteration: every microbatch forward and backward, then one update; and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.config import RunConfig
from megatron.core.comm_log import LOSS
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.source import Source
from megatron.core.distributed.finalize import finalize_gradients
from megatron.core.fp8 import watched
from megatron.core.mesh import Axis
from megatron.core.optimizer import StepResult
from megatron.core.paper import numbers
from megatron.core.pipeline_parallel.layout import checked_schedule
from megatron.core.pipeline_parallel.p2p import Pipes
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedule import Action, Op
from megatron.core.tensor_parallel.mappings import all_reduce_
from megatron.training.auxiliary import MoeReport, MoeStep
from megatron.training.initialize import Runtime
from megatron.training.providers import Parts


@dataclass(frozen=True)
class StepOutcome:
    """What one iteration did, the same on every rank.

    Attributes:
        loss: Mean loss over the unmasked tokens of the whole batch.
        tokens: Number of those tokens.
        update: The optimizer's report.
        moe: What layers with experts did; empty without them.
    """

    loss: float
    tokens: float
    update: StepResult
    moe: MoeReport = field(default_factory=MoeReport)

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)


class BatchSource(Protocol):
    """Where microbatches come from; `Source` is one."""

    def batch(self, consumed_samples: int, microbatch: int, dp_rank: int) -> Batch:
        """Return one microbatch."""


class Batches:
    """The microbatches of one step, each read once although several stages may need it.

    Args:
        source: Where they come from.
        runtime: Mesh and device.
    """

    def __init__(self, source: BatchSource, runtime: Runtime) -> None:
        self._source, self._device = source, runtime.device
        self._dp_rank, self._cp = runtime.mesh.dp.rank, runtime.mesh.cp
        self._consumed = 0
        self._kept: dict[int, Batch] = {}

    def start(self, consumed_samples: int) -> None:
        """Begin a step."""
        self._consumed = consumed_samples
        self._kept.clear()

    def count_tokens(self, microbatches: Sequence[int]) -> torch.Tensor:
        """Return the unmasked tokens of all microbatches; they are read now and kept for later."""
        masks = []
        for microbatch in microbatches:
            masks.append(self.get(microbatch, last_use=False).loss_mask.sum())
        return torch.stack(masks).sum()

    def get(self, microbatch: int, last_use: bool) -> Batch:
        """Return a microbatch; after its last use it is forgotten."""
        batch = self._kept.pop(microbatch, None)
        if batch is None:
            batch = self._source.batch(self._consumed, microbatch, self._dp_rank)
            batch = batch.context_shard(self._cp).to(self._device)
        if not last_use:
            self._kept[microbatch] = batch
        return batch


def pipes_of(cfg: RunConfig, runtime: Runtime) -> Pipes | None:
    """Return the channels to the other pipeline stages, None without any."""
    mesh = runtime.mesh
    if mesh.pp.size == 1:
        return None
    split = mesh.cp.size * (mesh.tp.size if cfg.sequence_parallel else 1)
    shape = (cfg.seq_length // split, cfg.micro_batch_size, cfg.hidden_size)
    return Pipes(mesh, shape, getattr(torch, cfg.params_dtype), runtime.device)


def run_stage(
    parts: Parts,
    batches: Batches,
    sums: torch.Tensor,
    stage: int,
    microbatch: int,
    received: torch.Tensor | None,
) -> torch.Tensor:
    """Run one stage forward.

    Args:
        parts: The model.
        batches: The step's microbatches.
        sums: `[tokens, loss]`; the last stage adds its own.
        stage: Number of the stage in the pipeline.
        microbatch: Number of the microbatch.
        received: `[s or s/tp, b, h]` from the stage before, None in the first one.

    Returns:
        `[s or s/tp, b, h]` for the next stage; in the last one the sum of the token losses.
    """
    stages = parts.model.stages
    index = next(i for i, one in enumerate(stages) if one.index == stage)
    batch = batches.get(microbatch, last_use=index == len(stages) - 1)
    output: torch.Tensor = parts.ddp(
        batch.tokens,
        batch.position_ids,
        batch.labels,
        document_starts=batch.document_starts,
        hidden=received,
        stage=index,
    )
    if not stages[index].loss:
        return output
    loss: torch.Tensor = (output * batch.loss_mask).sum()  # [b, s]
    sums += torch.stack([batch.loss_mask.sum(), loss.detach()])
    return loss


@dataclass(frozen=True)
class _Plan:
    """What this rank does in steps of one batch size."""

    batch_size: int
    actions: Sequence[Action]
    microbatches: Sequence[int]
    last_backward: Action

    @classmethod
    def of(cls, batch_size: int, actions: Sequence[Action]) -> _Plan:
        numbers = sorted({a.microbatch for a in actions if a.microbatch is not None})
        return cls(batch_size, actions, numbers, [a for a in actions if a.op is Op.B][-1])


class TrainStep:
    """Runs iterations of training; the work that the schedule's runner asks for.

    Args:
        cfg: The configuration.
        runtime: Mesh and device.
        parts: Model, optimizer, scheduler, FP8 state.
        source: Training batches.
        actions: What this rank does in a step; default what the configuration's schedule says.

    Attributes:
        iteration: Number of the iteration that was started last, 0 before the first.
    """

    def __init__(
        self,
        cfg: RunConfig,
        runtime: Runtime,
        parts: Parts,
        source: BatchSource,
        actions: Sequence[Action] | None = None,
    ) -> None:
        self.parts = parts
        self._mesh, self._device = runtime.mesh, runtime.device
        self._batches = Batches(source, runtime)
        self._cfg = cfg
        self._moe = MoeStep(cfg, runtime, parts.model) if cfg.num_experts is not None else None
        # FP16 overflows on purpose while the loss scale is found, so it always skips.
        self._skip_non_finite = bool(cfg.check_for_nan_in_loss_and_grad or cfg.fp16)
        self._runner = Runner(
            self,
            self._root_gradient,
            pipes_of(cfg, runtime),
            self._before_backward,
            parts.weight_grads,
        )
        size = int(cfg.global_batch_size)
        self._plan = _Plan.of(size, actions or checked_schedule(cfg)[self._mesh.pp.rank])
        self.iteration = 0
        # [tokens, loss] summed over this rank's microbatches, later over the whole batch.
        self._sums = torch.zeros(2, device=self._device)
        self._loss, self._tokens, self._grad_norm = 0.0, 0.0, 0.0

    @property
    def current(self) -> str:
        """Which action is in progress, empty between iterations."""
        return str(self._runner.current or "")

    def use_batch(self, size: int) -> bool:
        """Make steps of another global batch from here on; return whether it is another one."""
        if size == self._plan.batch_size:
            return False
        schedule = checked_schedule(self._cfg.with_batch(size))
        self._plan = _Plan.of(size, schedule[self._mesh.pp.rank])
        return True

    def run(self, iteration: int, consumed_samples: int) -> StepOutcome:
        """Run one iteration. Collective.

        Args:
            iteration: Its number, counted from 1; dropout depends on it.
            consumed_samples: Samples read before it; the data depend on it.
        """
        self.gradients(iteration, consumed_samples)
        skip = self._skip_non_finite and not math.isfinite(self._loss)
        update = self.parts.optimizer.step(self._grad_norm, skip=skip)
        if update.success:
            self.parts.scheduler.step(self._plan.batch_size)
        else:
            self.parts.ddp.drop_residual()
        report = MoeReport() if self._moe is None else self._moe.finish(update.success)
        return StepOutcome(self._loss, self._tokens, update, report)

    def gradients(self, iteration: int, consumed_samples: int) -> float:
        """Run the forward and backward passes of an iteration; the parameters stay. Collective.

        Args:
            iteration: As for `run`.
            consumed_samples: As for `run`.

        Returns:
            The mean loss. The gradient is left in the parameters' buffers.
        """
        self.iteration = iteration
        self.parts.fp8.begin(iteration)
        self.parts.optimizer.refresh_model_params()
        self._sums.zero_()
        self._batches.start(consumed_samples)
        self.parts.ddp.zero_grad_buffer(self.parts.optimizer.backward_scale)
        stats = self.parts.fp8.stats
        if stats is not None:
            stats.begin_step(iteration)
        if self._moe is not None:
            tokens = None
            if self._moe.needs_tokens:
                tokens = self._batches.count_tokens(self._plan.microbatches)
            scale = self.parts.optimizer.backward_scale
            self._moe.start(tokens, scale, len(self._plan.microbatches))
        self._runner.run(self._plan.actions)
        if stats is not None:
            stats.end_step(watched.layers(self.parts.fp8))
        return self._loss

    # -- what the runner asks for ---------------------------------------------------------------

    def forward(self, stage: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run a stage on one microbatch; the last one returns the sum of its token losses."""
        self.parts.rng.position = (self.iteration, microbatch)
        return run_stage(self.parts, self._batches, self._sums, stage, microbatch, received)

    def _root_gradient(self) -> torch.Tensor | None:
        scale = self.parts.optimizer.backward_scale
        return None if scale == 1.0 else torch.tensor(scale, device=self._device)

    def _before_backward(self, action: Action) -> None:
        if action == self._plan.last_backward:
            self.parts.ddp.expect_last_backward()

    def sync_gradients(self) -> None:
        """Sum gradients, tokens and losses over the replicas and normalise by the tokens."""
        sums = all_reduce_(self._sums, self._mesh.pp, part=LOSS)  # only the last stage has counted
        totals = finalize_gradients(self.parts.ddp, self._mesh, sums)
        self._tokens, loss = numbers(totals)
        self._loss = loss / max(self._tokens, 1.0)

    def sync_amax(self) -> None:
        """Make the scales of the next step, unless this step is not taken.

        A step that overflowed recorded infinities, which would freeze the scales for as long as
        they stay in the history.
        """
        self._grad_norm = self.parts.optimizer.measure()
        if math.isfinite(self._loss) and math.isfinite(self._grad_norm):
            self.parts.fp8.sync(self._mesh.amax, self._mesh.expert_amax)
        else:
            self.parts.fp8.discard()


@torch.no_grad()
def parameters_are_finite(parts: Parts, world: Axis) -> bool:
    """Return whether every parameter on every rank is a number. Collective."""
    finite = [torch.isfinite(weight).all() for _, weight in parts.named_weights()]
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
    mesh = runtime.mesh
    work = _Evaluation(runtime, parts, source)
    runner = Runner(work, transport=pipes_of(cfg, runtime))
    actions = checked_schedule(cfg, training=False)[mesh.pp.rank]
    parts.optimizer.refresh_model_params()
    parts.ddp.eval()
    try:
        with parts.fp8.not_recording():
            for iteration in range(cfg.eval_iters):
                if should_stop():
                    return None
                work.batches.start(consumed_samples + iteration * cfg.global_batch_size)
                runner.run(actions)
    finally:
        parts.ddp.train()
    tokens, loss_sum = all_reduce_(all_reduce_(work.sums, mesh.pp), mesh.dp_cp).tolist()
    return float(loss_sum / max(tokens, 1.0))


class _Evaluation:
    """What the schedule's runner asks for in an evaluation.

    Attributes:
        batches: The microbatches.
        sums: `[tokens, loss]` of this rank, fp64.
    """

    def __init__(self, runtime: Runtime, parts: Parts, source: Source) -> None:
        self._parts = parts
        self.batches = Batches(source, runtime)
        self.sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)

    def forward(self, stage: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        return run_stage(self._parts, self.batches, self.sums, stage, microbatch, received)

    def sync_gradients(self) -> None:
        """There are none."""

    def sync_amax(self) -> None:
        """Nothing is recorded."""
