"""What does a second replica bring, and what do the distributed optimizer and overlap change?

Ranks are forked from this process and talk through gloo. All contenders exist at once in every rank
and take one step each in turn, so that they share the machine's moods; the slowest rank counts.
Medians, their ratios and the loss are printed, then one JSON line.

    python benchmarks/overlap.py                      two replicas, about a minute
    python benchmarks/overlap.py --hidden 128 --steps 5

Contenders: `one` is one process with the whole global batch (alone, before the others start); `dp`
plain data parallelism; `dp_overlap` with --overlap-grad-reduce; `zero` the distributed optimizer;
`zero_overlap` with both overlaps. All have the same global batch, so `one / dp` is the speedup.
On a CPU the transport uses the same cores as the arithmetic, and there is little to hide.
"""

from __future__ import annotations

import argparse
from typing import Any

from ranks import Found, in_turn, print_record, run, train_step

from megatron.config import RunConfig, make_config

ZERO = {"use_distributed_optimizer": True}
CONTENDERS: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp_overlap": {"overlap_grad_reduce": True},
    "zero": ZERO,
    "zero_overlap": {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True},
}


def configuration(args: argparse.Namespace, world_size: int, fields: dict[str, Any]) -> RunConfig:
    """Return the settings of one contender."""
    return make_config(
        world_size,
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 64,
        seq_length=args.seq,
        vocab_size=args.vocab,
        micro_batch_size=1,
        global_batch_size=args.batch,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        train_iters=1000,
        lr=1e-4,
        bf16=True,
        device="cpu",
        mock_data=True,
        ddp_num_buckets=args.buckets,
        **fields,
    )


def measure(
    rank: int, world_size: int, args: argparse.Namespace, names: dict[str, dict[str, Any]]
) -> Found:
    """Run the contenders in turn."""
    steps = {
        name: train_step(configuration(args, world_size, fields), rank)
        for name, fields in names.items()
    }
    return in_turn(steps, args.steps)


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4, help="sequences in one step, all replicas")
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = read_arguments()
    found = run(measure, 1, args, {"one": {}})
    found |= run(measure, args.replicas, args, CONTENDERS)
    base = found["one"]["s"]
    print(f"{'contender':14}{'ms a step':>10}{'one / it':>10}{'dp / it':>10}{'loss':>9}")
    for name, row in found.items():
        print(
            f"{name:14}{row['s'] * 1e3:10.1f}{base / row['s']:10.2f}"
            f"{found['dp']['s'] / row['s']:10.2f}{row['loss']:9.4f}"
        )
    print_record(args, found)


if __name__ == "__main__":
    main()
