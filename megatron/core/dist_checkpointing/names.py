"""Names inside a save directory, and which of them are checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.core.dist_checkpointing import mp_ranks

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MARKER_FILE = "metadata.json"
MANIFEST_FILE = "manifest.json"
RELEASE = "release"
MARKER = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
REMOVED = ".del"
TMP, OLD = ".tmp", ".old"
_NAME = re.compile(r"iter_(\d{7,})$")


def directory_name(iteration: int | str) -> str:
    """Return ``iter_0000100`` for 100 and ``release`` for ``"release"``."""
    return RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}"


def iteration_of(directory: Path) -> int | str | None:
    """Return the iteration that a directory's name stands for, or None."""
    if directory.name == RELEASE:
        return RELEASE
    match = _NAME.match(directory.name)
    return int(match.group(1)) if match else None


def is_committed(directory: Path) -> bool:
    """Whether the directory holds a checkpoint: completely written by us, or ranks' files."""
    return (directory / MARKER_FILE).is_file() or mp_ranks.is_one(directory)


def committed(root: Path) -> list[tuple[int, Path]]:
    """Return (iteration, directory) of every committed checkpoint below ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = []
    for child in root.iterdir():
        iteration = iteration_of(child)
        if isinstance(iteration, int) and is_committed(child):
            found.append((iteration, child))
    return sorted(found)
