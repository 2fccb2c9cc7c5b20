"""Rules about the process mesh and how it cuts the model and the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule
from megatron.config.schema import flag_of

_SIZE_OF = {
    "a2a": "--context-parallel-size",
    "a2a+p2p": "--hierarchical-context-parallel-sizes",
}


@rule
def a_fake_world_is_on_paper(c: Draft) -> Iterator[Problem]:
    """--fake-world-size belongs to --dry-run."""
    size = c.fake_world_size
    if size is None or "fake_world_size" in c.broken:
        return
    if not c.dry_run:
        yield Problem(
            ("--fake-world-size", "--dry-run"),
            f"{size} without --dry-run",
            "A run has the processes that the launcher started",
            "Add --dry-run, or remove --fake-world-size",
        )
    if size < 1:
        yield Problem(
            ("--fake-world-size",), size, "A run has at least one process", "Use 1 or more"
        )


@rule
def mesh_fills_the_world(c: Draft) -> Iterator[Problem]:
    """The number of processes is a multiple of TP * PP * CP."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    if c.world_size < 1:
        yield Problem(
            ("world_size",), c.world_size, "A run has at least one process", "Use the launcher"
        )
        return
    if not c.counts(*names):
        return  # refused by another rule
    tp, pp, cp = (c.values[name] for name in names)
    if c.world_size % (tp * pp * cp):
        yield Problem(
            tuple(flag_of(name) for name in names),
            f"{tp}, {pp} and {cp} on {c.world_size} processes",
            f"One replica needs {tp * pp * cp} processes, and they must divide all processes",
            f"{c.start(tp * pp * cp)}, or lower a size",
        )


@rule
def heads_divide_tp(c: Draft) -> Iterator[Problem]:
    """Attention heads split evenly over tensor-parallel ranks."""
    if c.counts("num_attention_heads", "tensor_model_parallel_size") and (
        c.num_attention_heads % c.tensor_model_parallel_size
    ):
        yield Problem(
            ("--num-attention-heads", "--tensor-model-parallel-size"),
            f"{c.num_attention_heads} and {c.tensor_model_parallel_size}",
            "Each rank owns whole heads",
            "Choose a tensor-parallel size that divides the heads",
        )


@rule
def query_groups_divide_tp(c: Draft) -> Iterator[Problem]:
    """Query groups split evenly over tensor-parallel ranks."""
    if (
        c.group_query_attention
        and c.counts("num_query_groups", "tensor_model_parallel_size")
        and c.num_query_groups % c.tensor_model_parallel_size
    ):
        yield Problem(
            ("--num-query-groups", "--tensor-model-parallel-size"),
            f"{c.num_query_groups} and {c.tensor_model_parallel_size}",
            "Each rank owns whole groups of heads with their keys and values",
            "Choose a tensor-parallel size that divides the groups",
        )


@rule
def ffn_divides_tp(c: Draft) -> Iterator[Problem]:
    """The MLP's inner width splits evenly over tensor-parallel ranks."""
    tp = c.tensor_model_parallel_size
    if c.counts("ffn_hidden_size", "tensor_model_parallel_size") and c.ffn_hidden_size % tp:
        yield Problem(
            ("--ffn-hidden-size", "--tensor-model-parallel-size"),
            f"{c.ffn_hidden_size} and {tp}",
            "Each rank owns the same number of the MLP's inner channels",
            f"Set --ffn-hidden-size {-(-c.ffn_hidden_size // tp) * tp}",
        )


@rule
def sequence_divides_tp(c: Draft) -> Iterator[Problem]:
    """With --sequence-parallel the sequence splits evenly over tensor-parallel ranks."""
    tp = c.tensor_model_parallel_size
    if c.context_parallel_size > 1:
        return  # refused by another rule
    if c.sequence_parallel and c.counts("seq_length", "tensor_model_parallel_size"):
        if c.seq_length % tp == 0:
            return
        yield Problem(
            ("--seq-length", "--tensor-model-parallel-size", "--sequence-parallel"),
            f"{c.seq_length} and {tp}",
            "Each rank holds the same number of positions",
            f"Set --seq-length {-(-c.seq_length // tp) * tp}, or remove --sequence-parallel",
        )


@rule
def sequence_divides_cp(c: Draft) -> Iterator[Problem]:
    """The sequence splits into two equal chunks for every context-parallel rank.

    With --sequence-parallel each rank's two chunks together split over the tensor-parallel ranks.
    """
    cp, tp = c.context_parallel_size, c.tensor_model_parallel_size
    if cp == 1 or not c.counts("seq_length", "context_parallel_size", "tensor_model_parallel_size"):
        return
    flags: tuple[str, ...] = ("--seq-length", "--context-parallel-size")
    got, step = f"{c.seq_length} and {cp}", 2 * cp
    why = f"Each rank holds two of {2 * cp} equal chunks, an early and a late one"
    if c.sequence_parallel:
        flags = (*flags, "--tensor-model-parallel-size", "--sequence-parallel")
        got = f"{c.seq_length}, {cp} and {tp}"
        step = math.lcm(step, cp * tp)
        why += f", and splits them over {tp} tensor-parallel ranks"
    if c.seq_length % step:
        below = c.seq_length // step * step
        near = " or ".join(str(n) for n in (below, below + step) if n > 0)
        yield Problem(flags, got, why, f"Set --seq-length to {near}")


@rule
def cp_comm_types_fit(c: Draft) -> Iterator[Problem]:
    """--cp-comm-type has one value, or one a layer; a2a needs heads for every rank of a group."""
    names = ("num_layers", "num_attention_heads", "num_query_groups", "tensor_model_parallel_size")
    if not c.counts(*names, "context_parallel_size") or "cp_comm_type" in c.broken:
        return
    kinds, cp, tp = c.cp_comm_type, c.context_parallel_size, c.tensor_model_parallel_size
    if len(kinds) not in (1, c.num_layers):
        yield Problem(
            ("--cp-comm-type", "--num-layers"),
            f"{len(kinds)} values and {c.num_layers} layers",
            "It takes one value for all layers, or one for each",
            f"Give 1 or {c.num_layers} values",
        )
    levels: tuple[int, ...] = c.hierarchical_context_parallel_sizes or ()
    sharing = {"a2a": cp} | ({"a2a+p2p": levels[0]} if len(levels) == 2 and levels[0] > 0 else {})
    for kind, ranks in sharing.items():
        if cp == 1 or kind not in kinds or c.num_query_groups % tp:
            continue
        heads = c.num_query_groups // tp
        what = "query groups" if c.group_query_attention else "attention heads"
        flag = "--num-query-groups" if c.group_query_attention else "--num-attention-heads"
        if heads % ranks:
            size = "context-parallel size" if kind == "a2a" else "first size"
            yield Problem(
                ("--cp-comm-type", _SIZE_OF[kind], flag),
                f"{kind}, {ranks} and {c.num_query_groups}",
                f"Each context-parallel rank attends with whole {what}, and a tensor-parallel rank"
                f" has {heads} of them",
                f"Use --cp-comm-type p2p or all_gather, or a {size} that divides {heads}",
            )


@rule
def cp_levels_fill_the_axis(c: Draft) -> Iterator[Problem]:
    """--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A P with A * P = CP."""
    levels, cp = c.hierarchical_context_parallel_sizes or (), c.context_parallel_size
    flag, two_levels = "--hierarchical-context-parallel-sizes", "a2a+p2p" in c.cp_comm_type
    if c.broken & {"hierarchical_context_parallel_sizes", "cp_comm_type"}:
        return
    if levels and not two_levels:
        yield Problem(
            (flag, "--cp-comm-type"),
            f"{' '.join(map(str, levels))} and {' '.join(c.cp_comm_type)}",
            "Only a2a+p2p has two levels",
            f"Add --cp-comm-type a2a+p2p, or remove {flag}",
        )
    elif not two_levels or (cp == 1 and not levels):
        return
    elif len(levels) != 2 or min(levels) < 2 or math.prod(levels) != cp:
        got = " ".join(map(str, levels)) or "nothing"
        yield Problem(
            (flag, "--context-parallel-size"),
            f"{got} and {cp}",
            "The ranks are cut into groups that exchange heads, and the groups form a ring",
            f"Give two numbers above 1 whose product is {cp}"
            if cp >= 4
            else "Use --cp-comm-type p2p or a2a: two levels take at least 4 ranks",
        )


@rule
def param_gather_has_an_optimizer_and_reduced_gradients(c: Draft) -> Iterator[Problem]:
    """--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce."""
    needed = ("use_distributed_optimizer", "overlap_grad_reduce")
    missing = [flag_of(name) for name in needed if not c.values[name]]
    if c.overlap_param_gather and missing:
        yield Problem(
            ("--overlap-param-gather", *missing),
            "--overlap-param-gather alone",
            "It fetches what a distributed optimizer updated on other replicas, bucket by bucket "
            "as gradients are reduced",
            f"Add {' and '.join(missing)}, or remove --overlap-param-gather",
        )


@rule
def instances_cut_the_replicas(c: Draft) -> Iterator[Problem]:
    """--num-distributed-optimizer-instances divides the replicas, those of the experts too."""
    flag, count = "--num-distributed-optimizer-instances", c.num_distributed_optimizer_instances
    if count < 1:
        yield Problem((flag,), count, "There is at least one", "Use 1 or more")
        return
    if count > 1 and not c.use_distributed_optimizer:
        yield Problem(
            (flag, "--use-distributed-optimizer"),
            f"{count} without --use-distributed-optimizer",
            "Without it every replica has a whole optimizer",
            f"Add --use-distributed-optimizer, or remove {flag}",
        )
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    if not c.counts(*sizes, "world_size", "expert_model_parallel_size"):
        return  # refused by another rule
    tp, pp, cp = (c.values[name] for name in sizes)
    etp = c.expert_tensor_parallel_size or tp
    of_dense = c.world_size // (tp * pp * cp) * cp
    of_experts = c.world_size // (etp * c.expert_model_parallel_size * pp)
    for replicas, flags, which in (
        (of_dense, (flag,), "replicas (with context-parallel ranks)"),
        (of_experts, (flag, "--expert-model-parallel-size"), "replicas of each expert"),
    ):
        if replicas and replicas % count:
            yield Problem(
                flags,
                f"{count} with {replicas} {which}",
                "They are cut into that many equal parts",
                f"Use a divisor of {replicas}",
            )
            return


@rule
def buckets_have_a_size(c: Draft) -> Iterator[Problem]:
    """--ddp-bucket-size and --ddp-num-buckets are at least 1, and only one of them is given."""
    names = ("ddp_bucket_size", "ddp_num_buckets")
    for name in names:
        if c.values[name] is not None and c.values[name] < 1:
            yield Problem(
                (flag_of(name),),
                c.values[name],
                "Gradients travel in at least one bucket, which holds at least one of them",
                "Give 1 or more, or leave it out",
            )
    if c.was_given(*names[:1]) and c.was_given(*names[1:]):
        yield Problem(
            tuple(flag_of(name) for name in names),
            f"{c.ddp_bucket_size} and {c.ddp_num_buckets}",
            "The size of a bucket follows from the number of buckets",
            "Remove one",
        )


@rule
def backend_fits_the_device(c: Draft) -> Iterator[Problem]:
    """--distributed-backend nccl needs CUDA."""
    if c.device == "cpu" and c.distributed_backend == "nccl":
        yield Problem(
            ("--distributed-backend", "--device"),
            "nccl and cpu",
            "NCCL moves CUDA tensors only",
            "Use --distributed-backend gloo, or leave it out",
        )
