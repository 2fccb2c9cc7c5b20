"""Text files as a stream of chunks: finding them, decompressing, and going on from a position.

JSON lines (plain, gzip or Zstandard) and Parquet; what a file is, its first bytes say. Memory does
not depend on the size of a file, and every chunk knows the position behind it.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from megatron.core.errors import DataError, complaint

CHUNK_BYTES = 1 << 18
# A longer line is taken for a file that is not JSON lines, before it fills the memory.
MAX_LINE_BYTES = 1 << 30
ROWS_PER_BATCH = 64

# What is read of a folder.
ENDINGS = tuple(
    f"{ending}{packed}"
    for ending in (".jsonl", ".ndjson", ".json")
    for packed in ("", ".gz", ".zst")
) + (".parquet",)

_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_SKIPPABLE = (
    b"\x2a\x4d\x18"  # bytes 1 to 3 of a Zstandard frame without text: pzstd begins with one
)
_NOT_READ = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip", b"\x04\x22\x4d\x18": "lz4"}


@dataclass(frozen=True)
class Position:
    """A place between two lines of the input.

    Attributes:
        file: Number of the input.
        lines: Lines, or rows, of it before this place.
        offset: Bytes of uncompressed text of it before this place; unused for Parquet.
        overall: Lines of all inputs before this place.
    """

    file: int = 0
    lines: int = 0
    offset: int = 0
    overall: int = 0


@dataclass(frozen=True)
class Chunk:
    """Some consecutive lines or rows of one file.

    Attributes:
        path: The file.
        first: Number of the first line or row in it, from 1.
        content: Whole lines, or rows as objects; a row that cannot be read is the reason.
        size: Bytes of text.
        after: The position behind the chunk.
        stored: Bytes that the inputs up to there take on the disk.
    """

    path: str
    first: int
    content: bytes | list[dict[str, Any] | str]
    size: int
    after: Position
    stored: int


def find_inputs(patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files that names, folders and patterns stand for, in the order they are read.

    What is named comes in the order of the command line. A pattern (``*``, ``?``, ``[]``, ``**``)
    stands for its matches, a folder for the files below it that end like text (`ENDINGS`), both
    sorted by path as text; hidden files are not read, links are followed.

    Returns:
        The files, and the files of folders that are left out because of their ending.

    Raises:
        DataError: A name stands for nothing, a file for two, or one cannot be read.
    """
    found: list[str] = []
    others: list[str] = []
    for pattern in patterns:
        matches = (
            [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        )
        if not matches:
            raise _bad_input(pattern, "No file has this name", "Check the path or the pattern")
        named: list[str] = []
        for match in matches:
            if not os.path.isdir(match):
                named.append(match)
                continue
            inside = _files_below(match)
            texts = [path for path in inside if path.endswith(ENDINGS)]
            others += [path for path in inside if not path.endswith(ENDINGS)]
            if match == pattern and not texts:
                raise _bad_input(
                    match,
                    f"None of the {len(inside)} files in this folder is text to read",
                    f"Endings that are read: {' '.join(ENDINGS)}; or name the files",
                )
            named += texts
        found += dict.fromkeys(named)  # of a folder and a file in it, ** matches both
    _check_readable(found)
    return found, others


def _check_readable(paths: Sequence[str]) -> None:
    # Now, and not when their turn comes after hours.
    first: dict[str, str] = {}
    for path in paths:
        if not os.access(path, os.R_OK):
            why = "It is a link to nothing, or its rights do not allow to read it"
            raise _bad_input(path, why, "Check the file, or leave it out")
        before = first.setdefault(os.path.realpath(path), path)
        if before is not path:
            also = "" if before == path else f", also as {before},"
            raise _bad_input(
                path, f"It is named twice{also} and would be read twice", "Name it once"
            )


def _files_below(folder: str) -> list[str]:
    """The files of a folder and of folders that links in it lead to, each folder once."""
    found: list[str] = []
    seen = {os.path.realpath(folder)}
    for parent, folders, files in os.walk(Path(folder), onerror=_fail, followlinks=True):
        inside = {name: os.path.join(parent, name) for name in sorted((*folders, *files))}
        folders.clear()
        for name, path in inside.items():
            if name.startswith("."):
                continue
            if os.path.isdir(path):
                if (place := os.path.realpath(path)) not in seen:
                    seen.add(place)
                    folders.append(name)
            elif os.path.isfile(path) or not os.path.exists(path):  # the latter is reported
                found.append(path)
    return sorted(found)


def _fail(error: OSError) -> NoReturn:
    raise _bad_input(
        str(error.filename), f"It cannot be read ({error.strerror})", "Check its rights"
    )


def refuse_address(flag: str, path: str) -> None:
    """Refuse an object store's address, which would be taken for a folder's name.

    Raises:
        DataError: It is one.
    """
    if "://" in path:
        why = "Only paths of the file system can be read and written"
        raise DataError(complaint(flag, path, why, "Give a path on a disk"))


class TextInput:
    """The inputs, one after the other.

    Args:
        paths: The files.
        keys: Columns to read of Parquet files.

    Attributes:
        paths: The files.
        total_bytes: What they take on the disk, 0 if one is a pipe.
        seekable: Whether reading can begin anywhere, which a pipe does not allow.
    """

    def __init__(self, paths: Sequence[str], keys: Sequence[str]) -> None:
        self.paths, self.keys = list(paths), list(keys)
        regular = [os.path.isfile(path) for path in self.paths]
        self.seekable = all(regular)
        self.sizes = [os.path.getsize(p) if ok else 0 for p, ok in zip(paths, regular, strict=True)]
        self.total_bytes = sum(self.sizes) if self.seekable else 0

    def chunks(self, start: Position | None = None) -> Iterator[Chunk]:
        """Read from a position, or the beginning, to the end.

        Raises:
            DataError: A file cannot be read, is cut short or has an endless line.
        """
        place = start or Position()
        for number in range(place.file, len(self.paths)):
            if number > place.file:
                place = Position(number, overall=place.overall)
            for chunk in self._file(place):
                place = chunk.after
                yield chunk

    def _file(self, start: Position) -> Iterator[Chunk]:
        path, lines = self.paths[start.file], start.lines
        try:
            with open(path, "rb") as raw:
                # Peeking instead of seeking lets the input be a pipe.
                if raw.peek(4)[:4] == _PARQUET:
                    chunks = self._parquet(path, start)
                else:
                    chunks = self._lines(path, raw, start)
                for chunk in chunks:
                    lines = chunk.after.lines
                    yield chunk
        except (OSError, EOFError, zlib.error) as error:
            _unreadable(path, lines, error)

    def _lines(self, path: str, raw: io.BufferedReader, start: Position) -> Iterator[Chunk]:
        stored_before, stored = sum(self.sizes[: start.file]), self.sizes[start.file]
        source = _unpacked(path, raw)
        _skip(source, start.offset)
        place = start
        while block := source.read(CHUNK_BYTES):
            if not block.endswith(b"\n"):
                block += source.readline(MAX_LINE_BYTES)
                if len(block) >= MAX_LINE_BYTES:
                    raise _bad_input(
                        path,
                        f"After line {place.lines} comes one of over {MAX_LINE_BYTES >> 20} MiB",
                        "Write one JSON object a line",
                    )
            first = place.lines + 1
            place = _further(place, block.count(b"\n") + (not block.endswith(b"\n")), len(block))
            read = stored_before + (min(raw.tell(), stored) if self.seekable else 0)
            yield Chunk(path, first, block, len(block), place, read)

    def _parquet(self, path: str, start: Position) -> Iterator[Chunk]:
        stored_before, stored = sum(self.sizes[: start.file]), self.sizes[start.file]
        arrow, parquet = _arrow(path)
        place = start
        try:
            # Without a buffer size the package holds whole column chunks in memory.
            file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            names = file.schema_arrow.names
            groups, row = _groups_from(file, start.lines)
            batches = file.iter_batches(
                ROWS_PER_BATCH,
                row_groups=groups,
                columns=[key for key in self.keys if key in names],
                use_threads=False,
            )
            for batch in batches:
                batch, row = batch.slice(max(start.lines - row, 0)), row + batch.num_rows
                if not batch.num_rows:
                    continue
                first, place = place.lines + 1, _further(place, batch.num_rows, 0)
                read = stored_before + stored * place.lines // file.metadata.num_rows
                yield Chunk(path, first, _rows(batch, names), batch.nbytes, place, read)
        except arrow.ArrowException as error:
            _unreadable(path, place.lines, error)


def _further(place: Position, lines: int, size: int) -> Position:
    return Position(place.file, place.lines + lines, place.offset + size, place.overall + lines)


def _rows(batch: Any, names: Sequence[str]) -> list[dict[str, Any] | str]:
    if not batch.num_columns:
        # So that the message about a missing field can list those there are.
        return [dict.fromkeys(names)] * batch.num_rows
    try:
        rows: list[dict[str, Any] | str] = batch.to_pylist()
    except (ValueError, OverflowError):  # a text that is not UTF-8, a date that Python cannot hold
        rows = []
        for number in range(batch.num_rows):
            try:
                rows += batch.slice(number, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                rows.append(str(error))
    return rows


def _groups_from(file: Any, lines: int) -> tuple[list[int], int]:
    """Return the row groups that hold rows from `lines` on, and the first row of the first."""
    row = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows > lines:
            return list(range(group, file.num_row_groups)), row
        row += rows
    return [], row


def _unpacked(path: str, raw: io.BufferedReader) -> BinaryIO:
    head = raw.peek(4)[:4]
    if head[:2] == _GZIP:
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if head == _ZSTD or (head[1:] == _SKIPPABLE and head[0] >> 4 == 5):
        return io.BufferedReader(_ZstdFile(raw, path), CHUNK_BYTES)
    for start, name in _NOT_READ.items():
        if head.startswith(start):
            why = f"It is packed with {name}, which is not read"
            raise _bad_input(path, why, "Unpack it, or pack it with gzip or zstd")
    return raw


def _skip(source: BinaryIO, offset: int) -> None:
    if offset and isinstance(source, io.BufferedReader) and isinstance(source.raw, io.FileIO):
        source.seek(offset)
        return
    while offset:
        block = source.read(min(offset, CHUNK_BYTES))
        if not block:
            raise EOFError("the file has become shorter")
        offset -= len(block)


class _ZstdFile(io.RawIOBase):
    """Zstandard frames back to back; unlike the package's own reader it notices a cut."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        try:
            import zstandard  # noqa: PLC0415 - optional
        except ImportError as error:
            raise _needs(path, "zstandard") from error
        self._raw, self._package = raw, zstandard
        self._frame: Any = None
        self._rest = b""
        self._ready = memoryview(b"")

    def _start(self) -> Any:
        # Dumps are often packed with windows beyond the default limit of 128 MiB (zstd --long).
        return self._package.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def readable(self) -> bool:
        """Say that bytes can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Put the next bytes into a buffer and return how many."""
        while not self._ready:
            block = self._rest or self._raw.read(1 << 14)
            self._rest = b""
            if not block:
                if self._frame is not None:
                    raise EOFError("the compressed file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._start()
            try:
                self._ready = memoryview(self._frame.decompress(block))
            except self._package.ZstdError as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _arrow(path: str) -> tuple[Any, Any]:
    try:
        import pyarrow  # noqa: PLC0415 - optional
        import pyarrow.parquet  # noqa: PLC0415 - optional
    except ImportError as error:
        raise _needs(path, "pyarrow") from error
    return pyarrow, pyarrow.parquet


def _needs(path: str, package: str) -> DataError:
    return _bad_input(
        path,
        f"Reading it takes the package {package}, which is not installed",
        f"Run pip install {package}",
    )


def _unreadable(path: str, lines: int, error: Exception) -> NoReturn:
    raise _bad_input(
        path,
        f"It cannot be read after line {lines}: {error}",
        "Check the path and that the file is complete",
    ) from error


def _bad_input(got: str, why: str, fix: str) -> DataError:
    return DataError(complaint("--input", got, why, fix))
