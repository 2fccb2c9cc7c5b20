"""What this machine can do, each answer with its reason."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F

FP8_COMPUTE_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Fact:
    """One thing that this machine has or lacks.

    Attributes:
        name: What was looked for.
        present: Whether it is there.
        reason: Version, size or cause, in words.
    """

    name: str
    present: bool
    reason: str


def cuda() -> Fact:
    """The first CUDA device and its compute capability."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "no device found" if built else f"torch {torch.__version__} is built without CUDA"
        return Fact("cuda", False, why)
    major, minor = torch.cuda.get_device_capability()
    return Fact("cuda", True, f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}")


@dataclass(frozen=True)
class Target:
    """A device as far as matrix products depend on it, present or imagined.

    Attributes:
        kind: `cpu`, `cuda`, or `meta` for tensors on paper.
        capability: Compute capability; None without CUDA.
        cuda: Release of CUDA that torch was built with; None if unknown, and then new enough.
        has_scaled_mm: Whether this torch has `torch.nn.functional.scaled_mm` (2.10 and later).
        is_rocm: Whether this torch is built for AMD's devices.
    """

    kind: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    has_scaled_mm: bool = True
    is_rocm: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target that a device is."""
        if device.type != "cuda":
            return cls(device.type)
        return cls._with(torch.cuda.get_device_capability(device))

    @classmethod
    def imagined(cls, capability: tuple[int, int]) -> Target:
        """A CUDA device of some compute capability, with the torch that runs here."""
        return cls._with(capability)

    @classmethod
    def _with(cls, capability: tuple[int, int]) -> Target:
        cuda = release(torch.version.cuda)
        rocm = torch.version.hip is not None
        return cls("cuda", capability, cuda, hasattr(F, "scaled_mm"), rocm)

    def describe(self) -> str:
        """In words."""
        if self.capability is None:
            return self.kind
        return f"compute capability {self.capability[0]}.{self.capability[1]}"


def release(version: str | None) -> tuple[int, int] | None:
    """Major and minor number of a version, as `12.9` of `12.9.1`; None if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def has_fp8_hardware(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` multiplies FP8 in hardware on this device; on paper it does."""
    if device.type == "meta":
        return True
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_COMPUTE_CAPABILITY
    )


def fp8_gemm() -> Fact:
    """Whether FP8 matrix products run in hardware here; otherwise they are emulated."""
    device = cuda()
    if not device.present:
        return Fact("fp8_gemm", False, f"emulated: {device.reason}")
    if not has_fp8_hardware(torch.device("cuda")):
        return Fact("fp8_gemm", False, f"emulated: {device.reason}, FP8 needs 8.9")
    return Fact("fp8_gemm", True, f"torch._scaled_mm on {device.reason}")


@functools.cache
def cpu_bf16_gemm() -> Fact:
    """Whether this CPU multiplies bf16 matrices in hardware (AVX512-BF16 or AMX).

    Without these instructions torch widens bf16 operands block by block, several times slower than
    an fp32 product of the same numbers. The fp32 product is the same sum of the same exact
    products, so callers may choose it freely.
    """
    for instruction, probe in (
        ("AMX", "_is_amx_tile_supported"),
        ("AVX512-BF16", "_is_avx512_bf16_supported"),
    ):
        supported = getattr(torch.cpu, probe, None)
        if supported is not None and supported():
            return Fact("cpu_bf16_gemm", True, f"this CPU has {instruction}")
    if platform.machine().lower() in ("aarch64", "arm64"):
        return Fact("cpu_bf16_gemm", True, "assumed on Arm; torch has no probe for it")
    return Fact("cpu_bf16_gemm", False, "this CPU has neither AMX nor AVX512-BF16")


def gemm_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of `dtype` matrices run fastest without losing anything.

    Args:
        dtype: What the operands are held in.
        device: Where they are.

    Returns:
        float32 where a CPU has no instructions for 16-bit products, else `dtype`.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if dtype == torch.bfloat16 and cpu_bf16_gemm().present:
        return dtype
    return torch.float32
