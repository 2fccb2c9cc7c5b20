"""Speed of products, casts, a layer, and of training steps in bf16 and each FP8 recipe.

    python tests/gpu/throughput.py --json OUT.json     on a GPU, about four minutes
    python tests/gpu/throughput.py --dry-run           tiny, on whatever there is

The model is configs/llama3_1b.yaml, the step a whole one. MFU is the model's FLOP/s over the dense
bf16 rate of the data sheet, for FP8 as well; beside it stands the share of what a large bf16
product reaches here. Results are written after every part.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core.backends.native import NativeBackend
from megatron.core.backends.registry import backends
from megatron.core.fp8 import kernels
from megatron.training.products import RECIPES, Place, rows_of_recipes
from tests.gpu import kernel_speed, training_speed
from tests.gpu.cases import CPU
from tests.gpu.timing import copy_bandwidth, gemm_tflops, peak_tflops


def measure(device: torch.device, dry: bool, times: int, result: dict[str, Any], save: Any) -> None:
    """Fill `result`, part after part."""
    small = 1 << 12
    result["copy_gb_per_s"] = copy_bandwidth(device, small if dry else 1 << 30, times) / 1e9
    result["bf16_gemm_tflops"] = gemm_tflops(device, 64 if dry else 8192, times)
    result["bf16_peak_tflops"] = peak_tflops(result["device"])
    result["dispatch"] = rows_of_recipes(Place.here())
    result["cast_kernels"] = kernels.describe(device)
    save()
    for recipe in training_speed.OVERLAYS:
        if recipe == "mxfp8" and not Place.here().verdict(RECIPES[recipe]).hardware:
            result["skipped"]["training in mxfp8"] = "it is emulated here"
            continue
        for backend in reversed(backends()):
            able, reason = backend.availability()
            if backend.name == "transformer_engine" and device.type != "cuda":
                able = False
            if not able:
                result["skipped"][backend.name] = reason
                continue
            sizes = training_speed.TINY if dry else training_speed.SIZES
            try:
                row = training_speed.train(backend, recipe, device, sizes, times)
            except Exception as error:  # a recipe that a backend lacks is a result, too
                text = str(error).partition("\n")[0]
                result["skipped"][f"{backend.name} {recipe}"] = f"{type(error).__name__}: {text}"
                continue
            peak = result["bf16_peak_tflops"]
            row["mfu"] = None if peak is None else row["model_tflops"] / peak
            row["share_of_gemm"] = row["model_tflops"] / result["bf16_gemm_tflops"]
            result["training"].append(row)
            save()
    for shape in [(32, 32, 64)] if dry else kernel_speed.PRODUCTS:
        result["products"].append(kernel_speed.products(shape, device, times))
    save()
    shape = (48, 64) if dry else kernel_speed.CASTS
    limit = result["copy_gb_per_s"] * 1e9
    result["casts"] += kernel_speed.cast_speed(shape, device, limit, times)
    save()
    layer = (32, 64, 48) if dry else kernel_speed.LAYERS
    result["layers"] += kernel_speed.layer_speed(layer, NativeBackend(), device, times)
    save()


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    limits = f"copy {result['copy_gb_per_s']:.0f} GB/s, bf16 product of 8192: "
    lines = [f"{result['device']}, torch {result['torch']}"]
    lines.append(f"{limits}{result['bf16_gemm_tflops']:.0f} TFLOP/s")
    lines += [f"cast kernels, {group}: {why}" for group, why in result["cast_kernels"].items()]
    plain = {r["backend"]: r for r in result["training"] if r["name"].endswith("bf16")}
    head = f"{'training step, 1B parameters':32} {'tokens/s':>9} {'ms':>8} {'x bf16':>7} {'MFU':>6}"
    lines.append(f"{head} {'of GEMM':>8} {'GiB':>6}  loss")
    for row in result["training"]:
        ratio = row["tokens_per_s"] / plain[row["backend"]]["tokens_per_s"]
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"{row['name']:32} {row['tokens_per_s']:9.0f} {row['step_ms']:8.1f} {ratio:7.2f}"
            f" {mfu:>6} {row['share_of_gemm']:8.1%} {row['peak_gib']:6.1f}"
            f"  {row['loss']:.4f}"
        )
    names = [name for name in result["products"][0] if name != "shape"]
    lines.append(f"{'product m x n x k, TFLOP/s':32} " + " ".join(f"{n:>11}" for n in names))
    for row in result["products"]:
        shape = " x ".join(str(extent) for extent in row["shape"])
        lines.append(f"{shape:32} " + " ".join(f"{row[n]:11.2f}" for n in names))
    lines.append(f"{'cast':32} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'x plain torch':>14}")
    for row in result["casts"]:
        plain_ratio = row["times_plain_torch"]
        against = f"{plain_ratio:14.2f}" if plain_ratio else f"{'-':>14}"
        lines.append(
            f"{row['name']:32} {row['ms']:9.3f} {row['gb_per_s']:8.0f} {row['share_of_copy']:8.1%}"
            f" {against}"
        )
    lines.append(f"{'norm and linear, both passes':32} {'ms':>9} {'x bf16':>8}  kernel")
    for row in result["layers"]:
        lines.append(f"{row['name']:32} {row['ms']:9.3f} {row['times_bf16']:8.2f}  {row['kernel']}")
    lines += [f"skipped {name}: {reason}" for name, reason in result["skipped"].items()]
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
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "training": [],
        "products": [],
        "casts": [],
        "layers": [],
        "skipped": {},
    }

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    measure(device, options.dry_run, 1 if options.dry_run else options.times, result, save)
    print(table(result))
    return result


if __name__ == "__main__":
    main()
