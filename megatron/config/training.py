"""Batches, duration, schedules and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long to train, on how much at a time, and how weights are updated."""

    micro_batch_size: int = field(1, help="Sequences in one forward pass of one replica.")
    global_batch_size: int | None = field(
        help="Sequences in one optimizer step, over all replicas.",
        fallback="micro_batch_size * data_parallel_size",
    )
    num_microbatches: int = field(
        1, derived=True, help="Forward passes of one replica in one optimizer step."
    )
    train_iters: int | None = field(
        help="Optimizer steps to train for.",
        units="steps",
        fallback="train_samples / global_batch_size, or 500",
    )
    train_samples: int | None = field(
        help="Sequences to train on, instead of --train-iters.", units="sequences"
    )
    exit_interval: int | None = field(
        help="Save and leave after a step whose number this divides.", units="steps"
    )
    exit_duration_in_mins: int | None = field(
        help="Save and leave after this long.", units="minutes"
    )
    exit_signal_handler: bool = field(
        False,
        help="On SIGTERM, SIGUSR1, SIGUSR2 or --exit-signal finish the step, save and leave.",
    )
    exit_signal: str = field(
        "SIGTERM",
        choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGQUIT"),
        aliases={
            "15": "SIGTERM", "10": "SIGUSR1", "12": "SIGUSR2", "2": "SIGINT", "1": "SIGHUP",
            "3": "SIGQUIT", "sigterm": "SIGTERM", "sigint": "SIGINT",
        },
        help="A further signal that --exit-signal-handler listens to.",
    )  # fmt: skip
    exit_signal_deadline: float | None = field(
        help="Leave at most so long after the signal, if need be without the checkpoint.",
        units="seconds",
    )
    eval_interval: int | None = field(
        help="Evaluate on the validation data every so many steps.", units="steps"
    )
    eval_iters: int = field(100, help="Batches in one evaluation; 0 switches it off.")

    optimizer: str = field(
        "adam", choices=("adam", "sgd"), help="Adam with decoupled weight decay, or SGD."
    )
    lr: float | None = field(help="Peak learning rate.", fallback="1.5e-4")
    min_lr: float = field(0.0, help="Smallest learning rate of the schedule.")
    lr_decay_style: str = field(
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        help="Shape of the learning-rate decay.",
    )
    lr_decay_iters: int | None = field(
        help="Steps over which the learning rate decays.", units="steps", fallback="train_iters"
    )
    lr_decay_samples: int | None = field(
        help="Sequences over which the learning rate decays, with --train-samples.",
        units="sequences",
        fallback="train_samples",
    )
    lr_warmup_fraction: float | None = field(
        help="Share of the decay length spent warming up, instead of a count."
    )
    lr_warmup_iters: int = field(0, help="Steps of linear warm-up.", units="steps")
    lr_warmup_samples: int = field(
        0, help="Sequences of linear warm-up, with --train-samples.", units="sequences"
    )
    lr_warmup_init: float = field(0.0, help="Learning rate at which the warm-up starts.")
    lr_wsd_decay_style: str = field(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        help="Shape of the final decay of the WSD schedule.",
    )
    lr_wsd_decay_iters: int | None = field(
        help="Steps of the final decay of the WSD schedule.", units="steps"
    )
    lr_wsd_decay_samples: int | None = field(
        help="Sequences of the final decay of the WSD schedule, with --train-samples.",
        units="sequences",
    )
    weight_decay: float = field(0.01, help="Weight decay of matrices and embeddings.")
    start_weight_decay: float | None = field(
        help="Weight decay at the first step, with a non-constant --weight-decay-incr-style."
    )
    end_weight_decay: float | None = field(
        help="Weight decay at the last step, with a non-constant --weight-decay-incr-style."
    )
    weight_decay_incr_style: str = field(
        "constant",
        choices=("constant", "linear", "cosine"),
        help="How weight decay goes from its start to its end.",
    )
    adam_beta1: float = field(0.9, help="Adam: decay of the mean of gradients.")
    adam_beta2: float = field(0.999, help="Adam: decay of the mean of squared gradients.")
    adam_eps: float = field(1e-8, help="Adam: added to the denominator.")
    use_precision_aware_optimizer: bool = field(
        False, help="Adam: keep moments in the types of --exp-avg-dtype and --exp-avg-sq-dtype."
    )
    exp_avg_dtype: str = field(
        "fp32",
        choices=("fp32", "bf16", "fp16", "fp8"),
        help="Precision-aware Adam: type of the mean of gradients.",
    )
    exp_avg_sq_dtype: str = field(
        "fp32",
        choices=("fp32", "bf16", "fp16", "fp8"),
        help="Precision-aware Adam: type of the mean of squared gradients.",
    )
    sgd_momentum: float = field(0.9, help="SGD: momentum.")
    clip_grad: float = field(1.0, help="Largest global gradient norm; 0 switches clipping off.")

    loss_scale: float | None = field(
        help="float16: constant factor on the loss.", fallback="dynamic loss scaling"
    )
    initial_loss_scale: float = field(2.0**32, help="float16: first dynamic loss scale.")
    min_loss_scale: float = field(1.0, help="float16: smallest dynamic loss scale.")
    loss_scale_window: int = field(
        1000, help="float16: good steps before the loss scale doubles.", units="steps"
    )
    hysteresis: int = field(
        2, help="float16: bad steps before the loss scale halves.", units="steps"
    )
    check_for_nan_in_loss_and_grad: bool = field(
        True,
        flags="--no-check-for-nan-in-loss-and-grad",
        help="Stop at a loss or gradient that is not finite (not with dynamic loss scaling).",
    )

    recompute_activations: bool = field(False, help="Short for --recompute-granularity selective.")
    recompute_granularity: str | None = field(
        choices=("full", "selective"),
        help="Recompute whole layers (full) or the attention core (selective) in backward.",
    )
    recompute_method: str | None = field(
        choices=("uniform", "block"),
        help="Full recomputation: checkpoint chunks of layers (uniform) or the first ones (block).",
    )
    recompute_num_layers: int | None = field(
        help="Full recomputation: layers in one chunk (uniform) or recomputed layers (block)."
    )
    recompute_modules: tuple[str, ...] = field(
        ("core_attn",),
        nargs="*",
        choices=("core_attn",),
        help="Selective recomputation: the modules that are recomputed.",
    )
