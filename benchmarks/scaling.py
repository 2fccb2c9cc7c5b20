"""What does a second process bring, along every axis of the mesh?

Two ranks of one thread each are forked from this process and talk through gloo. In every round each
contender takes one step in turn, the single process too (the other rank then waits), so that they
share the machine's moods; the slower rank counts. All train the same model on the same batches.
Medians, the ratios to one process and the losses are printed, then one JSON line.

    python benchmarks/scaling.py                      the reference size, a few minutes
    python benchmarks/scaling.py --only tp2_sp,pp2 --layers 2 --hidden 128 --steps 3

It needs two cores that nobody else uses. CPU time is no help here: waiting is what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.config import RunConfig, make_config
from megatron.core.datasets.batch import Batch
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

TP_SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP: dict[str, Any] = {**PP, "num_virtual_stages_per_pipeline_rank": 2}
CONTENDERS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2_sp": TP_SP,
    "cp2": {"context_parallel_size": 2},
    "pp2": PP,
    "pp2_vpp2": VPP,
    "dp2": {},
}
FP8: dict[str, Any] = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}


class RandomTokens:
    """Batches of random tokens that depend on the sample's number only."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg

    def batch(self, consumed_samples: int, microbatch: int, dp_rank: int) -> Batch:
        """Return one microbatch."""
        cfg = self.cfg
        first = consumed_samples
        first += (microbatch * cfg.data_parallel_size + dp_rank) * cfg.micro_batch_size
        windows = []
        for sample in range(first, first + cfg.micro_batch_size):
            generator = torch.Generator().manual_seed(sample)
            windows.append(
                torch.randint(0, cfg.vocab_size, (cfg.seq_length + 1,), generator=generator)
            )
        window = torch.stack(windows)
        positions = torch.arange(cfg.seq_length).expand(cfg.micro_batch_size, -1)
        mask = torch.ones(cfg.micro_batch_size, cfg.seq_length)
        return Batch(window[:, :-1], window[:, 1:], mask, positions)


def configuration(args: argparse.Namespace, world_size: int, fields: dict[str, Any]) -> RunConfig:
    """Return the settings of one contender: a Llama-like model in bf16."""
    return make_config(
        world_size,
        **{
            "num_layers": args.layers,
            "hidden_size": args.hidden,
            "num_attention_heads": max(1, args.hidden // 64),
            "ffn_hidden_size": args.hidden * 11 // 4,
            "seq_length": args.seq,
            "vocab_size": args.vocab,
            "micro_batch_size": args.micro_batch,
            "global_batch_size": args.micro_batch * args.microbatches,
            "swiglu": True,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "train_iters": 1000,
            "lr": 1e-4,
            "bf16": True,
            "device": "cpu",
            "transformer_impl": "native",
            "mock_data": True,
            **(FP8 if args.fp8 else {}),
            **fields,
        },
    )


def measure(rank: int, args: argparse.Namespace, names: list[str]) -> dict[str, dict[str, float]]:
    """Run the contenders in turn; return median seconds and last loss by name."""
    steps: dict[str, TrainStep] = {}
    for name in names:
        world_size = 1 if name == "one" else 2
        if rank >= world_size:
            continue
        cfg = configuration(args, world_size, CONTENDERS[name])
        runtime = start(cfg, Launch(rank, world_size, rank, world_size))
        source: Any = RandomTokens(cfg)
        steps[name] = TrainStep(cfg, runtime, setup_model(cfg, runtime), source)
    wall: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    batch = args.micro_batch * args.microbatches
    for iteration in range(1, args.steps + 2):
        for name in names:
            dist.barrier()
            before = time.perf_counter()
            if name in steps:
                losses[name] = steps[name].run(iteration, (iteration - 1) * batch).loss
            seconds = torch.tensor(time.perf_counter() - before)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if iteration > 1:  # the first one warms up
                wall[name].append(seconds.item())
    return {
        n: {"s": statistics.median(wall[n]), "min_s": min(wall[n]), "loss": losses.get(n, 0.0)}
        for n in names
    }


def rank_main(rank: int, args: argparse.Namespace, folder: str, names: list[str]) -> None:
    """Run one rank; the first one writes the result."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    result = measure(rank, args, names)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--fp8", action="store_true", help="FP8 with delayed scaling")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="comma-separated contenders; default all")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = read_arguments()
    torch.set_num_threads(1)  # forked ranks of a parent with an OpenMP team would hang
    chosen = set(args.only.split(",")) if args.only else set(CONTENDERS)
    names = [name for name in CONTENDERS if name in chosen | {"one"}]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, args=(args, folder, names), nprocs=2, start_method="fork")
        found = json.loads(Path(folder, "result").read_text("utf-8"))
    print(f"{'contender':12}{'s a step':>10}{'tokens/s':>10}{'x one':>8}{'best':>8}{'loss':>9}")
    tokens = args.micro_batch * args.microbatches * args.seq
    for name, row in found.items():
        print(
            f"{name:12}{row['s']:10.3f}{tokens / row['s']:10.0f}"
            f"{found['one']['s'] / row['s']:8.2f}{found['one']['min_s'] / row['min_s']:8.2f}"
            f"{row['loss']:9.4f}"
        )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(json.dumps({"settings": vars(args), "load": os.getloadavg()[0], "found": found}))


if __name__ == "__main__":
    main()
