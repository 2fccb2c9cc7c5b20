"""FP8 weights of HuggingFace directories: exact dequantization, and export with scales.

A weight ``w`` is stored as FP8 codes ``q`` beside a scale ``s`` with ``w = q * s``. The scales of
an import are kept in the checkpoint that it makes, so that exporting it gives the same files.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.schema import FP8_PREFIX
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.fp8.formats import E4M3
from megatron.core.fp8.scales import current_scale
from megatron.training.hf_config import unusable
from megatron.training.hf_quantization import Fp8Style, describe
from megatron.training.hf_rows import Place, Row
from megatron.training.safetensors_file import (
    Planned,
    read_header,
    read_tensor,
    write_stream,
)

CODES = torch.float8_e4m3fn
FILE = "fp8_scales.safetensors"  # kept in the checkpoint that an import makes
FOLDER = "huggingface"
# Where delayed scaling's factors are stored, of a layer or of a group of experts `[experts, ...]`.
_STATE = re.compile(
    rf"{re.escape(FP8_PREFIX)}(replica\d+\.)?(layers|experts)\.(?P<module>.+)\.scale_fwd$"
)
_CODE_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE, _SCALE_INV, _INPUT = "weight_scale", "weight_scale_inv", "input_scale"
_LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


class Weights(Protocol):
    """Tensors by name, as `hf_files.HfWeights` has them."""

    directory: Path

    def __iter__(self) -> Iterator[str]:
        """All names."""

    def __contains__(self, name: object) -> bool:
        """Whether there is one of that name."""

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        """One tensor, or some of its rows."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Its type."""


# ---------------------------------------------------------------------------------------- import


class Dequantized:
    """A directory's tensors with FP8 weights multiplied out, in fp32.

    Raises:
        CheckpointError: An FP8 tensor has no scale, or one that does not fit.
    """

    def __init__(self, weights: Weights, block: tuple[int, int] | None = None) -> None:
        """Find the scales.

        Args:
            weights: The tensors as they are stored.
            block: Rows and columns that share a scale, where there are blocks.
        """
        self.directory = weights.directory
        self._weights, self.block = weights, block
        self._scale_of: dict[str, str] = {}
        self.scales: list[str] = []
        for name in weights:
            if weights.dtype(name) in _CODE_TYPES:
                self._scale_of[name] = self._find(name)
        modules = {name.removesuffix("weight") for name in self._scale_of}
        ends = (_SCALE, _SCALE_INV, _INPUT)
        self.scales = [n for n in weights if n.endswith(ends) and n[: n.rindex(".") + 1] in modules]
        hidden = set(self.scales)
        self._names = [n for n in weights if n not in hidden]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._weights and name not in self.scales

    def __len__(self) -> int:
        """How many weights are in FP8."""
        return len(self._scale_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._weights.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the type of what ``get`` returns."""
        return torch.float32 if name in self._scale_of else self._weights.dtype(name)

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        """Read one tensor, or some of its rows, dequantized.

        Raises:
            CheckpointError: It is not there, or its file is damaged.
        """
        if name not in self._scale_of:
            return self._weights.get(name, rows)
        scale = self._weights.get(self._scale_of[name]).float()
        whole = self._spread(scale, self._weights.shape(name))
        values = self._weights.get(name, rows).float()
        return values.mul_(whole if rows is None or whole.dim() < 2 else whole[rows])

    def is_code(self, name: str) -> bool:
        """Whether a tensor is stored in FP8."""
        return name in self._scale_of

    def stored(self, name: str) -> Tensor:
        """Return a scale as it is stored."""
        return self._weights.get(name)

    def _find(self, name: str) -> str:
        module = name.removesuffix("weight")
        for end in (_SCALE, _SCALE_INV):
            scale = module + end
            if scale in self._weights:
                shape = self._weights.shape(scale)
                if self._fits(shape, self._weights.shape(name)):
                    return scale
                raise unusable(
                    f"{self.directory}: {scale} has shape {shape}, which fits no way to scale "
                    f"{name} {self._weights.shape(name)}"
                )
        raise unusable(
            f"{self.directory}: {name} is in FP8 and has no scale ({module}{_SCALE} or "
            f"{module}{_SCALE_INV}), so its values are unknown"
        )

    def _fits(self, scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
        if torch.Size(scale).numel() == 1 or scale in ((weight[0], 1), (weight[0],)):
            return True
        return self.block is not None and scale == _grid(weight, self.block)

    def _spread(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Bring a scale into a shape that multiplies the weight's."""
        blocks = self.block is not None and tuple(scale.shape) == _grid(shape, self.block)
        if scale.numel() == 1:
            return scale.reshape(())
        if not blocks:
            return scale.reshape(-1, 1)
        rows, columns = self.block or (1, 1)
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return wide[: shape[0], : shape[1]]


def _grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // size) for n, size in zip(shape, block, strict=True))


def to_keep(weights: Dequantized) -> dict[str, Tensor]:
    """Return the scales of an import, for an export that gives the same files.

    Blocks are not exported, so their scales are not kept.
    """
    scales = {n: weights.stored(n) for n in weights.scales}
    plain = sum(n.endswith(_SCALE) for n in scales)
    return scales if plain == len(weights) and weights.block is None else {}


def dump(scales: Mapping[str, Tensor]) -> bytes:
    """Return the content of the file that scales are kept in."""
    file = io.BytesIO()
    write_stream(file, [_planned(n, t) for n, t in scales.items()], torch.float32)
    return file.getvalue()


def _planned(name: str, tensor: Tensor) -> Planned:
    return Planned(name, tuple(tensor.shape), lambda: tensor, tensor.dtype)


# ---------------------------------------------------------------------------------------- export


class Exporter:
    """Quantizes the linear layers of a model, and says which ones.

    Attributes:
        style: How.
        ignored: Linear layers that stay as they are.
    """

    def __init__(
        self,
        style: Fp8Style,
        inputs: Callable[[Row, Place], Tensor] | None = None,
        kept: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Prepare.

        Args:
            style: How to quantize.
            inputs: The scale of a layer's inputs, for static activations.
            kept: Scales of the import that the model came from, by name; they are used again.
        """
        self.style = style
        self.ignored = {"lm_head": None}  # in order; tied models have that layer, and no tensor
        self._inputs, self._kept = inputs, kept or {}

    def config(self) -> dict[str, Any]:
        """The ``quantization_config``, once all tensors have been listed."""
        return describe(self.style, list(self.ignored))

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is quantized; notes linear layers that are not."""
        if name.endswith(_LINEAR):
            return True
        if len(shape) == 2 and "embed" not in name:  # routers, gates, the output layer
            self.ignored[name.removesuffix(".weight")] = None
        return False

    def planned(
        self, row: Row, at: Place, parts: Callable[[], Sequence[Tensor]]
    ) -> Iterator[Planned]:
        """List what is written for the parts of one of our weights: codes and scales.

        Args:
            row: The weight.
            at: Which one of that row.
            parts: Supplies the HuggingFace weights that it is made of.
        """
        for number, (template, shape) in enumerate(zip(row.names, row.shapes, strict=True)):
            name = at.of(template)
            module = name.removesuffix("weight")
            size: tuple[int, ...] = (shape[0], 1) if self.style.weights == "channel" else (1,)
            kept = self._kept.get(module + _SCALE)
            if kept is None:
                make = partial(self._scale_inv, name, number, parts, size)
                yield Planned(module + _SCALE, size, make, torch.float32)
            else:
                yield _planned(module + _SCALE, kept)
            yield Planned(name, shape, partial(self._codes, name, number, parts), CODES)
            if self.style.activations == "static":
                known = self._kept.get(module + _INPUT)
                if known is not None:
                    yield _planned(module + _INPUT, known)
                elif self._inputs is not None:
                    make = partial(self._inputs, row, at)
                    yield Planned(module + _INPUT, (1,), make, torch.float32)

    def _scale(self, name: str, number: int, parts: Callable[[], Sequence[Tensor]]) -> Tensor:
        """The factor that codes are made with, ``[rows, 1]`` or of no dimensions."""
        kept = self._kept.get(f"{name.removesuffix('weight')}{_SCALE}")
        if kept is not None:
            scale_inv = kept.float()
            return 1.0 / scale_inv.reshape(() if scale_inv.numel() == 1 else (-1, 1))
        if self.style.weights == "channel":
            amax = parts()[number].abs().amax(dim=1, keepdim=True).float()
        else:  # one scale for all that is one matrix here, and in the kernels that serve the model
            amax = torch.stack([p.abs().amax().float() for p in parts()]).amax()
        if not bool(torch.isfinite(amax).all()):
            raise unusable(f"{name} has values that are not finite; FP8 cannot hold them")
        return current_scale(amax, E4M3.max)

    def _scale_inv(
        self,
        name: str,
        number: int,
        parts: Callable[[], Sequence[Tensor]],
        size: tuple[int, ...],
    ) -> Tensor:
        return (1.0 / self._scale(name, number, parts)).reshape(size)

    def _codes(self, name: str, number: int, parts: Callable[[], Sequence[Tensor]]) -> Tensor:
        scale = self._scale(name, number, parts)
        scaled = parts()[number].float() * scale
        return scaled.clamp_(-E4M3.max, E4M3.max).to(CODES)


def kept_scales(directory: Path) -> dict[str, Tensor]:
    """Return the scales that an import left in its checkpoint; none if it was not in FP8."""
    path = directory / FOLDER / FILE
    if not path.is_file():
        return {}
    header = read_header(path)
    return {name: read_tensor(path, name, entry) for name, entry in header.items()}


def exporter(
    kept: Mapping[str, Tensor], weights: str | None, activations: str | None, reader: Reader | None
) -> Exporter:
    """Return an exporter: as asked for, else as the model was, else channels and dynamic.

    Args:
        kept: Scales of the import that the model came from.
        weights: ``channel`` or ``tensor``, None to leave it open.
        activations: ``dynamic`` or ``static``, None to leave it open.
        reader: The checkpoint, which may have scales of inputs.

    Raises:
        CheckpointError: Nothing is known about static activations.
    """
    was, scales = Fp8Style(), [t for n, t in kept.items() if n.endswith(_SCALE)]
    if scales:
        static = any(n.endswith(_INPUT) for n in kept)
        was = Fp8Style(
            "tensor" if all(t.numel() == 1 for t in scales) else "channel",
            "static" if static else "dynamic",
        )
    style = Fp8Style(weights or was.weights, activations or was.activations)
    if style.weights != was.weights:
        kept = {n: t for n, t in kept.items() if n.endswith(_INPUT)}
    inputs = None
    if style.activations == "static" and not any(n.endswith(_INPUT) for n in kept):
        inputs = None if reader is None else input_scales(reader)
        if inputs is None:
            raise no_input_scales("the model" if reader is None else reader.directory)
    return Exporter(style, inputs, kept)


def input_scales(reader: Reader) -> Callable[[Row, Place], Tensor] | None:
    """Return what reads delayed scaling's input scales from a checkpoint; None without any."""
    stored: dict[str, list[str]] = {}
    for key in reader.tensors:
        found = _STATE.match(key)
        if found:
            stored.setdefault(found["module"], []).append(key)
    if not stored:
        return None

    def scale(row: Row, at: Place) -> Tensor:
        module = at.of(row.name).rpartition(".weight")[0]
        if module not in stored:
            raise no_input_scales(reader.directory, module)
        values = [reader.read(key) for key in stored[module]]
        own = [v if at.expert is None else v[at.expert] for v in values]
        # Replicas with scales of their own: the smallest factor holds the values of all.
        return (1.0 / torch.stack([v[0] for v in own]).amin()).reshape(1)

    return scale


def no_input_scales(source: Any, module: str = "its layers") -> CheckpointError:
    """The error for static activations that nothing is known about."""
    return CheckpointError(
        complaint(
            "--fp8-activations",
            "static",
            f"{source} has no scale for the inputs of {module}: only delayed scaling keeps them",
            "Use --fp8-activations dynamic",
        )
    )
