"""Copies of a checkpoint with other names, or with less in it; and checkpoints that may go.

A copy is written like any save: complete or not at all, checksums recorded, and compared with its
source before it counts. One layer of one tensor is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, lock, plain, schema
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.retention import Retention, remove
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.dist_checkpointing.storage import INDEX_FILE, Reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import Axis
from megatron.training.inspection.compare import Where, places

DROPPABLE = ("optimizer", "rng", "fp8")
_RNG_PREFIX = schema.RNG_KEY.partition("/")[0]
_OWN_FILES = (INDEX_FILE, place.MANIFEST_FILE, place.MARKER_FILE, schema.COMMON_FILE)


def renaming(
    rules: Sequence[tuple[str, str]], keys: Sequence[str], taken: Sequence[str] = ()
) -> dict[str, str]:
    """Return old key -> new key, of model, optimizer and empty entries alike.

    FP8 state keeps its names: it belongs to layers, not to tensors.

    Args:
        rules: Regular expression and replacement, applied one after the other.
        keys: Stored keys.
        taken: Keys of entries that keep their names.

    Raises:
        CheckpointError: A pattern is none or matches nothing, or two keys become one.
    """
    names = {key: key for key in keys}
    for pattern, replacement in rules:
        try:
            changed = {
                key: name
                if key.startswith(schema.FP8_PREFIX)
                else re.sub(pattern, replacement, name)
                for key, name in names.items()
            }
        except (re.error, IndexError) as error:
            fix = "Write a regular expression, and \\1 for its first group"
            raise CheckpointError(complaint("--map", pattern, f"{error}", fix)) from error
        if changed == names:
            why = f"No key becomes another by it, of {len(keys)}"
            fix = "Look at the keys with the action 'tensors'"
            raise CheckpointError(complaint("--map", f"{pattern} {replacement}", why, fix))
        names = changed
    by_new: dict[str, list[str]] = {}
    for key, name in (*names.items(), *((key, key) for key in taken)):
        by_new.setdefault(name, []).append(key)
    twice = [f"{' and '.join(old)} become {new}" for new, old in by_new.items() if len(old) > 1]
    if twice:
        fix = "Give new names that are all different"
        raise CheckpointError(complaint("--map", twice[0], "A key names one tensor", fix))
    return names


def kind_of(key: str) -> str | None:
    """Return which of the parts that may be dropped an entry belongs to, None for the rest."""
    if key.startswith(schema.OPTIMIZER_PREFIX):
        return "optimizer"
    if key.startswith(_RNG_PREFIX + "/"):
        return "rng"
    if key.startswith(f"{schema.FP8_PREFIX}grad_residual."):
        return "optimizer"  # what a step left for the next one
    return "fp8" if key.startswith(schema.FP8_PREFIX) else None


def copy(
    reader: Reader,
    root: Path,
    rename: Callable[[str], str] = lambda key: key,
    drop: Sequence[str] = (),
) -> io.Saved:
    """Write a checkpoint anew.

    Args:
        reader: The source.
        root: The save directory of the copy; it must hold no checkpoint.
        rename: Old key -> new key.
        drop: Parts to leave out, of ``DROPPABLE``.

    Raises:
        CheckpointError: The directory is in use or cannot be written, or the copy differs.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        fix = "Name a new directory"
        raise CheckpointError(complaint("OUTPUT", root, "It is in use", fix))
    if not (reader.directory / INDEX_FILE).is_file():
        why = "It is in the older torch format"
        fix = "Convert it with tools/checkpoint/convert.py first"
        raise CheckpointError(complaint("directory", reader.directory, why, fix))
    kept = places(reader, lambda key: kind_of(key) not in drop)
    pieces: dict[str, list[Piece]] = {}
    for where in kept.values():
        pieces.setdefault(where.key, []).append(_piece(reader, where))
    tensors = {
        rename(key): Sharded(reader.tensors[key].shape, blocks) for key, blocks in pieces.items()
    }
    blobs = {rename(key): reader.read_blob(key) for key in reader.blobs if kind_of(key) not in drop}
    assets = _assets(reader)
    if schema.COMMON_KEY in blobs:
        blobs[schema.COMMON_KEY] = _common(blobs[schema.COMMON_KEY], drop)
    if schema.COMMON_FILE in assets:
        content = (reader.directory / schema.COMMON_FILE).read_bytes()
        assets[schema.COMMON_FILE] = _common(content, drop)
    iteration = place.iteration_of(reader.directory)
    return io.save(
        root,
        place.RELEASE if iteration is None else iteration,
        tensors,
        blobs,
        Peers(Axis.single("world")),
        assets,
        partial(_check, reader, kept, rename),
    )


def _piece(reader: Reader, where: Where) -> Piece:
    entry = reader.tensors[where.key]
    shape, first = entry.shape, (0,) * len(entry.shape)
    if where.row is not None:
        shape, first = (1, *shape[1:]), (where.row, *first[1:])

    def make() -> Tensor:
        return where.read(reader).view(shape)

    return Piece(torch.empty(shape, dtype=entry.dtype, device="meta"), first, make)


def _assets(reader: Reader) -> dict[str, Path | bytes]:
    """Return the files beside the tensors: settings, tokenizer, and what else there is."""
    data, root = reader.files(), reader.directory
    names = sorted(place.sizes_of(root))
    found: dict[str, Path | bytes] = {
        n: root / n for n in names if n not in data and n not in _OWN_FILES
    }
    if (root / schema.COMMON_FILE).is_file():
        found[schema.COMMON_FILE] = root / schema.COMMON_FILE
    return found


def _common(content: bytes, drop: Sequence[str]) -> bytes:
    """Forget in the common entry what is not there any more; untouched if it knew nothing."""
    forgotten = {"optimizer": ("optimizer_scalars", "optimizer"), "fp8": ("fp8",)}
    names = [name for part in drop for name in forgotten.get(part, ())]
    common = plain.load(content, schema.COMMON_KEY)
    if not any(common.get(name) for name in names):
        return content
    return plain.dump({**common, **dict.fromkeys(names)})


def _check(reader: Reader, kept: dict[str, Where], rename: Callable[[str], str], tmp: Path) -> None:
    written = Reader(tmp)
    for name, where in kept.items():
        copied = Where(rename(where.key), where.row).read(written)
        if not torch.equal(_bits(where.read(reader)), _bits(copied)):
            raise CheckpointError(
                complaint("OUTPUT", tmp, f"{name} was written with other values", "Check the disk")
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def old_checkpoints(root: Path, keep_last: int) -> list[Path]:
    """Return the checkpoints that may go when the newest ones are to stay, as a run decides it.

    Args:
        root: A save directory.
        keep_last: How many stay.

    Raises:
        CheckpointError: It is none.
    """
    if place.iteration_of(root) is not None or not (root / place.TRACKER_FILE).is_file():
        why = f"It is no save directory with a {place.TRACKER_FILE}"
        fix = "Name the directory that --save was given"
        raise CheckpointError(complaint("directory", root, why, fix))
    doomed = Retention(root, keep_last).doomed(keep_last)
    # A run decides by names and sizes; here there is time to read the files, as a resume does.
    latest = place.tracked(root)
    before = [d for i, d in reversed(place.committed(root)) if latest is not None and i <= latest]
    kept = [d for d in before if d not in doomed]
    sound = next((d for d in (*kept, *reversed(doomed)) if _has_what_was_written(d)), None)
    return [d for d in doomed if d != sound]


def _has_what_was_written(directory: Path) -> bool:
    try:
        return not place.verify(directory)
    except CheckpointError:
        return False


def delete(root: Path, doomed: Sequence[Path]) -> None:
    """Delete checkpoints of a save directory into which nobody saves meanwhile.

    Raises:
        CheckpointError: A run saves there, or something could not be deleted.
    """
    try:
        held = lock.take(root)
        try:
            for directory in doomed:
                remove(directory)
        finally:
            held.release()
    except OSError as error:
        why = f"A checkpoint cannot be deleted ({place.describe(error)})"
        raise CheckpointError(complaint("directory", root, why, "Check its rights")) from error
