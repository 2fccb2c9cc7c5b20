"""What does a second process bring, along every axis of the mesh?

Two ranks of one thread each are forked from this process and talk through gloo. In every round each
contender takes one step in turn, the single process too (the other rank then waits), so that they
share the machine's moods; the slower rank counts. All train the same model on the same batches.
Medians, the ratios to one process and the losses are printed, then one JSON line.

    python benchmarks/scaling.py                      the reference size, five minutes
    python benchmarks/scaling.py --only tp2_sp,pp2 --layers 2 --hidden 128 --steps 3
    python benchmarks/scaling.py --experts 8          Mixtral-like, expert parallelism

`twins` are two processes that know nothing of each other, each with the whole batch: what the
machine allows at most.

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
ALONE: dict[str, dict[str, Any]] = {"one": {}, "twins": {}}
DENSE: dict[str, dict[str, Any]] = {
    "tp2_sp": TP_SP,
    "tp2_sp_over": {**TP_SP, "tp_comm_overlap": True},
    "cp2": {"context_parallel_size": 2},
    "cp2_gather": {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)},
    "cp2_a2a": {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
    "pp2": PP,
    "pp2_zb": {**PP, "pipeline_schedule": "zb-h1"},
    "pp2_vpp2": VPP,
    "dp2": {},
    "dp2_zero": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
EP: dict[str, Any] = {"expert_model_parallel_size": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "ep2_a2a": {**EP, "moe_token_dispatcher_type": "alltoall"},
    "ep2_gather": {**EP, "moe_token_dispatcher_type": "allgather"},
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
            **(with_experts(args) if args.experts else {}),
            **fields,
        },
    )


def with_experts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of layers with experts, two for each token."""
    return {
        "num_experts": args.experts,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": args.hidden * 11 // 8,
        "moe_aux_loss_coeff": (0.01,),
    }


def measure(rank: int, world_size: int, args: argparse.Namespace, names: list[str]) -> Found:
    """Run the contenders in turn; the second rank only waits for the single process."""
    steps = {}
    for name in names:
        if name in ALONE:
            waits = name == "one" and rank > 0
            steps[name] = None if waits else train_step(configuration(args, 1, {}), 0)
        else:
            fields = (EXPERTS if args.experts else DENSE)[name]
            steps[name] = train_step(configuration(args, world_size, fields), rank)
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
    parser.add_argument("--experts", type=int, default=0, help="experts of every layer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="comma-separated contenders; default all")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = read_arguments()
    known = [*ALONE, *(EXPERTS if args.experts else DENSE)]
    chosen = args.only.split(",") if args.only else known
    names = [name for name in known if name in {*chosen, "one"}]
    found = run(measure, 2, args, names)
    print(f"{'contender':12}{'s a step':>10}{'tokens/s':>10}{'x one':>8}{'best':>8}{'loss':>9}")
    tokens = args.micro_batch * args.microbatches * args.seq
    for name, row in found.items():
        work = 2 if name == "twins" else 1
        median, best = (work * found["one"][key] / row[key] for key in ("s", "min_s"))
        print(
            f"{name:12}{row['s']:10.3f}{work * tokens / row['s']:10.0f}{median:8.2f}{best:8.2f}"
            f"{row['loss']:9.4f}"
        )
    print_record(args, found)


if __name__ == "__main__":
    main()
