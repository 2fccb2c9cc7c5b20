"""What do the figures of FP8 casts cost?

Steps that are measured and steps that are not take turns in one run of a small Llama, everything
included (data, both passes, AdamW): medians of process CPU time, their ratio, what it comes to at
the default interval, one JSON line a recipe. Work is counted too: casts, and elements looked at.

    python benchmarks/fp8_stats.py
    python benchmarks/fp8_stats.py --steps 20 --recipes delayed
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from megatron.config import make_config
from megatron.config.schema import SPECS
from megatron.core.fp8.stats import StatsCollector
from megatron.training.initialize import Launch, start
from megatron.training.parity.source import SyntheticSource
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
NEVER = 1 << 40


def measure(recipe: str, args: argparse.Namespace) -> dict[str, float]:
    """Alternate measured and other steps."""
    cfg = make_config(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=4 * args.hidden,
        num_attention_heads=args.hidden // 32, seq_length=args.seq, micro_batch_size=args.batch,
        vocab_size=4096, swiglu=True, normalization="RMSNorm", position_embedding_type="rope",
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
        fp8_format=FORMATS[recipe], fp8_recipe=recipe, mock_data=True, train_iters=1, lr=1e-3,
        device="cpu",
    )  # fmt: skip
    runtime = start(cfg, Launch())
    parts = setup_model(cfg, runtime)
    parts.fp8.stats = stats = StatsCollector(NEVER, cfg.fp8_stats_samples)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, 1))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * args.steps + 2):
        due = bool(i % 2)
        if due:
            stats.request()
        before = time.process_time()
        step.run(i + 2, 0)
        if i > 1:  # the first of each kind warms up
            taken[due].append(time.process_time() - before)
    plain, due_s = (statistics.median(taken[kind]) for kind in (False, True))
    interval = SPECS["fp8_stats_interval"].default
    figures = [one for roles in stats.figures.values() for one in roles.values()]
    return {
        "plain_ms": plain * 1000.0,
        "measured_over_plain": due_s / plain,
        "share_at_default": (due_s / plain - 1.0) / interval,
        "interval": interval,
        "casts": sum(one.casts for one in figures),
        "elements": sum(one.elements for one in figures),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each kind")
    parser.add_argument("--recipes", default=",".join(FORMATS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for recipe in args.recipes.split(","):
        found = measure(recipe, args)
        print(
            f"{recipe:11s} step {found['plain_ms']:.0f} ms, measured x"
            f" {found['measured_over_plain']:.3f}: {found['share_at_default']:.2%} of the time at"
            f" every {found['interval']} steps ({found['casts']} casts,"
            f" {found['elements']:,} elements)"
        )
        print(json.dumps({"recipe": recipe, **found}))


if __name__ == "__main__":
    main()
