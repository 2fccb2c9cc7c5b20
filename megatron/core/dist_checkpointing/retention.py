"""Which older checkpoints stay: ``--keep-last`` and ``--keep-every``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import uploads
from megatron.core.dist_checkpointing.store import StorePath
from megatron.core.errors import CheckpointError
from megatron.core.files import sync_directory


class Retention:
    """Removes the checkpoints of one save directory that need not be kept.

    Never removed are the one that the tracker names, newer ones than that, the last sound one, what
    is protected, and directories with anything in them that no save has written.

    Args:
        root: The save directory.
        keep_last: So many of the newest ones stay.
        keep_every: And those whose iteration this divides; None for no others.

    Attributes:
        protected: Directories that stay in any case.
    """

    def __init__(self, root: Path, keep_last: int, keep_every: int | None = None) -> None:
        self._root, self._keep_last, self._keep_every = root, keep_last, keep_every
        self.protected: set[Path] = set()

    def apply(self) -> None:
        """Remove what need not be kept. A crash meanwhile leaves the others as they are.

        Raises:
            OSError: Something could not be removed.
        """
        for directory in self.doomed(self._keep_last):
            remove(directory)

    def make_room(self) -> None:
        """Remove what the next save would remove, as long as a checkpoint stays.

        Raises:
            OSError: Something could not be removed.
        """
        for directory in self.doomed(max(self._keep_last - 1, 1)):
            remove(directory)

    def doomed(self, keep_last: int) -> list[Path]:
        """Return what is removed when so many of the newest ones stay."""
        latest = place.tracked(self._root)
        if latest is None:
            return []
        older = [(i, d) for i, d in place.committed(self._root) if i <= latest]
        kept = {d for _, d in older[-keep_last:]} | {d for i, d in older if i == latest}
        if not any(is_sound(directory) for directory in kept):
            sound = (d for _, d in reversed(older) if is_sound(d))
            kept.update(d for d in (next(sound, None),) if d is not None)
        kept |= {d for i, d in older if self._keep_every and i % self._keep_every == 0}
        protected = {path.resolve() for path in self.protected}
        return [
            d for _, d in older if d not in kept and d.resolve() not in protected and _is_ours(d)
        ]


def remove(directory: Path) -> None:
    """Remove a checkpoint: from the first moment on it does not count any more.

    Raises:
        OSError: It could not be removed.
    """
    if isinstance(directory, StorePath):
        uploads.remove(directory)
        return
    doomed = directory.with_name(directory.name + place.REMOVED)
    os.rename(directory, doomed)
    sync_directory(directory.parent)
    shutil.rmtree(doomed)


def drop_newer(root: Path, iteration: int) -> None:
    """Remove later checkpoints: of a run that was given up for one that starts earlier.

    Raises:
        OSError: Something could not be removed.
    """
    for number, directory in place.committed(root):
        if number > iteration and _is_ours(directory):
            remove(directory)


def is_sound(directory: Path) -> bool:
    """Whether a checkpoint has all its files, by their names and sizes."""
    try:
        return not place.verify(directory, contents=False)
    except CheckpointError:
        return False


def _is_ours(directory: Path) -> bool:
    """Whether a directory holds what a save has written and nothing else."""
    try:
        records = place.read_manifest(directory)
    except CheckpointError:
        return False
    if records is None or directory.is_symlink():
        return False
    own = {*records, place.MANIFEST_FILE, place.MARKER_FILE}
    if isinstance(directory, StorePath):
        return set(directory.sizes()) <= own
    files = {
        str(p.relative_to(directory))
        for p in directory.rglob("*")
        if p.is_symlink() or not p.is_dir()
    }
    return files <= own
