"""How a checkpoint gets into an object store, and out of it: without directories and renames.

A save writes its objects where they stay::

    run/iter_0000200/.incomplete        first: what lies here is no checkpoint, and may be removed
    run/iter_0000200/__0_0.distcp ...   by every rank, then the index and the list of files
    run/iter_0000200/metadata.json      makes it a checkpoint
    run/latest_checkpointed_iteration.txt

and the first one is removed again. Removing goes backwards: ``.incomplete`` appears, then
``metadata.json`` goes before all others. So whoever dies at whatever point leaves a checkpoint, or
what the next save removes. A checkpoint of the same iteration is copied aside first
(``iter_0000200.old``), inside the store.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.names import (
    MANIFEST_FILE,
    MARKER_FILE,
    OLD,
    TRACKER_FILE,
    directory_name,
    is_committed,
    iteration_of,
)
from megatron.core.dist_checkpointing.storage import FileRecord
from megatron.core.dist_checkpointing.store import StorePath

INCOMPLETE_FILE = ".incomplete"


def prepare(root: StorePath, iteration: int | str) -> StorePath:
    """Make room for a save, after clearing what interrupted ones left.

    Args:
        root: The save directory.
        iteration: What is about to be saved.

    Returns:
        Where its files belong.

    Raises:
        OSError: The store refused.
    """
    clean(root)
    final = root / directory_name(iteration)
    if is_committed(final):
        _copy(final, _aside(final))
    remove(final)
    (final / INCOMPLETE_FILE).write_bytes(b"")
    return final


def clean(root: StorePath) -> None:
    """Remove what interrupted saves left, and bring back what they were about to replace.

    Raises:
        OSError: The store refused.
    """
    children = {child.name: child for child in root.iterdir()} if root.is_dir() else {}
    for child in children.values():
        if iteration_of(child) is None or not (child / INCOMPLETE_FILE).is_file():
            continue
        if is_committed(child):
            (child / INCOMPLETE_FILE).unlink(missing_ok=True)
        else:
            remove(child)
    for name, child in children.items():
        final = root / name.removesuffix(OLD)
        if final == child or iteration_of(final) is None:
            continue
        if is_committed(child) and not is_committed(final):
            _copy(child, final)
        remove(child)


def commit(final: StorePath, manifest: str, marker: str) -> None:
    """Turn completely written files into the latest checkpoint.

    Args:
        final: Where they lie.
        manifest: The list of files.
        marker: What makes it a checkpoint.

    Raises:
        OSError: The store refused.
    """
    (final / MANIFEST_FILE).write_text(manifest)
    (final / MARKER_FILE).write_text(marker)
    (final.parent / TRACKER_FILE).write_text(str(iteration_of(final)))
    with contextlib.suppress(OSError):  # what is left of this, the next save removes
        (final / INCOMPLETE_FILE).unlink(missing_ok=True)
        remove(_aside(final))


def discard(final: StorePath) -> None:
    """Remove a save that failed, as far as that is possible, and bring back what it replaced."""
    with contextlib.suppress(OSError):
        if not is_committed(final):
            clean(final.parent)


def remove(directory: StorePath) -> None:
    """Remove a checkpoint or parts of one: from the first moment on it does not count any more.

    Raises:
        OSError: The store refused.
    """
    names = directory.sizes()
    if MARKER_FILE in names:
        (directory / INCOMPLETE_FILE).write_bytes(b"")
        (directory / MARKER_FILE).unlink(missing_ok=True)
    own = (MARKER_FILE, INCOMPLETE_FILE)
    directory.unlink_below([name for name in names if name not in own])
    if names:
        (directory / INCOMPLETE_FILE).unlink(missing_ok=True)


def add_files(final: StorePath, files: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    """Put further files beside the others; see `directory.add_files`."""
    records = {}
    for name, source in files.items():
        content = source if isinstance(source, bytes) else source.read_bytes()
        (final / name).write_bytes(content)
        records[name] = FileRecord(len(content), zlib.crc32(content))
    return records


def _aside(final: StorePath) -> StorePath:
    return final.with_name(final.name + OLD)


def _copy(source: StorePath, target: StorePath) -> None:
    """Copy a checkpoint, its marker last."""
    names = set(source.sizes()) - {INCOMPLETE_FILE}
    (target / INCOMPLETE_FILE).write_bytes(b"")
    for name in sorted(names, key=lambda name: (name == MARKER_FILE, name)):
        (source / name).copy_to(target / name)
    (target / INCOMPLETE_FILE).unlink(missing_ok=True)
