"""Where checkpoints lie, which one is the latest, and how a new one takes its place.

Layout of a save directory::

    latest_checkpointed_iteration.txt     the tracker: an iteration, or the word "release"
    iter_0000100/                         a committed checkpoint: it holds metadata.json
    iter_0000200.tmp/                     being written, or left behind by a crash
    iter_0000100.old/                     being replaced by a new save of the same iteration
    iter_0000050.del/                     being removed (``--keep-last``)
    .lock                                 the job that saves here

A checkpoint counts once ``metadata.json`` lies in a directory with its final name; both appear with
one rename. The tracker is replaced, never rewritten, and only after that. In an object store, which
has no renames, `uploads` keeps the same promise in another order.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing import uploads
from megatron.core.dist_checkpointing.names import (
    MANIFEST_FILE,
    MARKER,
    MARKER_FILE,
    OLD,
    RELEASE,
    REMOVED,
    TMP,
    TRACKER_FILE,
    committed,
    directory_name,
    is_committed,
    iteration_of,
)
from megatron.core.dist_checkpointing.storage import FileRecord, checksum
from megatron.core.dist_checkpointing.store import StorePath
from megatron.core.errors import CheckpointError, UnusableCheckpointError, complaint
from megatron.core.files import sync, sync_directory

__all__ = [  # of `names`, for those who look for them here
    "MANIFEST_FILE",
    "MARKER_FILE",
    "RELEASE",
    "REMOVED",
    "TRACKER_FILE",
    "committed",
    "directory_name",
    "is_committed",
    "iteration_of",
]


@dataclass(frozen=True)
class Found:
    """The checkpoint to load.

    Attributes:
        directory: Where it lies.
        iteration: Its iteration, or ``"release"`` for converted weights.
        notes: What the user has to know about how it was chosen.
        named: Whether the user asked for this very one.
    """

    directory: Path
    iteration: int | str
    notes: tuple[str, ...] = ()
    named: bool = False


def find(load: Path, step: int | None = None) -> Found | None:
    """Decide which checkpoint ``--load`` means.

    Args:
        load: A save directory, or one checkpoint's directory.
        step: The iteration to take instead of the latest.

    Returns:
        The checkpoint, or None when ``load`` has neither a tracker file nor a complete checkpoint.

    Raises:
        CheckpointError: What was asked for is not there or was never completely written.
    """
    try:
        if load.exists() and not load.is_dir():
            raise CheckpointError(
                complaint(
                    "--load",
                    load,
                    "It is a file, and a checkpoint is a directory",
                    "Name a directory that --save wrote",
                )
            )
        return _choose(load, step)
    except OSError as error:
        raise CheckpointError(
            complaint("--load", load, f"It cannot be read ({describe(error)})", "Check its rights")
        ) from error


def _choose(load: Path, step: int | None) -> Found | None:
    own = iteration_of(load)
    if own is not None or is_committed(load):
        if not is_committed(load):
            raise CheckpointError(_not_committed("--load", load, _previous(load.parent, own)))
        return Found(load, RELEASE if own is None else own, named=True)
    if step is not None:
        directory = _restored(load, step)
        if not is_committed(directory):
            have = ", ".join(str(i) for i, _ in committed(load)) or "none"
            raise CheckpointError(
                complaint(
                    "--ckpt-step",
                    step,
                    f"{directory} holds no complete checkpoint",
                    f"Choose one of the iterations that are there ({have})",
                )
            )
        return Found(directory, step, named=True)
    return _latest(load)


def tracked(root: Path) -> int | None:
    """Return the iteration that the tracker names, None if it names none."""
    tracker = root / TRACKER_FILE
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    return int(text) if text.isdecimal() else None


def _latest(root: Path) -> Found | None:
    tracker = root / TRACKER_FILE
    if not tracker.is_file():
        newest = _previous(root, None)
        note = f"WARNING: {tracker} is missing. Loading the newest complete checkpoint beside it."
        return None if newest is None else Found(newest[1], newest[0], (note,))
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE or text.isdecimal():
        iteration: int | str = RELEASE if text == RELEASE else int(text)
        directory = _restored(root, iteration)
        if is_committed(directory):
            return Found(directory, iteration)
        problem = f"{tracker} names iteration {text}, but {directory} was never completely written"
        before = _previous(root, iteration)
    else:
        problem = f"{tracker} is empty or unreadable (it holds {text[:40]!r})"
        before = _previous(root, None)
    if before is None:
        raise CheckpointError(
            complaint(
                "--load",
                root,
                problem,
                "There is no complete checkpoint to fall back to; "
                "remove the directory to start from random weights",
            )
        )
    note = (
        f"WARNING: {problem}. Falling back to the newest complete checkpoint, iteration "
        f"{before[0]} in {before[1]}."
    )
    return Found(before[1], before[0], (note,))


def older(found: Found) -> list[Found]:
    """Return what may take the place of a damaged checkpoint, newest first.

    Only earlier ones: a later one may be of a run that was given up.
    """
    if found.named or not isinstance(found.iteration, int):
        return []
    before = committed(found.directory.parent)
    return [Found(d, i) for i, d in reversed(before) if i < found.iteration]


def _restored(root: Path, iteration: int | str) -> Path:
    """The directory of an iteration; the set-aside one where a crash interrupted the exchange."""
    final = root / directory_name(iteration)
    aside = final.with_name(final.name + OLD)
    there = is_committed(final) if isinstance(final, StorePath) else final.exists()
    return aside if not there and is_committed(aside) else final


def _previous(root: Path, iteration: int | str | None) -> tuple[int, Path] | None:
    """The newest committed checkpoint other than ``iteration``."""
    others = [(i, d) for i, d in committed(root) if i != iteration]
    return others[-1] if others else None


def _not_committed(name: str, directory: Path, previous: tuple[int, Path] | None) -> str:
    fix = "Check the path" if previous is None else f"The newest complete one is {previous[1]}"
    if not directory.exists():
        return complaint(name, directory, "There is no such directory", fix)
    return complaint(
        name, directory, f"It has no {MARKER_FILE}, so it was never completely written", fix
    )


# ------------------------------------------------------------------------------------- writing


def check_writable(root: Path, keep: bool = True) -> None:
    """Make the save directory and a file in it, which is removed again.

    Args:
        root: The directory.
        keep: Whether directories made here may stay.

    Raises:
        CheckpointError: That is not possible.
    """
    probe = root / f".probe-{os.getpid()}"
    try:
        if isinstance(root, StorePath):
            probe.write_bytes(b"x")
            probe.unlink()
            return
        new = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
        for folder in () if keep else new:
            folder.rmdir()
    except OSError as error:
        raise _not_writable(root, error) from error


def _not_writable(root: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        complaint(
            "--save",
            root,
            f"It cannot be written to ({describe(error)})",
            "Check that the bucket is there, and that the credentials, which fsspec's package "
            "takes from the environment, allow writing"
            if isinstance(root, StorePath)
            else "Choose a writable directory",
        )
    )


def prepare(
    root: Path,
    iteration: int | str,
    needed_bytes: int,
    make_room: Callable[[], None] | None = None,
) -> Path:
    """Make the temporary directory for a save, after clearing what crashed saves left.

    Nobody knows how much space there is in a store.

    Args:
        root: The save directory; made when missing.
        iteration: What is about to be saved.
        needed_bytes: Expected size of the checkpoint.
        make_room: Removes what need not be kept, called when there is too little space.

    Returns:
        The empty temporary directory.

    Raises:
        CheckpointError: ``root`` is not writable or has too little free space.
    """
    try:
        if isinstance(root, StorePath):
            return uploads.prepare(root, iteration)
        root.mkdir(parents=True, exist_ok=True)
        clean(root)
        free = shutil.disk_usage(root).free
        if free < needed_bytes and make_room is not None:
            make_room()
            free = shutil.disk_usage(root).free
        if free < needed_bytes:
            raise CheckpointError(
                complaint(
                    "--save",
                    root,
                    f"The checkpoint needs {needed_bytes:,} bytes and only {free:,} are free",
                    "Free space or choose another directory; earlier checkpoints are untouched",
                )
            )
        tmp = root / (directory_name(iteration) + TMP)
        tmp.mkdir()
        # Rights may allow a directory and still refuse files (quota, read-only mounts).
        probe = tmp / ".probe"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _not_writable(root, error) from error
    return tmp


def clean(root: Path) -> None:
    """Remove what interrupted saves left, first completing an interrupted exchange."""
    for child in sorted(root.iterdir()):
        base = child.name.removesuffix(TMP).removesuffix(OLD).removesuffix(REMOVED)
        if base == child.name or iteration_of(root / base) is None:
            continue
        if child.name.endswith(OLD) and is_committed(child) and not (root / base).exists():
            os.rename(child, root / base)
        else:
            shutil.rmtree(child)


def add_files(tmp: Path, files: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    """Put further files into a temporary directory.

    Args:
        tmp: The directory.
        files: Relative name -> file to copy, or content.

    Returns:
        Relative name -> size and checksum.
    """
    if isinstance(tmp, StorePath):
        return uploads.add_files(tmp, files)
    records = {}
    for name, source in files.items():
        target = tmp / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes | StorePath):
            target.write_bytes(source if isinstance(source, bytes) else source.read_bytes())
        else:
            shutil.copyfile(source, target)
        with target.open("rb") as file:
            sync(file)
        records[name] = checksum(target)
    return records


def commit(tmp: Path, records: dict[str, FileRecord]) -> Path:
    """Turn a completely written temporary directory into the latest checkpoint.

    Args:
        tmp: What ``prepare`` returned, with all data files in it and synced.
        records: Name -> size and checksum of each of them.

    Returns:
        The final directory.

    Raises:
        OSError: The file system refused; nothing that was committed before is lost.
    """
    root, final = tmp.parent, tmp.with_name(tmp.name.removesuffix(TMP))
    manifest = {
        "files": {
            name: {"size_bytes": r.size_bytes, "crc32": f"{r.crc32:08x}"}
            for name, r in sorted(records.items())
        }
    }
    contents = json.dumps(manifest, indent=1), json.dumps(MARKER)
    if isinstance(tmp, StorePath):
        uploads.commit(tmp, *contents)
        return tmp
    _write_synced(tmp / MANIFEST_FILE, contents[0])
    _write_synced(tmp / MARKER_FILE, contents[1])
    sync_directory(tmp)
    aside = final.with_name(final.name + OLD)
    if final.exists():
        os.rename(final, aside)
    os.rename(tmp, final)
    sync_directory(root)
    point_to(root, iteration_of(final))
    if aside.exists():
        shutil.rmtree(aside)
    return final


def point_to(root: Path, iteration: int | str | None) -> None:
    """Let the tracker name a complete checkpoint. A crash leaves the old tracker or the new one.

    Raises:
        OSError: The file system refused; the old tracker is intact.
    """
    _write_synced(root / (TRACKER_FILE + TMP), str(iteration))
    os.replace(root / (TRACKER_FILE + TMP), root / TRACKER_FILE)
    sync_directory(root)


def discard(tmp: Path) -> None:
    """Remove a temporary directory after a failed save, as far as that is possible."""
    if isinstance(tmp, StorePath):
        uploads.discard(tmp)
        return
    shutil.rmtree(tmp, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


# ---------------------------------------------------------------------------------- verification


def read_manifest(directory: Path) -> dict[str, FileRecord] | None:
    """Return the recorded files of a checkpoint, or None when it was written without a record.

    Raises:
        CheckpointError: The record itself is damaged.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {n: FileRecord(int(r["size_bytes"]), int(r["crc32"], 16)) for n, r in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path}: the list of files is damaged ({error!r})"
        raise UnusableCheckpointError(problem) from error


def verify(directory: Path, part: int = 0, parts: int = 1, contents: bool = True) -> list[str]:
    """Compare the files with the manifest.

    Args:
        directory: The checkpoint.
        part: Which share of the files this rank reads.
        parts: Number of shares.
        contents: Whether to read the files, or only to look at their sizes.

    Returns:
        One sentence a damaged file; empty when all is well.
    """
    problems = []
    records = read_manifest(directory) or {}
    sizes = sizes_of(directory, records)
    for index, (name, record) in enumerate(sorted(records.items())):
        path = directory / name
        if name not in sizes:
            problems.append(f"{path} is missing")
        elif sizes[name] != record.size_bytes:
            problems.append(f"{path} has {sizes[name]} bytes instead of {record.size_bytes}")
        elif contents and index % parts == part and checksum(path) != record:
            problems.append(f"{path} has the right size but other content than was written")
    return problems


def sizes_of(directory: Path, names: Iterable[str] | None = None) -> dict[str, int]:
    """Return relative name -> bytes of the files in a directory.

    Args:
        directory: A checkpoint.
        names: Which files; those that are not there are left out. None for all.
    """
    if isinstance(directory, StorePath):
        sizes = directory.sizes()
        return sizes if names is None else {n: sizes[n] for n in names if n in sizes}
    if names is None:
        names = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    paths = {name: directory / name for name in names}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def damage(directory: Path, problems: list[str]) -> str:
    """Build the error text for a committed checkpoint that is damaged."""
    iteration = iteration_of(directory)
    good = [
        f"{d} (iteration {i})"
        for i, d in reversed(committed(directory.parent))
        if i != iteration and not verify(d, contents=False)
    ]
    fix = (
        f"The newest other complete checkpoint is {good[0]}; load it with --ckpt-step or by path"
        if good
        else "There is no other complete checkpoint beside it"
    )
    return complaint("--load", directory, f"The checkpoint is damaged: {'; '.join(problems)}", fix)


def describe(error: OSError) -> str:
    """Return the plain reason of a file system error."""
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
