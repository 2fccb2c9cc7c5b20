r"""The ``.bin``/``.idx`` corpus format: memory-mapped reading, atomic writing.

A corpus ``PREFIX`` is two files. ``PREFIX.bin`` holds the token ids of all sequences back to back;
``PREFIX.idx`` says where each sequence starts and which sequences form a document. The layout is
Megatron-LM's, byte for byte, so corpora move between the two projects unchanged (little endian)::

    magic "MMIDIDX\0\0" | u64 version = 1 | u8 dtype code | u64 S | u64 D
    int32 lengths[S] | int64 byte offsets[S] | int64 document starts[D] | int8 modes[S], optional

``D`` counts one more than there are documents: the starts begin with 0 and end with ``S``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import types
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.core.errors import DataError, complaint
from megatron.core.files import sync, sync_directory

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[Any]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}

# Vocabularies from this size on are stored as int32; the value is part of the format.
UINT16_LIMIT = 65500

# `fingerprint` hashes an index up to this size completely and larger ones in evenly spaced blocks,
# because every rank of a run computes it at start-up.
_FULL_HASH_BYTES = 256 << 20
_HASH_BLOCK = 1 << 20

# What a builder appends to, and how many entries of it are copied at a time.
_LOGS = ("tokens", "lengths", "documents")
_BLOCK = 1 << 16


def optimal_dtype(vocab_size: int | None) -> type[Any]:
    """Return the element type that a corpus with this vocabulary is stored in."""
    if vocab_size is not None and vocab_size < UINT16_LIMIT:
        return np.uint16
    return np.int32


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the token file of a corpus."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the index file of a corpus."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """Random access to the sequences of one corpus.

    Both files are checked against each other when they are opened, so that a copy cut short fails
    here with numbers and not in the middle of training.

    Args:
        prefix: Path without ``.bin``/``.idx``.
        mmap: Map the token file (default). Without it every read is one ``pread``; file systems
            whose mappings are slow or unstable want that.

    Attributes:
        prefix: The path, as given.
        dtype: Element type of the tokens.
        sequence_lengths: int32 [S], tokens per sequence.
        sequence_pointers: int64 [S], byte offset of each sequence in the token file.
        document_indices: int64 [D], first sequence of each document, closed by ``S``.
        sequence_modes: int8 [S] if the corpus has them; they are not interpreted.

    Raises:
        DataError: A file is missing, is not this format, or the two do not fit together.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.mmap = mmap
        self._file: BinaryIO | None = None
        self._fingerprint: str | None = None
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise DataError(
                    complaint(
                        "--data-path",
                        self.prefix,
                        f"{path} does not exist or is not a file",
                        "Give the path without its .bin or .idx ending; "
                        "tools/preprocess_data.py writes both files",
                    )
                )
        self._read_index(idx_path(prefix))
        self._check_index(idx_path(prefix))
        self._open_tokens(bin_path(prefix))

    def _read_index(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise _broken(
                path, f"the first bytes {head[: len(MAGIC)]!r}", "It is not a corpus index"
            )
        if len(head) < HEADER.size:
            raise _broken(path, f"{size} bytes", f"The header alone has {HEADER.size} bytes")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != VERSION:
            raise _broken(path, f"format version {version}", f"Only version {VERSION} is known")
        if code not in DTYPES:
            known = ", ".join(f"{c} {np.dtype(t).name}" for c, t in DTYPES.items())
            raise _broken(path, f"dtype code {code}", f"The known codes are {known}")
        plain = HEADER.size + 12 * sequences + 8 * documents
        if size not in (plain, plain + sequences):
            raise _broken(
                path,
                f"{size} bytes",
                f"Its header announces {sequences} sequences and {documents} document entries, "
                f"which take {plain} bytes",
            )
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        raw = _mapped(path)
        edges = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
        self.sequence_lengths: npt.NDArray[np.int32] = raw[edges[0] : edges[1]].view("<i4")
        self.sequence_pointers: npt.NDArray[np.int64] = raw[edges[1] : edges[2]].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = raw[edges[2] : edges[3]].view("<i8")
        modes = raw[edges[3] :].view("i1")
        self.sequence_modes: npt.NDArray[np.int8] | None = (
            modes if sequences and modes.size == sequences else None
        )

    def _check_index(self, path: Path) -> None:
        lengths, starts = self.sequence_lengths, self.document_indices
        if lengths.size and int(lengths.min()) < 0:
            where = int(lengths.argmin())
            raise _broken(path, f"length {lengths[where]} of sequence {where}", "It is negative")
        if not starts.size or starts[0] != 0 or starts[-1] != lengths.size:
            raise _broken(
                path,
                f"document entries from {starts[:1].tolist()} to {starts[-1:].tolist()}",
                f"They have to run from 0 to the number of sequences, {lengths.size}",
            )
        self.num_tokens = int(lengths.sum(dtype=np.int64))

    def _open_tokens(self, path: Path) -> None:
        have = path.stat().st_size
        want = 0
        if len(self):
            last = int(self.sequence_lengths[-1]) * self.dtype.itemsize
            want = int(self.sequence_pointers[-1]) + last
            want = max(want, self.num_tokens * self.dtype.itemsize)
        if have != want:
            raise DataError(
                complaint(
                    str(path),
                    f"{have} bytes",
                    f"{idx_path(self.prefix).name} describes {want} bytes ({len(self)} sequences, "
                    f"{self.num_tokens} tokens of {self.dtype.itemsize} bytes), so the file is "
                    f"{'cut short' if have < want else 'not the one this index was made for'}",
                    "Copy both files again, or run tools/preprocess_data.py again",
                )
            )
        self._num_bytes = have
        self._tokens: npt.NDArray[np.uint8] | None = None
        if self.mmap:
            self._tokens = _mapped(path) if have else np.empty(0, np.uint8)
        else:
            self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return int(self.sequence_lengths.size)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self.document_indices.size) - 1

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}")
        return self.get(index % len(self))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return tokens ``[offset, offset + length)`` of a sequence, read-only.

        Args:
            index: Sequence number.
            offset: First token.
            length: Number of tokens; the rest of the sequence when None.
        """
        available = int(self.sequence_lengths[index]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of sequence {index} in {self.prefix}, "
                f"which has {self.sequence_lengths[index]}"
            )
        start = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        return self._bytes(start, count * self.dtype.itemsize).view(self.dtype)

    def _bytes(self, start: int, size: int) -> npt.NDArray[np.uint8]:
        if not 0 <= start <= self._num_bytes - size:
            raise _broken(
                idx_path(self.prefix),
                f"a sequence of {size} bytes at offset {start}",
                f"{bin_path(self.prefix).name} has {self._num_bytes} bytes",
            )
        if self._tokens is not None:
            return self._tokens[start : start + size]
        if self._file is None:
            raise ValueError(f"{self.prefix} is closed")
        # A positioned read shares no file offset, so threads and forked workers cannot disturb it.
        data = os.pread(self._file.fileno(), size, start)
        while len(data) < size:
            more = os.pread(self._file.fileno(), size - len(data), start + len(data))
            if not more:
                raise DataError(
                    complaint(
                        str(bin_path(self.prefix)),
                        f"{len(data)} of {size} bytes at offset {start}",
                        "The file became shorter after it was opened",
                        "Do not rewrite a corpus that a run is reading",
                    )
                )
            data += more
        return np.frombuffer(data, dtype=np.uint8)

    def fingerprint(self) -> str:
        """Return a hash of the index that tells corpora with different documents apart."""
        if self._fingerprint is None:
            self._fingerprint = self._hash_index()
        return self._fingerprint

    def _hash_index(self) -> str:
        path = idx_path(self.prefix)
        size = path.stat().st_size
        sizes = f"{size}:{bin_path(self.prefix).stat().st_size}"
        digest = hashlib.blake2b(sizes.encode(), digest_size=16)
        with path.open("rb") as file:
            if size <= _FULL_HASH_BYTES:
                while block := file.read(_HASH_BLOCK):
                    digest.update(block)
            else:
                for start in np.linspace(0, size - _HASH_BLOCK, _FULL_HASH_BYTES // _HASH_BLOCK):
                    file.seek(int(start))
                    digest.update(file.read(_HASH_BLOCK))
        return digest.hexdigest()

    def close(self) -> None:
        """Close the token file; views that were handed out stay valid."""
        if self._file is not None:
            self._file.close()
        self._tokens = None

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.prefix, self.mmap))


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    # As a plain array: every slice of a memmap object pays for bookkeeping that nobody reads.
    return np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)


def _reopen(prefix: str, mmap: bool) -> IndexedDataset:
    return IndexedDataset(prefix, mmap=mmap)


def _broken(path: Path, got: str, why: str) -> DataError:
    return DataError(
        complaint(str(path), got, why, "Run tools/preprocess_data.py again or copy the file again")
    )


class IndexedDatasetBuilder:
    """Write a corpus; the two files appear together, complete, or not at all.

    Everything goes to unfinished files beside the target: tokens, sequence lengths and document
    ends are appended to one file each, so that memory does not grow with the corpus. ``finalize``
    makes the index of them, flushes to disk and renames; leaving the ``with`` block by an exception
    removes them.

    Args:
        prefix: Target path without ending. Its directory must exist.
        dtype: Element type, see `optimal_dtype`.
        unfinished: Path that the names of the unfinished files start with, on the file system of
            the target; a name of its own beside the target if None.
        written: From `mark`: go on where an earlier builder with the same `unfinished` was then.

    Raises:
        DataError: The type has no code in the format, or a token does not fit the type.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike = np.int32,
        *,
        unfinished: str | os.PathLike[str] | None = None,
        written: Mapping[str, int] | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(
                complaint(
                    self.prefix,
                    f"dtype {self.dtype}",
                    "The corpus format has no code for it",
                    f"Use one of {', '.join(d.name for d in CODES)}",
                )
            )
        if unfinished is None:
            unfinished = f"{self.prefix}.tmp-{os.getpid()}-{os.urandom(4).hex()}"
        self._unfinished = os.fspath(unfinished)
        sizes = dict.fromkeys(_LOGS, 0) if written is None else written
        self._logs: dict[str, BinaryIO] = {}
        try:
            for name in _LOGS:
                path = Path(f"{self._unfinished}.{name}")
                self._logs[name] = path.open("wb" if written is None else "r+b", 1 << 20)
                self._logs[name].truncate(sizes[name])
                self._logs[name].seek(sizes[name])
        except OSError:
            self.abort()
            raise
        self._sequences = sizes["lengths"] // 4
        self._documents = sizes["documents"] // 8
        self._crc = sizes.get("crc", 0)

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return self._documents

    def add_document(self, tokens: npt.ArrayLike, lengths: list[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: Its token ids, flat.
            lengths: Tokens of each sequence when the document has several; one sequence if None.
        """
        flat = self._converted(tokens)
        parts = [flat.size] if lengths is None else [int(n) for n in lengths]
        if sum(parts) != flat.size or min(parts, default=0) < 0:
            raise ValueError(f"sequence lengths {parts} do not add up to {flat.size} tokens")
        self._write(flat, parts)
        self.end_document()

    def add_sequence(self, tokens: npt.ArrayLike) -> None:
        """Append one sequence to the current document; `end_document` closes it."""
        flat = self._converted(tokens)
        self._write(flat, [flat.size])

    def add_documents(
        self, tokens: npt.ArrayLike, counts: npt.ArrayLike, lengths: npt.ArrayLike
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: Token ids of all of them, flat.
            counts: Number of sequences of each document.
            lengths: Tokens of each sequence, in order.
        """
        flat, counted, parts = self._converted(tokens), np.asarray(counts), np.asarray(lengths)
        if int(parts.sum()) != flat.size or int(counted.sum()) != parts.size:
            raise ValueError("tokens, sequence lengths and sequence counts do not add up")
        first = self._sequences
        self._write(flat, parts)
        self._end_documents(first + np.cumsum(counted, dtype=np.int64))

    def end_document(self) -> None:
        """Close the current document."""
        self._end_documents(np.array([self._sequences]))

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append a whole corpus of the same element type."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                complaint(
                    os.fspath(prefix),
                    f"element type {other.dtype.name}",
                    f"The corpus it is appended to holds {self.dtype.name}",
                    "Tokenize both with the same tokenizer",
                )
            )
        self._append(bin_path(prefix), other.sequence_lengths, other.document_indices[1:])

    def add_unfinished(self, other: IndexedDatasetBuilder) -> None:
        """Append what another builder of the same element type has written so far."""
        other.mark()
        lengths, documents = (
            np.memmap(path, mode="r", dtype=dtype) if path.stat().st_size else np.empty(0, dtype)
            for path, dtype in ((other._path("lengths"), "<i4"), (other._path("documents"), "<i8"))
        )
        self._append(other._path("tokens"), lengths, documents)

    def _append(
        self, tokens: Path, lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int64]
    ) -> None:
        first = self._sequences
        with tokens.open("rb") as file:
            while block := file.read(1 << 20):
                self._put(block)
        for start in range(0, lengths.size, _BLOCK):
            self._record(lengths[start : start + _BLOCK])
        for start in range(0, documents.size, _BLOCK):
            self._end_documents(documents[start : start + _BLOCK] + first)

    def mark(self) -> dict[str, int]:
        """Put everything on the disk and return what a later builder needs to go on from here."""
        sizes = {}
        for name in _LOGS:
            log = self._log(name)
            sync(log)
            sizes[name] = log.tell()
        return {**sizes, "crc": self._crc}

    def seal(self) -> dict[str, object]:
        """Complete the two files under their unfinished names, see `publish`.

        Returns:
            Counts and checksums: documents, sequences, tokens, dtype, and the size and CRC-32 of
            either file.
        """
        written = self.mark()
        crc = self._write_index()
        for log in self._logs.values():
            log.close()
        self._logs = {}
        return {
            "documents": self._documents,
            "sequences": self._sequences,
            "tokens": written["tokens"] // self.dtype.itemsize,
            "dtype": self.dtype.name,
            "bin_bytes": written["tokens"],
            "bin_crc32": self._crc,
            "idx_bytes": self._path("index").stat().st_size,
            "idx_crc32": crc,
        }

    def _write_index(self) -> int:
        code, entries = CODES[self.dtype], self._documents + 1
        head = HEADER.pack(MAGIC, VERSION, code, self._sequences, entries)
        crc = 0
        with self._path("index").open("wb", 1 << 20) as index:
            parts = (
                [head],
                self._blocks("lengths"),
                self._pointers(),
                [np.zeros(1, "<i8").tobytes()],
                self._blocks("documents"),
            )
            for block in itertools.chain.from_iterable(parts):
                index.write(block)
                crc = zlib.crc32(block, crc)
            sync(index)
        return crc

    def _blocks(self, name: str) -> Iterator[bytes]:
        with self._path(name).open("rb") as file:
            while block := file.read(8 * _BLOCK):
                yield block

    def _pointers(self) -> Iterator[bytes]:
        start = 0
        for block in self._blocks("lengths"):
            # int64 throughout: a 32-bit sum wraps beyond 2 GiB.
            ends = np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self.dtype.itemsize
            pointers = np.concatenate([[0], ends[:-1]]) + start
            start += int(ends[-1])
            yield pointers.astype("<i8").tobytes()

    def finalize(self) -> None:
        """Make the corpus visible under its final name."""
        self.seal()
        publish(self._unfinished, self.prefix)

    def close(self) -> None:
        """Stop writing and leave the unfinished files to a later builder."""
        for log in self._logs.values():
            with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
                log.close()
        self._logs = {}

    def abort(self) -> None:
        """Remove what was written."""
        self.close()
        for name in (*_LOGS, "index"):
            self._path(name).unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if kind is not None or self._logs:
            self.abort()

    def _path(self, name: str) -> Path:
        return Path(f"{self._unfinished}.{name}")

    def _log(self, name: str) -> BinaryIO:
        if not self._logs:
            raise ValueError(f"{self.prefix} is already finalized or aborted")
        return self._logs[name]

    def _write(self, flat: npt.NDArray[Any], parts: npt.ArrayLike) -> None:
        lengths = np.asarray(parts, dtype=np.int64)
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise DataError(
                complaint(
                    self.prefix,
                    f"a sequence of {lengths.max()} tokens",
                    "The format stores sequence lengths in 32 bits",
                    "Split the text into several documents",
                )
            )
        self._put(flat.tobytes())
        self._record(lengths)

    def _put(self, block: bytes) -> None:
        self._log("tokens").write(block)
        self._crc = zlib.crc32(block, self._crc)

    def _record(self, lengths: npt.NDArray[Any]) -> None:
        self._log("lengths").write(lengths.astype("<i4").tobytes())
        self._sequences += lengths.size

    def _end_documents(self, ends: npt.NDArray[Any]) -> None:
        self._log("documents").write(ends.astype("<i8").tobytes())
        self._documents += ends.size

    def _converted(self, tokens: npt.ArrayLike) -> npt.NDArray[Any]:
        values = np.asarray(tokens).reshape(-1)
        if values.dtype == self.dtype or not values.size:
            return values.astype(self.dtype, copy=False)
        if np.issubdtype(self.dtype, np.integer):
            info = np.iinfo(self.dtype)
            low, high = int(values.min()), int(values.max())
            if low < info.min or high > info.max:
                raise DataError(
                    complaint(
                        self.prefix,
                        f"token ids from {low} to {high}",
                        f"{self.dtype.name} holds {info.min} to {info.max}",
                        "Write the corpus with a wider element type",
                    )
                )
        return values.astype(self.dtype)


def publish(unfinished: str | os.PathLike[str], prefix: str | os.PathLike[str]) -> None:
    """Give the two files that `IndexedDatasetBuilder.seal` completed their final names.

    Repeating it after a crash in between ends with both files in place.
    """
    tokens, index = (Path(f"{os.fspath(unfinished)}.{name}") for name in ("tokens", "index"))
    if tokens.exists():
        # Without its index a token file is unreadable, so at no moment do an old index and new
        # tokens (or the other way round) look like a corpus.
        idx_path(prefix).unlink(missing_ok=True)
        os.replace(tokens, bin_path(prefix))
    if index.exists():
        os.replace(index, idx_path(prefix))
    sync_directory(idx_path(prefix).parent)
    for name in ("lengths", "documents"):
        Path(f"{os.fspath(unfinished)}.{name}").unlink(missing_ok=True)
