"""Write a checkpoint of parts that a test has built, without a trainer."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing.peers import Peers
from megatron.training.checkpointing import collect


def save_checkpoint(cfg, mesh, *, progress, **parts):
    """Save below `cfg.save`, as a run does; every rank calls this. Returns the directory."""
    entries = collect(cfg, mesh, progress=progress, **parts)
    saved = io.save(
        Path(cfg.save),
        progress.iteration,
        entries.tensors,
        entries.blobs,
        Peers(mesh.world),
        entries.assets,
    )
    return saved.directory
