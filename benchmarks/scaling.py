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
from typing import Any

from ranks import Found, in_turn, print_record, run, train_step

from megatron.config import RunConfig, make_config

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


def measure(rank: int, world_size: int, args: argparse.Namespace, names: list[str]) -> Found:
    """Run the contenders in turn; the second rank only waits for the single process."""
    steps = {}
    for name in names:
        size = 1 if name == "one" else world_size
        cfg = configuration(args, size, CONTENDERS[name])
        steps[name] = train_step(cfg, rank) if rank < size else None
    return in_turn(steps, args.steps)


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
    chosen = set(args.only.split(",")) if args.only else set(CONTENDERS)
    names = [name for name in CONTENDERS if name in chosen | {"one"}]
    found = run(measure, 2, args, names)
    print(f"{'contender':12}{'s a step':>10}{'tokens/s':>10}{'x one':>8}{'best':>8}{'loss':>9}")
    tokens = args.micro_batch * args.microbatches * args.seq
    for name, row in found.items():
        print(
            f"{name:12}{row['s']:10.3f}{tokens / row['s']:10.0f}"
            f"{found['one']['s'] / row['s']:8.2f}{found['one']['min_s'] / row['min_s']:8.2f}"
            f"{row['loss']:9.4f}"
        )
    print_record(args, found)


if __name__ == "__main__":
    main()
