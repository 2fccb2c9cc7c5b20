"""Files in safetensors format: headers checked, tensors read one by one, written as a stream.

The package of that name writes a file from tensors that are all in memory. Here a tensor is made
when its turn comes and is gone after it, so that a shard may be larger than memory.

Format: 8 bytes with the length of the header, the header as JSON (name -> dtype, shape, first and
last byte), the tensors one after another.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, complaint
from megatron.training.hf_config import unusable

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # of the first tensor
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_WRITE_BYTES = 64 << 20
NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SPELLED = {dtype: name for name, dtype in NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file.

    Attributes:
        dtype: Its type, None if PyTorch has none for it.
        shape: Its shape.
        start: Its first byte, counted from the start of the file.
        num_bytes: Its length.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """Read and check the header of a file.

    Raises:
        CheckpointError: The file is unreadable, truncated, or its header contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(_LENGTH.size)
            length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH.size):
                raise unusable(f"{path} is truncated or no safetensors file ({size} bytes)")
            raw = json.loads(file.read(length))
        entries = {
            name: _entry(name, values, _LENGTH.size + length)
            for name, values in raw.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise unusable(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unusable(f"{path} has a damaged header ({error})") from error
    end = _LENGTH.size + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start != end:
            raise unusable(f"{path} has a damaged header ({name} does not begin where it should)")
        end += entry.num_bytes
    if end != size:
        what = "is truncated" if size < end else "has bytes that belong to no tensor"
        raise unusable(f"{path} {what}: it has {size} bytes, its header describes {end}")
    return entries


def _entry(name: str, values: Mapping[str, Any], base: int) -> Entry:
    shape, offsets = values["shape"], values["data_offsets"]
    if not (_whole(shape) and _whole(offsets) and len(offsets) == 2):
        raise ValueError(f"{name} has no proper shape and offsets")
    dtype = NAMES.get(str(values["dtype"]))
    num_bytes = offsets[1] - offsets[0]
    if dtype is not None and num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {num_bytes} bytes for {shape} of {values['dtype']}")
    return Entry(dtype, tuple(shape), base + offsets[0], num_bytes)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and v >= 0 for v in values)


def read_tensor(path: Path, name: str, entry: Entry, rows: slice | None = None) -> Tensor:
    """Read one tensor, or some of its rows, into memory of its own.

    Raises:
        CheckpointError: Its type is unknown, or the file cannot be read.
    """
    if entry.dtype is None:
        raise unusable(f"{path}: {name} has a type that PyTorch does not have")
    start, shape = entry.start, entry.shape
    if rows is not None:
        first, last, _ = rows.indices(shape[0])
        row_bytes = entry.num_bytes // max(shape[0], 1)
        start, shape = start + first * row_bytes, (max(last - first, 0), *shape[1:])
    target = torch.empty(shape, dtype=entry.dtype)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            _fill(file, memoryview(_bytes_of(target)))
    except OSError as error:
        raise unusable(f"{path}: {name} cannot be read ({error.strerror or error})") from error
    return target


def _fill(file: IO[bytes], view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file ends too early")
        done += count


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: what it will be called, and how to get it when its turn comes.

    Attributes:
        name: Its name.
        shape: Its shape.
        make: Supplies it.
        dtype: The type that it is written in; None for that of the others.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype: torch.dtype | None = None


def write_file(path: Path, tensors: Sequence[Planned], dtype: torch.dtype) -> None:
    """Write a file; only one of the tensors is in memory at a time.

    Args:
        path: The file to make.
        tensors: What to write.
        dtype: Type to convert to, where a tensor has none of its own.

    Raises:
        OSError: The file cannot be written.
        ValueError: A tensor has another shape than announced.
    """
    with path.open("wb") as file:
        write_stream(file, tensors, dtype)


def write_stream(file: IO[bytes], tensors: Sequence[Planned], dtype: torch.dtype) -> None:
    """Write what ``write_file`` writes into something that is open already."""
    sizes = [(p.dtype or dtype).itemsize for p in tensors]
    starts = itertools.accumulate(
        (math.prod(p.shape) * n for p, n in zip(tensors, sizes, strict=True)), initial=0
    )
    if any(start % size for start, size in zip(starts, sizes, strict=False)):
        # The format wants every tensor aligned to its type: the widest come first.
        tensors = sorted(tensors, key=lambda p: -(p.dtype or dtype).itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for planned in tensors:
        own = planned.dtype or dtype
        start, end = end, end + math.prod(planned.shape) * own.itemsize
        header[planned.name] = {
            "dtype": _SPELLED[own],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(_LENGTH.pack(len(text)) + text)
    for planned in tensors:
        tensor = planned.make()
        if tuple(tensor.shape) != planned.shape:
            raise ValueError(f"{planned.name}: {tuple(tensor.shape)} is not {planned.shape}")
        _write(file, tensor, planned.dtype or dtype, planned.name)


def in_type(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return weights in another type.

    Raises:
        CheckpointError: Finite ones are beyond its range.
    """
    made = tensor.to(dtype)
    if dtype == torch.float16 and made.isinf().sum() > tensor.isinf().sum():
        largest = torch.finfo(dtype).max
        why = f"{name} holds finite values above {largest:g}, where that type ends"
        raise CheckpointError(complaint("--target-dtype", "fp16", why, "Use bf16 or fp32"))
    return made


def _write(file: IO[bytes], tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    """Convert and write block by block, so that no second copy of a large tensor is made."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    row_bytes = max(1, tensor[:1].numel() * dtype.itemsize)
    for block in torch.split(tensor, max(1, _WRITE_BYTES // row_bytes)):
        file.write(memoryview(_bytes_of(in_type(block, dtype, name).contiguous())))
