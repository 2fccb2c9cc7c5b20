"""Saving and resuming a run.

What is stored: the model and the optimizer as global tensors, the counters, schedule and settings
as plain values, FP8 scales by layer, and each process's random state. Nothing in it depends on how
many processes wrote it, except the random state, which is used only by an equal arrangement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import exchange, io, plain, schema
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Sharded
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.dist_checkpointing.store import path_of
from megatron.core.errors import complaint
from megatron.core.mesh import ParallelState
from megatron.core.shards import FlatRange
from megatron.training import (
    checkpoint_config,
    finding,
    foreign_state,
    fp8_entries,
    megatron_entries,
    random_state,
)
from megatron.training.changed_settings import changes
from megatron.training.descriptions import Descriptions
from megatron.training.progress import Progress
from megatron.training.residual_entries import PREFIX as RESIDUAL_PREFIX
from megatron.training.residual_entries import Residual
from megatron.training.schedule_entries import load_schedule

Say = Callable[[str], None]
CHECKPOINT_VERSION = 3.0


class Optimizer(Protocol):
    """What a checkpoint needs of an optimizer."""

    def named_state(self) -> Any:
        """Yield (parameter name, kind -> local tensor), to be read."""

    @property
    def lends_copies(self) -> bool:
        """Whether some tensors of ``named_state`` are made anew each time."""

    def loadable_state(self) -> Any:
        """Yield the same to be written into."""

    def finish_load(self) -> None:
        """Take over what was written, and round the masters into the model's parameters."""

    @property
    def owned_ranges(self) -> Mapping[str, FlatRange]:
        """Which elements flat tensors of ``named_state`` hold, by parameter name."""

    def scalars(self) -> dict[str, Any]:
        """Return step counts and loss scale as plain values."""

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """Take over what ``scalars`` returned."""

    def reload_model_params(self, fp8_values: Any = None) -> None:
        """Take the masters from the model's parameters, and from ``fp8_values``."""

    def fp8_values(self) -> dict[str, tuple[Tensor, FlatRange]]:
        """Return copies of weights that rest in FP8, rounded from this rank's masters."""


class Scheduler(Protocol):
    """What a checkpoint needs of a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""


class Stateful(Protocol):
    """What a checkpoint needs of the FP8 state, and of what watches over a run."""

    def state_dict(self) -> dict[str, Any]:
        """Return a tree of tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Take it over; the returned sentences are shown to the user."""


def print_line(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _timestamp() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")


# ------------------------------------------------------------------------------------------- save


@dataclass(frozen=True)
class Entries:
    """What a rank contributes to a checkpoint; see `io.save`."""

    tensors: dict[str, Sharded]
    blobs: dict[str, bytes]
    assets: dict[str, Path | bytes]


def collect(
    cfg: RunConfig,
    mesh: ParallelState,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: Scheduler | None,
    fp8: Stateful | None,
    progress: Progress,
    residual: Residual | None = None,
    guards: Stateful | None = None,
    alone: bool = False,
    described: Descriptions | None = None,
) -> Entries:
    """Describe the run's present state as entries of a checkpoint. Every rank calls this.

    Plain values are copied; tensors are those of the run, which are to be copied or written before
    they change.

    Args:
        cfg: The configuration; ``no_save_optim`` and ``no_save_rng`` count here.
        mesh: The process mesh.
        model: The model, bare or wrapped for data parallelism.
        optimizer: None to leave it out.
        scheduler: None to leave it out.
        fp8: FP8 state, None without.
        progress: The counters.
        residual: What FP8 gradient reductions keep, None without.
        guards: What watches over the run, None without; plain values, the same on every rank.
        alone: Whether each rank keeps its own checkpoint, with the entry that all share.
        described: What is kept from save to save, by default nothing.
    """
    peers = Peers(mesh.world)
    bare = _bare(model)
    stacking = checkpoint_config.stacking_of(cfg)
    described = described or Descriptions()
    in_fp8 = optimizer.fp8_values() if optimizer is not None else {}
    tensors, empty = described.model(bare, mesh, stacking, in_fp8)
    blobs = dict.fromkeys(empty, plain.dump_nothing())
    if optimizer is not None and not cfg.no_save_optim:
        tensors.update(described.optimizer(optimizer, bare, mesh, stacking))
    kept = residual.save(stacking) if residual is not None else {}
    tensors.update({} if cfg.no_save_optim else kept)
    places = fp8_entries.Places.of(cfg, mesh)
    tree, fp8_tensors = fp8_entries.split(fp8.state_dict() if fp8 else {}, places)
    tensors.update(fp8_tensors)
    if mesh.pp.size > 1 or mesh.ep.size > 1:  # each rank knows its own layers only
        tree = fp8_entries.merge(peers.gather(tree))
    assets: dict[str, Path | bytes] = {}
    if peers.leads or alone:
        common = _common(cfg, mesh, None if cfg.no_save_optim else optimizer, scheduler, progress)
        watch = guards.state_dict() if guards else {}
        blobs[schema.COMMON_KEY] = plain.dump({**common, "fp8": tree, "guards": watch})
        assets[schema.COMMON_FILE] = blobs[schema.COMMON_KEY]  # for Megatron-Core up to 0.18
    if not cfg.no_save_rng:
        blobs[_rng_key(mesh)] = plain.dump(random_state.capture())
    return Entries(tensors, blobs, assets)


def saving_line(iteration: int, root: str | Path, ckpt_format: str) -> str:
    """Return the line that a save begins with, for log readers."""
    return (
        f"[{_timestamp()}] saving checkpoint at iteration {iteration:7d} to {root} "
        f"in {ckpt_format} format"
    )


def saved_line(iteration: int, root: str | Path, saved: io.Saved, mesh: ParallelState) -> str:
    """Return the line that tells that a checkpoint is complete on disk."""
    rate = saved.size_bytes / max(saved.seconds, 1e-9) / 1e6
    return (
        f"  [{_timestamp()}] successfully saved checkpoint from iteration {iteration:7d} to "
        f"{root} [ t {mesh.tp.rank + 1}/{mesh.tp.size}, p {mesh.pp.rank + 1}/{mesh.pp.size} ] "
        f"({saved.size_bytes / 1e6:.1f} MB in {saved.seconds:.2f} s, {rate:.0f} MB/s)"
    )


def check_save(
    cfg: RunConfig, mesh: ParallelState, say: Say = print_line, keep: bool = True
) -> None:
    """Find out at the start, not hours later, whether ``--save`` can be written to.

    Every rank calls this.

    Args:
        cfg: The configuration; without ``save`` nothing happens.
        mesh: The process mesh.
        say: Receives a warning when the run will replace checkpoints that it did not start from.
        keep: Whether the directory may stay if it was not there.

    Raises:
        CheckpointError: On every rank, when the first one cannot write there.
    """
    if cfg.save is None:
        return
    peers, root = Peers(mesh.world), path_of(cfg.save)
    peers.decide(lambda: place.check_writable(root, keep))
    if not peers.leads or (cfg.load is not None and path_of(cfg.load).resolve() == root.resolve()):
        return
    before = place.committed(root)
    if before:
        say(
            f"WARNING: --save: {root} holds checkpoints up to iteration {before[-1][0]} of a run "
            f"that is not continued here (--load is {cfg.load or 'not given'}). Those of the same "
            "iterations will be replaced, and a later --load takes what was saved last."
        )


def _bare(model: nn.Module) -> nn.Module:
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def _common(
    cfg: RunConfig,
    mesh: ParallelState,
    optimizer: Optimizer | None,
    scheduler: Scheduler | None,
    progress: Progress,
) -> dict[str, Any]:
    """The entry that all ranks share; the outer names are Megatron-Core's."""
    counters = progress.to_dict()
    args = argparse.Namespace(**{**cfg.to_dict(), **counters})
    scalars = optimizer.scalars() if optimizer else None
    schedule = scheduler.state_dict() if scheduler else None
    theirs = megatron_entries.entries(cfg, scalars, schedule)
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": progress.iteration,
        "args": args,
        "given": cfg.given_dict(),
        "num_floating_point_operations_so_far": progress.floating_point_operations_so_far,
        "progress": counters,
        "arrangement": finding.arrangement(mesh),
        "optimizer_scalars": scalars,
        **theirs,
    }


def _rng_key(mesh: ParallelState) -> str:
    return schema.RNG_KEY.format(rank=mesh.world.rank, size=mesh.world.size)


# ------------------------------------------------------------------------------------------- load


@dataclass
class _Loading:
    """One load in progress, the same decisions on every rank."""

    cfg: RunConfig
    mesh: ParallelState
    peers: Peers
    reader: Reader
    common: dict[str, Any]
    weights_only: bool
    say: Say
    alone: bool = False  # each rank reads a checkpoint of its own
    device: torch.device = torch.device("cpu")  # of the model

    def note(self, text: str) -> None:
        if self.peers.leads:
            self.say(text)

    def read(self, targets: Mapping[str, Sharded]) -> int:
        """Fill the targets; returns their bytes. Collective."""
        if not self.cfg.ckpt_fully_parallel_load or self.alone:
            return self.peers.attempt(lambda: self.reader.load(targets))
        return exchange.load(self.reader, targets, self.mesh, self.device)


def load_checkpoint(
    cfg: RunConfig,
    mesh: ParallelState,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: Scheduler | None,
    fp8: Stateful | None,
    progress: Progress,
    residual: Residual | None = None,
    guards: Stateful | None = None,
    say: Say = print_line,
    warn: Say | None = None,
) -> bool:
    """Continue from the checkpoint that ``--load`` means.

    Everything is written in place. The arrangement of processes may differ from the one that saved.

    Args:
        cfg: The configuration; every loading flag counts here.
        mesh: The process mesh.
        model: The model, bare or wrapped for data parallelism.
        optimizer: None to leave it alone.
        scheduler: None to leave it alone.
        fp8: FP8 state, None without.
        progress: Receives the counters.
        residual: What FP8 gradient reductions keep, None without.
        guards: What watches over the run, None to leave it alone.
        say: Receives the lines to show, on the first rank only.
        warn: Receives there what went wrong without stopping the run; default `say`.

    Returns:
        Whether there was a checkpoint.

    Raises:
        CheckpointError: On every rank, naming what is damaged, missing or different.
    """
    if cfg.load is None:
        return False
    peers = Peers(mesh.world)
    opened = finding.open_newest(cfg, mesh, peers, say, warn or say)
    if opened is None:
        return False
    reader, common = opened.reader, opened.common
    weights_only = cfg.finetune or opened.iteration == place.RELEASE
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    loading = _Loading(cfg, mesh, peers, reader, common, weights_only, say, opened.alone, device)
    saved = checkpoint_config.saved_settings(common)
    for note in peers.attempt(lambda: checkpoint_config.check_same_model(saved, cfg)):
        loading.note(note)
    for note in changes(saved, cfg) if optimizer is not None and not weights_only else ():
        loading.note(note)
    _load_weights(loading, _bare(model), optimizer)
    if not weights_only:
        progress.update(peers.attempt(lambda: counters_of(common, reader.directory)))
    if not weights_only:
        where = reader.directory
        peers.attempt(lambda: load_schedule(cfg, common, where, optimizer, scheduler, loading.note))
    elif cfg.use_checkpoint_opt_param_scheduler:
        loading.note("  NOTE: the schedule starts anew: a converted checkpoint has none")
    for sentence in _of_all_ranks(peers, peers.attempt(lambda: _load_fp8(loading, fp8))):
        loading.note(sentence)
    peers.attempt(lambda: _load_residual(loading, residual))
    if guards is not None and not weights_only:
        guards.load_state_dict(common.get("guards") or {})
    peers.attempt(lambda: _load_random_state(loading))
    for line in [] if weights_only else foreign_state.left_out(common, reader.blobs, cfg):
        loading.note(line)
    loading.note(
        f"  successfully loaded checkpoint from {opened.place} "
        f"[ t {mesh.tp.rank + 1}/{mesh.tp.size}, p {mesh.pp.rank + 1}/{mesh.pp.size} ] "
        f"at iteration {progress.iteration}"
    )
    return True


def check_load(
    cfg: RunConfig,
    tensors: Callable[[schema.Stacking], dict[str, Sharded]],
    trained: Callable[[schema.Stacking], dict[str, Sharded]],
    say: Say = print_line,
) -> bool:
    """Refuse what `load_checkpoint` refuses, from the checkpoint's index alone.

    Reads no tensor and no checksum. Not collective.

    Args:
        cfg: The configuration; without ``load`` nothing happens.
        tensors: Returns all tensors of the model, stored so.
        trained: Returns all tensors of the optimizer, stored so.
        say: Receives the lines to show.

    Returns:
        Whether there is a checkpoint.

    Raises:
        CheckpointError: Names what is missing or different.
    """
    if cfg.load is None:
        return False
    mesh = ParallelState.single()
    peers = Peers(mesh.world)
    opened = finding.open_newest(cfg, mesh, peers, say, say, contents=False)
    if opened is None:
        return False
    reader, common = opened.reader, opened.common
    weights_only = cfg.finetune or opened.iteration == place.RELEASE
    loading = _Loading(cfg, mesh, peers, reader, common, weights_only, say)
    for note in checkpoint_config.check_same_model(checkpoint_config.saved_settings(common), cfg):
        say(note)
    stacking = checkpoint_config.stacking_of(cfg).as_in(reader.tensors)
    _check_tensors(loading, tensors(stacking), _stored(reader, schema.is_model_key), "the model")
    if not (weights_only or cfg.no_load_optim):
        _check_optimizer_tensors(loading, trained(stacking))
    return True


def with_checkpoint_args(cfg: RunConfig) -> RunConfig:
    """Return the configuration with the model's shape taken from the checkpoint.

    For ``--use-checkpoint-args``, before the model is built. Each rank reads the common entry for
    itself. Without the flag, or without a checkpoint, ``cfg`` is returned.

    Raises:
        CheckpointError: The checkpoint is unusable or contradicts an explicit flag.
        ConfigError: The result cannot work.
    """
    if not cfg.use_checkpoint_args or cfg.load is None:
        return cfg
    common = finding.read_newest_common(cfg.load, cfg.ckpt_step, cfg.no_ckpt_fallback)
    if common is not None:
        cfg = checkpoint_config.adopt(cfg, checkpoint_config.saved_settings(common))
    cfg.replace(use_checkpoint_args=False)  # the rules that waited for the checkpoint's settings
    return cfg


def counters_of(common: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the counters of a checkpoint, for `Progress.update`; Megatron-Core's has some.

    Raises:
        CheckpointError: Its place in the data is not known.
    """
    if common.get("progress"):
        return dict(common["progress"])
    return foreign_state.counters(common, directory)


def _load_weights(loading: _Loading, model: nn.Module, optimizer: Optimizer | None) -> None:
    cfg, mesh, reader = loading.cfg, loading.mesh, loading.reader
    stacking = checkpoint_config.stacking_of(cfg).as_in(reader.tensors)
    in_fp8 = optimizer.fp8_values() if optimizer is not None else {}
    wanted = schema.model_state(model, mesh, stacking, in_fp8)
    _check_tensors(loading, wanted, _stored(reader, schema.is_model_key), "the model")
    num_bytes = loading.read(wanted)
    counts = f"{len(wanted)} model tensors"
    if optimizer is not None:
        if loading.weights_only or cfg.no_load_optim:
            optimizer.reload_model_params(in_fp8)
        else:
            named, owned = optimizer.loadable_state(), optimizer.owned_ranges
            state = schema.optimizer_state(named, model, mesh, stacking, owned)
            _check_optimizer_tensors(loading, state)
            num_bytes += loading.read(state)
            optimizer.finish_load()
            counts += f", {len(state)} optimizer tensors"
    loading.note(f"  loaded {counts}, {num_bytes / 1e6:.1f} MB on this rank, 0 missing")


def _check_optimizer_tensors(loading: _Loading, state: Mapping[str, Sharded]) -> None:
    foreign_state.check_optimizer_form(loading.common, loading.reader)
    loading.reader.take_weights_as_masters()
    stored = _stored(loading.reader, lambda k: k.startswith(schema.OPTIMIZER_PREFIX))
    hint = "pass --no-load-optim or --finetune to load the weights alone"
    _check_tensors(loading, state, stored, "the optimizer", hint)


def _stored(reader: Reader, belongs: Callable[[str], bool]) -> dict[str, tuple[int, ...]]:
    return {key: entry.shape for key, entry in reader.tensors.items() if belongs(key)}


def _check_tensors(
    loading: _Loading,
    wanted: Mapping[str, Sharded],
    stored: Mapping[str, tuple[int, ...]],
    what: str,
    hint: str = "",
) -> None:
    """Refuse missing, unexpected and differently shaped tensors, over all ranks together."""
    own = {k: (tuple(w.size()), w.padded_dim) for k, w in wanted.items()}
    everyone: dict[str, tuple[tuple[int, ...], int | None]] = {}
    for part in [own] if loading.alone else loading.peers.gather(own):
        everyone.update(part)
    if what == "the model":
        foreign_state.check_known_model(loading.common, loading.reader.directory)
        foreign_state.check_vocabulary(loading.reader, loading.cfg.vocab_size)
    found = schema.compare(everyone, stored)
    problem = None
    if found:
        problem = complaint(
            "--load",
            loading.reader.directory,
            f"Its tensors do not fit {what}: {found.describe()}",
            hint or "Load a checkpoint of this model",
        )
    loading.peers.agree(problem)


def _of_all_ranks(peers: Peers, own: list[str]) -> list[str]:
    """Sentences of every rank, the same ones once: pipeline stages know their own layers only."""
    return list(dict.fromkeys(sentence for part in peers.gather(own) for sentence in part))


def _load_fp8(loading: _Loading, fp8: Stateful | None) -> list[str]:
    """Load FP8 state; returns what is to be said about it."""
    if fp8 is None or loading.weights_only:
        return []
    places = fp8_entries.Places.of(loading.cfg, loading.mesh)
    saved = fp8_entries.join(loading.common.get("fp8") or {}, loading.reader, places)
    return list(fp8.load_state_dict(saved) or ())


def _load_residual(loading: _Loading, residual: Residual | None) -> None:
    if loading.weights_only or loading.cfg.no_load_optim:
        return
    reader = loading.reader
    stored = any(key.startswith(RESIDUAL_PREFIX) for key in reader.tensors)
    if residual is None:
        if stored:
            loading.note(
                "  NOTE: what the saved run kept of its FP8 gradients for the next step is not "
                "used: this run does not reduce gradients so (--grad-reduce-dtype fp8)."
            )
        return
    stacking = checkpoint_config.stacking_of(loading.cfg).as_in(reader.tensors)
    if stored:
        count, added = residual.load(reader, stacking)
        how = "the sum over the replicas that saved" if added else "as each replica saved it"
        loading.note(f"  loaded what was kept of FP8 gradients, {how}: {count} tensors")


def _load_random_state(loading: _Loading) -> None:
    if loading.weights_only or loading.cfg.no_load_rng:
        return
    key = _rng_key(loading.mesh)
    same = loading.common.get("arrangement") == finding.arrangement(loading.mesh)
    if same and key in loading.reader.blobs:
        data = loading.reader.read_blob(key)
        random_state.restore(plain.load(data, f"{loading.reader.directory}: {key}"))
    else:
        loading.note(
            "  NOTE: the random state was not restored: the checkpoint has none for this "
            "arrangement of processes. Dropout and data order do not depend on it."
        )
