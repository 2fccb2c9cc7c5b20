"""Contenders that take steps in turn, on ranks forked from the benchmark's process.

Ranks have one thread each and talk through gloo. All contenders exist at once in every rank and
take one step each in turn, so that they share the machine's moods; the slowest rank counts.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.config import RunConfig
from megatron.core.datasets.source import Source
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

Step = Callable[[int], float]  # takes the step with this number, from 1, and returns its loss
Found = dict[str, dict[str, float]]


class RandomTokens:
    """Samples of random tokens that depend on their number only."""

    def __init__(self, cfg: RunConfig) -> None:
        self.seq, self.vocab = cfg.seq_length, cfg.vocab_size

    def __len__(self) -> int:
        return 1 << 31

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        window = torch.randint(0, self.vocab, (self.seq + 1,), generator=generator)
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": torch.ones(self.seq),
            "position_ids": torch.arange(self.seq),
        }


def train_step(cfg: RunConfig, rank: int) -> Step:
    """Build a model on this rank, and what trains it on random tokens. Collective."""
    runtime = start(cfg, Launch(rank, cfg.world_size, rank, cfg.world_size))
    source = Source(
        RandomTokens(cfg),
        micro_batch_size=cfg.micro_batch_size,
        data_parallel_size=runtime.mesh.dp.size,
    )
    step = TrainStep(cfg, runtime, setup_model(cfg, runtime), source)
    return lambda number: step.run(number, (number - 1) * cfg.global_batch_size).loss


def in_turn(
    steps: Mapping[str, Step | None],
    rounds: int,
    clocks: Mapping[str, Callable[[], float]] | None = None,
) -> Found:
    """Let every contender take one step in every round.

    Args:
        steps: By name; None for a contender that this rank only waits for.
        rounds: How many count, after one that warms up.
        clocks: More to be measured than the time: functions whose readings grow.

    Returns:
        By name: the median `s` of a step on the slowest rank, the same for every clock, the
        shortest step `min_s`, and the last `loss`.
    """
    clocks = {"s": time.perf_counter, **(clocks or {})}
    spent: dict[str, list[list[float]]] = {name: [] for name in steps}
    losses = dict.fromkeys(steps, 0.0)
    for number in range(1, rounds + 2):
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            before = torch.tensor([clock() for clock in clocks.values()], dtype=torch.float64)
            if step is not None:
                losses[name] = step(number)
            taken = torch.tensor([clock() for clock in clocks.values()], dtype=torch.float64)
            taken -= before
            if dist.is_initialized():
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number > 1:
                spent[name].append(taken.tolist())
    found = {}
    for name, rows in spent.items():
        columns = dict(zip(clocks, zip(*rows, strict=True), strict=True))
        found[name] = {clock: statistics.median(times) for clock, times in columns.items()}
        found[name] |= {"min_s": min(columns["s"]), "loss": losses[name]}
    return found


def _rank_main(
    rank: int, measure: Callable[..., Any], world_size: int, folder: str, *args: Any
) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = measure(rank, world_size, *args)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
    if world_size > 1:
        dist.destroy_process_group()


def run(measure: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Call `measure(rank, world_size, *args)` on forked ranks.

    Returns:
        What the first rank returned, by way of JSON.
    """
    torch.set_num_threads(1)  # forked ranks of a parent with an OpenMP team would hang
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank_main,
            args=(measure, world_size, folder, *args),
            nprocs=world_size,
            start_method="fork",
        )
        return json.loads(Path(folder, "found").read_text("utf-8"))


def print_record(args: Namespace, found: Found) -> None:
    """Print the machine's load, and everything as one JSON line."""
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} cores")
    print(json.dumps({"settings": vars(args), "load": load, "found": found}))
