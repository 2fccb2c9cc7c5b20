"""Saved at one layout and loaded at another: the same bits, and the same losses from there on.

`python -m tests.distributed.test_any_to_any` compares every pair.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch

from tests.distpool import run_ranks
from tests.trained_parts import advance, build, content, fetch, store

MODEL = {
    "num_experts": 4, "moe_ffn_hidden_size": 32, "swiglu": True, "ffn_hidden_size": 64,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "micro_batch_size": 1,
    "make_vocab_size_divisible_by": 32, "lr": 1e-3, "min_lr": 1e-3,
}  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2, EP4 = ({"expert_model_parallel_size": size} for size in (2, 4))
ZERO = {"use_distributed_optimizer": True, "ddp_bucket_size": 2000}
SAVED = {
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "dp2 sharded": (2, ZERO),
    "ep2": (2, EP2),
    "cp2": (2, CP2),
    "tp2 pp2": (4, {**TP2, **PP2}),
}
LOADED = {
    "one process": (1, {}),
    "tp2 dp2 sharded": (4, {**TP2, **ZERO}),
    "pp2 ep2": (4, {**PP2, **EP2}),
    "dp2": (2, {}),
    "tp2 cp2": (4, {**TP2, **CP2}),
    "dp4 ep4 sharded": (4, {**EP4, **ZERO}),
}
STEPS = 5  # after the two before the checkpoint
# Sums in another order, in fp32, through seven steps of Adam.
ROUNDING = 1e-5


def save_and_go_on(rank, world, root, **fields):
    cfg, mesh, parts, step = build(rank, world, save=str(root), **fields)
    advance(cfg, parts, step, 1, 2)
    store(cfg, mesh, parts)
    return [done[0] for done in advance(cfg, parts, step, 3, STEPS)]


def load_and_go_on(rank, world, source, target, **fields):
    cfg, mesh, parts, step = build(rank, world, load=str(source), save=str(target), **fields)
    fetch(cfg, mesh, parts)
    store(cfg, mesh, parts)
    return [done[0] for done in advance(cfg, parts, step, 3, STEPS)]


def compare(root, pairs):
    """Check pairs of names; return the largest relative difference of a loss."""
    saved, worst = {}, 0.0
    for first, second in pairs:
        source, target = root / first, root / f"{first} to {second}"
        if first not in saved:
            world, fields = SAVED[first]
            losses = run_ranks(save_and_go_on, world, source, detail=False, **MODEL, **fields)[-1]
            saved[first] = content(source), losses
        expected, losses = saved[first]
        assert {k.split(".")[2] for k in expected if k.startswith("optimizer.")} == {
            "param", "exp_avg", "exp_avg_sq"
        }  # fmt: skip
        world, fields = LOADED[second]
        found = run_ranks(load_and_go_on, world, source, target, detail=False, **MODEL, **fields)
        again = content(target)
        assert again.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(again[key], tensor), (key, first, second)
        for own, other in zip(found[-1], losses, strict=True):
            worst = max(worst, abs(own - other) / abs(other))
        assert worst <= ROUNDING, (first, second, found[-1], losses)
    return worst


def test_some_pairs(tmp_path):
    pairs = [("tp2 pp2", "one process"), ("dp2 sharded", "pp2 ep2"), ("ep2", "tp2 cp2")]
    compare(tmp_path, pairs)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        difference = compare(Path(folder), itertools.product(SAVED, LOADED))
    print(f"36 pairs: bitwise; losses of {STEPS} steps within {difference:.1e}")  # noqa: T201
