"""Saving and opening checkpoints as all ranks together.

Every step that can fail on one rank ends in an agreement, so a full disk or a missing file is the
same error on all ranks and never a hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing.lock import Lock
from megatron.core.dist_checkpointing.mp_reader import open_reader
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.plans import Plans, save_failure
from megatron.core.dist_checkpointing.retention import Retention
from megatron.core.dist_checkpointing.shard import Sharded
from megatron.core.dist_checkpointing.storage import ChecksumWriter, FileRecord, Reader
from megatron.core.dist_checkpointing.store import persistently
from megatron.core.dist_checkpointing.writing import HostBuffers, Share, ShareWriter, unpacked
from megatron.core.errors import CheckpointError, UnusableCheckpointError


@dataclass(frozen=True)
class Saved:
    """What a save wrote; the seconds are those from its beginning to its commit.

    Attributes:
        warning: What did not work afterwards; empty if all did.
    """

    directory: Path
    size_bytes: int
    seconds: float
    warning: str = ""


@dataclass(frozen=True)
class Care:
    """What a save takes care of besides its own files.

    Attributes:
        lock: Says that the save directory is this run's; None where nobody else can be there.
        retention: Which older checkpoints are kept; None for all.
        read_back: Compare every file with what was written before the checkpoint counts.
        alone: The ranks that save are independent, and each writes all blocks that it has.
    """

    lock: Lock | None = None
    retention: Retention | None = None
    read_back: bool = False
    alone: bool = False


def save(
    root: Path,
    iteration: int | str,
    tensors: Mapping[str, Sharded],
    blobs: Mapping[str, bytes],
    peers: Peers,
    assets: Mapping[str, Path | bytes] | None = None,
    check: Callable[[Path], None] | None = None,
    care: Care | None = None,
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
        care: What else is to be done; None for nothing.

    Returns:
        Where it lies and how large it is.

    Raises:
        CheckpointError: On every rank, when any rank failed. What was committed before is intact.
    """
    saving = Saving(root, iteration, tensors, blobs, peers, assets, care)
    saving.write()
    return saving.finish(check)


class Saving:
    """A save from its plan to its commit; every rank has one and calls the same methods.

    Args:
        root: See `save`, as for all others.
        iteration: See there.
        tensors: See there.
        blobs: See there.
        peers: See there.
        assets: See there.
        care: See there.
        plans: What the saves before agreed on, if that is kept.

    Raises:
        CheckpointError: On every rank, when the directory cannot be written to, has too little
            space or belongs to another job.
    """

    def __init__(
        self,
        root: Path,
        iteration: int | str,
        tensors: Mapping[str, Sharded],
        blobs: Mapping[str, bytes],
        peers: Peers,
        assets: Mapping[str, Path | bytes] | None = None,
        care: Care | None = None,
        plans: Plans | None = None,
    ) -> None:
        self.iteration = iteration
        self._start = time.monotonic()
        self._root, self._peers, self._assets = root, peers, dict(assets or {})
        self._care = care or Care()
        self._plans = plans or Plans(peers, self._care.alone)
        agreed = self._plans.agree(tensors, blobs, root, self._prepare)
        self._tmp, self._needed = agreed.result, agreed.needed_bytes
        self._writer = ShareWriter(self._tmp, agreed.part, tensors, blobs, self._care.read_back)
        self._commit: _Commit | None = None

    def _prepare(self, needed: int) -> Path:
        """On the first rank: make room for the files."""
        care = self._care
        if care.lock is not None:
            care.lock.confirm()
        make_room = care.retention.make_room if care.retention else None
        return place.prepare(self._root, self.iteration, needed, make_room)

    def write(self) -> None:
        """Write this rank's files; what goes wrong is told by `finish`."""
        self._writer.run()

    def write_behind(self, buffers: HostBuffers | None) -> None:
        """Copy what is to be written to host memory, and write it in the background.

        Args:
            buffers: Room for the copy; None where the tensors change no more.

        Raises:
            CheckpointError: On every rank, when the memory does not suffice on one.
        """
        if buffers is not None:
            try:
                self._peers.attempt(lambda: self._writer.hold(buffers))
            except CheckpointError:
                if self._peers.leads:
                    place.discard(self._tmp)
                raise
        self._writer.start()

    @property
    def written(self) -> bool:
        """Whether this rank's files are written, or failed to be."""
        return self._writer.done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for this rank's files, or for so many seconds; return whether they are written."""
        return self._writer.wait(timeout_s)

    @property
    def handed_in(self) -> bool:
        """Whether the first rank has what it needs to turn the files into a checkpoint."""
        return self._commit is not None

    @property
    def committed(self) -> bool:
        """Whether nothing is done any more for this checkpoint on this rank."""
        return self._commit is not None and self._commit.done

    def hand_in(self) -> None:
        """Tell the first rank what was written, which completes the checkpoint in the background.

        Collective, for when all have `written`.
        """
        self._gather(None).start()

    def wait_for_commit(self) -> None:
        """Wait for what `hand_in` began."""
        if self._commit is not None:
            self._commit.wait()

    def finish(self, check: Callable[[Path], None] | None = None) -> Saved:
        """Wait for all ranks' files and turn them into the latest checkpoint. Collective.

        Args:
            check: See `save`; only without `hand_in`.

        Raises:
            CheckpointError: On every rank, when any rank failed.
        """
        commit = self._commit
        if commit is None:
            self._writer.wait()
            commit = self._gather(check)
            commit.run()
        commit.wait()
        return self._peers.decide(lambda: commit.saved)

    def _gather(self, check: Callable[[Path], None] | None) -> _Commit:
        shares = self._peers.gather_to_first(self._writer.share)
        work = None if shares is None else lambda: self._complete(shares, check)
        self._commit = _Commit(work)
        return self._commit

    def _complete(self, packed: list[bytes], check: Callable[[Path], None] | None) -> Saved:
        """On the first rank: put the shares together and commit them."""
        if self._care.lock is not None:
            self._care.lock.confirm()  # first: the files of another job are none to discard
        try:
            records = self._join([unpacked(share) for share in packed])
            if check is not None:
                check(self._tmp)
            final = place.commit(self._tmp, records)
        except (CheckpointError, OSError) as error:
            place.discard(self._tmp)
            if isinstance(error, CheckpointError):
                raise
            reason = place.describe(error)
            raise CheckpointError(save_failure(self._root, self._needed, reason)) from error
        size = sum(r.size_bytes for r in records.values())
        seconds = time.monotonic() - self._start
        return Saved(final, size, seconds, self._remove_older())

    def _remove_older(self) -> str:
        """Remove what need not be kept; returns what went wrong, which is not the save's fault."""
        try:
            if self._care.retention is not None:
                self._care.retention.apply()
        except (OSError, CheckpointError) as error:
            reason = place.describe(error) if isinstance(error, OSError) else str(error)
            return f"WARNING: --keep-last: a checkpoint in {self._root} was not removed: {reason}"
        return ""

    def _join(self, shares: list[Share]) -> dict[str, FileRecord]:
        """Write the index and the further files; return all files' sizes and checksums."""
        for rank, share in enumerate(shares):
            if share.problem:
                reason = f"{share.problem} (rank {rank})"
                raise CheckpointError(save_failure(self._root, self._needed, reason))
        if self._plans.index is None:
            raise CheckpointError(save_failure(self._root, self._needed, "it has no plan"))
        writer = ChecksumWriter(self._tmp)
        index, results = self._plans.index, [share.results for share in shares]
        persistently(lambda: writer.finish(index, results), self._tmp)
        records = dict(writer.records)
        for share in shares:
            records.update(share.records)
        records.update(place.add_files(self._tmp, self._assets))
        return records


class _Commit:
    """The end of a save: work of the first rank, nothing for the others."""

    def __init__(self, work: Callable[[], Saved] | None) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._problem: Exception | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def saved(self) -> Saved:
        """What was saved; raises what went wrong."""
        if self._problem is not None:
            raise self._problem
        return cast(Saved, self._saved)

    def start(self) -> None:
        if self._work is not None:
            self._thread = threading.Thread(target=self.run, name="checkpoint commit", daemon=True)
            self._thread.start()

    def run(self) -> None:
        try:
            self._saved = self._work() if self._work is not None else None
        except Exception as error:  # raised where somebody asks for the result
            self._problem = error

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


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
    missing = sorted(reader.files() - place.sizes_of(directory, reader.files()).keys())
    if missing:
        problems = [f"{directory / n} is missing" for n in missing]
        raise CheckpointError(place.damage(directory, problems))
    return reader
