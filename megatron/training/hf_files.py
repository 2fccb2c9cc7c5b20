"""Weight files in HuggingFace format: reading one tensor at a time, writing in shards."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.directory import describe
from megatron.core.errors import CheckpointError, complaint
from megatron.training.hf_config import unusable
from megatron.training.safetensors_file import (
    Entry,
    Planned,
    read_header,
    read_tensor,
    write_file,
)

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_SHARD_BYTES = 5_000_000_000
KEPT_CONFIG = "huggingface_config.json"  # see hf_kept; only conversions write it

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    KEPT_CONFIG,
)


class HfWeights:
    """The tensors of a HuggingFace directory, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Find the weight files and read their headers.

        Raises:
            CheckpointError: There are none, one is damaged, or they do not fit their index.
        """
        self.directory = directory
        self._file_of = _locate(directory)
        self._headers: dict[str, dict[str, Entry]] = {}
        self._cached: tuple[str, Mapping[str, Tensor]] = ("", {})
        for file in dict.fromkeys(self._file_of.values()):
            if file.endswith(".safetensors"):
                self._headers[file] = read_header(directory / file)
        absent = [
            f"{name} ({file})"
            for name, file in self._file_of.items()
            if file in self._headers and name not in self._headers[file]
        ]
        if absent:
            raise unusable(f"{directory}: the index names tensors that are not there: {absent[:6]}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        """Read one tensor, or some of its rows.

        Raises:
            CheckpointError: It is not there, or its file is damaged.
        """
        file = self._file_of.get(name)
        if file is None:
            raise unusable(f"{self.directory} has no tensor {name!r}")
        path = self.directory / file
        if file in self._headers:
            return read_tensor(path, name, self._headers[file][name], rows)
        if self._cached[0] != file:
            self._cached = (file, _load_bin(path))
        tensor = self._cached[1].get(name)
        if not isinstance(tensor, Tensor):
            raise unusable(f"{path} has no tensor {name!r}, though the index says so")
        return (tensor if rows is None else tensor[rows]).clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header where there is one."""
        entry = self._entry(name)
        return tuple(self.get(name).shape) if entry is None else entry.shape

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's type, None if PyTorch has none for it."""
        entry = self._entry(name)
        return self.get(name).dtype if entry is None else entry.dtype

    def _entry(self, name: str) -> Entry | None:
        return self._headers.get(self._file_of[name], {}).get(name)


@contextmanager
def new_directory(save: Path) -> Iterator[Path]:
    """Make a directory that appears under its name when the block is left without an error.

    Args:
        save: The name; it must not hold anything yet.

    Yields:
        Where to write in the meantime. It is gone after an error.

    Raises:
        CheckpointError: The directory is in use or not writable.
    """
    tmp = save.with_name(save.name + ".tmp")
    try:
        if save.exists() and any(save.iterdir()):
            raise CheckpointError(
                complaint("--save-dir", save, "It is not empty", "Name a new directory")
            )
        if tmp.exists():
            shutil.rmtree(tmp)
        tmp.mkdir(parents=True)
        yield tmp
        if save.exists():
            save.rmdir()
        tmp.rename(save)
    except OSError as error:
        raise CheckpointError(
            complaint(
                "--save-dir",
                save,
                f"It cannot be written ({describe(error)})",
                "Choose a new directory on a disk with enough space",
            )
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _locate(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    for index in (SAFE_INDEX, BIN_INDEX):
        path = directory / index
        if path.is_file():
            try:
                files = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise unusable(f"{path} is no index of weight files ({error!r})") from error
            outside = sorted({str(f) for f in files.values() if Path(str(f)).name != f})
            if outside:
                raise unusable(f"{path} names files outside of its directory: {outside}")
            missing = sorted({f for f in files.values() if not (directory / f).is_file()})
            if missing:
                raise unusable(f"{path} names files that are missing: {missing}")
            return files
    if (directory / SAFE).is_file():
        return dict.fromkeys(read_header(directory / SAFE), SAFE)
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
        # Files in the older format, before torch 1.6, cannot be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise unusable(f"{path} is damaged or no plain weight file ({error})") from error
    if not isinstance(loaded, dict):
        raise unusable(f"{path} holds no dictionary of tensors")
    odd = [n for n, t in loaded.items() if not (isinstance(n, str) and _is_plain(t))]
    if odd:
        raise unusable(f"{path} holds more than plain tensors by name: {odd[:3]!r}")
    return loaded


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def write_weights(
    directory: Path,
    tensors: Iterable[Planned],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write tensors as one safetensors file, or as shards with an index.

    Only one tensor is held in memory.

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
        write_file(directory / name, shard, dtype)
        weight_map.update({p.name: name for p in shard})
        names.append(name)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / SAFE_INDEX, index)
    return names


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as a JSON file."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def tokenizer_files(directory: Path) -> dict[str, Path]:
    """Return the files about tokens and generation in a directory: name -> path."""
    return {n: directory / n for n in TOKENIZER_FILES if (directory / n).is_file()}


def tokenizer_at(path: Path) -> dict[str, Path]:
    """Return the files of a tokenizer that was named: a directory, or one file.

    Raises:
        CheckpointError: There are none.
    """
    found = tokenizer_files(path)
    if path.is_file():
        found = {"tokenizer.json" if path.suffix == ".json" else "tokenizer.model": path}
    if not found:
        why = "There are no tokenizer files" if path.is_dir() else "There is no such file"
        raise CheckpointError(complaint("--tokenizer-model", path, why, "Check the path"))
    return found
