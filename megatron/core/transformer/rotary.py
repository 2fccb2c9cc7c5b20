"""Rotary position embeddings, and the split of the fused projection that they go with.

Each head is turned in fp32 and rounded once. The two halves of a head form the pairs, which is the
layout of Megatron and HuggingFace checkpoints (Meta's own files pair neighbours).

Shape legend: s local sequence, b microbatch, g key/value groups, r query heads per group
(n = g * r), d head dimension, p rotated pairs (d * rotary_percent / 2).

Source: Su et al., RoFormer (2021); the long-context rescaling is the one published with Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.build import Build

# Llama 3.1: wavelengths above 8192 / 1 positions are stretched, those below 8192 / 4 are kept.
_ORIGINAL_CONTEXT = 8192
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0

_CHUNK_ELEMENTS = 2**16  # fp32 temporaries of one chunk stay in the L2 cache


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one batch's positions, fp32 `[s, b or 1, p]`."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(dim: int, base: float, *, scaling_factor: float | None = None) -> Tensor:
    """Turns per position of each pair, fp32 `[dim / 2]`, fastest first.

    Args:
        dim: Rotated part of the head dimension.
        base: `--rotary-base`.
        scaling_factor: `--rope-scaling-factor` if `--use-rope-scaling`, else None.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (base**exponents)
    if scaling_factor is None:
        return frequencies
    turns = _ORIGINAL_CONTEXT * frequencies / (2 * math.pi)  # full turns within the old context
    spread = _HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR
    keep = ((turns - _LOW_FREQUENCY_FACTOR) / spread).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / scaling_factor * (1.0 - keep)


class RotaryEmbedding(nn.Module):
    """Turns positions into rotations.

    Args:
        build: Supplies the `rotary_*` and `rope_*` settings and the head size.
    """

    def __init__(self, *, build: Build) -> None:
        super().__init__()
        config = build.config
        dim = int(config.kv_channels * config.rotary_percent)
        self.dim = dim - dim % 2
        scaling = config.rope_scaling_factor if config.use_rope_scaling else None
        frequencies = inverse_frequencies(self.dim, config.rotary_base, scaling_factor=scaling)
        frequencies /= config.rotary_seq_len_interpolation_factor or 1
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies.to(build.device), persistent=False)

    def forward(self, position_ids: Tensor) -> Rotation:
        """Rotations of a batch.

        Args:
            position_ids: `[b, s]`; a batch whose rows agree gets `b = 1`.
        """
        positions = shared_row(position_ids).t().to(torch.float32)
        angles = positions[..., None] * self.frequencies
        return Rotation(angles.cos(), angles.sin())

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"dim={self.dim}"


def shared_row(position_ids: Tensor) -> Tensor:
    """`[b, s]` as `[1, s]` where all rows agree, which is the usual case."""
    first = position_ids[:1]
    if position_ids.shape[0] == 1 or position_ids.stride(0) == 0:
        return first
    if position_ids.device.type != "cpu":
        return position_ids  # looking at the values would stall an accelerator
    return first if torch.equal(position_ids, first.expand_as(position_ids)) else position_ids


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn every head of `x [s, b, n, d]`; dimensions beyond the rotated ones pass through."""
    return _rotate(x, rotation.cos, rotation.sin)


def split_qkv(
    mixed: Tensor, groups: int, heads_per_group: int, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the fused projection apart and, if asked, rotate queries and keys on the way.

    One pass forward, and one gradient buffer backward instead of three that are added up.

    Args:
        mixed: `[s, b, g * (r + 2) * d]`; per group its r query heads, its key, its value.
        groups: g on this rank.
        heads_per_group: r.
        rotation: None for models without rotary positions.

    Returns:
        query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, d]`.
    """
    cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    return _split_qkv(mixed, groups, heads_per_group, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rotate_into(out, x, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        d_x = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        rotate_into(d_x, grads[0], cos, -sin)  # a rotation's inverse: other sign
        return d_x, None, None


_rotate: Callable[..., Tensor] = _Rotate.apply


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        groups: int,
        heads: int,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        s, b, width = mixed.shape
        d = width // (groups * (heads + 2))
        ctx.save_for_backward(cos, sin)
        ctx.settings = (groups, heads, d)
        by_group = mixed.view(s, b, groups, heads + 2, d)
        query = mixed.new_empty(s, b, groups, heads, d)
        key, value = mixed.new_empty(s, b, groups, d), mixed.new_empty(s, b, groups, d)
        _move(query, by_group[..., :heads, :], cos, sin)
        _move(key[..., None, :], by_group[..., heads : heads + 1, :], cos, sin)
        value.copy_(by_group[..., heads + 1, :])
        return query.view(s, b, groups * heads, d), key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_query, d_key, d_value = grads
        d_query = d_query.contiguous()
        cos, sin = ctx.saved_tensors
        groups, heads, d = ctx.settings
        s, b = d_query.shape[:2]
        d_mixed = d_query.new_empty(s, b, groups, heads + 2, d)
        back = None if sin is None else -sin
        _move(d_mixed[..., :heads, :], d_query.view(s, b, groups, heads, d), cos, back)
        _move(d_mixed[..., heads : heads + 1, :], d_key[..., None, :], cos, back)
        d_mixed[..., heads + 1, :].copy_(d_value)
        return d_mixed.view(s, b, -1), None, None, None, None


_split_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]] = _SplitQKV.apply


def _move(out: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    if cos is None or sin is None:
        out.copy_(x)
    else:
        rotate_into(out, x, cos, sin)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the rotation of `x` into `out`, in fp32 and with one rounding.

    Args:
        out: `[s, b, ..., d]`, any strides.
        x: The same shape.
        cos: `[s, b or 1, p]` fp32.
        sin: The same shape.
    """
    pairs = cos.shape[-1]
    between = (1,) * (x.dim() - 3)
    cos = cos.view(*cos.shape[:2], *between, pairs)
    sin = sin.view(*sin.shape[:2], *between, pairs)
    rows = x.shape[0]
    if x.device.type == "cpu":
        rows = max(1, _CHUNK_ELEMENTS // max(1, x[0].numel()))
    for i in range(0, x.shape[0], rows):
        part, into = x[i : i + rows], out[i : i + rows]
        c, s = cos[i : i + rows], sin[i : i + rows]
        first = part[..., :pairs].to(c.dtype)
        second = part[..., pairs : 2 * pairs].to(c.dtype)
        into[..., :pairs].copy_((first * c).addcmul_(second, s, value=-1))
        into[..., pairs : 2 * pairs].copy_((second * c).addcmul_(first, s))
        if 2 * pairs < part.shape[-1]:
            into[..., 2 * pairs :].copy_(part[..., 2 * pairs :])
