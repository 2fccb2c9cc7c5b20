"""Saving and opening checkpoints as all ranks together.

Every step that can fail on one rank ends in an agreement, so a full disk or a missing file is the
same error on all ranks and never a hang.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing.mp_reader import open_reader
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Sharded, volume
from megatron.core.dist_checkpointing.storage import (
    ChecksumWriter,
    FileRecord,
    PlainPlanner,
    Reader,
)
from megatron.core.errors import CheckpointError, UnusableCheckpointError, complaint

_SLACK_BYTES = 1 << 20  # index, manifest, container overhead


@dataclass(frozen=True)
class Saved:
    """What a save wrote."""

    directory: Path
    size_bytes: int
    seconds: float


def save(
    root: Path,
    iteration: int | str,
    tensors: Mapping[str, Sharded],
    blobs: Mapping[str, bytes],
    peers: Peers,
    assets: Mapping[str, Path | bytes] | None = None,
    check: Callable[[Path], None] | None = None,
) -> Saved:
    """Write a checkpoint so that a crash at any moment leaves the previous one loadable.

    Args:
        root: The save directory (``--save``).
        iteration: Number of the iteration, or ``"release"``.
        tensors: Key -> this rank's blocks. Replicas may be offered by several ranks.
        blobs: Key -> bytes; a key offered by several ranks must hold the same bytes.
        peers: The ranks that call this together.
        assets: Relative name -> further file (path or content), taken from the first rank.
        check: Called on the first rank with the finished files before they become a checkpoint;
            if it raises ``CheckpointError``, they do not.

    Returns:
        Where it lies and how large it is.

    Raises:
        CheckpointError: On every rank, when any rank failed. What was committed before is intact.
    """
    start = time.monotonic()
    needed = _needed_bytes(tensors, blobs, peers)
    tmp = peers.decide(lambda: place.prepare(root, iteration, needed))
    try:
        peers.attempt(lambda: _must_see(tmp))
        records = _write(tmp, tensors, blobs, peers)
        records.update(peers.decide(lambda: place.add_files(tmp, assets or {})))
    except CheckpointError as error:
        _discard(tmp, peers)
        raise CheckpointError(_save_failure(root, needed, str(error))) from error
    if check is not None:
        try:
            peers.decide(lambda: check(tmp))
        except CheckpointError:
            _discard(tmp, peers)
            raise
    try:
        final = peers.decide(lambda: place.commit(tmp, records))
    except CheckpointError as error:
        _discard(tmp, peers)
        raise CheckpointError(_save_failure(root, needed, str(error))) from error
    size = sum(r.size_bytes for r in records.values())
    return Saved(final, size, time.monotonic() - start)


def _discard(tmp: Path, peers: Peers) -> None:
    if peers.leads:
        place.discard(tmp)


def open_checkpoint(directory: Path, peers: Peers, contents: bool = True) -> Reader:
    """Verify a checkpoint's files and open it.

    Args:
        directory: A committed checkpoint.
        peers: The ranks that call this together; they share the reading.
        contents: Whether checksums are compared; otherwise only names and sizes are.

    Raises:
        CheckpointError: On every rank, naming the damaged files.
    """
    problems = peers.attempt(lambda: place.verify(directory, peers.rank, peers.size, contents))
    everyone = sorted({p for part in peers.gather(problems) for p in part})
    if everyone:
        raise CheckpointError(peers.decide(lambda: place.damage(directory, everyone)))
    return peers.attempt(lambda: _open(directory))


def _open(directory: Path) -> Reader:
    try:
        reader = open_reader(directory)
    except UnusableCheckpointError as error:
        raise CheckpointError(place.damage(directory, [error.problem])) from error
    missing = sorted(n for n in reader.files() if not (directory / n).is_file())
    if missing:
        problems = [f"{directory / n} is missing" for n in missing]
        raise CheckpointError(place.damage(directory, problems))
    return reader


def _needed_bytes(tensors: Mapping[str, Sharded], blobs: Mapping[str, bytes], peers: Peers) -> int:
    own = {k: volume(t.size()) * t.element_size() for k, t in tensors.items()}
    own.update({k: len(b) for k, b in blobs.items()})
    sizes: dict[str, int] = {}
    for part in peers.gather(own):
        sizes.update(part)
    return sum(sizes.values()) + _SLACK_BYTES


def _must_see(tmp: Path) -> None:
    if not tmp.is_dir():
        raise CheckpointError(
            f"{tmp} is not visible here: the save directory is not shared by all machines."
        )


def _write(
    tmp: Path, tensors: Mapping[str, Sharded], blobs: Mapping[str, bytes], peers: Peers
) -> dict[str, FileRecord]:
    writer = ChecksumWriter(tmp)
    state: dict[str, object] = {**tensors, **{k: io.BytesIO(b) for k, b in blobs.items()}}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to save.*")
            dcp_save(
                state,
                storage_writer=writer,
                planner=PlainPlanner(),
                process_group=peers.group,
                no_dist=peers.size == 1,
            )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = place.describe(cause) if isinstance(cause, OSError) else str(cause)
        raise CheckpointError(f"{reason or repr(cause)} (rank {rank})") from error
    records: dict[str, FileRecord] = {}
    for part in peers.gather(writer.records):
        records.update(part)
    return records


def _save_failure(root: Path, needed: int, reason: str) -> str:
    return complaint(
        "--save",
        root,
        f"The checkpoint of about {needed:,} bytes could not be written: {reason}",
        "Earlier checkpoints and the tracker are untouched; free space or fix the directory, "
        "then resume",
    )
