"""How the work is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process mesh and the transport between its processes."""

    tensor_model_parallel_size: int = field(
        1, help="Ranks that share every linear layer (tensor parallelism, TP)."
    )
    pipeline_model_parallel_size: int = field(
        1, help="Ranks that hold the layers one after the other (pipeline parallelism, PP)."
    )
    pipeline_schedule: str = field(
        "1f1b",
        choices=("1f1b", "gpipe", "zb-h1"),
        help="Order of forward and backward passes; gpipe keeps every microbatch's activations,"
        " zb-h1 computes weight gradients while it would wait.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = field(
        None,
        help="Interleave: layers of one virtual stage, of which a rank then holds several.",
        fallback="one stage a rank",
    )
    num_virtual_stages_per_pipeline_rank: int | None = field(
        None, help="Interleave: virtual stages of a rank.", fallback="one"
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = field(
        None,
        help="Microbatches that pass one virtual stage before the rank turns to its next one.",
        fallback="the pipeline size",
    )
    decoder_first_pipeline_num_layers: int | None = field(
        None, help="Layers of the first pipeline rank.", fallback="as many as the others"
    )
    decoder_last_pipeline_num_layers: int | None = field(
        None, help="Layers of the last pipeline rank.", fallback="as many as the others"
    )
    account_for_embedding_in_pipeline_split: bool = field(
        False, help="Count the embedding as a layer when layers are spread over the stages."
    )
    account_for_loss_in_pipeline_split: bool = field(
        False, help="Count output layer and loss as a layer when layers are spread."
    )
    pipeline_model_parallel_layout: str | None = field(
        None,
        help="What each stage holds, as in 'Et|(tt|)*2tL': E embedding, t layer, L loss.",
        fallback="an even split",
    )
    use_tp_pp_dp_mapping: bool = field(
        False, help="Number ranks along the pipeline before the replicas (tp-cp-ep-pp-dp)."
    )
    overlap_p2p_communication: bool = field(
        True,
        flags="--no-overlap-p2p-communication",
        help="Start to receive what a stage needs next while it still computes.",
    )
    context_parallel_size: int = field(
        1, help="Ranks that share every sequence (context parallelism, CP)."
    )
    cp_comm_type: tuple[str, ...] = field(
        ("p2p",),
        nargs="*",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        help="How context-parallel ranks share keys and values: a ring (p2p), gathering, heads for"
        " tokens (a2a), or a ring of groups that exchange heads (a2a+p2p); one for all layers or"
        " one each.",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = field(
        None,
        nargs="*",
        help="With a2a+p2p: ranks of a group that exchanges heads, and groups of the ring.",
        fallback="one level",
    )
    expert_model_parallel_size: int = field(
        1, help="Ranks among which the experts are shared out (expert parallelism, EP)."
    )
    expert_tensor_parallel_size: int | None = field(
        help="Ranks that share the matrices of one expert (ETP).",
        fallback="tensor_model_parallel_size",
    )
    sequence_parallel: bool = field(
        False,
        help="Split sequences over the TP ranks outside the linear layers; off at TP 1.",
    )
    tp_comm_overlap: bool = field(
        False,
        help="Let the linear layers multiply while sequence shards travel between the TP ranks.",
    )
    tp_comm_overlap_ag: bool = field(
        True,
        flags=("--no-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag"),
        help="With --tp-comm-overlap: multiply gathered rows as they arrive.",
    )
    tp_comm_overlap_rs: bool = field(
        True,
        flags=("--no-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs"),
        help="With --tp-comm-overlap: send parts of a row-parallel output as they are made.",
    )
    tp_comm_overlap_rs_dgrad: bool = field(
        False,
        help="With --tp-comm-overlap: send parts of a column-parallel input gradient as they are"
        " made, instead of behind the weight gradient.",
    )
    tp_comm_bulk_dgrad: bool = field(
        True,
        flags=("--no-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad"),
        help="With --tp-comm-overlap: gather the input again behind the input gradient's product.",
    )
    tp_comm_bulk_wgrad: bool = field(
        True,
        flags=("--no-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad"),
        help="With --tp-comm-overlap: scatter the input gradient behind the weight gradient.",
    )
    tp_comm_overlap_cfg: str | None = field(
        None,
        help="With --tp-comm-overlap on Transformer Engine: YAML file with settings of its"
        " userbuffers.",
        fallback="Transformer Engine's own settings",
    )
    tp_comm_bootstrap_backend: str = field(
        "nccl",
        choices=("nccl", "mpi", "gloo"),
        help="With --tp-comm-overlap on Transformer Engine: how ranks meet to share userbuffers.",
    )
    use_distributed_optimizer: bool = field(
        False,
        help="Spread masters and moments of the optimizer over the replicas (ZeRO-1).",
    )
    num_distributed_optimizer_instances: int = field(
        1,
        help="Copies of the distributed optimizer: each is spread over a part of the replicas,"
        " and gradients are then added up over the parts.",
    )
    overlap_grad_reduce: bool = field(
        False,
        help="Sum a bucket of gradients as soon as the last backward pass has completed it.",
    )
    overlap_param_gather: bool = field(
        False,
        help="Fetch updated parameters during the next forward pass (distributed optimizer).",
    )
    grad_reduce_in_bf16: bool = field(
        False, help="Send gradients in bfloat16; microbatches are still added up in float32."
    )
    ddp_bucket_size: int | None = field(
        help="Gradients that are summed in one collective.",
        units="elements",
        fallback="max(40000000, 1000000 * replicas), or by --ddp-num-buckets",
    )
    ddp_num_buckets: int | None = field(
        help="About how many collectives sum all gradients, instead of --ddp-bucket-size."
    )
    distributed_backend: str = field(
        "auto",
        choices=("auto", "nccl", "gloo"),
        help="Transport: nccl on CUDA and gloo elsewhere (auto), or one by name.",
    )
    distributed_timeout_minutes: float = field(
        10.0, help="How long a collective may wait for a rank; fractions count.", units="minutes"
    )
    world_size: int = field(1, derived=True, help="Number of processes, from the launcher.")
    virtual_pipeline_model_parallel_size: int = field(
        1, derived=True, help="Stages that a pipeline rank holds."
    )
    data_parallel_size: int = field(
        1, derived=True, help="Model replicas (DP): world_size / (TP * PP * CP)."
    )
