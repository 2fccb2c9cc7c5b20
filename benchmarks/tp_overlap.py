"""What does tensor parallelism bring on one machine, and what does --tp-comm-overlap change?

Ranks are forked from this process, one thread each, and talk through gloo. All contenders exist at
once in every rank and take one step each in turn, so that they share the machine's moods; the
slowest rank counts. Medians, their ratios and the loss are printed, then one JSON line.

    python benchmarks/tp_overlap.py                      8 layers, hidden 512, two minutes
    python benchmarks/tp_overlap.py --layers 2 --steps 3
    python benchmarks/tp_overlap.py --fp8 delayed

Contenders: `one` is one process (alone, before the others start); `twins` are as many independent
copies of it at once, which is what the machine allows at most; `tp` is TP with sequence
parallelism; `tp_overlap` the same with --tp-comm-overlap. All have the same batch, so `one / tp` is
the speedup. On a CPU the transport uses the same cores as the arithmetic: hidden is only the
waiting. CPU time is that of the busiest rank, transport included; on a machine that others use,
read the ratios of CPU time. `waiting` are the ms in which the rank that waits most had nothing else
to do than wait for messages of other ranks.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from ranks import Found, in_turn, print_record, run, train_step

from megatron.config import RunConfig, make_config
from megatron.core import wire


class Waiting:
    """Seconds that this rank has spent waiting for messages between tensor-parallel ranks."""

    def __init__(self) -> None:
        self.total = 0.0
        wait = wire.Swap.wait

        def timed(swap: wire.Swap) -> None:
            before = time.perf_counter()
            wait(swap)
            self.total += time.perf_counter() - before

        wire.Swap.wait = timed  # type: ignore[method-assign]


def configuration(args: argparse.Namespace, world_size: int, fields: dict[str, Any]) -> RunConfig:
    """Return the settings of one contender."""
    if args.fp8:
        fields = {"fp8_format": "hybrid", "fp8_recipe": args.fp8, **fields}
    return make_config(
        world_size,
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 64,
        seq_length=args.seq,
        vocab_size=args.vocab,
        micro_batch_size=args.batch,
        global_batch_size=args.batch,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        train_iters=1000,
        lr=1e-4,
        bf16=True,
        device="cpu",
        mock_data=True,
        **fields,
    )


def measure(
    rank: int, world_size: int, args: argparse.Namespace, names: dict[str, dict[str, Any]]
) -> Found:
    """Run the contenders in turn."""
    steps = {}
    for name, fields in names.items():
        size = world_size if fields.get("tensor_model_parallel_size", 1) > 1 else 1
        steps[name] = train_step(configuration(args, size, fields), rank % size)
    waiting = Waiting()
    clocks = {"cpu_s": time.process_time, "waiting_s": lambda: waiting.total}
    return in_turn(steps, args.steps, clocks)


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of what runs on several ranks."""
    tp = {"tensor_model_parallel_size": args.ranks, "sequence_parallel": True}
    found = {"twins": {}, "tp": tp, "tp_overlap": {**tp, "tp_comm_overlap": True}}
    wanted = [name for name in args.only.split(",") if name] or list(found)
    return {name: found[name] for name in wanted}


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences in one step")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--fp8", default="", choices=("", "delayed", "tensorwise"))
    parser.add_argument("--only", default="", help="twins,tp,tp_overlap")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = read_arguments()
    found = run(measure, 1, args, {"one": {}})
    found |= run(measure, args.ranks, args, contenders(args))
    base = found["one"]
    header = f"{'contender':14}{'ms a step':>10}{'tokens/s':>10}{'one / it':>10}"
    print(f"{header}{'cpu ms':>10}{'one / it':>10}{'waiting':>10}{'loss':>9}")
    for name, row in found.items():
        print(
            f"{name:14}{row['s'] * 1e3:10.1f}{args.batch * args.seq / row['s']:10.0f}"
            f"{base['s'] / row['s']:10.2f}{row['cpu_s'] * 1e3:10.1f}"
            f"{base['cpu_s'] / row['cpu_s']:10.2f}{row['waiting_s'] * 1e3:10.1f}"
            f"{row['loss']:9.4f}"
        )
    print_record(args, found)


if __name__ == "__main__":
    main()
