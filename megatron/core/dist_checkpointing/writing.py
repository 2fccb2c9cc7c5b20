"""One rank's share of a checkpoint on its way to the disk, at once or behind the run's back.

What has to be agreed (which rank writes which block) is planned together before the first byte is
written, and what was written is put together afterwards. In between a rank is alone with its files,
so that part may run in a thread: the tensors are copied to host memory first, and from then on the
thread looks at nothing that training changes.

A thread, not a process: it ends with the run at whatever moment that is killed, so that nobody is
left behind who goes on writing into a directory which the next run cleans. It costs the run little,
because compressing, checksums and system calls leave Python to the others
(`docs/decisions/006-async-save.md`).
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.dist_checkpointing import directory as place
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
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """What the room takes."""
        return sum(room.nbytes for room in self._rooms.values())

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
        before, self._rooms = self._rooms, {}
        pieces: dict[str, list[Piece]] = {}
        on_device = False
        try:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    continue
                key, offset = item.index.fqn, tuple(item.index.offset or ())
                live = tensors[key].__get_tensor_shard__(item.index)
                room = _fitting(before.pop((key, offset), None), live)
                room.copy_(live, non_blocking=True)
                on_device = on_device or live.is_cuda
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
        if on_device:
            torch.cuda.current_stream().synchronize()
        return {key: Sharded(tensors[key].size(), own) for key, own in pieces.items()}


def _fitting(room: Tensor | None, live: Tensor) -> Tensor:
    if room is not None and room.shape == live.shape and room.dtype == live.dtype:
        return room
    return torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.is_cuda)


class ShareWriter:
    """Writes one rank's files.

    Args:
        tmp: The directory that receives them.
        plan: Which entries this rank writes.
        tensors: Key -> this rank's blocks.
        blobs: Key -> bytes.
        read_back: Compare the files with what was written, from the disk where that is possible.

    Attributes:
        results: Where each entry lies, once written.
        records: File name -> size and checksum, once written.
        problem: Why it failed; empty when it did not.
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
        self._pace = Pace()
        self.results: list[WriteResult] = []
        self.records: dict[str, FileRecord] = {}
        self.problem = ""

    @property
    def done(self) -> bool:
        """Whether it is finished, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def hold(self, buffers: HostBuffers) -> None:
        """Copy what is to be written, so that the tensors may change from now on."""
        self._tensors = buffers.copy(self._tensors, self._plan)

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
        """Write; what goes wrong becomes `problem`."""
        try:
            persistently(self._write, self._tmp)
        except OSError as error:
            self.problem = place.describe(error)
        except Exception as error:  # a writer that fails is the same error on all ranks
            self.problem = str(error) or repr(error)

    def _behind(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self.run()

    def _write(self) -> None:
        if not self._tmp.is_dir():
            raise CheckpointError(
                f"{self._tmp} is not visible here: the save directory is not shared by all machines"
            )
        writer = ChecksumWriter(self._tmp, self._pace if self._thread is not None else None)
        planner = PlainPlanner()
        state: dict[str, object] = {
            **self._tensors,
            **{key: io.BytesIO(data) for key, data in self._blobs.items()},
        }
        planner.set_up_planner(state)
        self.results = writer.write_data(self._plan, planner).value()
        self.records = dict(writer.records)
        if self._read_back:
            check_written(self._tmp, self.records)


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
