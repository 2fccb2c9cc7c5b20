"""Runs of a small model with Adam, step by step, with checkpoints between them."""

from __future__ import annotations

import math

from megatron.config import make_config
from megatron.core.dist_checkpointing.storage import Reader
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import Launch, start
from megatron.training.parity.outcome import global_weights
from megatron.training.progress import Progress
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.parity import BASE, SyntheticSource
from tests.saving import save_checkpoint

# Without linear biases: a key's bias has a gradient of zero up to rounding, which Adam magnifies.
ADAM = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5,
        "add_bias_linear": False}  # fmt: skip
RUN = {"train_iters": 9, "save_interval": 9}


def build(rank, world, **fields):
    cfg = make_config(world_size=world, **{**BASE, **ADAM, **RUN, **fields})
    runtime = start(cfg, Launch(rank, world, rank, world))
    parts = setup_model(cfg, runtime)
    source = SyntheticSource(cfg, runtime.mesh.dp.size)
    return cfg, runtime.mesh, parts, TrainStep(cfg, runtime, parts, source)


def advance(cfg, parts, step, first, count):
    done = []
    for iteration in range(first, first + count):
        outcome = step.run(iteration, (iteration - 1) * cfg.global_batch_size)
        update = outcome.update
        norm = update.grad_norm if update.success else None
        done.append((outcome.loss, norm, update.num_zeros, update.success))
        if update.success:
            assert math.isfinite(parts.optimizer.params_norm())
    parts.ddp.finish_param_sync()
    return done


def store(cfg, mesh, parts, iteration=2):
    parts.ddp.finish_param_sync()
    progress = Progress(iteration=iteration)
    return save_checkpoint(
        cfg, mesh, model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler,
        fp8=parts.fp8, progress=progress, residual=parts.residual(cfg, mesh),
    )  # fmt: skip


def fetch(cfg, mesh, parts):
    """Load; returns what was said."""
    said = []
    assert load_checkpoint(
        cfg, mesh, model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler,
        fp8=parts.fp8, progress=Progress(), residual=parts.residual(cfg, mesh),
        say=said.append,
    )  # fmt: skip
    return said


def weights(mesh, parts):
    """Global weights by name, as arrays."""
    return {name: w.float().numpy() for name, w in global_weights(parts, mesh).items()}


def resume(rank, world, root, **fields):
    """Four steps in one go, and two, a checkpoint, a new model, two more."""
    straight = build(rank, world, **fields)
    expected = advance(straight[0], straight[2], straight[3], 1, 4)
    cfg, mesh, parts, step = build(rank, world, save=str(root), load=str(root), **fields)
    first = advance(cfg, parts, step, 1, 2)
    store(cfg, mesh, parts)
    cfg, mesh, parts, step = build(rank, world, save=str(root), load=str(root), **fields)
    fetch(cfg, mesh, parts)
    second = advance(cfg, parts, step, 3, 2)
    own, other = weights(mesh, parts), weights(straight[1], straight[2])
    return first + second == expected, all((own[n] == other[n]).all() for n in own)


def make_checkpoint(rank, world, root, **fields):
    cfg, mesh, parts, step = build(rank, world, save=str(root), **fields)
    advance(cfg, parts, step, 1, 2)
    store(cfg, mesh, parts)


def pass_on(rank, world, source, target, **fields):
    """Load under one layout and save again at once."""
    cfg, mesh, parts, _ = build(rank, world, load=str(source), save=str(target), **fields)
    fetch(cfg, mesh, parts)
    store(cfg, mesh, parts)


def content(root):
    reader = Reader(root / "iter_0000002")
    return {key: reader.read(key) for key in reader.tensors}
