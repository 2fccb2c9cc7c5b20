"""Build what a run consists of. Used by training, by tools and by tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core.build import Build
from megatron.core.datasets.build import Position
from megatron.core.datasets.history import Record
from megatron.core.datasets.source import Sources, build_sources
from megatron.core.datasets.tokenizers import Tokenizer, build_tokenizer
from megatron.core.distributed.ddp import DistributedDataParallel
from megatron.core.errors import BackendUnavailable, complaint
from megatron.core.fp8 import Fp8State
from megatron.core.fp8.primary import weights_in_fp8
from megatron.core.fp8.ranges import Ranges
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MixedPrecisionOptimizer, build_optimizer, build_scheduler
from megatron.core.optimizer.lr import ParamScheduler
from megatron.core.pipeline_parallel.layout import local_stages
from megatron.core.shards import global_shape, is_expert, shard_axis
from megatron.core.tensor_parallel.mappings import gather_objects
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.checkpoint_config import saved_settings
from megatron.training.finding import read_newest_common
from megatron.training.initialize import Runtime
from megatron.training.progress import Progress
from megatron.training.residual_entries import Residual

_ROOMY = 1.5  # a vocabulary this many times larger than the tokenizer's is hardly meant
_WIRE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Parts:
    """A model with everything that trains it.

    Attributes:
        model: The bare model; its parameter names are checkpoint names.
        ddp: The same model with fp32 gradient buffers.
        optimizer: Updates the parameters.
        scheduler: Learning rate and weight decay.
        fp8: FP8 state of the model's linear layers.
        rng: Random streams of dropout.
        weight_grads: Where linear layers put off their weight gradients, if the schedule wants it.
    """

    model: GPTModel
    ddp: DistributedDataParallel
    optimizer: MixedPrecisionOptimizer
    scheduler: ParamScheduler
    fp8: Fp8State
    rng: RngStreams
    weight_grads: WeightGradQueue | None = None

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter; of weights that rest in FP8 the masters that this rank has."""
        for name, param in self.model.named_parameters():
            if not self.ddp.is_in_fp8(param):
                yield name, param.detach()
        for slot in self.optimizer.slots:
            if self.ddp.is_in_fp8(slot.param):
                yield slot.name, slot.master.detach()

    def residual(self, cfg: RunConfig, mesh: ParallelState) -> Residual | None:
        """What FP8 gradient reductions keep for the next step; None if they keep nothing."""
        keep_sum = cfg.ckpt_grad_residual == "sum"
        return Residual(self.ddp, mesh, keep_sum) if self.ddp.keeps_residual else None


def saved_config(load: str, step: int | None = None) -> dict[str, Any] | None:
    """Return the settings that a checkpoint was made with, None where there is no checkpoint.

    Args:
        load: A checkpoint folder, or one of its ``iter_XXXXXXX`` folders.
        step: Iteration to look at instead of the newest.

    Raises:
        CheckpointError: There is one and it is unusable.
    """
    common = read_newest_common(load, step)
    return None if common is None else saved_settings(common)


def with_tokenizer(runtime: Runtime) -> tuple[Runtime, Tokenizer]:
    """Build the tokenizer and complete the configuration with its vocabulary size.

    Raises:
        DataError: The tokenizer cannot be built, or `--vocab-size` is too small for it.
    """
    cfg = runtime.config
    tokenizer = build_tokenizer(cfg.data)
    if cfg.padded_vocab_size is None:
        runtime = replace(runtime, config=cfg.replace(vocab_size=tokenizer.vocab_size))
    return runtime, tokenizer


def vocabulary_notices(cfg: RunConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return a line if many rows of the embedding belong to no token.

    Args:
        cfg: The complete configuration.
        tokenizer: Its tokenizer.
    """
    rows, ids = cfg.padded_vocab_size, tokenizer.vocab_size
    if cfg.vocab_size is None or cfg.vocab_size <= _ROOMY * ids:
        return ()
    return (
        f"the tokenizer has {ids:,} ids and the model {rows:,} rows (--vocab-size"
        f" {cfg.vocab_size}): {rows - ids:,} rows of the embedding are never used; without"
        " --vocab-size the tokenizer's ids decide",
    )


def build_gpt(
    cfg: RunConfig, runtime: Runtime, weight_grads: WeightGradQueue | None = None
) -> tuple[GPTModel, Fp8State, RngStreams]:
    """Build the model alone, e.g. for a tool that only runs it.

    Args:
        cfg: The configuration; `padded_vocab_size` must be known (see `with_tokenizer`).
        runtime: Mesh, backend and device.
        weight_grads: Where linear layers may put off their weight gradients.
    """
    fp8 = Fp8State.from_config(cfg, runtime.device)
    if runtime.fallback is not None:
        fp8.replaced = (runtime.fallback.instead_of, runtime.fallback.why)
    fp8.rng = rng = RngStreams(cfg.seed, runtime.mesh, runtime.device)
    build = Build(
        config=cfg,
        mesh=runtime.mesh,
        backend=runtime.backend,
        fp8=fp8,
        rng=rng,
        device=runtime.device,
        weight_grads=weight_grads,
    )
    stages = local_stages(cfg, runtime.mesh.pp)
    model = GPTModel(build, stages=stages)
    if cfg.nvtx_ranges:
        fp8.ranges = Ranges(runtime.device)
        fp8.ranges.attach(model, {r.path: r.delivered for r in model.named_precision_rows()})
    return model, fp8, rng


def setup_model(cfg: RunConfig, runtime: Runtime) -> Parts:
    """Build the model, its gradient buffers, the optimizer and the scheduler.

    Raises:
        BackendUnavailable: The backend's linear layers cannot do what the pipeline schedule needs.
    """
    _check_backend(cfg, runtime)
    weight_grads = WeightGradQueue() if cfg.pipeline_schedule == "zb-h1" else None
    model, fp8, rng = build_gpt(cfg, runtime, weight_grads)
    mesh = runtime.mesh
    ddp = DistributedDataParallel(
        model,
        mesh.dp_cp_inner,
        expert_dp_axis=mesh.edp_inner,
        outer_axis=mesh.dp_cp_outer,
        expert_outer_axis=mesh.edp_outer,
        reduce_dtype=_WIRE_TYPES[cfg.grad_reduce_dtype],
        error_feedback=cfg.grad_reduce_error_feedback,
        sharded=cfg.use_distributed_optimizer,
        bucket_size=cfg.ddp_bucket_size,
        num_buckets=cfg.ddp_num_buckets,
        overlap_reduce=cfg.overlap_grad_reduce,
        overlap_gather=cfg.overlap_param_gather,
        weight_grads=weight_grads,
        fp8_weights=dict(weights_in_fp8(model)) if cfg.fp8_param_gather else None,
    )
    shards = ddp if cfg.use_distributed_optimizer else None
    optimizer = build_optimizer(cfg, model, mesh, shards)
    scheduler = build_scheduler(cfg, optimizer)
    optimizer.refresh_model_params()
    ddp.finish_param_sync()
    return Parts(model, ddp, optimizer, scheduler, fp8, rng, weight_grads)


def _check_backend(cfg: RunConfig, runtime: Runtime) -> None:
    """Refuse what only native layers can do."""
    if runtime.backend.name == "native":
        return
    if cfg.pipeline_schedule == "zb-h1":
        raise BackendUnavailable(
            complaint(
                "--pipeline-schedule",
                f"zb-h1 with {runtime.backend.name}",
                "Its linear layers compute both gradients at once",
                "Use --transformer-impl native, or --pipeline-schedule 1f1b",
            )
        )
    if cfg.fp8_param_gather:
        raise BackendUnavailable(
            complaint(
                "--fp8-param-gather",
                f"it with {runtime.backend.name}",
                "Its linear layers keep weights that they quantize themselves",
                "Use --transformer-impl native, or remove the flag",
            )
        )


def count_parameters(model: torch.nn.Module, mesh: ParallelState) -> int:
    """Return the parameters of the whole model, of which this rank may hold a part. Collective."""
    count = 0
    for param in model.parameters():
        if not getattr(param, "shared", False):
            whole = math.prod(global_shape(param, shard_axis(param, mesh).size))
            count += whole * (mesh.ep.size if is_expert(param) else 1)
    return sum(gather_objects(count, mesh.pp))


def data_position(progress: Progress) -> Position:
    """Return where a run is in its data."""
    return Position(
        iteration=progress.iteration,
        trained=progress.trained_samples,
        valid=progress.consumed_valid_samples,
        record=Record.of(progress.data) if progress.data else None,
    )


def setup_sources(
    cfg: RunConfig, tokenizer: Tokenizer, runtime: Runtime, progress: Progress | None = None
) -> Sources:
    """Build the training, validation and test batches. Collective: every rank calls it.

    Args:
        cfg: The configuration.
        tokenizer: The tokenizer the corpus was written with.
        runtime: Mesh and device.
        progress: How far the run has come.
    """
    position = None if progress is None else data_position(progress)
    return build_sources(cfg, tokenizer, runtime.mesh, position)
