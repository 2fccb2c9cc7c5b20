"""Stand-ins for the FP8 products of CUDA devices, on CPU tensors.

They read scales where the documented layouts put them, one number at a time, so a scale in a wrong
place gives a wrong result, and refuse what torch's own checks refuse.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from megatron.core.capability import Target
from megatron.core.fp8 import hardware


def block_scales(x, scales, kind):
    """What each element of `[rows, K]` is multiplied by: fp32 scales of blocks of 128."""
    rows, k = x.shape
    assert k % 128 == 0
    if kind is F.ScalingType.BlockWise1x128:
        assert rows % 4 == 0  # columns of scales start at multiples of 16 bytes
        assert scales.shape == (rows, k // 128)
        assert scales.stride(0) == 1
        assert scales.stride(1) == rows or k == 128
        return scales.repeat_interleave(128, 1)
    assert kind is F.ScalingType.BlockWise128x128
    four = -(-k // 512) * 4
    assert scales.shape == (four, -(-rows // 128))
    assert scales.stride(0) == 1
    assert scales.stride(1) == four or scales.shape[1] == 1
    read = torch.as_strided(scales, (scales.shape[1], four), (four, 1))[:, : k // 128]
    return read.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)


def mx_scales(x, scales):
    """The same for E8M0 scales of 32 elements, in swizzled tiles of 128 x 4."""
    rows, k = x.shape
    assert k % 32 == 0
    wide = -(-k // 128) * 4
    assert scales.dtype == torch.float8_e8m0fnu
    assert scales.is_contiguous()
    assert scales.numel() == -(-rows // 128) * 128 * wide
    i, j = torch.arange(rows)[:, None], torch.arange(k // 32)[None, :]
    tile = (i // 128) * (wide // 4) + j // 4
    place = tile * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
    codes = scales.view(torch.uint8)[place].to(torch.int32)
    return torch.exp2((codes - 127).double()).repeat_interleave(32, 1)


def multiply(left, right, scale_left, scale_right, dtype):
    assert left.stride() == (left.shape[1], 1)
    assert right.stride() == (1, right.shape[0])
    assert left.shape[1] % 16 == 0
    assert right.shape[1] % 16 == 0
    assert not left.dtype == right.dtype == torch.float8_e5m2
    a = left.float().double() * scale_left
    b = right.t().float().double() * scale_right
    return (a @ b.t()).to(dtype)


def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype):
    sides = block_scales(a, scale_a, kind_a), block_scales(b.t(), scale_b, kind_b)
    return multiply(a, b, *sides, output_dtype)


def mx_product(real):
    def scaled_mm_v1(a, b, scale_a, scale_b, out_dtype, **others):
        if scale_a.dtype != torch.float8_e8m0fnu:
            return real(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, **others)
        assert not others
        return multiply(a, b, mx_scales(a, scale_a), mx_scales(b.t(), scale_b), out_dtype)

    return scaled_mm_v1


@contextlib.contextmanager
def device_like(capability, monkeypatch):
    """CPU tensors are multiplied as on a CUDA device of some compute capability."""
    with monkeypatch.context() as patch:
        target = Target("cuda", capability, (13, 0))
        patch.setattr(Target, "of", classmethod(lambda cls, device: target))
        patch.setattr(F, "scaled_mm", scaled_mm)
        patch.setattr(torch, "_scaled_mm", mx_product(torch._scaled_mm))
        hardware.verdict.cache_clear()
        hardware._call.cache_clear()
        yield target
    hardware.verdict.cache_clear()
    hardware._call.cache_clear()
