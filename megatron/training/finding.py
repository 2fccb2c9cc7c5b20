"""Which checkpoint a run continues from: the newest that is sound, of all kinds that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import RunConfig
from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing.mp_reader import open_reader
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.retention import is_sound
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.dist_checkpointing.store import path_of
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import Axis, ParallelState
from megatron.training import checkpoint_config

Say = Callable[[str], None]
NON_PERSISTENT = "non_persistent"


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was found and verified.

    Attributes:
        place: Where it was found, for the user.
        iteration: Its iteration, or ``"release"``.
        reader: Access to it.
        common: The entry that all ranks share.
        alone: Whether each rank has a checkpoint of its own.
    """

    place: str
    iteration: int | str
    reader: Reader
    common: dict[str, Any]
    alone: bool


@dataclass(frozen=True)
class _Candidate:
    found: place.Found
    root: str
    alone: bool = False

    @property
    def age(self) -> tuple[int, bool]:
        """Newest first; of two equally new ones the persistent one."""
        number = self.found.iteration if isinstance(self.found.iteration, int) else -1
        return -number, self.alone


def arrangement(mesh: ParallelState) -> dict[str, int]:
    """Return the sizes on which random state depends."""
    axes = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp, "world": mesh.world}
    return {name: axis.size for name, axis in axes.items()}


def global_root(cfg: RunConfig, beside: str) -> Path:
    """Return the folder of non-persistent checkpoints on a shared disk.

    Args:
        cfg: The configuration.
        beside: ``--save`` or ``--load``.
    """
    return Path(cfg.non_persistent_global_ckpt_dir or Path(beside) / NON_PERSISTENT)


def local_root(cfg: RunConfig, mesh: ParallelState) -> Path:
    """Return this rank's folder of non-persistent checkpoints on a disk of its machine.

    Only an equal arrangement of processes finds it again.
    """
    sizes = {**arrangement(mesh), "ep": mesh.ep.size, "etp": mesh.etp.size}
    layout = "_".join(f"{name}{size}" for name, size in sizes.items())
    return Path(cfg.non_persistent_local_ckpt_dir, layout, f"rank_{mesh.world.rank:05d}")


def open_newest(
    cfg: RunConfig,
    mesh: ParallelState,
    peers: Peers,
    say: Say,
    warn: Say,
    contents: bool = True,
) -> Opened | None:
    """Open the newest sound checkpoint that ``--load`` means. Every rank calls this.

    Args:
        cfg: The configuration; ``load``, ``ckpt_step`` and the non-persistent folders count here.
        mesh: The process mesh.
        peers: All ranks.
        say: Receives the lines to show, on the first rank only.
        warn: Receives there what is damaged and was left out.
        contents: Whether checksums are compared.

    Returns:
        None when there is no checkpoint.

    Raises:
        CheckpointError: On every rank, when none is sound, or the one that was asked for is not.
    """
    candidates = _candidates(cfg, mesh, peers)
    if not candidates:
        _say_nothing_there(cfg, peers, say)
        return None
    problems: list[CheckpointError] = []
    for candidate in candidates:
        try:
            opened = _open(candidate, peers, contents)
        except CheckpointError as error:
            problems.append(error)
            if cfg.no_ckpt_fallback or candidate.found.named:
                break
            if peers.leads:
                warn(f"iteration {candidate.found.iteration} is left out: {error}")
            continue
        if peers.leads:
            for line in candidate.found.notes:
                say(line)
            say(
                f" loading distributed checkpoint from {candidate.root} "
                f"at iteration {opened.iteration}"
            )
            for line in _oddities(opened):
                say(line)
        return opened
    if len(problems) == 1:
        raise problems[0]
    # The first one's message may recommend another of them.
    why = f"None of its {len(problems)} checkpoints can be loaded, for the reasons above"
    fix = "Restore one from a copy, or give another directory"
    raise CheckpointError(complaint("--load", cfg.load, why, fix)) from problems[0]


def _open(candidate: _Candidate, peers: Peers, contents: bool) -> Opened:
    found = candidate.found
    if candidate.alone:
        own = Peers(Axis.single("world"))
        reader = peers.attempt(lambda: io.open_checkpoint(found.directory, own, contents))
    else:
        reader = io.open_checkpoint(found.directory, peers, contents)
    common = peers.attempt(lambda: checkpoint_config.read_common(reader))
    return Opened(candidate.root, found.iteration, reader, common, candidate.alone)


def _oddities(opened: Opened) -> Iterator[str]:
    """What is no error and should not pass without a word."""
    directory, inside = opened.reader.directory, opened.common.get("iteration")
    if isinstance(opened.iteration, int) and inside not in (None, opened.iteration):
        yield f"WARNING: {directory} holds iteration {inside}, and that is what counts"
    if place.read_manifest(directory) is None:
        yield f"NOTE: {directory} has no {place.MANIFEST_FILE}: its files were not checked"


def _candidates(cfg: RunConfig, mesh: ParallelState, peers: Peers) -> list[_Candidate]:
    """What may be loaded, in the order in which it is tried; the same on every rank."""
    root = path_of(cfg.load)
    found = peers.decide(lambda: place.find(root, cfg.ckpt_step))
    if found is not None and found.notes and cfg.no_ckpt_fallback:
        raise CheckpointError(
            complaint(
                "--no-ckpt-fallback",
                cfg.load,
                found.notes[0].removeprefix("WARNING: ").rstrip("."),
                "Name the checkpoint to load with --ckpt-step, or leave the flag out",
            )
        )
    if found is not None and found.named:
        return [_Candidate(found, cfg.load)]
    several = []
    if found is not None:
        older = peers.decide(lambda: place.older(found))
        several = [_Candidate(one, cfg.load) for one in (found, *older)]
    if cfg.non_persistent_ckpt_type == "global":
        folder = global_root(cfg, cfg.load)
        newer = peers.decide(lambda: place.committed(folder))
        several += [_Candidate(place.Found(d, i), str(folder)) for i, d in newer]
    if cfg.non_persistent_ckpt_type == "local":
        several += _local(cfg, mesh, peers)
    return sorted(several, key=lambda candidate: candidate.age)


def _local(cfg: RunConfig, mesh: ParallelState, peers: Peers) -> list[_Candidate]:
    """The non-persistent checkpoints that every rank has with all its files."""
    folder = local_root(cfg, mesh)
    own = peers.attempt(lambda: {i: d for i, d in place.committed(folder) if is_sound(d)})
    common = set.intersection(*(set(part) for part in peers.gather(list(own))))
    return [
        _Candidate(place.Found(own[i], i), str(cfg.non_persistent_local_ckpt_dir), alone=True)
        for i in common
    ]


def _say_nothing_there(cfg: RunConfig, peers: Peers, say: Say) -> None:
    """Say that the run starts from random weights.

    Raises:
        CheckpointError: The user wants an error.
    """
    root = path_of(cfg.load)
    tracker = root / place.TRACKER_FILE
    if cfg.exit_on_missing_checkpoint:
        raise CheckpointError(
            complaint(
                "--exit-on-missing-checkpoint",
                f"--load {root}",
                f"There is no checkpoint: could not find the metadata file {tracker}",
                "Correct --load, or leave the flag out to start from random weights",
            )
        )
    if not peers.leads:
        return
    say(f"WARNING: could not find the metadata file {tracker}")
    say("    will not load any checkpoints and will start from random")


def read_newest_common(
    load: str, step: int | None = None, only_newest: bool = False
) -> dict[str, Any] | None:
    """Return the entry that all ranks share, of the newest readable checkpoint. Not collective.

    Args:
        load: A checkpoint folder, or one of its ``iter_XXXXXXX`` folders.
        step: Iteration to look at instead of the newest.
        only_newest: Whether a damaged one is an error even if an earlier one is sound.

    Returns:
        None where there is no checkpoint.

    Raises:
        CheckpointError: There is one and it is unusable.
    """
    found = place.find(path_of(load), step)
    if found is None:
        return None
    problems: list[CheckpointError] = []
    for one in (found, *([] if only_newest else place.older(found))):
        try:
            return checkpoint_config.read_common(open_reader(one.directory))
        except CheckpointError as error:
            problems.append(error)
    raise problems[0]
