"""Quantized models as HuggingFace directories, in the ``pack-quantized`` layout.

For a linear layer ``x`` the files hold ``x.weight_packed`` (int32), ``x.weight_scale`` (bf16, one a
row or a group of columns) and ``x.weight_shape``; all else is as in the bf16 model. That is what
the compressed-tensors package, transformers and vLLM read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from megatron.training import hf_files
from megatron.training.hf_rows import Place, Row
from megatron.training.hf_sources import Source
from megatron.training.quantization.grid import Grid, Quantized, pack, unpack

LINEAR = (".linear_qkv.", ".linear_proj.", ".linear_fc1.", ".linear_fc2.")
_WEIGHT = ".weight"


def is_quantized(row: Row) -> bool:
    """Whether a row's tensor is the matrix of a linear layer inside a transformer layer."""
    name = row.name.removesuffix("{e}")
    return name.endswith(_WEIGHT) and len(row.shape) == 2 and any(part in name for part in LINEAR)


def packed_tensors(row: Row, at: Place, quantized: Quantized, bits: int) -> dict[str, Tensor]:
    """Return what the files hold for one of our weights, which may be several of theirs.

    Rows are quantized by themselves, so that a fused weight can be taken apart afterwards.
    """
    tensors: dict[str, Tensor] = {}
    values, scales = row.split(quantized.values), row.split(quantized.scales)
    for template, part, scale in zip(row.names, values, scales, strict=True):
        name = at.of(template)
        tensors[f"{name}_packed"] = pack(part, bits)
        tensors[f"{name}_scale"] = scale.cpu().contiguous()
        tensors[f"{name}_shape"] = torch.tensor(part.shape)
    return tensors


def plain_tensors(row: Row, at: Place, tensor: Tensor) -> dict[str, Tensor]:
    """Return what the files hold for a tensor that is not quantized."""
    dtype = row.dtype or torch.bfloat16
    parts = zip(row.names, row.split(tensor), strict=True)
    return {at.of(n): torch.empty(p.shape, dtype=dtype).copy_(p) for n, p in parts}


class ShardWriter:
    """Writes one weight file after another, and their index at the end.

    Args:
        directory: An existing directory.
        count: How many files there will be.
    """

    def __init__(self, directory: Path, count: int) -> None:
        """Start with the first file."""
        self.directory, self.count = directory, count
        self.weight_map: dict[str, str] = {}
        self.num_bytes = self.written = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the next file."""
        self.written += 1
        name = f"model-{self.written:05d}-of-{self.count:05d}.safetensors"
        safetensors.torch.save_file(dict(tensors), self.directory / name, metadata={"format": "pt"})
        self.weight_map.update(dict.fromkeys(tensors, name))
        self.num_bytes += sum(t.nbytes for t in tensors.values())

    def finish(self) -> None:
        """Write the index."""
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self.weight_map}
        hf_files.write_json(self.directory / hf_files.SAFE_INDEX, index)


def quantization_config(grid: Grid, act_order: bool, ignore: list[str]) -> dict[str, Any]:
    """Return the part of ``config.json`` by which other programs find the weights.

    Args:
        grid: How they were rounded.
        act_order: Whether columns with large inputs were rounded first.
        ignore: Linear layers that were not quantized.
    """
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if grid.group_size is None else "group",
        "group_size": grid.group_size,
        "actorder": "weight" if act_order else None,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {**group, "input_activations": None, "output_activations": None}
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def ignored_layers(rows: list[Row], num_layers: int) -> list[str]:
    """Name the linear layers that stay as they are, as transformers calls them."""
    names: list[str] = []
    for row in rows:
        matrix = len(row.shape) == 2 and row.name.endswith("weight")
        if is_quantized(row) or not matrix or row.name.startswith("embedding."):
            continue
        layers = range(num_layers) if row.layers is None else row.layers
        places = [Place(i) for i in layers] if row.per_layer else [Place()]
        names += [at.of(n).removesuffix(_WEIGHT) for at in places for n in row.names]
    return names if "lm_head" in names else ["lm_head", *names]


class _Changed:
    """A source whose linear layers have other weights."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.fields, self.tokenizer = source.fields, source.tokenizer
        self.special_tokens, self.dtype = source.special_tokens, source.dtype
        self.kept, self.tokenizer_settings = source.kept, source.tokenizer_settings

    def rows(self) -> list[Row]:
        """The table of the model."""
        return self._source.rows()

    def scales(self) -> dict[str, Tensor]:
        """None: the weights are no FP8 weights."""
        return {}


class RoundedSource(_Changed):
    """A model whose linear layers are rounded to nearest when they are read."""

    def __init__(self, source: Source, grid: Grid) -> None:
        """Remember the grid."""
        super().__init__(source)
        self._grid = grid

    def read(self, row: Row, at: Place) -> Tensor:
        """One tensor, as a reader of the rounded model's files would see it."""
        tensor = self._source.read(row, at)
        if not is_quantized(row):
            return tensor
        return self._grid.nearest(tensor.float()).dequantize()


class PackedSource(_Changed):
    """A model as it lies in the files of a quantized directory."""

    def __init__(self, source: Source, directory: Path, grid: Grid) -> None:
        """Find the weight files.

        Args:
            source: The model that was quantized.
            directory: What was made of it.
            grid: How.
        """
        super().__init__(source)
        self._weights, self._grid = hf_files.HfWeights(directory), grid

    def read(self, row: Row, at: Place) -> Tensor:
        """One tensor, dequantized."""
        return row.join([self._one(at.of(name)) for name in row.names])

    def _one(self, name: str) -> Tensor:
        if name in self._weights:
            return self._weights.get(name)
        _, columns = self._weights.get(f"{name}_shape").tolist()
        values = unpack(self._weights.get(f"{name}_packed"), self._grid.bits, columns)
        return Quantized(values, self._weights.get(f"{name}_scale")).dequantize()


def file_bytes(directory: Path) -> int:
    """Return the size of a directory's weight files."""
    return sum(path.stat().st_size for path in _weight_files(directory))


def _weight_files(directory: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        yield from directory.glob(pattern)
