"""Files of one checkpoint directory: checksummed writing, and reading that executes nothing.

The format is that of ``torch.distributed.checkpoint``: data files ``__{rank}_{n}.distcp`` and the
index ``.metadata``. Reading is our own because it must be safe with files from elsewhere (the index
is a pickle; here only a fixed set of plain record types may appear in it), must name the file that
is damaged, and must work without a process group.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megatron.core.dist_checkpointing import safe_pickle
from megatron.core.dist_checkpointing.chunks import ChunkIndex, misplaced
from megatron.core.dist_checkpointing.foreign import own_names, weights_as_masters
from megatron.core.dist_checkpointing.safe_pickle import Forbidden, Opaque, refusal
from megatron.core.dist_checkpointing.shard import Piece, Sharded, overlap, volume
from megatron.core.dist_checkpointing.store import Parts, StorePath
from megatron.core.errors import UnusableCheckpointError
from megatron.core.files import sync

INDEX_FILE = ".metadata"
_COPY_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20
_SHOWN = 3  # problems in a message
_LEAD_S = 0.01


@dataclass(frozen=True)
class FileRecord:
    """What a file must look like: its size in bytes and the CRC-32 of its content."""

    size_bytes: int
    crc32: int


class Pace:
    """Half speed for a writer behind a run, until somebody waits for it.

    Writing takes cores, memory bandwidth and the disk away from the run. So the writer rests for as
    long as it works, and puts on the disk what it wrote piece by piece, not all at the end.
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._since_sync = self._since_rest = 0
        self._worked_s = 0.0

    def begin(self) -> None:
        """Let the run go on first, which has just asked for the writer."""
        self._hurry.wait(_LEAD_S)

    def hurry(self) -> None:
        """Go on at full speed."""
        self._hurry.set()

    def rest(self, file: IO[bytes], num_bytes: int, begun: float) -> None:
        """Rest after so many bytes, written since `begun` by the monotonic clock."""
        if self._hurry.is_set():
            return
        self._since_sync += num_bytes
        self._since_rest += num_bytes
        if self._since_sync >= _COPY_BYTES:
            self._since_sync = 0
            sync(file)
        self._worked_s += time.monotonic() - begun
        if self._since_rest >= _PIECE_BYTES:  # many short rests cost more than they give
            worked, self._worked_s, self._since_rest = self._worked_s, 0.0, 0
            self._hurry.wait(worked)


class _ChecksumStream(io.RawIOBase):
    """Passes sequential writes on to a file and keeps their length and CRC-32."""

    def __init__(self, file: IO[bytes], pace: Pace | None = None) -> None:
        self._file, self._pace = file, pace
        self.size_bytes = 0
        self.crc32 = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            self._write_piece(view[start : start + _PIECE_BYTES])
        return len(view)

    def _write_piece(self, view: memoryview) -> None:
        begun = time.monotonic()
        try:
            self._file.write(view)
            self.size_bytes += len(view)
            self.crc32 = zlib.crc32(view, self.crc32)
            if self._pace is not None:
                self._pace.rest(self._file, len(view), begun)
        except OSError as error:
            self.failure = error
            raise

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        # The caller is about to fsync, which does not see bytes still buffered here.
        self._file.flush()
        return self._file.fileno()


class _ChecksumFileSystem(FileSystem):
    """The library's file access with a record of every file it wrote."""

    def __init__(self, pace: Pace | None) -> None:
        self.records: dict[str, FileRecord] = {}
        self._pace = pace

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with (path if isinstance(path, Path) else Path(path)).open(mode) as file:
            if "w" not in mode:
                yield cast(io.IOBase, file)
                return
            stream = _ChecksumStream(cast(IO[bytes], file), self._pace)
            try:
                yield stream
            except RuntimeError as error:
                # torch's archive writer fails again while it closes, and hides the cause.
                if stream.failure is None:
                    raise
                raise stream.failure from error
        self.records[Path(path).name] = FileRecord(stream.size_bytes, stream.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        if isinstance(path, StorePath):
            path.copy_to(cast(StorePath, new_path))
            path.unlink()
        else:
            super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class ChecksumWriter(FileSystemWriter):
    """DCP's writer; afterwards ``records`` holds size and checksum of what this rank wrote."""

    def __init__(self, path: Path, pace: Pace | None = None) -> None:
        """Write into ``path``, with an fsync for each file."""
        stored = isinstance(path, StorePath)
        super().__init__(path, sync_files=not stored, thread_count=1, overwrite=False)
        files = _ChecksumFileSystem(pace)
        self.fs = files
        self.records: dict[str, FileRecord] = files.records

    def storage_meta(self) -> StorageMeta:
        """Return what the index says of itself; in plain values, so that anybody can read it."""
        where = str(self.path) if isinstance(self.path, StorePath) else self.checkpoint_id
        return StorageMeta(checkpoint_id=where, save_id=self.save_id)


class PlainPlanner(DefaultSavePlanner):
    """DCP's planner for a flat mapping; ``BytesIO`` values are written as they are.

    Its own check of the blocks compares all with all, which takes minutes with many experts.
    """

    def __init__(self, partial: bool = False) -> None:
        """Keys are final already: nothing is flattened or renamed.

        Args:
            partial: The blocks need not cover their tensors.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._partial = partial

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give each block to one of the ranks that offer it, and check that all are there."""
        plans, metadata = create_default_global_save_plan(dedup_save_plans(all_plans))
        problems = [
            problem
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not self._partial
            for problem in misplaced(key, entry.size, entry.chunks)
        ]
        if problems:
            raise ValueError(f"The blocks do not fit together: {'; '.join(problems[:_SHOWN])}")
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Write bytes unchanged instead of pickling the object that wraps them."""
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)


# Every global that the index of a DCP checkpoint may name. torch.dtype members are added below.
_INDEX_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # Megatron-Core keeps the plans of all ranks in the index.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in (
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    ),
}


class _ForeignMetadata(Metadata):
    """The index as Megatron-Core up to 0.15 writes it, with data of its own that is not used."""


class _IndexUnpickler(pickle.Unpickler):
    """Reads the index, refusing anything but its own record types."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("megatron.core.dist_checkpointing."):
            return _ForeignMetadata if name == "MCoreMetadata" else Opaque
        if (module, name) in _INDEX_GLOBALS:
            return getattr(importlib.import_module(module), name)
        raise Forbidden(f"{module}.{name}")


@dataclass(frozen=True)
class TensorEntry:
    """Global shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Reader:
    """Random access to the tensors and byte entries of one checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        """Read the index.

        Args:
            directory: An ``iter_XXXXXXX`` or ``release`` directory.

        Raises:
            CheckpointError: The index is missing or is not one.
        """
        self._take(directory, _read_index(directory / INDEX_FILE))

    def _take(self, directory: Path, metadata: Metadata) -> None:
        self.directory, self._metadata, self._source = directory, metadata, Parts()
        self.common: dict[str, Any] | None = None  # settings that lie in no entry and no file
        self.tensors: dict[str, TensorEntry] = {}
        self.blobs: list[str] = []
        self._chunks: dict[str, ChunkIndex] = {}
        self._stored = own_names(metadata.state_dict_metadata)
        for key, stored in self._stored.items():
            entry = metadata.state_dict_metadata[stored]
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[key] = TensorEntry(tuple(entry.size), entry.properties.dtype)
            else:
                self.blobs.append(key)

    def take_weights_as_masters(self) -> None:
        """Give masters that are not stored, since the fp32 weights are, their names too."""
        for key, weight in weights_as_masters(self.tensors).items():
            self.tensors[key] = self.tensors[weight]
            self._stored[key] = self._stored[weight]

    def files(self) -> set[str]:
        """Return the names of the data files that the index refers to."""
        return {info.relative_path for info in self._metadata.storage_data.values()}

    def read_blob(self, key: str) -> bytes:
        """Return the bytes stored under ``key``.

        Raises:
            CheckpointError: There is no such entry, or its file is damaged.
        """
        if key not in self.blobs:
            raise UnusableCheckpointError(f"{self.directory}: it has no entry {key!r}.")
        return self._raw(self._metadata.storage_data[MetadataIndex(key)])

    def read(self, key: str) -> Tensor:
        """Return the whole tensor ``key``.

        Raises:
            CheckpointError: There is no such tensor, or its file is damaged.
        """
        entry = self._entry(key)
        target = torch.empty(entry.shape, dtype=entry.dtype)
        self.load({key: Sharded(entry.shape, [Piece(target, (0,) * target.dim())])})
        return target

    def read_row(self, key: str, *row: int) -> Tensor:
        """Return ``tensor[row]`` of a stacked tensor without reading other layers or experts.

        Args:
            key: The tensor.
            row: One index for each stacked axis, outermost first.

        Raises:
            CheckpointError: There is no such tensor or row, or its file is damaged.
        """
        entry = self._entry(key)
        extents = entry.shape[: len(row)]
        inside = all(0 <= i < n for i, n in zip(row, extents, strict=False))
        if len(extents) < len(row) or not inside:
            where = ", ".join(str(i) for i in row)
            raise UnusableCheckpointError(
                f"{self.directory}: {key} {entry.shape} has no row {where}."
            )
        rest = entry.shape[len(row) :]
        target = torch.empty((*(1,) * len(row), *rest), dtype=entry.dtype)
        self.load({key: Sharded(entry.shape, [Piece(target, (*row, *(0,) * len(rest)))])})
        return target.view(rest)

    def load(self, targets: Mapping[str, Sharded]) -> int:
        """Copy the stored values into the blocks of ``targets``, converting dtypes.

        A block that reaches past the stored extent along its ``padded_dim`` keeps zeros there.

        Args:
            targets: Stored key -> blocks to fill in place.

        Returns:
            Number of bytes of the blocks.

        Raises:
            CheckpointError: A key is missing, a shape differs, a block is not covered by stored
                data, or a file is damaged.
        """
        jobs, num_bytes = self.jobs(targets)
        for job in jobs:
            job.fill(self.stored(job))
        return num_bytes

    def jobs(self, targets: Mapping[str, Sharded]) -> tuple[list[Job], int]:
        """Return which stored blocks `load` reads, in file order, and the bytes of the targets.

        Args:
            targets: See `load`.

        Raises:
            CheckpointError: As there, but for damage.
        """
        jobs: dict[tuple[str, int], Job] = {}
        num_bytes = 0
        for key, target in targets.items():
            self._check_shape(key, target)
            for piece in target.pieces:
                num_bytes += piece.local.nbytes
                for index, shape, copy in self._plan(key, piece, target.padded_dim):
                    info = self._metadata.storage_data[index]
                    place = info.relative_path, info.offset
                    if place not in jobs:
                        jobs[place] = Job(key, place, shape, self.tensors[key].dtype, index, [])
                    jobs[place].copies.append(copy)
        return [jobs[place] for place in sorted(jobs)], num_bytes

    def stored(self, job: Job) -> Tensor:
        """Read a stored block.

        Raises:
            CheckpointError: Its file is damaged.
        """
        return self._tensor(job.index, self._metadata.storage_data[job.index])

    def _entry(self, key: str) -> TensorEntry:
        if key not in self.tensors:
            raise UnusableCheckpointError(f"{self.directory}: it has no tensor {key!r}.")
        return self.tensors[key]

    def _check_shape(self, key: str, target: Sharded) -> None:
        stored, wanted = list(self._entry(key).shape), list(target.size())
        if target.padded_dim is not None and len(stored) == len(wanted):
            wanted[target.padded_dim] = stored[target.padded_dim]
        if stored != wanted:
            raise UnusableCheckpointError(
                f"{self.directory}: {key} has shape {tuple(stored)}, the model needs "
                f"{tuple(target.size())}."
            )

    def _plan(
        self, key: str, piece: Piece, padded_dim: int | None
    ) -> Iterator[tuple[MetadataIndex, tuple[int, ...], _Copy]]:
        stored = self._stored[key]
        entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[stored])
        shape = tuple(piece.local.shape)
        missing = volume(shape)
        copies = []
        if key not in self._chunks:
            self._chunks[key] = ChunkIndex(entry.chunks)
        for chunk in self._chunks[key].near(piece.offset, shape):
            box = overlap(piece.offset, shape, chunk.offsets, chunk.sizes)
            if box is None:
                continue
            start, extent = box
            missing -= volume(extent)
            source = _slices(start, extent, chunk.offsets)
            destination = piece.local[_slices(start, extent, piece.offset)]
            index = MetadataIndex(stored, chunk.offsets)
            copies.append((index, tuple(chunk.sizes), _Copy(source, destination)))
        if missing and padded_dim is not None:
            beyond = piece.offset[padded_dim] + shape[padded_dim] - entry.size[padded_dim]
            beyond = min(max(beyond, 0), shape[padded_dim])
            missing -= beyond * volume(shape) // max(shape[padded_dim], 1)
            with torch.no_grad():
                piece.local.narrow(padded_dim, shape[padded_dim] - beyond, beyond).zero_()
        if missing:
            raise UnusableCheckpointError(
                f"{self.directory}: {key}: {missing} of the {volume(shape)} elements at "
                f"{piece.offset} are stored nowhere."
            )
        yield from copies

    def _tensor(self, index: MetadataIndex, info: Any) -> Tensor:
        data = self._raw(info)
        what = f"the bytes of {index.fqn} at offset {info.offset}"
        path = self.directory / info.relative_path
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            value = safe_pickle.load(data, f"{path}: {what}")  # says what is wrong with it
        except (RuntimeError, EOFError, ValueError) as error:
            raise UnusableCheckpointError(f"{path}: {what} are damaged ({error}).") from error
        if not isinstance(value, Tensor):
            raise UnusableCheckpointError(
                f"{self.directory}: {index.fqn} is not stored as a tensor."
            )
        return value

    def _raw(self, info: Any) -> bytes:
        path = self.directory / info.relative_path
        try:
            data = self._source.read(path, info.offset, info.length)
        except OSError as error:
            raise UnusableCheckpointError(f"{path}: cannot read it ({error.strerror}).") from error
        if len(data) != info.length:
            raise UnusableCheckpointError(
                f"{path}: it ends too early, at byte {info.offset + len(data)}."
            )
        return data


@dataclass(frozen=True)
class _Copy:
    source: tuple[slice, ...]
    destination: Tensor

    def run(self, stored: Tensor) -> None:
        with torch.no_grad():
            self.destination.copy_(stored[self.source])


@dataclass(frozen=True)
class Job:
    """A stored block, read once, and the places that get parts of it.

    Attributes:
        key: The tensor that it belongs to.
        place: File and offset.
        shape: Its shape.
        dtype: Its type.
        index: Its name in the index.
        copies: What goes where.
    """

    key: str
    place: tuple[str, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: MetadataIndex
    copies: list[_Copy]

    @property
    def num_bytes(self) -> int:
        """Bytes of the block's values."""
        return volume(self.shape) * self.dtype.itemsize

    def fill(self, stored: Tensor) -> None:
        """Copy the block to its places."""
        for copy in self.copies:
            copy.run(stored)


def _slices(
    start: Sequence[int], extent: Sequence[int], origin: Sequence[int]
) -> tuple[slice, ...]:
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(start, extent, origin, strict=True))


def _read_index(path: Path) -> Metadata:
    try:
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise UnusableCheckpointError(f"{path}: cannot read it ({error.strerror}).") from error
    except Forbidden as error:
        raise refusal(str(path), error) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
        raise UnusableCheckpointError(f"{path}: it is not a checkpoint index ({error}).") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UnusableCheckpointError(f"{path}: it is not a checkpoint index.")
    return metadata


def checksum(path: Path) -> FileRecord:
    """Return size and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_COPY_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return FileRecord(size, crc)
