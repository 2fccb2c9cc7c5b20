"""What does a checkpoint cost the run: saved at once, and with --async-save?

One process, one thread for arithmetic, one core left for the writer. Synchronous and asynchronous
saves of the same model alternate in one run, so that a busy machine slows both alike; steps while a
save is on its way are compared with those in between. Prints ratios.

    python benchmarks/async_save.py --save /some/disk
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.config import make_config  # noqa: E402
from megatron.core.dist_checkpointing.shard import Sharded  # noqa: E402
from megatron.core.dist_checkpointing.writing import HostBuffers  # noqa: E402
from megatron.observe.bus import Bus  # noqa: E402
from megatron.training.checkpointing import Entries, collect  # noqa: E402
from megatron.training.descriptions import Descriptions  # noqa: E402
from megatron.training.initialize import Launch, start  # noqa: E402
from megatron.training.parity.source import SyntheticSource  # noqa: E402
from megatron.training.progress import Progress  # noqa: E402
from megatron.training.providers import setup_model  # noqa: E402
from megatron.training.saver import PERSISTENT, Saver  # noqa: E402
from megatron.training.step import TrainStep  # noqa: E402

SAVED_BYTES = 14  # BF16 weight, fp32 master and two moments


def build(
    args: argparse.Namespace, behind: bool, buffers: HostBuffers | None = None
) -> tuple[Saver, TrainStep]:
    """Build a model, and what saves it."""
    cfg = make_config(
        1, num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=8,
        seq_length=128, max_position_embeddings=128, vocab_size=8192, micro_batch_size=2,
        global_batch_size=2, bf16=True, train_iters=10000, lr=1e-4, mock_data=True, device="cpu",
        save=str(args.save / ("behind" if behind else "sync")), save_interval=1, keep_last=1,
        async_save=behind,
    )  # fmt: skip
    runtime = start(cfg, Launch())
    parts = setup_model(cfg, runtime)
    bus = Bus([], log_interval=1000, world=runtime.mesh.world, device=runtime.device)

    described = Descriptions()

    def entries(alone: bool) -> Entries:
        return collect(
            cfg, runtime.mesh, model=parts.model, optimizer=parts.optimizer,
            scheduler=parts.scheduler, fp8=parts.fp8, progress=Progress(), alone=alone,
            described=described,
        )  # fmt: skip

    saver = Saver(runtime, entries, bus, buffers)
    saver.open()
    count = sum(p.numel() for p in parts.model.parameters())
    print(f"{count / 1e6:.1f} million parameters, {SAVED_BYTES * count / 1e6:.0f} MB")
    return saver, TrainStep(cfg, runtime, parts, SyntheticSource(cfg, 1))


class TimedBuffers(HostBuffers):
    """Notes how long the copies to host memory take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def copy(self, *args: Any) -> dict[str, Sharded]:
        """Copy as usual."""
        begun = time.perf_counter()
        copied = super().copy(*args)
        self.seconds.append(time.perf_counter() - begun)
        return copied


class Timed:
    """Runs steps as a run does, and notes how long they take, by the clock and by the thread's own
    time."""

    def __init__(self, step: TrainStep) -> None:
        self._step, self._done = step, 0

    def __call__(self, saver: Saver) -> tuple[float, float]:
        wall, own = time.perf_counter(), time.thread_time()
        self._step.run(self._done + 1, 2 * self._done)
        saver.poll()
        self._done += 1
        return time.perf_counter() - wall, time.thread_time() - own


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    buffers = TimedBuffers()
    (sync, _), (behind, training) = (
        build(args, behind=False),
        build(args, behind=True, buffers=buffers),
    )
    step = Timed(training)
    for _ in range(3):
        step(behind)
    waits: dict[str, list[float]] = {"sync": [], "async": []}
    steps: dict[str, list[tuple[float, float]]] = {"during": [], "between": []}
    for number in range(1, args.rounds + 1):
        for kind, saver in (("sync", sync), ("async", behind)):
            begun = time.perf_counter()
            saver.request(number, PERSISTENT, good=True)
            waits[kind].append(time.perf_counter() - begun)
        count = 0
        while behind.is_saving:
            steps["during"].append(step(behind))
            count += 1
        steps["between"] += [step(behind) for _ in range(max(count, 3))]
    for saver in (sync, behind):
        saver.close()
    report(waits, buffers.seconds, steps)
    for name in ("sync", "behind"):
        shutil.rmtree(args.save / name)


def report(
    waits: dict[str, list[float]],
    copies: list[float],
    steps: dict[str, list[tuple[float, float]]],
) -> None:
    """Print the ratios."""
    # The first copy makes its room.
    stall = statistics.median(waits["async"][1:])
    share = stall / statistics.median(waits["sync"][1:])
    copied = statistics.median(copies[1:]) / stall
    print(f"stall of an asynchronous save: {100 * share:.1f} % of a synchronous one")
    print(f"of which the copy to host memory: {100 * copied:.0f} %")
    for index, name in enumerate(("clock", "thread's own time")):
        during, between = (
            statistics.median(pair[index] for pair in steps[k]) for k in ("during", "between")
        )
        print(f"a step while one is written ({name}): {during / between:.3f}x")
    print(f"{len(steps['during'])} steps during {len(copies)} saves")


if __name__ == "__main__":
    main()
