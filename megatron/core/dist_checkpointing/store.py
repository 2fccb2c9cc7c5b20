"""Paths in an object store (``s3://bucket/run``), for which fsspec knows how to reach it.

`StorePath` is a path: whatever reads a checkpoint takes one without knowing. What differs is
writing, because a store has neither directories nor renames: see `uploads`.

Whatever goes wrong in a store is an ``OSError`` here, as on a disk, after a few tries where that
may help. Listings are never taken from a cache: other processes write there.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path, PosixPath, PurePath
from typing import IO, Any, TypeVar

import fsspec
from fsspec.core import url_to_fs

from megatron.config import stores
from megatron.core.errors import CheckpointError, complaint

PAUSES_S = (1.0, 4.0)  # between tries
_AHEAD_BYTES = 8 << 20
_NEAR_BYTES = 1 << 20
# What a second try does not change.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_REACHED: dict[tuple[int, str], Any] = {}  # by process: connections do not survive a fork

T = TypeVar("T")


def path_of(text: str | Path) -> Path:
    """Return the path that a user means: in the file system, or in a store if it has ``://``.

    Raises:
        CheckpointError: It names no store, or two.
    """
    if isinstance(text, Path):
        return text
    if not stores.in_store(text):
        protocol, separator, rest = text.partition(stores.SEPARATOR)
        return Path(rest if separator else protocol)
    if not stores.has_form(text):
        raise CheckpointError(complaint("path", text, stores.WHY, stores.FIX))
    return StorePath(text)


def given_path(text: str) -> Path:
    """Return `path_of` for a tool's command line."""
    try:
        return path_of(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class StorePath(PosixPath):
    """A place in a store, with those methods of a path that a store can offer.

    An object appears whole or not at all when the file that writes it is closed. Directories are
    the common beginnings of names. Whatever needs a real file fails with a ``TypeError``.
    """

    def __str__(self) -> str:
        return "/".join(self.parts).replace(":/", stores.SEPARATOR, 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not in the file system")

    def __reduce__(self) -> tuple[Any, ...]:
        return StorePath, (str(self),)

    # -- looking ---------------------------------------------------------------------------------

    def is_file(self, **options: Any) -> bool:
        """Whether there is an object of this name.

        Raises:
            OSError: The store does not say; fsspec's own question takes that for a no.
        """
        try:
            return bool(self._ask(lambda files, key: files.info(key)["type"] == "file"))
        except FileNotFoundError:
            return False

    def is_dir(self, **options: Any) -> bool:
        """Whether names go on from here."""
        try:
            return any(self.iterdir())
        except FileNotFoundError:
            return False

    def exists(self, **options: Any) -> bool:
        """Whether it is a file or a directory."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """There are no links."""
        return False

    def stat(self, **options: Any) -> os.stat_result:
        """Return the size; nothing else is known of an object."""
        size = self._ask(lambda files, key: files.info(key)["size"])
        return os.stat_result((0, 0, 0, 0, 0, 0, int(size), 0, 0, 0))

    def resolve(self, strict: bool = False) -> StorePath:
        """Return itself: it is absolute and has no links."""
        return self

    def iterdir(self) -> Generator[StorePath, None, None]:
        """Yield what is directly below."""
        yield from (self / name for name in sorted(self._entries()))

    def _entries(self) -> dict[str, int | None]:
        """Return the names directly below and the sizes of objects; None for further levels."""

        def listed(files: Any, key: str) -> dict[str, int | None]:
            own, found = key.rstrip("/"), {}
            for entry in files.ls(key, detail=True):
                name = entry["name"].rstrip("/")
                if name != own:  # a mark of an empty directory
                    is_object = entry["type"] == "file"
                    found[name.rpartition("/")[2]] = int(entry["size"]) if is_object else None
            return found

        return self._ask(listed)

    def sizes(self) -> dict[str, int]:
        """Return relative name -> bytes of every object below, by one listing a level.

        Raises:
            OSError: The store does not say; fsspec's own walk leaves such levels out.
        """
        try:
            entries = self._entries()
        except FileNotFoundError:
            return {}
        found: dict[str, int] = {}
        for name, size in entries.items():
            if size is not None:
                found[name] = size
            else:
                found |= {f"{name}/{n}": below for n, below in (self / name).sizes().items()}
        return found

    def rglob(self, pattern: str, **options: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """Yield every object below; the only pattern is ``*``."""
        if pattern != "*":
            raise ValueError(f"{pattern}: a store is listed as a whole")
        yield from (self / name for name in sorted(self.sizes()))

    # -- reading ---------------------------------------------------------------------------------

    def open(self, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        """Open it to be read (``rb``), or written from its beginning (``wb``)."""
        if mode == "rb":
            return _Object(self)  # type: ignore[return-value]
        if mode == "wb":
            return _Upload(self)  # type: ignore[return-value]
        raise ValueError(f"{self}: an object is opened with rb or wb, not {mode}")

    def read_part(self, offset: int, length: int) -> bytes:
        """Return so many bytes from an offset on, fewer where the object ends before."""
        if not length:
            return b""
        end = offset + length
        return self._ask(lambda files, key: bytes(files.cat_file(key, start=offset, end=end)))

    def read_bytes(self) -> bytes:
        """Return all of it."""
        return self._ask(lambda files, key: bytes(files.cat_file(key)))

    def read_text(
        self, encoding: str | None = None, errors: str | None = None, **options: Any
    ) -> str:
        """Return all of it as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    # -- changing --------------------------------------------------------------------------------

    def write_bytes(self, data: Any) -> int:
        """Put an object of this content in its place."""
        self._ask(lambda files, key: files.pipe_file(key, bytes(data)))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, *args: Any, **options: Any) -> int:
        """Put an object of this text in its place."""
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: names need no directories."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete it."""
        try:
            self._ask(lambda files, key: files.rm_file(key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def unlink_below(self, names: Sequence[str]) -> None:
        """Delete objects by their names relative to here, at once where the store can."""
        try:
            if names:
                self._ask(lambda files, key: files.rm([f"{key.rstrip('/')}/{n}" for n in names]))
        except FileNotFoundError:  # some are gone: a try that failed has removed them
            for name in names:
                (self / name).unlink(missing_ok=True)

    def copy_to(self, target: StorePath) -> None:
        """Copy it inside the store, where the store itself does so."""
        _, key = target.reach()
        self._ask(lambda files, own: files.cp_file(own, key))

    # -- access ----------------------------------------------------------------------------------

    def reach(self) -> tuple[Any, str]:
        """Return fsspec's file system and what this place is called there.

        Raises:
            CheckpointError: What it takes to reach the store is not installed, or not set.
        """
        start = os.getpid(), self.parts[0][:-1] + stores.SEPARATOR + self.parts[1]
        try:
            if start not in _REACHED:  # fsspec's own memory of it is one for each thread
                _REACHED[start] = url_to_fs(start[1])[0]
                if hasattr(_REACHED[start], "dircache"):
                    _REACHED[start].dircache.use_listings_cache = False
        except (ImportError, ValueError) as error:
            known = ", ".join(sorted(n for n in ("s3", "gs", "az") if _is_there(n))) or "none"
            raise CheckpointError(
                complaint(
                    "path",
                    self,
                    f"fsspec cannot reach it: {error} (installed of s3, gs, az: {known})",
                    "Install the package of this protocol (s3://: pip install s3fs, gs://: gcsfs, "
                    "az://: adlfs), or give a path on a disk",
                )
            ) from error
        except Exception as error:  # whatever the protocol's package raises
            raise _as_os_error(error, self) from error
        files = _REACHED[start]
        return files, str(files._strip_protocol(str(self)))

    def _ask(self, work: Callable[[Any, str], T]) -> T:
        """Ask the store, several times if need be.

        Raises:
            OSError: It did not do it.
        """
        files, key = self.reach()
        files.invalidate_cache()
        return persistently(lambda: work(files, key), self)


def _is_there(protocol: str) -> bool:
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return False
    return True


def persistently(work: Callable[[], T], path: PurePath) -> T:
    """Do what may fail for a moment, more than once if it is about a store.

    Raises:
        OSError: It failed each time.
    """
    if not isinstance(path, StorePath):
        return work()
    tries = len(PAUSES_S) + 1
    while True:
        tries -= 1
        try:
            return work()
        except CheckpointError:
            raise
        except Exception as error:  # of whatever kind: the package of a protocol has its own
            if not tries or isinstance(error, _FINAL):
                raise _as_os_error(error, path) from error
        time.sleep(PAUSES_S[-tries])


def _as_os_error(error: Exception, path: PurePath) -> OSError:
    """Return an error as a file system would tell it, with a number, a text and a name."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror is not None:
        return error
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "There is no such object, or no bucket", str(path))
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, text, str(path))
    return OSError(errno.EIO, f"{type(error).__name__}: {text}", str(path))


class _Object(io.RawIOBase):
    """An object that is read from a store as it is asked for."""

    def __init__(self, path: StorePath) -> None:
        self._path, self._at, self._size = path, 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._path.read_part(self._at, min(len(buffer), max(self._size - self._at, 0)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Upload(io.RawIOBase):
    """An object that is written into a store piece by piece, and there once this is closed."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        files, key = path.reach()
        try:
            self._file = files.open(key, "wb")
        except Exception as error:  # of whatever kind: the package of a protocol has its own
            raise _as_os_error(error, path) from error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._once(lambda: self._file.write(view))
        return len(view)

    def close(self) -> None:
        if not self.closed:
            try:
                self._once(self._file.close)
            finally:
                super().close()

    def _once(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # of whatever kind: the package of a protocol has its own
            raise _as_os_error(error, self._path) from error


class Parts:
    """Reads parts of files. Those of a store that follow one another take few requests."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._start, self._last, self._window = 0, 0, b""

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Return so many bytes from an offset on, fewer where the file ends before.

        Raises:
            OSError: It cannot be read.
        """
        if not isinstance(path, StorePath):
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(length)
        start = offset - self._start
        if path != self._path or start < 0 or start + length > len(self._window):
            follows = path == self._path and 0 <= offset - self._last <= _NEAR_BYTES
            self._window = path.read_part(offset, max(length, _AHEAD_BYTES if follows else 0))
            self._path, self._start, start = path, offset, 0
        self._last = offset + length
        return self._window[start : start + length]
