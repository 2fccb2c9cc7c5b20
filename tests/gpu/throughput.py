"""Tokens a second of a training step in bf16 and FP8, and the speed of single matrix products.

    python tests/gpu/throughput.py --json OUT.json     on a GPU, about two minutes
    python tests/gpu/throughput.py --dry-run           tiny, on whatever there is

Forward, backward and the amax update are timed, the optimizer is not. Medians are printed as a
table with ratios to bf16 of the same backend, and written as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core.backends.contract import Backend
from megatron.core.backends.registry import backends
from megatron.core.capability import has_fp8_hardware
from megatron.core.fp8 import gemm_nt
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.gpu.cases import CPU, RECIPES, build_on, on, quantize
from tests.small_models import LLAMA

SIZES = {
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 11264,
    "num_attention_heads": 32,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "micro_batch_size": 2,
}
TINY = {
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 64,
    "micro_batch_size": 2,
}
PRODUCTS = ((8192, 4096, 4096), (8192, 11264, 4096), (8192, 4096, 11264))


def median_seconds(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """Median duration of a call; the device finishes before the clock is read."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2 if device.type == "cpu" else 3):
        call()
    taken = []
    for _ in range(times):
        finish()
        start = time.perf_counter()
        call()
        finish()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def train(
    backend: Backend, recipe: str | None, device: torch.device, sizes: dict[str, int], times: int
) -> dict[str, Any]:
    """One contender: its tokens a second, its loss, its peak memory."""
    fp8 = {"fp8_format": "hybrid", **RECIPES[recipe]} if recipe else {}
    build = build_on(device, backend, **{**LLAMA, **sizes, "fp8_emulation": "fast", **fp8})
    model = GPTModel(build)
    shape = (sizes["micro_batch_size"], sizes["seq_length"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], shape, generator=generator).to(device)
    positions = torch.arange(sizes["seq_length"], device=device).expand(shape)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    losses = []

    def step() -> None:
        loss = model(tokens, positions, tokens.roll(-1, 1)).mean()
        loss.backward()
        build.fp8.sync(build.mesh.amax)
        losses.append(loss.detach())

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = median_seconds(step, device, times)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "name": f"{backend.name} {recipe or 'bf16'}",
        "backend": backend.name,
        "tokens_per_s": shape[0] * shape[1] / seconds,
        "step_ms": seconds * 1e3,
        "loss": float(losses[-1]),
        "peak_gib": peak / 2**30,
        "kernels": sorted({row.kernel for row in build.fp8.rows()}),
    }


def multiply(
    m: int, n: int, k: int, device: torch.device, times: int
) -> dict[str, float | list[int]]:
    """One matrix product in bf16 and in FP8, the cast not included."""
    a, b = (torch.randn(rows, k, dtype=torch.bfloat16) for rows in (m, n))
    plain = [x.to(device) for x in (a, b)]
    fp8 = [on(device, quantize(x, "e4m3")) for x in (a, b)]
    seconds = {
        "bf16": median_seconds(lambda: gemm_nt(*plain, out_dtype=torch.bfloat16), device, times),
        "fp8": median_seconds(
            lambda: gemm_nt(*fp8, out_dtype=torch.bfloat16, fast_accum=True), device, times
        ),
    }
    operations = 2.0 * m * n * k
    return {
        "shape": [m, n, k],
        "bf16_tflops": operations / seconds["bf16"] / 1e12,
        "fp8_tflops": operations / seconds["fp8"] / 1e12,
        "ratio": seconds["bf16"] / seconds["fp8"],
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    plain = {row["backend"]: row for row in result["training"] if row["name"].endswith("bf16")}
    lines = [f"{result['device']}, torch {result['torch']}"]
    lines.append(f"{'training step':38} {'tokens/s':>12} {'ms':>9} {'x bf16':>7} {'GiB':>6}  loss")
    for row in result["training"]:
        ratio = row["tokens_per_s"] / plain[row["backend"]]["tokens_per_s"]
        lines.append(
            f"{row['name']:38} {row['tokens_per_s']:12.0f} {row['step_ms']:9.1f} {ratio:7.2f}"
            f" {row['peak_gib']:6.1f}  {row['loss']:.4f}"
        )
    lines.append(f"{'product m x n x k':38} {'bf16 TFLOP/s':>12} {'fp8':>9} {'x bf16':>7}")
    for row in result["products"]:
        shape = " x ".join(str(extent) for extent in row["shape"])
        lines.append(
            f"{shape:38} {row['bf16_tflops']:12.3f} {row['fp8_tflops']:9.3f} {row['ratio']:7.2f}"
        )
    lines += result["skipped"]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, any device")
    parser.add_argument("--times", type=int, default=8, help="timed repetitions")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    if device.type == "cpu" and not options.dry_run:
        parser.error("no CUDA device; --dry-run checks the script without one")
    times = 1 if options.dry_run else options.times
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "fp8_hardware": has_fp8_hardware(device),
        "training": [],
        "products": [],
        "skipped": [],
    }
    for backend in reversed(backends()):
        able, reason = backend.availability()
        if not able:
            result["skipped"].append(f"{backend.name}: {reason}")
            continue
        for recipe in (None, *RECIPES):
            sizes = TINY if options.dry_run else SIZES
            result["training"].append(train(backend, recipe, device, sizes, times))
    for shape in [(32, 32, 64)] if options.dry_run else PRODUCTS:
        result["products"].append(multiply(*shape, device, times))
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
