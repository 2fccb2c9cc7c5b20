"""Clocks and limits for the speed measurements of the GPU suite."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# Dense bf16 TFLOP/s by the vendor's data sheets, by the first part that a device's name has.
BF16_PEAK_TFLOPS = {
    "B300": 2250.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "A100": 312.0,
}


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """Median duration of a call, between events of the device's own clock where it has one."""
    for _ in range(2 if device.type == "cpu" else 3):
        call()
    taken = []
    if device.type != "cuda":
        for _ in range(times):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        finish(device)
        start.record()
        call()
        end.record()
        finish(device)
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def copy_bandwidth(device: torch.device, elements: int, times: int) -> float:
    """Bytes a second that a large copy reads and writes: the limit of what only moves data."""
    source = torch.randint(0, 255, (elements,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * elements / median_seconds(lambda: target.copy_(source), device, times)


def gemm_tflops(device: torch.device, size: int, times: int) -> float:
    """What a large bf16 product of random numbers reaches: the limit of what only multiplies."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / median_seconds(lambda: torch.mm(a, b), device, times) / 1e12


def peak_tflops(name: str) -> float | None:
    """The data sheet's dense bf16 rate of a device, if it is known here."""
    return next((peak for part, peak in BF16_PEAK_TFLOPS.items() if part in name), None)
