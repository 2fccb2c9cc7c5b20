"""What a dry run found, as text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import RunConfig
from megatron.core.dist_checkpointing.shard import volume
from megatron.core.mesh import MeshSizes
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.training.communication import (
    aligned,
    lines,
    readable,
    saving_lines,
    sent_bytes,
)
from megatron.training.dry_run.checks import Stored
from megatron.training.dry_run.ranks import RankClass, World, spans

_GIB = 2.0**30
_COLUMNS = (
    "pipeline rank",
    "ranks",
    "parameters",
    "weights",
    "gradients",
    "optimizer",
    "fp8",
    "activations",
    "kept passes",
    "temporary",
    "total",
)


def mesh_lines(cfg: RunConfig, groups: dict[str, tuple[int, int]]) -> list[str]:
    """Describe the mesh."""
    found = "; ".join(f"{name}: {count} x {size}" for name, (count, size) in groups.items())
    sizes = MeshSizes.from_config(cfg, cfg.world_size)
    mesh = sizes.text(experts=cfg.num_experts is not None)
    return [
        f"dry run: {cfg.world_size} rank(s) on paper, {mesh}",
        f"groups (number x ranks): {found}" if found else "groups: none, there is one rank",
    ]


def schedule_line(world: World) -> str:
    """Describe the pipeline schedule."""
    cfg = world.config
    size, virtual = cfg.pipeline_model_parallel_size, cfg.virtual_pipeline_model_parallel_size
    if size == 1:
        return f"schedule: {cfg.num_microbatches} microbatch(es) a step, one pipeline stage"
    bubble = simulate(world.schedule).bubble
    stages = f", {virtual} stages a rank" if virtual > 1 else ""
    return (
        f"schedule: {cfg.pipeline_schedule}{stages}, {cfg.num_microbatches} microbatches a step, "
        f"ends on every rank; bubble {bubble:.1%} of the computing time (backward 2, forward 1)"
    )


def data_lines(cfg: RunConfig, splits: Sequence[str]) -> list[str]:
    """Describe the samples."""
    return [
        f"data: {cfg.data_parallel_size} replica(s) x {cfg.num_microbatches} microbatch(es) x "
        f"{cfg.micro_batch_size} read each of the {cfg.global_batch_size} samples of a step once",
        *(f"  {line}" for split in splits for line in split.splitlines()),
    ]


def checkpoint_line(stored: Stored) -> str:
    """Describe a checkpoint."""
    return (
        f"checkpoint: {len(stored.model)} tensors of the model in {stored.blocks} blocks, and "
        f"{', '.join(stored.kinds)} of the optimizer for each; every element is stored once"
    )


def residual_line(cfg: RunConfig, stored: Stored) -> str:
    """Say what FP8 gradients add to a checkpoint; empty if nothing."""
    sizes = MeshSizes.from_config(cfg, cfg.world_size)
    replicas = (cfg.data_parallel_size * cfg.context_parallel_size, sizes.edp)
    keeps = cfg.grad_reduce_dtype == "fp8" and cfg.grad_reduce_error_feedback
    if not keeps or cfg.no_save_optim or replicas[0] == 1:
        return ""
    each = cfg.ckpt_grad_residual == "each"
    count = sum(
        volume(shard.size()) * (replicas[".experts." in key] if each else 1)
        for key, shard in stored.model.items()
    )
    who = "each replica keeps" if each else "all replicas keep together"
    return (
        f"checkpoint: what {who} of FP8 gradients for the next step takes {readable(4 * count)} "
        "(--ckpt-grad-residual)"
    )


def memory_lines(classes: Sequence[RankClass]) -> list[str]:
    """Return the table of memory."""
    cells = []
    for one in classes:
        kept = one.kept
        sizes = [
            kept.weights,
            kept.gradients,
            kept.optimizer,
            kept.fp8 + one.cached_bytes,
            one.peak.activations,
        ]
        temporary = one.peak.total - one.peak.activations
        cells.append(
            [
                spans(one.pipeline_ranks),
                str(one.ranks),
                f"{one.parameters:,}",
                *(f"{size / _GIB:.3f}" for size in sizes),
                str(one.peak.microbatches),
                f"{temporary / _GIB:.3f}",
                f"{one.total_bytes / _GIB:.3f}",
            ]
        )
    uneven = [one for one in classes if one.least_optimizer != one.kept.optimizer]
    notes = []
    if uneven:
        least = min(one.kept.optimizer - one.least_optimizer for one in uneven)
        most = max(one.kept.optimizer - one.least_optimizer for one in uneven)
        between = readable(most) if least == most else f"{readable(least)} to {readable(most)}"
        notes = [f"(of the optimizer some replicas keep up to {between} less)"]
    return [
        "memory of a rank at the worst moment of a step (GiB):",
        *(f"  {line}" for line in aligned([_COLUMNS, *cells], numbers_from=1)),
        *notes,
    ]


def snapshot_line(cfg: RunConfig, num_bytes: int) -> str:
    """Describe the snapshots of ``--fp8-spike-rollback``, which the table leaves out."""
    place = "device" if cfg.fp8_spike_rollback_memory == "device" else "host"
    return f"on top, for --fp8-spike-rollback: about {readable(num_bytes)} of {place} memory a rank"


def communication_lines(classes: Sequence[RankClass]) -> list[str]:
    """Return what each kind of rank sends."""
    alike: dict[tuple[object, ...], list[RankClass]] = {}
    for one in classes:
        alike.setdefault(one.communication, []).append(one)
    text = []
    for group in alike.values():
        rows = group[0].communication
        where = spans(sorted(n for one in group for n in one.pipeline_ranks))
        total = readable(sent_bytes(rows))
        text.append(f"communication of a step, ranks of pipeline rank {where}: {total} sent")
        text += [f"  {line}" for line in (*lines(rows), *saving_lines(rows))]
    return text
