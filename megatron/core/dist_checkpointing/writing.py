"""One rank's share of a checkpoint on its way to the disk, at once or behind the run's back.

What has to be agreed (which rank writes which block) is planned together before the first byte is
written, and what was written is put together afterwards. In between a rank is alone with its files,
so that part may run in a thread: the tensors are copied to host memory first, and from then on the
thread looks at nothing that training changes.

A thread, not a process: it ends with the run at whatever moment that is killed, so that nobody is
left behind who goes on writing into a directory which the next run cleans. It costs the run little,
because compressing, checksums and system calls leave Python to the others
(`docs/decisions/001-async-save.md`).
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing.container import Frames
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.dist_checkpointing.storage import (
    ChecksumWriter,
    FileRecord,
    Pace,
    PlainPlanner,
    checksum,
)
from megatron.core.dist_checkpointing.store import StorePath, persistently
from megatron.core.errors import CheckpointError, complaint

# The writer yields the processor to the run, like a program started with `nice`.
_NICENESS = 10


class HostBuffers:
    """Room in host memory for one checkpoint's blocks, used again by the next one.

    On a GPU the room is page-locked, so that copies run at the speed of the bus.

    Attributes:
        frames: What surrounds blocks in a file, used again as well.
    """

    def __init__(self) -> None:
        self.frames = Frames()
        self._rooms: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._plan: SavePlan | None = None
        self._copies: dict[str, Sharded] = {}

    @property
    def num_bytes(self) -> int:
        """What the last copy takes."""
        return sum(piece.local.nbytes for copy in self._copies.values() for piece in copy.pieces)

    def copy(self, tensors: Mapping[str, Sharded], plan: SavePlan) -> dict[str, Sharded]:
        """Copy the blocks that a plan writes.

        Args:
            tensors: Key -> this rank's blocks.
            plan: What this rank writes.

        Returns:
            Key -> those blocks, in host memory.

        Raises:
            CheckpointError: The memory does not suffice.
        """
        self.reserve(tensors, plan)
        blocks = [
            (tensors[key].block(piece.offset), piece.local)
            for key, copy in self._copies.items()
            for piece in copy.pieces
        ]
        live = [block for block, _ in blocks]
        if live:
            torch._foreach_copy_([room for _, room in blocks], live, non_blocking=True)
        if any(block.is_cuda for block in live):
            torch.cuda.current_stream().synchronize()
        return dict(self._copies)

    def reserve(self, tensors: Mapping[str, Sharded], plan: SavePlan) -> None:
        """Make the room that `copy` needs, as far as it is not there.

        Args:
            tensors: See `copy`.
            plan: See there. The same one means blocks of the same shapes.

        Raises:
            CheckpointError: The memory does not suffice.
        """
        if plan is self._plan:
            return
        pieces: dict[str, list[Piece]] = {}
        try:
            for item in plan.items:
                if item.type != WriteItemType.BYTE_IO:
                    key, offset = item.index.fqn, tuple(item.index.offset or ())
                    # What another plan needs stays: a run may have one for each kind of save.
                    room = _fitting(self._rooms.get((key, offset)), tensors[key].block(offset))
                    self._rooms[key, offset] = room
                    pieces.setdefault(key, []).append(Piece(room, offset))
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                complaint(
                    "--async-save",
                    "too little host memory",
                    f"A copy of this rank's share of the checkpoint does not fit ({error})",
                    "Save without it, or use fewer processes on a machine",
                )
            ) from error
        self._copies = {key: Sharded(tensors[key].size(), own) for key, own in pieces.items()}
        self._plan = plan


def _fitting(room: Tensor | None, live: Tensor) -> Tensor:
    if room is not None and room.shape == live.shape and room.dtype == live.dtype:
        return room
    # Zeros, so that the system hands out the pages now and not when the run waits for the copy.
    return torch.zeros(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.is_cuda)


@dataclass(frozen=True)
class Share:
    """What a rank wrote, or why it could not."""

    problem: str
    results: list[WriteResult]
    records: dict[str, FileRecord]


class _BehindWriter(ChecksumWriter):
    """Writes the same files with as little need of Python's lock as possible."""

    def __init__(self, path: Path, pace: Pace, frames: Frames) -> None:
        super().__init__(path, pace)
        self._frames = frames

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in items:
                start, value = stream.tell(), planner.resolve_data(item)
                if isinstance(value, Tensor):
                    self._frames.write(value.cpu(), cast(IO[bytes], stream))
                else:
                    stream.write(value.getbuffer())
                length = stream.tell() - start
                place = _StorageInfo(name, start, length)
                results.append(WriteResult(item.index, length, place))
            if self.sync_files:
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def unpacked(share: bytes) -> Share:
    """Return what another rank's writer has packed, which never was a file."""
    written: Share = pickle.loads(share)
    return written


class ShareWriter:
    """Writes one rank's files.

    Args:
        tmp: The directory that receives them.
        plan: Which entries this rank writes.
        tensors: Key -> this rank's blocks.
        blobs: Key -> bytes.
        read_back: Compare the files with what was written, from the disk where that is possible.

    Attributes:
        share: The `Share`, once written. As bytes, since it is as long as the plan, and the run
            that sends it to the first rank should not wait for more than that.
    """

    def __init__(
        self,
        tmp: Path,
        plan: SavePlan,
        tensors: Mapping[str, Sharded],
        blobs: Mapping[str, bytes],
        read_back: bool = False,
    ) -> None:
        self._tmp, self._plan, self._tensors, self._blobs = tmp, plan, tensors, blobs
        self._read_back = read_back
        self._thread: threading.Thread | None = None
        self._pace, self._frames = Pace(), Frames()
        self.share = b""

    @property
    def done(self) -> bool:
        """Whether it is finished, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def hold(self, buffers: HostBuffers) -> None:
        """Copy what is to be written, so that the tensors may change from now on."""
        self._tensors, self._frames = buffers.copy(self._tensors, self._plan), buffers.frames

    def start(self) -> None:
        """Write in the background, at half speed; call `hold` before."""
        self._thread = threading.Thread(target=self._behind, name="checkpoint writer", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let it hurry, wait for it or for so many seconds; return whether it is finished."""
        self._pace.hurry()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.done

    def run(self) -> None:
        """Write; what goes wrong becomes part of the share."""
        try:
            share = persistently(self._write, self._tmp)
        except OSError as error:
            share = Share(place.describe(error), [], {})
        except Exception as error:  # a writer that fails is the same error on all ranks
            share = Share(str(error) or repr(error), [], {})
        self.share = pickle.dumps(share)

    def _behind(self) -> None:
        self._pace.begin()
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self.run()

    def _write(self) -> Share:
        if not self._tmp.is_dir():
            raise CheckpointError(
                f"{self._tmp} is not visible here: the save directory is not shared by all machines"
            )
        writer = ChecksumWriter(self._tmp)
        if self._thread is not None:
            writer = _BehindWriter(self._tmp, self._pace, self._frames)
        planner = PlainPlanner()
        state: dict[str, object] = {
            **self._tensors,
            **{key: io.BytesIO(data) for key, data in self._blobs.items()},
        }
        planner.set_up_planner(state)
        results = writer.write_data(self._plan, planner).value()
        records = dict(writer.records)
        if self._read_back:
            check_written(self._tmp, records)
        return Share("", results, records)


def check_written(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Read files again and compare them with what was written.

    Raises:
        CheckpointError: They differ.
    """
    for name, record in records.items():
        if not isinstance(folder, StorePath):
            _forget_cached(folder / name)
        if checksum(folder / name) != record:
            raise CheckpointError(
                f"{folder / name} has other content than was written (--verify-checkpoint)"
            )


def _forget_cached(path: Path) -> None:
    """Ask for the file itself next time, not for the copy of it in memory."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
