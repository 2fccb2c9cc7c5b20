"""Every rule: what it refuses, what it says, and that all problems come at once."""

from __future__ import annotations

import pickle

import pytest
from unit.data_refusals import DATA_REFUSED
from unit.guard_refusals import GUARDS_REFUSED
from unit.moe_refusals import MOE_REFUSED
from unit.saving_refusals import SAVING_ACCEPTED, SAVING_REFUSED

from megatron.config import ConfigError, Problem, make_config
from megatron.config.draft import Draft, derive
from megatron.config.rules import RULES

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
FP8 = {"fp8_format": "hybrid"}
EXPERTS = {"num_experts": 8, "add_bias_linear": False, "moe_ffn_hidden_size": 64}
OVERLAP = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}
PARTS = (
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_bulk_dgrad",
    "tp_comm_bulk_wgrad",
)
ATTENTION = {"fp8_dot_product_attention": True}
TE_FP8 = {**FP8, "transformer_impl": "transformer_engine"}
DATA = {"data_path": ["a"], "tokenizer_type": "NullTokenizer", "vocab_size": 9}


def problems(world_size=1, **fields):
    """Return the problems of the tiny model with these settings."""
    try:
        make_config(world_size, **{**TINY, **fields})
    except ConfigError as error:
        return list(error.problems)
    return []


# (settings, first flag of the one problem, words that its text must hold)
REFUSED = [
    # shape
    ({"num_layers": 0}, "--num-layers", ["got 0", "at least 1"]),
    ({"num_layers": -3}, "--num-layers", ["got -3"]),
    # A folder called `s3:` is nobody's wish.
    ({"data_cache_path": "gs://bucket/c"}, "--data-cache-path", ["paths of the file system"]),
    # A size that a list is made from would fill the memory before anything is said.
    ({"num_layers": 10**9}, "--num-layers", ["got 1000000000", "at most 100000"]),
    ({"num_layers": 10**18, **EXPERTS}, "--num-layers", ["at most 100000"]),
    ({"dry_run": True, "fake_world_size": 10**9}, "--fake-world-size", ["at most 1000000"]),
    (
        {"global_batch_size": 10**9, "micro_batch_size": 2},
        "--global-batch-size",
        ["got 500000000 microbatches", "at most 100000"],
    ),
    ({"seed": 2**32}, "--seed", ["32 bits", "at most 4294967295"]),
    ({"distributed_timeout_minutes": 1e300}, "--distributed-timeout-minutes", ["at most 1000000"]),
    ({"hidden_dropout": 1.0}, "--hidden-dropout", ["below 1"]),
    ({"attention_dropout": -0.1}, "--attention-dropout", ["at least 0"]),
    ({"norm_epsilon": 0}, "--norm-epsilon", ["above 0"]),
    ({"hidden_size": None}, "--hidden-size", ["got nothing", "Give --hidden-size"]),
    ({"hidden_size": 66}, "--hidden-size", ["66 and 4", "--kv-channels"]),
    ({"num_query_groups": 2}, "--num-query-groups", ["Add --group-query-attention"]),
    (
        {"group_query_attention": True, "num_query_groups": 3},
        "--num-query-groups",
        ["3 and 4", "divides the heads"],
    ),
    ({"max_position_embeddings": 16}, "--seq-length", ["Set --max-position-embeddings 32"]),
    ({"rotary_base": 500000}, "--rotary-base", ["Add --position-embedding-type rope"]),
    ({"use_rope_scaling": True}, "--use-rope-scaling", ["rope"]),
    (
        {"position_embedding_type": "rope", "rotary_percent": 1.5},
        "--rotary-percent",
        ["at most 1"],
    ),
    ({"position_embedding_type": "rope", "kv_channels": 7}, "--kv-channels", ["even"]),
    (
        {"position_embedding_type": "rope", "rope_scaling_factor": 4.0},
        "--rope-scaling-factor",
        ["--use-rope-scaling"],
    ),
    ({"tp_comm_overlap": True}, "--tp-comm-overlap", ["got 1", "whole matrices"]),
    ({"tp_comm_overlap_cfg": "a"}, "--tp-comm-overlap-cfg", ["belongs to --tp-comm-overlap"]),
    ({"swiglu": True, "squared_relu": True}, "--swiglu", ["Remove one"]),
    ({"padded_vocab_size": 100, "vocab_size": 101}, "--padded-vocab-size", ["100 and 101"]),
    ({"fp16": True, "bf16": True}, "--fp16", ["--bf16", "Remove one"]),
    # FP8
    ({"fp8_recipe": "tensorwise"}, "--fp8-recipe", ["Add --fp8-format hybrid"]),
    ({"fp8_recipe": "mxfp8"}, "--fp8-recipe", ["Add --fp8-format e4m3"]),
    ({"fp8_recipe": "delayed"}, "--fp8-recipe", ["Add --fp8-format hybrid"]),
    ({"fp8_margin": 0, "fp8_amax_history_len": 1}, "--fp8-margin", ["--fp8-amax-history-len"]),
    ({"fp8_emulate_accumulation": "fp32"}, "--fp8-emulate-accumulation", ["--fp8-format"]),
    ({"fp4_format": "e2m1", "fp8_recipe": "delayed"}, "--fp8-recipe", ["no --fp8-format"]),
    ({"fp8_amax_history_len": 16}, "--fp8-amax-history-len", ["--fp8-format"]),
    ({"fp8_wgrad": False}, "--no-fp8-wgrad", ["--fp8-format"]),
    ({**FP8, "fp4_format": "e2m1"}, "--fp8-format", ["hybrid and e2m1", "Remove one"]),
    ({"fp4_format": "e2m1", "fp8_recipe": "mxfp8"}, "--fp8-recipe", ["no --fp8-format"]),
    (
        {"fp4_format": "e2m1", "fp8_dot_product_attention": True},
        "--fp8-dot-product-attention",
        ["no products in FP4"],
    ),
    ({"fp4_format": "e2m1", "fp8_warmup_iters": 9, "train_iters": 9}, "--fp8-warmup-iters", []),
    ({"fp4_recipe": "custom"}, "--fp4-recipe", ["Custom", "Use --fp4-recipe nvfp4"]),
    (
        {"fp4_format": "e2m1", "transformer_impl": "transformer_engine", "ffn_hidden_size": 200},
        "--ffn-hidden-size",
        ["FP4 products", "192 or 208", "--fp4-format"],
    ),
    (
        {**FP8, "fp8_recipe": "mxfp8", "fp8_emulate_accumulation": "hopper"},
        "--fp8-emulate-accumulation",
        ["no products", "blockwise"],
    ),
    (
        {**TE_FP8, "fp8_emulate_accumulation": "hopper"},
        "--fp8-emulate-accumulation",
        ["not emulated", "--transformer-impl native"],
    ),
    (
        {**FP8, "fp8_emulate_accumulation": "hopper", "fp8_emulation": "fast"},
        "--fp8-emulate-accumulation",
        ["Remove --fp8-emulation"],
    ),
    (
        {"fp8_emulate_accumulation": "hopper"},
        "--fp8-emulate-accumulation",
        ["Add --fp8-format"],
    ),
    (
        {**FP8, "fp8_recipe": "tensorwise", "fp8_amax_history_len": 16},
        "--fp8-amax-history-len",
        ["keeps no history", "Remove --fp8-amax-history-len", "--fp8-recipe delayed"],
    ),
    ({**FP8, "num_layers_at_end_in_bf16": 2}, "--num-layers-at-end-in-bf16", ["--first-last"]),
    (
        {**FP8, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
        "--num-layers-at-start-in-bf16",
        ["1, 2 and 2"],
    ),
    ({**FP8, "fp8_amax_history_len": 0}, "--fp8-amax-history-len", ["at least 1"]),
    ({"fp8_warmup_iters": 5}, "--fp8-warmup-iters", ["no --fp8-format"]),
    ({"fp8_stats_samples": -1}, "--fp8-stats-samples", ["every element"]),
    ({"fp8_alert_saturation": 2.0}, "--fp8-alert-saturation", ["0 to 1"]),
    ({"fp8_debug_dump": "scales.jsonl"}, "--fp8-debug-dump", ["not in FP8"]),
    (
        {**FP8, "fp8_warmup_iters": 10, "train_iters": 10},
        "--fp8-warmup-iters",
        ["10 and 10", "after the last iteration"],
    ),
    ({**FP8, "fp8_policy": "missing.yaml"}, "--fp8-policy", ["got missing.yaml", "Check the path"]),
    ({**FP8, "fp8_policy": "rules:\n"}, "--fp8-policy", ["list of rules"]),
    (
        {**FP8, "fp8_recipe": "blockwise", "fp8_margin": 1},
        "--fp8-margin",
        ["The recipe blockwise", "keeps no history"],
    ),
    (ATTENTION, "--fp8-dot-product-attention", ["no --fp8-format", "Add --fp8-format hybrid"]),
    (
        {**FP8, "fp8_dpa_bwd": False, "fp8_cp_exchange": False},
        "--no-fp8-dpa-bwd",
        ["--no-fp8-cp-exchange", "Add --fp8-dot-product-attention"],
    ),
    (
        {**FP8, **ATTENTION, "fp8_recipe": "blockwise"},
        "--fp8-dot-product-attention",
        ["got blockwise", "a scale for each block", "Use --fp8-recipe delayed or tensorwise"],
    ),
    (
        {"fp8_format": "e4m3", **ATTENTION, "fp8_recipe": "mxfp8"},
        "--fp8-dot-product-attention",
        ["got mxfp8", "compute capability 10 only"],
    ),
    (
        {**TE_FP8, "hidden_size": 72, "kv_channels": 16, "ffn_hidden_size": 256},
        "--hidden-size",
        ["got 72", "multiple of 16", "64 or 80", "--transformer-impl native", "--fp8-format"],
    ),
    ({**TE_FP8, "ffn_hidden_size": 200}, "--ffn-hidden-size", ["192 or 208"]),
    ({**TE_FP8, "seq_length": 24}, "--seq-length", ["16 or 32"]),
    (
        {**TE_FP8, "fp8_recipe": "mxfp8", "seq_length": 48},
        "--seq-length",
        ["multiple of 32", "32 or 64"],
    ),
    (
        {**TE_FP8, "seq_length": 9, "micro_batch_size": 3},
        "--seq-length",
        ["got 27", "becomes 16 or 32"],
    ),
    # mesh
    (
        {"num_virtual_stages_per_pipeline_rank": 2},
        "--num-virtual-stages-per-pipeline-rank",
        ["got 2 and 1", "Set --pipeline-model-parallel-size"],
    ),
    (
        {"account_for_loss_in_pipeline_split": True},
        "--account-for-loss-in-pipeline-split",
        ["nothing to place"],
    ),
    ({"context_parallel_size": 0}, "--context-parallel-size", ["at least 1"]),
    ({"cp_comm_type": ["p2p", "p2p", "a2a"]}, "--cp-comm-type", ["3 values", "1 or 2 values"]),
    ({"cp_comm_type": []}, "--cp-comm-type", ["0 values"]),
    (
        {"hierarchical_context_parallel_sizes": [2, 2]},
        "--hierarchical-context-parallel-sizes",
        ["2 2 and p2p", "Only a2a+p2p"],
    ),
    ({"device": "cpu", "distributed_backend": "nccl"}, "--distributed-backend", ["gloo"]),
    (
        {"overlap_param_gather": True},
        "--overlap-param-gather",
        ["Add --use-distributed-optimizer and --overlap-grad-reduce"],
    ),
    (
        {"overlap_param_gather": True, "use_distributed_optimizer": True},
        "--overlap-param-gather",
        ["Add --overlap-grad-reduce,"],
    ),
    (
        {"overlap_param_gather": True, "overlap_grad_reduce": True},
        "--overlap-param-gather",
        ["Add --use-distributed-optimizer,"],
    ),
    (
        {"grad_reduce_dtype": "fp8", "grad_reduce_in_bf16": True},
        "--grad-reduce-dtype",
        ["got fp8 with --grad-reduce-in-bf16", "Remove one"],
    ),
    (
        {"grad_reduce_dtype": "fp32", "grad_reduce_in_bf16": True},
        "--grad-reduce-dtype",
        ["got fp32 with --grad-reduce-in-bf16"],
    ),
    (
        {"grad_reduce_error_feedback": False},
        "--no-grad-reduce-error-feedback",
        ["got --grad-reduce-dtype fp32", "Add --grad-reduce-dtype fp8"],
    ),
    (
        {"ckpt_grad_residual": "sum"},
        "--ckpt-grad-residual",
        ["sum with --grad-reduce-dtype fp32", "keeps nothing"],
    ),
    (
        {"fp8_param_gather": True, "use_distributed_optimizer": True, "bf16": True},
        "--fp8-param-gather",
        ["without --fp8-format"],
    ),
    (
        {
            "fp8_param_gather": True,
            "fp4_format": "e2m1",
            "use_distributed_optimizer": True,
            "bf16": True,
        },
        "--fp8-param-gather",
        ["with --fp4-format e2m1", "Remove --fp8-param-gather"],
    ),
    (
        {"fp8_param_gather": True, "fp8_format": "hybrid", "bf16": True},
        "--fp8-param-gather",
        ["Add --use-distributed-optimizer"],
    ),
    (
        {"fp8_param_gather": True, "fp8_format": "hybrid", "use_distributed_optimizer": True},
        "--fp8-param-gather",
        ["float32", "Add --bf16"],
    ),
    ({"ddp_bucket_size": 0}, "--ddp-bucket-size", ["got 0", "at least one"]),
    (
        {"num_distributed_optimizer_instances": 0},
        "--num-distributed-optimizer-instances",
        ["got 0"],
    ),
    ({"ddp_num_buckets": 0}, "--ddp-num-buckets", ["got 0"]),
    (
        {"ddp_bucket_size": 10, "ddp_num_buckets": 2},
        "--ddp-bucket-size",
        ["10 and 2", "Remove one"],
    ),
    ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype", ["Add --use-precision-aware-optimizer"]),
    ({"exp_avg_sq_dtype": "fp16"}, "--exp-avg-sq-dtype", ["Add --use-precision-aware"]),
    (
        {"exp_avg_dtype": "int8", "use_precision_aware_optimizer": True},
        "--exp-avg-dtype",
        ["fp8"],
    ),
    (
        {"use_precision_aware_optimizer": True, "optimizer": "sgd"},
        "--use-precision-aware-optimizer",
        ["got sgd", "Use --optimizer adam"],
    ),
    # duration and schedule
    ({"train_iters": 5, "train_samples": 50}, "--train-iters", ["Keep one of the two"]),
    ({"train_iters": 5, "lr_decay_samples": 50}, "--lr-decay-samples", ["Use --lr-decay-iters"]),
    (
        {"train_samples": 50, "lr_warmup_iters": 5},
        "--lr-warmup-iters",
        ["Use --lr-warmup-samples"],
    ),
    ({"train_samples": 3, "global_batch_size": 4}, "--train-samples", ["3 and 4"]),
    ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5}, "--lr-warmup-fraction", ["Keep one"]),
    ({"lr_warmup_fraction": 1.5}, "--lr-warmup-fraction", ["from 0 to 1"]),
    ({"train_iters": 5, "lr_warmup_iters": 5}, "--lr-warmup-iters", ["Shorten the warm-up"]),
    ({"lr": 1e-4, "min_lr": 1e-3}, "--min-lr", ["0.001 and 0.0001"]),
    ({"lr": 1e-4, "lr_warmup_init": 1e-3}, "--lr-warmup-init", ["peak"]),
    ({"lr": -1.0}, "--lr", ["0 or more"]),
    ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters", ["Add --lr-wsd-decay-iters"]),
    (
        {"lr_decay_style": "WSD", "train_samples": 50},
        "--lr-wsd-decay-samples",
        ["Add --lr-wsd-decay-samples"],
    ),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 501}, "--lr-wsd-decay-iters", ["501 and 500"]),
    ({"lr_wsd_decay_iters": 5}, "--lr-wsd-decay-iters", ["Add --lr-decay-style WSD"]),
    ({"start_weight_decay": 0.5}, "--start-weight-decay", ["constant"]),
    ({"weight_decay_incr_style": "linear"}, "--start-weight-decay", ["both ends"]),
    (
        {
            "weight_decay_incr_style": "cosine",
            "start_weight_decay": 0.2,
            "end_weight_decay": 0.1,
        },
        "--start-weight-decay",
        ["0.2, 0.1 and cosine"],
    ),
    ({"loss_scale": 128}, "--loss-scale", ["add --fp16"]),
    ({"fp16": True, "initial_loss_scale": 0.5}, "--initial-loss-scale", ["0.5 and 1.0"]),
    ({"adam_beta2": 1.0}, "--adam-beta2", ["below 1"]),
    # recomputation
    (
        {
            "recompute_activations": True,
            "recompute_granularity": "selective",
            "recompute_num_layers": 24,
        },
        "--recompute-num-layers",
        ["got 24", "Remove --recompute-num-layers", "--recompute-granularity full"],
    ),
    (
        {"recompute_granularity": "selective", "recompute_method": "block"},
        "--recompute-method",
        ["Remove --recompute-method"],
    ),
    (
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        "--recompute-num-layers",
        ["--recompute-num-layers 1"],
    ),
    ({"recompute_num_layers": 1}, "--recompute-num-layers", ["Add --recompute-granularity full"]),
    (
        {
            "recompute_activations": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "--recompute-activations",
        ["Remove --recompute-activations"],
    ),
    ({"recompute_modules": []}, "--recompute-modules", ["core_attn"]),
    ({"recompute_modules": ["mlp"]}, "--recompute-modules", ["got mlp", "not in this release"]),
    # data, files, logging
    ({**DATA, "mock_data": True}, "--mock-data", ["--data-path", "Remove one"]),
    ({"data_path": []}, "--data-path", ["--mock-data"]),
    ({"data_path": ["a"]}, "--tokenizer-type", ["--vocab-size"]),
    ({"split": "all"}, "--split", ["969,30,1"]),
    ({"split": "0,0,0"}, "--split", ["got 0,0,0"]),
    ({"split": "1,2,3,4"}, "--split", ["got 1,2,3,4"]),
    ({"split": "1e3,1"}, "--split", ["not a list of non-negative numbers"]),
    ({"split": "-1,2"}, "--split", ["got -1,2"]),
    ({"split": "9.9.9,1"}, "--split", ["969,30,1"]),
    ({"tokenizer_model": "llama"}, "--tokenizer-type", ["--tokenizer-model llama"]),
    ({"tokenizer_type": "Llama2Tokenizer"}, "--tokenizer-model", ["Add --tokenizer-model"]),
    ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "--merge-file", ["--merge-file"]),
    ({"save": "x"}, "--save-interval", ["Add --save-interval"]),
    ({"ckpt_step": 3}, "--ckpt-step", ["Add --load"]),
    ({"finetune": True}, "--finetune", ["Add --load"]),
    ({"use_checkpoint_args": True}, "--use-checkpoint-args", ["Add --load"]),
    (
        {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
        "--override-opt_param-scheduler",
        ["Remove one"],
    ),
    (
        {"load": "x", "finetune": True, "use_checkpoint_opt_param_scheduler": True},
        "--use-checkpoint-opt_param-scheduler",
        ["Remove one"],
    ),
    ({"wandb_project": "p"}, "--wandb-exp-name", ["Add --wandb-exp-name"]),
    ({"wandb_entity": "p"}, "--wandb-entity", ["Add --wandb-project"]),
    ({"manual_gc_interval": 5}, "--manual-gc-interval", ["Add --manual-gc"]),
    ({"manual_gc_eval": False}, "--no-manual-gc-eval", ["Add --manual-gc"]),
    # values of Megatron-LM that this release does not have
    ({"fp8_recipe": "custom", **FP8}, "--fp8-recipe", ["Custom", "blockwise or mxfp8"]),
    ({"ckpt_format": "torch"}, "--ckpt-format", ["torch_dist"]),
    ({"optimizer": "muon"}, "--optimizer", ["adam or sgd"]),
]


@pytest.mark.parametrize(("fields", "flag", "words"), REFUSED, ids=lambda v: str(v)[:60])
def test_refused_alone(fields, flag, words):
    found = problems(**fields)
    assert [problem.flags[0] for problem in found] == [flag]
    for word in words:
        assert word in str(found[0])


PP2 = {"pipeline_model_parallel_size": 2, "global_batch_size": 4}
PP4 = {"pipeline_model_parallel_size": 4, "global_batch_size": 8}
LAYOUT = "pipeline_model_parallel_layout"
CP2 = {"context_parallel_size": 2}
LEVELS = {
    "context_parallel_size": 4,
    "cp_comm_type": ["a2a+p2p"],
    "hierarchical_context_parallel_sizes": [2, 2],
}

# (world size, settings, first flag, words)
REFUSED_ON_A_MESH = [
    (1, {"fake_world_size": 8}, "--fake-world-size", ["8 without --dry-run", "Add --dry-run"]),
    (1, {"fake_world_size": 0, "dry_run": True}, "--fake-world-size", ["at least one process"]),
    (
        4,
        {"num_distributed_optimizer_instances": 2},
        "--num-distributed-optimizer-instances",
        ["Add --use-distributed-optimizer"],
    ),
    (
        3,
        {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
        "--num-distributed-optimizer-instances",
        ["2 with 3 replicas", "a divisor of 3"],
    ),
    (
        4,
        {
            "num_distributed_optimizer_instances": 2,
            "use_distributed_optimizer": True,
            "num_experts": 4,
            "expert_model_parallel_size": 4,
            "add_bias_linear": False,
        },
        "--num-distributed-optimizer-instances",
        ["2 with 1 replicas of each expert", "a divisor of 1"],
    ),
    (2, {**PP2, LAYOUT: "Et*99999999999|L"}, "--pipeline-model-parallel-layout", ["longer than"]),
    (
        2,
        {**PP2, LAYOUT: "E((((t*999)*999)*999)*999)*999|L"},
        "--pipeline-model-parallel-layout",
        ["longer than"],
    ),
    (
        2,
        {**LEVELS, "context_parallel_size": 1},
        "--hierarchical-context-parallel-sizes",
        ["2 2 and 1", "at least 4 ranks"],
    ),
    (3, CP2, "--tensor-model-parallel-size", ["1, 1 and 2 on 3 processes"]),
    (
        2,
        {**CP2, **FP8, **ATTENTION, "fp8_amax_reduction": "tp"},
        "--fp8-amax-reduction",
        ["tp with --context-parallel-size 2", "one scale", "tp-cp or tp-cp-dp"],
    ),
    (2, {**CP2, "seq_length": 30}, "--seq-length", ["30 and 2", "two of 4", "28 or 32"]),
    (
        12,
        {
            "context_parallel_size": 3,
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "seq_length": 30,
        },
        "--seq-length",
        ["30, 3 and 4", "24 or 36"],
    ),
    (4, {"context_parallel_size": 4, "seq_length": 4}, "--seq-length", ["Set --seq-length to 8"]),
    (
        4,
        {**CP2, "cp_comm_type": ["a2a"], "group_query_attention": True, "num_query_groups": 1},
        "--cp-comm-type",
        ["a2a, 2 and 1", "whole query groups", "p2p or all_gather"],
    ),
    (
        8,
        {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "cp_comm_type": ["a2a"]},
        "--cp-comm-type",
        ["a2a, 4 and 4", "has 2 of them"],
    ),
    (
        2,
        {**CP2, "cp_comm_type": ["a2a+p2p"]},
        "--hierarchical-context-parallel-sizes",
        ["nothing and 2", "at least 4 ranks"],
    ),
    (
        4,
        LEVELS | {"hierarchical_context_parallel_sizes": [4, 1]},
        "--hierarchical-context-parallel-sizes",
        ["4 1 and 4", "product is 4"],
    ),
    (
        4,
        LEVELS | {"group_query_attention": True, "num_query_groups": 1},
        "--cp-comm-type",
        ["a2a+p2p, 2 and 1", "whole query groups"],
    ),
    (
        2,
        PP2 | {"pipeline_schedule": "zb-h1", "transformer_impl": "transformer_engine"},
        "--pipeline-schedule",
        ["zb-h1 and transformer_engine", "--transformer-impl native"],
    ),
    (
        2,
        PP2
        | {
            "pipeline_schedule": "zb-h1",
            "num_layers": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
        },
        "--pipeline-schedule",
        ["zb-h1 and 2", "one stage a rank"],
    ),
    (2, {**TE_FP8, **CP2, "seq_length": 24}, "--seq-length", ["got 12", "one rank", "16"]),
    (3, PP2, "--tensor-model-parallel-size", ["on 3 processes", "multiple of 2"]),
    (2, PP2 | {"num_layers": 5}, "--num-layers", ["5 layers over 2 stages", "4 or 6"]),
    (4, PP4, "--num-layers", ["2 layers over 4 stages", "--num-layers 4"]),
    (
        2,
        PP2 | {"num_layers": 4, "account_for_embedding_in_pipeline_split": True},
        "--num-layers",
        ["4 layers and 1 reserved places", "3 or 5"],
    ),
    (
        2,
        PP2 | {"decoder_first_pipeline_num_layers": 2},
        "--decoder-first-pipeline-num-layers",
        ["2 of 2 layers over 2 ranks", "0 layers are left"],
    ),
    (
        2,
        PP2
        | {"num_layers": 6, "decoder_first_pipeline_num_layers": 3}
        | {"num_virtual_stages_per_pipeline_rank": 2},
        "--decoder-first-pipeline-num-layers",
        ["3 layers and 2", "multiple of 2"],
    ),
    (
        2,
        PP2 | {"decoder_last_pipeline_num_layers": 1, "account_for_loss_in_pipeline_split": True},
        "--decoder-last-pipeline-num-layers",
        ["nothing to account for"],
    ),
    (
        2,
        PP2 | {"num_layers": 6, "num_layers_per_virtual_pipeline_stage": 2},
        "--num-layers-per-virtual-pipeline-stage",
        ["2 with 3 layers a rank", "divisor of 3"],
    ),
    (
        2,
        PP2
        | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
        | {"num_virtual_stages_per_pipeline_rank": 2},
        "--num-layers-per-virtual-pipeline-stage",
        ["1 and 2", "Keep one"],
    ),
    (2, PP2 | {LAYOUT: "Et|t|L"}, "--pipeline-model-parallel-layout", ["3 stages", "2 ranks"]),
    (2, PP2 | {LAYOUT: "Et|L"}, "--pipeline-model-parallel-layout", ["places 1 of 2"]),
    (2, PP2 | {LAYOUT: "t|EtL"}, "--pipeline-model-parallel-layout", ["Begin with E"]),
    (2, PP2 | {LAYOUT: "Et||t|L"}, "--pipeline-model-parallel-layout", ["empty stage"]),
    (2, PP2 | {LAYOUT: "Et|t,m|L"}, "--pipeline-model-parallel-layout", ["multi-token"]),
    (
        2,
        PP2 | {LAYOUT: "Et|tL", "decoder_first_pipeline_num_layers": 1},
        "--pipeline-model-parallel-layout",
        ["Remove --decoder-first-pipeline-num-layers"],
    ),
    (
        2,
        PP2 | {"microbatch_group_size_per_virtual_pipeline_stage": 2},
        "--microbatch-group-size-per-virtual-pipeline-stage",
        ["several virtual stages"],
    ),
    (
        2,
        PP2 | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 3},
        "--global-batch-size",
        ["3 microbatches in groups of 2", "multiple of 2"],
    ),
    (
        2,
        PP2
        | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}
        | {"pipeline_schedule": "gpipe"},
        "--pipeline-schedule",
        ["gpipe and 2"],
    ),
    (6, {"tensor_model_parallel_size": 4}, "--tensor-model-parallel-size", ["on 6 processes"]),
    (
        3,
        {"tensor_model_parallel_size": 3, "ffn_hidden_size": 96},
        "--num-attention-heads",
        ["4 and 3", "divides the heads"],
    ),
    (
        4,
        {
            "tensor_model_parallel_size": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
        },
        "--num-query-groups",
        ["2 and 4"],
    ),
    (
        4,
        {"tensor_model_parallel_size": 4, "ffn_hidden_size": 90},
        "--ffn-hidden-size",
        ["Set --ffn-hidden-size 92"],
    ),
    (
        4,
        {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 30},
        "--seq-length",
        ["Set --seq-length 32"],
    ),
    (
        4,
        {"micro_batch_size": 2, "global_batch_size": 12},
        "--global-batch-size",
        ["4 replicas", "8 or 16"],
    ),
    (4, {"global_batch_size": 3}, "--global-batch-size", ["Set --global-batch-size 4"]),
    (
        4,
        {"tensor_model_parallel_size": 4, "padded_vocab_size": 50258},
        "--padded-vocab-size",
        ["50260"],
    ),
    (
        4,
        {**TE_FP8, "tensor_model_parallel_size": 4, "ffn_hidden_size": 224},
        "--ffn-hidden-size",
        ["got 56", "Set --ffn-hidden-size to 192 or 256"],
    ),
    (
        4,
        {**TE_FP8, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        "--seq-length",
        ["got 8", "Set --seq-length to 64"],
    ),
    (
        2,
        {**OVERLAP, "sequence_parallel": False},
        "--tp-comm-overlap",
        ["alone", "Add --sequence-parallel"],
    ),
    (
        2,
        {**OVERLAP, **{name: False for name in PARTS}},
        "--tp-comm-overlap",
        ["--no-tp-comm-overlap-ag", "Nothing is left"],
    ),
    (
        2,
        {**OVERLAP, "transformer_impl": "local", "tp_comm_bootstrap_backend": "gloo"},
        "--tp-comm-bootstrap-backend",
        ["gloo and native", "transformer_engine"],
    ),
    (
        2,
        {**OVERLAP, "tp_comm_overlap": False, "tp_comm_overlap_rs_dgrad": True},
        "--tp-comm-overlap-rs-dgrad",
        ["got set", "Add --tp-comm-overlap"],
    ),
]


@pytest.mark.parametrize(
    ("world_size", "fields", "flag", "words"),
    REFUSED_ON_A_MESH + MOE_REFUSED + GUARDS_REFUSED + DATA_REFUSED + SAVING_REFUSED,
    ids=lambda v: str(v)[:60],
)
def test_refused_on_a_mesh(world_size, fields, flag, words):
    found = problems(world_size, **fields)
    assert [problem.flags[0] for problem in found] == [flag]
    for word in words:
        assert word in str(found[0])


ACCEPTED = [
    {},
    {"fp8_spike_rollback": True},  # in any precision
    {**TE_FP8, "fp8_spike_rollback": True},
    {**FP8, "fp8_auto_fallback": True, "fp8_auto_fallback_amax_ratio": 0.0},
    {"kv_channels": 24, "hidden_size": 66},
    {"group_query_attention": True, "num_query_groups": 4},
    {"num_query_groups": 4},
    {**FP8, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    {**FP8, "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
    {**FP8, "first_last_layers_bf16": True, "bf16": True},  # with delayed scaling too
    {**FP8, "fp8_warmup_iters": 9, "train_iters": 10},
    {  # a history for the layers that have one
        **FP8,
        "fp8_recipe": "mxfp8",
        "fp8_amax_history_len": 4,
        "fp8_policy": "rules:\n- {layers: 0, recipe: delayed}\n",
    },
    {**FP8, **ATTENTION, "fp8_dpa_bwd": False, "bf16": True},
    {**FP8, **ATTENTION, "fp8_recipe": "tensorwise", "recompute_granularity": "selective"},
    {**FP8},  # float32 parameters
    {"fp8_format": None, "fp8_recipe": "delayed", "fp8_margin": 0},  # switched off in words
    {"fp8_warmup_iters": 0},
    {**FP8, "fp16": True},
    {**FP8, "fp8_recipe": "blockwise", "fp8_emulate_accumulation": "hopper"},
    {**FP8, "fp8_recipe": "mxfp8", "first_last_layers_bf16": True},
    {"fp4_format": "e2m1", "first_last_layers_bf16": True, "fp8_wgrad": False},
    {"fp4_format": "e2m1", "hidden_size": 60, "seq_length": 31},
    {**FP8, "seq_length": 31},  # the native backend pads inside the product
    {**FP8, "hidden_size": 60, "ffn_hidden_size": 100},
    {**TE_FP8, "fp8_recipe": "mxfp8", "seq_length": 64},
    {"transformer_impl": "transformer_engine", "seq_length": 31},  # not in FP8
    {"seq_length": 30},  # alignment matters only in FP8
    {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 100},
    {"train_samples": 100, "lr_decay_samples": 90, "lr_warmup_samples": 10},
    {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_activations": True, "recompute_granularity": "selective"},
    {**DATA, "split": "1"},
    {"clip_grad": 0.0, "weight_decay": 0.0, "eval_iters": 0, "hidden_dropout": 0.0},
    {"save": "x", "save_interval": 5, "load": "x", "finetune": True},
    {"exit_duration_in_mins": 5, "exit_interval": 3, "exit_signal_handler": True},
    {"fp16": True, "loss_scale": 1024.0},
    *SAVING_ACCEPTED,
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda v: str(v)[:60])
def test_accepted(fields):
    assert problems(**fields) == []


ACCEPTED_ON_A_MESH = [
    (2, OVERLAP),
    (2, OVERLAP | dict.fromkeys(PARTS, False) | {"tp_comm_overlap_rs_dgrad": True}),
    (2, OVERLAP | {"tp_comm_overlap": False, "tp_comm_bulk_wgrad": False}),
    (2, CP2),
    (8, {**CP2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    (2, {**CP2, "cp_comm_type": ["a2a", "p2p"]}),
    (4, LEVELS),
    (2, {**FP8, **CP2}),
    (4, {"context_parallel_size": 4, "seq_length": 8, "max_position_embeddings": 32}),
    (2, PP2),
    (2, PP2 | {"pipeline_schedule": "gpipe", "use_tp_pp_dp_mapping": True}),
    (2, PP2 | {"num_layers": 8, "num_layers_per_virtual_pipeline_stage": 2}),
    (4, PP4 | {LAYOUT: "Et|(t|)*2tL", "num_layers": 4}),
    (4, PP4 | {"account_for_embedding_in_pipeline_split": True}
     | {"account_for_loss_in_pipeline_split": True}),
    (2, PP2 | {"num_layers": 3, "decoder_last_pipeline_num_layers": 1}),
    (2, PP2 | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}
     | {"microbatch_group_size_per_virtual_pipeline_stage": 3, "global_batch_size": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "fields"), ACCEPTED_ON_A_MESH, ids=lambda v: str(v)[:60])
def test_accepted_on_a_mesh(world_size, fields):
    assert problems(world_size, **fields) == []
    cfg = make_config(world_size, **{**TINY, **fields})
    assert make_config(world_size, **cfg.given_dict()) == cfg


def test_all_problems_come_at_once():
    found = problems(
        4,
        num_attention_heads=5,
        tensor_model_parallel_size=2,
        fp16=True,
        bf16=True,
        lr="fast",
        layer_count=3,
        pipeline_model_parallel_size=3,
        recompute_num_layers=1,
        save="x",
    )
    first = [problem.flags[0] for problem in found]
    for flag in (
        "layer_count",
        "--lr",
        "--hidden-size",
        "--num-attention-heads",
        "--fp16",
        "--tensor-model-parallel-size",
        "--num-layers",
        "--recompute-num-layers",
        "--save-interval",
    ):
        assert flag in first


def test_error_lists_its_problems():
    with pytest.raises(ConfigError) as caught:
        make_config(**TINY, fp16=True, bf16=True, save="x")
    text = str(caught.value)
    assert text.startswith("2 configuration problems:")
    assert text.count("\n") == 2
    assert [str(p) in text for p in caught.value.problems] == [True, True]
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_problem_has_one_form():
    problem = Problem(("--a", "--b"), 3, "It is odd", "Use 4")
    assert str(problem) == "--a, --b: got 3. It is odd. Use 4."
    assert str(Problem(("--a",), 3, "No.", "Did you mean 4?")) == "--a: got 3. No. Did you mean 4?"


def test_every_problem_is_a_sentence_with_a_fix():
    for fields, _, _ in REFUSED:
        for problem in problems(**fields):
            assert problem.why[0].isupper() or problem.why.startswith(("--", "torch", "muon"))
            assert problem.fix
            assert "\n" not in str(problem)


def test_a_value_that_cannot_be_read_is_reported_once():
    assert len(problems(num_layers="two")) == 1
    assert len(problems(tensor_model_parallel_size="two")) == 1
    assert len(problems(fp8_format="fp8", fp8_margin=3)) == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("num_layer", "num_layers"),
        ("hiden_size", "hidden_size"),
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("fp8_amax_history_length", "fp8_amax_history_len"),
    ],
)
def test_unknown_names_get_the_nearest(name, near):
    (problem,) = problems(**{name: 1})
    assert problem.flags == (name,)
    assert f"Did you mean {near}?" in str(problem)


def test_derived_fields_cannot_be_set():
    (problem,) = problems(data_parallel_size=2)
    assert "Leave it out" in str(problem)


def test_world_size_must_be_positive():
    assert problems(0)[0].flags == ("world_size",)


def fired(world_size, fields):
    """Return the names of the rules that complain about these settings."""
    draft = Draft({**TINY, **fields}, world_size)
    derive(draft)
    return {one.__name__ for one in RULES if list(one(draft))}


def test_every_rule_is_documented_and_exercised():
    names = [one.__name__ for one in RULES]
    assert len(names) == len(set(names))
    for one in RULES:
        first = (one.__doc__ or "").strip().splitlines()[0]
        assert first.endswith("."), one.__name__
    cases = [(1, fields) for fields, _, _ in REFUSED]
    on_a_mesh = REFUSED_ON_A_MESH + MOE_REFUSED + GUARDS_REFUSED + DATA_REFUSED + SAVING_REFUSED
    cases += [(world, fields) for world, fields, _, _ in on_a_mesh]
    assert set(names) == set().union(*(fired(world, fields) for world, fields in cases))


def test_rules_are_listed_by_subject():
    modules = [one.__module__.rpartition("_")[2] for one in RULES]
    assert list(dict.fromkeys(modules)) == [
        "model",
        "fp8",
        "attention",
        "guards",
        "moe",
        "parallel",
        "replicas",
        "overlap",
        "pipeline",
        "batch",
        "training",
        "stats",
        "data",
        "mix",
        "fim",
        "saving",
    ]
    assert len(list(dict.fromkeys(modules))) == len(
        [m for m, before in zip(modules, [None, *modules], strict=False) if m != before]
    )
