"""One tensor as ``torch.save`` writes it, without asking ``torch.save`` each time.

A block of a checkpoint is a small zip archive around the bytes of a tensor. All that is in it
besides depends on the tensor's shape and type, except for a CRC-32 of the bytes that stands in two
places. ``torch.save`` makes that frame anew for each tensor and hands it out in some forty pieces,
and for each of them a writer in the background takes Python's lock away from the run. So the frame
is kept, and only the checksum is put in.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor

# The beginnings of a file in an archive, of what follows its content, and of its entry at the end.
_FILE, _FOLLOWING, _ENTRY = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_FILE_LENGTHS, _FILE_NAME = 26, 30
_FOLLOWING_CRC = 4
_ENTRY_CRC = 16


@dataclass(frozen=True)
class _Frame:
    """What precedes and what follows the bytes, and the two places of their checksum in that."""

    before: bytes
    after: bytes
    places: tuple[int, int]

    def end(self, crc: int) -> bytes:
        """What follows bytes of this checksum."""
        after = bytearray(self.after)
        for place in self.places:
            struct.pack_into("<I", after, place, crc)
        return bytes(after)


class Frames:
    """Writes tensors, and keeps their frames."""

    def __init__(self) -> None:
        self._frames: dict[tuple[torch.Size, torch.dtype], _Frame | None] = {}

    def write(self, tensor: Tensor, stream: IO[bytes]) -> None:
        """Write what ``torch.save`` would; only its identifier of the content may be another one.

        Args:
            tensor: In host memory.
            stream: Receives it.
        """
        tensor = tensor.detach().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # else all of what it is a part of would be saved
        kind = tensor.shape, tensor.dtype
        if kind not in self._frames:
            self._frames[kind] = _frame_of(tensor)
        frame = self._frames[kind]
        if frame is None:
            torch.save(tensor, stream)
            return
        data = _bytes(tensor)
        stream.write(frame.before)
        stream.write(data)
        stream.write(frame.end(zlib.crc32(data)))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


class _Pieces(io.RawIOBase):
    """Takes an archive and leaves the tensor's bytes out: the first piece that is as long."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.before, self.after = bytearray(), bytearray()
        self.found = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) == self._length and not self.found and _ends_with_header(self.before):
            self.found = True
        else:
            (self.after if self.found else self.before).extend(view)
        return len(view)


def _ends_with_header(archive: bytearray) -> bool:
    """Whether what comes next is the content of the last file in an archive: the tensor's."""
    start = archive.rfind(_FILE)
    if start < 0 or len(archive) < start + _FILE_NAME:
        return False
    name, extra = struct.unpack_from("<HH", archive, start + _FILE_LENGTHS)
    at = start + _FILE_NAME
    return len(archive) == at + name + extra and archive[at : at + name].endswith(b"/data/0")


def _frame_of(tensor: Tensor) -> _Frame | None:
    """Return the frame of tensors like this one, None if a release of torch makes another."""
    pieces = _Pieces(tensor.nbytes)
    torch.save(tensor, cast(IO[bytes], pieces))
    before, after = bytes(pieces.before), bytes(pieces.after)
    entry = after.rfind(b"/data/0")
    entry = after.rfind(_ENTRY, 0, max(entry, 0))
    if not (tensor.nbytes and after.startswith(_FOLLOWING) and entry >= 0):
        return None
    frame = _Frame(before, after, (_FOLLOWING_CRC, entry + _ENTRY_CRC))
    return frame if frame.end(zlib.crc32(_bytes(tensor))) == after else None
