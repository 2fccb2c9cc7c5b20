"""Whole training steps of a one-billion-parameter model on one GPU, optimizer included."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.config.cli import parse
from megatron.core.backends.contract import Backend
from megatron.core.datasets.batch import Batch
from megatron.training.flops import flops_per_iteration
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.gpu.timing import median_seconds

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL = CONFIGS / "llama3_1b.yaml"
OVERLAYS: dict[str, list[str]] = {
    "bf16": [],
    **{
        name: ["--config", str(CONFIGS / "fp8" / f"{name}.yaml")]
        for name in ("delayed", "tensorwise", "blockwise", "mxfp8")
    },
}
# Two microbatches: weights are cast once for both, as in a longer accumulation for all.
SIZES = ["--global-batch-size", "4"]
TINY = [
    "--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "64",
    "--num-attention-heads", "4", "--num-query-groups", "2", "--seq-length", "32",
    "--vocab-size", "64", "--micro-batch-size", "1", "--global-batch-size", "2",
]  # fmt: skip


class _Tokens:
    """The same random batch for every microbatch, on its device."""

    def __init__(self, cfg: Any, device: torch.device) -> None:
        shape = (cfg.micro_batch_size, cfg.seq_length)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, cfg.vocab_size, shape, generator=generator).to(device)
        positions = torch.arange(cfg.seq_length, device=device).expand(shape).contiguous()
        mask = torch.ones(shape, device=device)
        self._batch = Batch(tokens, tokens.roll(-1, 1), mask, positions)

    def batch(self, consumed_samples: int, microbatch: int, dp_rank: int) -> Batch:
        return self._batch


def train(
    backend: Backend, recipe: str, device: torch.device, sizes: Sequence[str], times: int
) -> dict[str, Any]:
    """One contender: tokens a second, TFLOP/s of the model, loss, peak memory."""
    try:
        return _train(backend, recipe, device, sizes, times)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _train(
    backend: Backend, recipe: str, device: torch.device, sizes: Sequence[str], times: int
) -> dict[str, Any]:
    tokens = ["--config", str(MODEL), *OVERLAYS[recipe], *sizes, "--mock-data"]
    tokens += ["--device", device.type, "--transformer-impl", backend.name]
    tokens += ["--tokenizer-type", "NullTokenizer"]
    cfg, _ = parse(tokens, 1)
    runtime = replace(start(cfg, Launch()), backend=backend)
    parts = setup_model(cfg, runtime)
    step = TrainStep(cfg, runtime, parts, _Tokens(cfg, device))
    losses = []

    def one() -> None:
        losses.append(step.run(len(losses) + 1, len(losses) * cfg.global_batch_size).loss)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = median_seconds(one, device, times)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "name": f"{backend.name} {recipe}",
        "backend": backend.name,
        "tokens_per_s": cfg.global_batch_size * cfg.seq_length / seconds,
        "step_ms": seconds * 1e3,
        "model_tflops": flops_per_iteration(cfg) / seconds / 1e12,
        "loss": losses[-1],
        "peak_gib": peak / 2**30,
        "kernels": sorted({row.kernel for row in parts.model.named_precision_rows()}),
    }
