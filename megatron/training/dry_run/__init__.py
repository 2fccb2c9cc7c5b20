"""A run on paper: everything that a real launch builds and checks, without the other processes.

Parameters and activations are tensors without values (`meta`), ranks are built one at a time, and
nothing is sent or written. What a real launch refuses is refused with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from megatron.config import ConfigError, Problem, RunConfig
from megatron.core.backends.registry import choose
from megatron.core.datasets.source import check_sources
from megatron.core.datasets.tokenizers import Tokenizer, build_tokenizer
from megatron.core.fp8 import PrecisionRow
from megatron.core.mesh import ParallelState
from megatron.core.pipeline_parallel.layout import checked_schedule
from megatron.observe.lines import precision_table
from megatron.training import precision
from megatron.training.checkpointing import check_load, check_save
from megatron.training.communication import Row
from megatron.training.dry_run import report
from megatron.training.dry_run.checks import (
    check_checkpoint,
    check_groups,
    check_samples,
    stored_model,
    stored_optimizer,
)
from megatron.training.dry_run.ranks import World
from megatron.training.dry_run.trace import Trace, build_rank
from megatron.training.providers import vocabulary_notices
from megatron.training.snapshot import changing_tensors

Say = Callable[[str], None]


def dry_run(cfg: RunConfig, notices: Iterable[str], say: Say) -> None:
    """Try a run out on paper.

    Args:
        cfg: The finished configuration.
        notices: Lines about it that the user should see.
        say: Shows a line.

    Raises:
        MegatronError: What would stop the real run, as far as it can be known here.
    """
    for notice in notices:
        say(f"NOTE: {notice}")
    if cfg.device == "cpu":
        warning = choose(cfg, torch.device("cpu")).warning
        if warning:
            say(f"WARNING: {warning}")
    planned, tokenizer = complete(cfg)
    for notice in vocabulary_notices(planned, tokenizer):
        say(f"NOTE: {notice}")
    plan = planned.batches()
    cfg = planned.with_batch(plan.largest)
    _show(say, report.mesh_lines(cfg, check_groups(cfg)))
    check_save(cfg, ParallelState.single(), say, keep=False)
    world = World(cfg)
    stored = check_checkpoint(world.stages, world.different)
    check_load(
        cfg,
        lambda stacking: stored_model(world.stages, stacking),
        lambda stacking: stored_optimizer(world.stages, stacking),
        say,
    )
    say(f"parameters: {stored.parameters:,} in {len(stored.model)} tensors")
    _show_precision(cfg, world.precision_rows(), say)
    for size in sorted(set(plan.sizes)):
        check_samples(cfg.with_batch(size))
        checked_schedule(cfg.with_batch(size))
    _show(say, report.data_lines(cfg, check_sources(planned, tokenizer)))
    if not plan.constant:
        say(f"batch sizes: {plan.text()}; figures here are those of the largest")
    say(report.schedule_line(world))
    say(report.checkpoint_line(stored))
    _show(say, filter(None, [report.residual_line(cfg, stored)]))
    classes = world.classes()
    _show(say, report.memory_lines(classes))
    if cfg.fp8_spike_rollback:
        sizes = [sum(t.nbytes for t in changing_tensors(rank.parts)) for rank in world.stages]
        say(report.snapshot_line(cfg, max(sizes)))
    _show(say, report.communication_lines(classes))
    _show(say, ["not checked here:", *(f"  - {line}" for line in _unchecked(cfg))])
    say("the dry run is done: nothing was found that would stop this run")


def complete(cfg: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Return the configuration with its vocabulary size, and the tokenizer.

    Raises:
        DataError: The tokenizer cannot be built, or `--vocab-size` is too small for it.
    """
    tokenizer = build_tokenizer(cfg.data)
    if cfg.padded_vocab_size is None:
        cfg = cfg.replace(vocab_size=tokenizer.vocab_size)
    return cfg, tokenizer


def communication(
    cfg: RunConfig, rank: int | None = None
) -> list[tuple[tuple[int, ...], tuple[Row, ...]]]:
    """Return what ranks send in a step.

    Args:
        cfg: The complete configuration.
        rank: A global rank; None for all.

    Returns:
        The rank and what it sends; or pipeline ranks and what ranks there send, once for those that
        send the same.

    Raises:
        ConfigError: There is no such rank.
    """
    if rank is None:
        return World(cfg).communication()
    if not 0 <= rank < cfg.world_size:
        why = f"The run has the ranks 0 to {cfg.world_size - 1}"
        raise ConfigError([Problem(("--rank",), rank, why, "Choose one of them")])
    on_paper = build_rank(cfg, rank)
    actions = checked_schedule(cfg)[on_paper.mesh.pp.rank]
    return [((rank,), Trace(on_paper, actions).communication(actions))]


def _show(say: Say, text: Iterable[str]) -> None:
    for line in text:
        say(line)


def _show_precision(cfg: RunConfig, rows: list[PrecisionRow], say: Say) -> None:
    found = precision.summarize(rows, cfg=cfg)
    say(precision_table(found.lines, shares=found.shares))
    if cfg.fp8_warmup_iters:
        say(f"until iteration {cfg.fp8_warmup_iters} nothing is in FP8 (--fp8-warmup-iters)")
    if not cfg.fp8_allow_fallback:
        precision.refuse_fallback(rows)
    elif precision.fallback_warning(rows):
        say(f"WARNING: {precision.fallback_warning(rows)}")


def _unchecked(cfg: RunConfig) -> Iterator[str]:
    """Say what only the real run can find."""
    if cfg.device == "cpu":
        yield "this machine: whether so much memory is there (kernels on a CPU keep a little less)"
    else:
        yield "GPUs: whether they are there, their memory, FP8 in hardware (assumed)"
        yield "the memory of CUDA, NCCL and the allocator's gaps, which comes on top"
    if cfg.transformer_impl != "native" and cfg.device != "cpu":
        yield "Transformer Engine: the figures are those of the native layers"
    if cfg.world_size > 1:
        yield "other machines: network, files that are not the same there"
    if not cfg.mock_data:
        yield "the corpus' tokens, and the index files, which the first real run builds"
    if cfg.load is not None:
        yield "the contents of the checkpoint's files"
