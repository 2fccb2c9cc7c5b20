"""Index arrays on disk: built once per file system, complete or absent, shared by every rank."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.errors import DataError, complaint
from megatron.core.files import sync

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def cached_arrays(
    directory: Path,
    kind: str,
    split: str,
    description: Mapping[str, object],
    names: Sequence[str],
    build: Callable[[], Arrays],
) -> Arrays:
    """Load arrays from the cache, or build and store them.

    The files are ``{md5}-{kind}-{split}-{name}.npy`` and ``...-description.txt``, where the md5 is
    that of the description: anything that shapes the arrays must be in it. The description is
    written last, so its presence says that the arrays are complete. Any number of processes may
    start at once: one builds while the others wait for its lock, and where a file system has no
    locks, several build the same bytes and rename them into place.

    Args:
        directory: The cache; made if missing.
        kind: Class name, for the file name.
        split: ``train``, ``valid`` or ``test``, for the file name.
        description: What determines the arrays; must be JSON.
        names: The arrays' names.
        build: Makes them.

    Returns:
        The arrays, memory-mapped read-only.

    Raises:
        DataError: The directory cannot be written.
    """
    text = json.dumps(description, indent=4)
    key = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    base = f"{key}-{kind}-{split}"
    begun = time.perf_counter()
    found, why = _load(directory, base, names)
    if found is not None:
        _log(directory / base, "found in the cache", begun)
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{base}.lock"):
            found, reason = _load(directory, base, names)
            if found is not None:
                _log(directory / base, f"{why}; waited for another process to build it,", begun)
                return found
            arrays = build()
            for name in names:
                _write(directory / f"{base}-{name}.npy", arrays[name])
            _write(directory / f"{base}-description.txt", text.encode())
    except OSError as error:
        raise DataError(
            complaint(
                "--data-cache-path",
                str(directory),
                f"The index cache cannot be written there: {error}",
                "Name a writable folder with --data-cache-path",
            )
        ) from error
    _log(directory / base, f"{reason}; built in", begun)
    # Read what was stored: this process then shares pages with the others.
    loaded, _ = _load(directory, base, names)
    return arrays if loaded is None else loaded


def _log(base: Path, what: str, begun: float) -> None:
    logger.info("index %s: %s %.1f s", base, what, time.perf_counter() - begun)


def note(text: str) -> None:
    """Say a line about the data to whoever hears `decisions`."""
    logger.info(text)


@contextlib.contextmanager
def decisions(say: Callable[[str], None]) -> Iterator[None]:
    """Hand every decision about the data inside the block to `say`, one line each."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    handler, level = Lines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _load(directory: Path, base: str, names: Sequence[str]) -> tuple[Arrays | None, str]:
    """Return the arrays, or why there are none."""
    if not (directory / f"{base}-description.txt").is_file():
        return None, "not in the cache"
    arrays: Arrays = {}
    for name in names:
        path = directory / f"{base}-{name}.npy"
        try:
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            return None, f"{path.name} is unreadable ({error})"
    return arrays, ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The file stays: removing it would let two processes lock two different files of one name.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.info("index %s: this file system has no locks, built without one", path)
        yield
    finally:
        os.close(handle)


def _write(path: Path, content: npt.NDArray[Any] | bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                np.save(file, content, allow_pickle=False)
            sync(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
