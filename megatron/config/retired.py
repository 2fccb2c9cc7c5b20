"""Tables about Megatron-LM's other flags: accepted with a notice, rewritten, or refused and why."""

from __future__ import annotations

ANY: tuple[str, ...] = ()

_ALWAYS = "always so here"
_NO_FUSION = "no such fused kernel is used, always so here"
_LAYOUT_FREE = "checkpoints never depend on the layout, always so here"

# Flag to (values that are accepted; ANY = all of them, notice). What these ask for happens anyway.
ACCEPTED: dict[str, tuple[tuple[str, ...], str]] = {
    "--use-mcore-models": (ANY, "there is one implementation of the model"),
    "--use-flash-attn": (ANY, "the backend picks the attention kernel"),
    "--attention-backend": (
        ("flash", "fused", "unfused", "local", "auto"),
        "the layer backend picks the attention kernel; the result is the same",
    ),
    "--use-dist-ckpt": (ANY, "checkpoints are always distributed"),
    "--dist-ckpt-format": (("torch_dist",), "torch_dist is the one format"),
    "--auto-detect-ckpt-format": (ANY, "torch_dist is the one format"),
    "--ckpt-fully-parallel-save": (ANY, "every rank writes its own share, always so here"),
    "--ckpt-assume-constant-structure": (ANY, "the layout of a checkpoint is cheap to plan"),
    "--dist-ckpt-optim-fully-reshardable": (ANY, _LAYOUT_FREE),
    "--distrib-optim-fully-reshardable-mem-efficient": (ANY, _LAYOUT_FREE),
    "--dist-ckpt-strictness": (
        (
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
        ),
        "loading has one strictness: a missing, unexpected or misshapen tensor is an error",
    ),
    "--no-use-tokenizer-model-from-checkpoint-args": (
        ANY,
        "the tokenizer comes from a checkpoint only when no model size is given",
    ),
    "--no-save-tokenizer-assets": (ANY, "a checkpoint never holds the tokenizer"),
    "--fp8-interval": (ANY, "ignored: scales are updated once per optimizer step"),
    "--fp16-lgs": (ANY, "loss scaling is dynamic with --fp16 and not needed otherwise"),
    "--no-fp16-lgs": (ANY, "the loss is scaled only with --fp16"),
    "--calculate-per-token-loss": (ANY, "the loss is per token, always so here"),
    "--accumulate-allreduce-grads-in-fp32": (ANY, "gradients are summed in fp32, always so here"),
    "--attention-softmax-in-fp32": (ANY, "softmax runs in fp32, always so here"),
    "--no-masked-softmax-fusion": (ANY, _NO_FUSION),
    "--no-bias-gelu-fusion": (ANY, _NO_FUSION),
    "--no-bias-swiglu-fusion": (ANY, _NO_FUSION),
    "--no-bias-dropout-fusion": (ANY, _NO_FUSION),
    "--no-rope-fusion": (ANY, _NO_FUSION),
    "--no-gradient-accumulation-fusion": (ANY, "gradients are added in fp32 either way"),
    "--no-persist-layer-norm": (ANY, _NO_FUSION),
    "--disable-jit-fuser": (ANY, "the model is never compiled, always so here"),
    "--cross-entropy-loss-fusion": (ANY, "there is one cross entropy, parallel over vocabulary"),
    "--cross-entropy-fusion-impl": (("native",), "there is one cross entropy"),
    "--no-create-attention-mask-in-dataloader": (ANY, "no mask is built, always so here"),
    "--dataloader-type": (("single",), "data is read in order, always so here"),
    "--mid-level-dataset-surplus": (("0.005",), _ALWAYS),
    "--timing-log-level": (("0",), _ALWAYS),
    "--timing-log-option": (("minmax",), _ALWAYS),
    "--no-barrier-with-level-1-timing": (ANY, "timers have no barrier"),
    "--no-async-tensor-model-parallel-allreduce": (ANY, "removed from Megatron-LM; no effect"),
    "--no-scatter-gather-tensors-in-pipeline": (ANY, "removed from Megatron-LM; no effect"),
    "--legacy-tokenizer": (ANY, "removed from Megatron-LM; there is one tokenizer layer"),
    "--local-rank": (ANY, "the launcher's environment says which rank this is"),
    "--no-one-logger": (ANY, "there is no such logger"),
    "--disable-msc": (ANY, "there is no such storage client"),
    "--use-cpu-initialization": (ANY, "initial weights are the same for every TP size"),
    "--te-rng-tracker": (ANY, "random streams are counters, safe to replay"),
    "--moe-grouped-gemm": (ANY, "experts always run grouped"),
    "--moe-use-legacy-grouped-gemm": (ANY, "removed from Megatron-LM; experts always run grouped"),
    "--moe-permute-fusion": (ANY, "one gather puts tokens in order, always so here"),
    "--moe-router-padding-for-fp8": (ANY, "experts pad their own inputs; routing never changes"),
    "--moe-router-padding-for-quantization": (
        ANY,
        "experts pad their own inputs; routing never changes",
    ),
    "--softmax-type": (("vanilla",), _ALWAYS),
    "--main-grads-dtype": (("fp32",), _ALWAYS),
    "--main-params-dtype": (("fp32",), _ALWAYS),
    "--cuda-graph-impl": (("none",), _ALWAYS),
    "--data-parallel-sharding-strategy": (("no_shard",), _ALWAYS),
    "--rerun-mode": (("disabled",), _ALWAYS),
    "--use-persistent-ckpt-worker": (ANY, "--async-save writes in a thread of each process"),
    "--async-strategy": (ANY, "--async-save writes in a thread of each process"),
    "--verify-integrity": (
        ANY,
        "the checksum of every file is recorded and compared when it is loaded, always so here",
    ),
    "--non-persistent-local-ckpt-algo": (ANY, "each process writes what it holds"),
    "--empty-unused-memory-level": (("0",), _ALWAYS),
}

# Spelling to the tokens that say the same here; "*" stands for the values.
REWRITTEN: dict[str, tuple[str, ...]] = {
    "--encoder-seq-length": ("--seq-length", "*"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--layernorm-epsilon": ("--norm-epsilon", "*"),
    "--fp8": ("--fp8-format", "*"),
    "--fp8-e4m3": ("--fp8-format", "e4m3"),
    "--fp8-hybrid": ("--fp8-format", "hybrid"),
}

# Launcher options that were typed after the script's name.
LAUNCHER_FLAGS = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--standalone",
    "--max-restarts",
    "--redirects",
    "--tee",
)

# Exact flag to (why, fix).
REFUSED: dict[str, tuple[str, str]] = {
    **{
        f"--{off}-tp-comm-split-{what}": (
            "Transformer Engine removed these overlaps in 1.6, in favour of others",
            f"Use --no-tp-comm-overlap-{what}",
        )
        for off in ("no", "disable")
        for what in ("ag", "rs")
    },
    "--moe-shared-expert-overlap": (
        "The shared expert does not overlap with the dispatch of tokens in this release",
        "Remove it; the result is the same",
    ),
    "--overlap-moe-expert-parallel-comm": (
        "The dispatch of tokens does not overlap with computation in this release",
        "Remove it; the result is the same",
    ),
    "--moe-router-fusion": (
        "There is no fused kernel for the router",
        "Remove it; the result is the same",
    ),
    "--moe-layer-recompute": (
        "Recomputing experts alone is not in this release",
        "Use --recompute-granularity full, which includes them",
    ),
    "--moe-extended-tp": (
        "It has been replaced",
        "Use --expert-tensor-parallel-size and --expert-model-parallel-size",
    ),
    "--moe-use-upcycling": (
        "A dense checkpoint cannot become one with experts in this release",
        "Remove it",
    ),
    "--moe-enable-deepep": (
        "Tokens travel by the collectives of --distributed-backend",
        "Use --moe-token-dispatcher-type allgather or alltoall",
    ),
    "--batch-size": ("It is ambiguous", "Use --micro-batch-size"),
    "--warmup": ("It is ambiguous", "Use --lr-warmup-fraction"),
    "--model-parallel-size": ("It is ambiguous", "Use --tensor-model-parallel-size"),
    "--checkpoint-activations": (
        "It has been replaced",
        "Use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "--yaml-cfg": (
        "Megatron-LM's own YAML has another layout",
        "Use --config, whose keys are flag names with underscores",
    ),
    "--disable-gloo-process-groups": ("Small CPU messages travel over gloo", "Remove it"),
    "--no-pad-vocab-size": (
        "Every rank holds the same number of vocabulary rows",
        "Use --make-vocab-size-divisible-by 1",
    ),
    "--no-position-embedding": (
        "Positions are chosen by one flag here",
        "Use --position-embedding-type rope or none",
    ),
    "--rotary-interleaved": (
        "Rotary positions rotate halves of a head, not neighbours",
        "Remove it",
    ),
    "--spec": ("Layers follow from the flags here", "Use --transformer-impl"),
    "--skip-train": ("Evaluation without training is not in this release", "Remove it"),
    "--use-mp-args-from-checkpoint-args": (
        "Checkpoints load at any parallel layout",
        "Remove it and choose --tensor-model-parallel-size",
    ),
    "--trust-remote-code": ("A tokenizer never runs code from its folder here", "Remove it"),
    "--apply-query-key-layer-scaling": (
        "Attention scores are computed in fp32 range and need no scaling by layer",
        "Remove it",
    ),
    "--log-progress": ("The progress file is not in this release", "Use --dllogger-json"),
    "--profile": ("Profiling from inside is not in this release", "Use nsys or py-spy outside"),
}

# Pattern on the flag (without dashes in front) to (why, fix); the first match counts.
REFUSED_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (r"moe-|expert-|.*-moe-|gtp-expert", "That part of mixture-of-experts layers is", ""),
    (r"rl-|grpo-|perform-rl|langrl|refit-", "Reinforcement learning is", ""),
    (r"inference-|max-tokens-to-oom|flash-decode|.*-for-prefill", "Inference is", ""),
    (
        r"multi-latent|q-lora|kv-lora|qk-head|v-head|qk-pos|mscale|rotary-scaling|mla-|cache-mla",
        "Multi-latent attention is",
        "",
    ),
    (r"mtp-|use-multi-token", "Multi-token prediction is", ""),
    (
        r"mamba|hybrid-(?!context)|is-hybrid|linear-|gdp-|disable-mamba",
        "Layers other than attention and MLP are",
        "",
    ),
    (
        r"te-precision",
        "A precision file of Transformer Engine is",
        "Write rules for --fp8-policy; docs/fp8-policy.md says how",
    ),
    (
        r"fp4-|fp8-quantizer|fp8-output|keep-fp8|reuse-grad-buf",
        "That use of low precision is",
        "Use --fp8-format with --fp8-recipe delayed, tensorwise, blockwise or mxfp8, or use"
        " --fp4-format",
    ),
    (
        r"cuda-graph|external-cuda|enable-cuda-graph|optimizer-cuda-graph",
        "CUDA graph capture is",
        "",
    ),
    (
        r".*pipeline|.*-vp|.*virtual|overlap-p2p",
        "That part of pipeline parallelism is",
        "Leave it out",
    ),
    (
        r"hybrid-context",
        "Context parallelism of varying size is",
        "Use --context-parallel-size",
    ),
    (
        r".*fsdp|outer-dp|data-parallel-sharding|ddp-",
        "That form of data parallelism is",
        "Use --use-distributed-optimizer, which shares the optimizer among all replicas",
    ),
    (r".*offload", "Offloading to host memory is", ""),
    (
        r"main-.*-dtype",
        "Gradients or masters in another type than float32 are",
        "Use --grad-reduce-in-bf16, --exp-avg-dtype and --exp-avg-sq-dtype to save memory and time",
    ),
    (r"muon-|lion-|soap-", "That optimizer is", "Use --optimizer adam or sgd"),
    (
        r"non-persistent|async-|ckpt-convert|.*-ckpt-.*|ckpt-|replication|verify-integrity",
        "That way of checkpointing is",
        "",
    ),
    (
        r"sft|retro-|ict-|bert-|biencoder|dino-|vision-|img-|swin|titles|evidence|retriever|block-data"
        r"|indexer|patch-dim|num-classes|num-channels|mask-|query-in",
        "Training other than GPT pretraining is",
        "",
    ),
    (r"encoder-|decoder-|vocab-extra", "Encoder-decoder models are", ""),
    (
        r"yarn-|mrope|rope-type|no-rope-freq|relative-|window-",
        "That kind of positions is",
        "Use --position-embedding-type learned_absolute, rope or none",
    ),
    (
        r"inprocess-|ft-|enable-ft|calc-ft|fault-injector|error-injection|adlr|rerun-|.*straggler",
        "That fault handling is",
        "",
    ),
    (r"otel-|one-logger|app-tag|run-workload", "That telemetry is", "Use --dllogger-json"),
    (
        r"fake-process",
        "Fake process groups are",
        "Use --dry-run --fake-world-size N, which counts what would be sent",
    ),
)

# (field, value) to (why, fix): values Megatron-LM has for flags that exist here.
REFUSED_VALUES: dict[tuple[str, str], tuple[str, str]] = {
    ("fp8_recipe", "custom"): (
        "Custom quantizers are not in this release",
        "Use --fp8-recipe delayed, tensorwise, blockwise or mxfp8",
    ),
    ("fp4_recipe", "custom"): (
        "Custom quantizers are not in this release",
        "Use --fp4-recipe nvfp4",
    ),
    ("moe_token_dispatcher_type", "flex"): (
        "Tokens travel by the collectives of --distributed-backend",
        "Use allgather or alltoall",
    ),
    ("moe_router_load_balancing_type", "quantile_balancing"): (
        "Balancing by quantiles is not in this release",
        "Use aux_loss, or --moe-router-enable-expert-bias",
    ),
    ("transformer_impl", "inference_optimized"): (
        "This project trains",
        "Use --transformer-impl auto, native or transformer_engine",
    ),
    ("ckpt_format", "torch"): (
        "Its files depend on the parallel layout",
        "Use --ckpt-format torch_dist",
    ),
    ("ckpt_format", "torch_dcp"): (
        "torch_dist is the DCP format here",
        "Use --ckpt-format torch_dist",
    ),
    ("ckpt_format", "fsdp_dtensor"): (
        "There is no FSDP here",
        "Use --ckpt-format torch_dist",
    ),
    ("position_embedding_type", "yarn"): (
        "YaRN is not in this release",
        "Use rope, with --use-rope-scaling for Llama 3.1's stretching",
    ),
}
for _module in ("layernorm", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts"):
    REFUSED_VALUES["recompute_modules", _module] = (
        f"Recomputing {_module} alone is not in this release",
        "Use core_attn, or --recompute-granularity full",
    )
for _optimizer in ("muon", "dist_muon", "adaptive_muon", "lion", "soap"):
    REFUSED_VALUES["optimizer", _optimizer] = (
        f"{_optimizer} is not in this release",
        "Use --optimizer adam or sgd",
    )
