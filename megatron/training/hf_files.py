"""Weight files in HuggingFace format: reading one tensor at a time, writing in shards."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, complaint
from megatron.training.hf_config import unusable

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_SHARD_BYTES = 5_000_000_000

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class HfWeights:
    """The tensors of a HuggingFace directory, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Find the weight files.

        Raises:
            CheckpointError: There are none, or the index names a file that is missing.
        """
        self.directory = directory
        self._file_of = _locate(directory)
        self._cached: tuple[str, Mapping[str, Tensor]] = ("", {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: It is not there, or its file is damaged.
        """
        file = self._file_of.get(name)
        if file is None:
            raise unusable(f"{self.directory} has no tensor {name!r}")
        path = self.directory / file
        try:
            if file.endswith(".safetensors"):
                with safetensors.safe_open(path, framework="pt") as opened:
                    tensor: Tensor = opened.get_tensor(name)
                return tensor
            if self._cached[0] != file:
                self._cached = (file, _load_bin(path))
            return self._cached[1][name]
        except (OSError, safetensors.SafetensorError, KeyError) as error:
            raise unusable(f"{path}: {name} cannot be read ({error})") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header where there is one."""
        file = self._file_of[name]
        if not file.endswith(".safetensors"):
            return tuple(self.get(name).shape)
        try:
            with safetensors.safe_open(self.directory / file, framework="pt") as opened:
                return tuple(opened.get_slice(name).get_shape())
        except (OSError, safetensors.SafetensorError) as error:
            raise unusable(f"{self.directory / file}: {name} cannot be read ({error})") from error


def _locate(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    for index in (SAFE_INDEX, BIN_INDEX):
        path = directory / index
        if path.is_file():
            try:
                files = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise unusable(f"{path} is no index of weight files ({error!r})") from error
            missing = sorted({str(f) for f in files.values() if not (directory / str(f)).is_file()})
            if missing:
                raise unusable(f"{path} names files that are missing: {missing}")
            return files
    if (directory / SAFE).is_file():
        try:
            with safetensors.safe_open(directory / SAFE, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), SAFE)
        except safetensors.SafetensorError as error:
            raise unusable(f"{directory / SAFE} is damaged ({error})") from error
    if (directory / BIN).is_file():
        return dict.fromkeys(_load_bin(directory / BIN), BIN)
    raise CheckpointError(
        complaint(
            "--load-dir",
            directory,
            f"It holds neither {SAFE} nor {BIN}, whole or with an index",
            "Name a directory with weights in HuggingFace format",
        )
    )


def _load_bin(path: Path) -> Mapping[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise unusable(f"{path} is damaged or no plain weight file ({error})") from error
    if not isinstance(loaded, dict):
        raise unusable(f"{path} holds no dictionary of tensors")
    return loaded


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


def write_weights(
    directory: Path,
    tensors: Iterable[Planned],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write tensors as one safetensors file, or as shards with an index.

    Only one shard is held in memory.

    Args:
        directory: An existing directory.
        tensors: What to write, in order.
        dtype: Type to convert to, where a tensor has none of its own.
        max_shard_bytes: Bound on the bytes of a shard (a larger tensor gets one for itself).

    Returns:
        The files' names.
    """
    shards: list[list[Planned]] = [[]]
    filled = total = 0
    for planned in tensors:
        num_bytes = math.prod(planned.shape) * (planned.dtype or dtype).itemsize
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(planned)
        filled += num_bytes
        total += num_bytes
    weight_map: dict[str, str] = {}
    names = []
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        name = SAFE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {p.name: _own(p.make(), p.dtype or dtype) for p in shard}
        safetensors.torch.save_file(content, directory / name, metadata={"format": "pt"})
        weight_map.update({p.name: name for p in shard})
        names.append(name)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A converted copy with memory of its own, which the file format insists on."""
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)


def tokenizer_files(directory: Path) -> dict[str, Path]:
    """Return the files about tokens and generation in a directory: name -> path."""
    return {n: directory / n for n in TOKENIZER_FILES if (directory / n).is_file()}
