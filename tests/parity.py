"""The parity harness over the test pool: train a small model at any layout.

FP32, dropout 0, plain SGD without clipping, and loss masks that are uneven between samples: scale
errors that Adam, clipping or equal token counts would hide show up here. What is trained on,
gathered and compared is in `megatron.training.parity`.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import make_config
from megatron.training.initialize import Launch
from megatron.training.parity.outcome import Outcome, errors, train
from megatron.training.parity.ranks import compile_kernels
from megatron.training.parity.source import SyntheticSource
from tests.distpool import run_ranks

__all__ = ["BASE", "Outcome", "SyntheticSource", "different", "mean_error", "run_layout", "worst"]

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 2,  # so that the padding depends on the layout
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "optimizer": "sgd",
    "sgd_momentum": 0.0,
    "lr": 0.1,
    "min_lr": 0.1,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "transformer_impl": "native",
    "device": "cpu",
}


def run_layout(
    fields: dict[str, Any], world_size: int = 1, steps: int = 1, timeout: float = 180
) -> list[Outcome]:
    """Train `steps` steps of `BASE` changed by `fields` on `world_size` ranks.

    Returns:
        One outcome per rank.
    """
    if fields.get("fp8_format"):
        compile_kernels()
    return run_ranks(_train, world_size, fields, steps, timeout=timeout, detail=False)


def _train(rank: int, world_size: int, fields: dict[str, Any], steps: int) -> Outcome:
    cfg = make_config(world_size=world_size, **{**BASE, "train_iters": steps, **fields})
    return train(cfg, Launch(rank, world_size, rank, world_size), steps=steps)


def worst(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest error relative to the tensor's largest magnitude, and the name of that tensor."""
    found = errors(ours, reference, BASE["vocab_size"])
    return max((error, name) for name, error in found.items())


def different(ours: Outcome, reference: Outcome, rtol: float = 0.0) -> set[tuple[str, str, int]]:
    """(layer, key, column) of every scale or history of the first step that is not the same."""
    found = set()
    assert ours.fp8.keys() == reference.fp8.keys()
    for path, entries in reference.fp8.items():
        for key, expected in entries.items():
            wrong = (ours.fp8[path][key] - expected).abs() > rtol * expected.abs()
            columns = wrong.reshape(-1, wrong.shape[-1]).any(0).nonzero().flatten()
            found |= {(path, key, column) for column in columns.tolist()}
    return found


def mean_error(ours: Outcome, reference: Outcome) -> float:
    """Mean relative difference of the losses."""
    pairs = list(zip(ours.losses, reference.losses, strict=True))
    return sum(abs(a - b) / b for a, b in pairs) / len(pairs)
