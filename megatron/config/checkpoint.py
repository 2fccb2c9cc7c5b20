"""Saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is written, what is read back, and what wins when the two disagree."""

    save: str | None = field(
        help="Folder that receives checkpoints, or a place in an object store (s3://bucket/run)."
    )
    save_interval: int | None = field(
        flags=("--save-interval", "--persistent-save-interval"),
        help="Save every so many steps.",
        units="steps",
    )
    async_save: bool = field(
        False, help="Write checkpoints in the background, from a copy in host memory."
    )
    verify_checkpoint: bool = field(
        False, help="Read every checkpoint back and compare it before it counts as saved."
    )
    keep_last: int | None = field(
        help="Remove older checkpoints, so that so many stay.",
        units="checkpoints",
        fallback="all stay, or 1 with --keep-every",
    )
    keep_every: int | None = field(
        flags=("--keep-every", "--save-retain-interval"),
        help="Keep the checkpoints of steps that this divides, and the last ones.",
        units="steps",
    )
    non_persistent_save_interval: int | None = field(
        help="Save every so many steps a checkpoint that the next one replaces.", units="steps"
    )
    non_persistent_ckpt_type: str | None = field(
        choices=("global", "local"),
        help="Where those go: one for all ranks on a shared disk, or each rank's own share on a"
        " disk of its machine.",
    )
    non_persistent_global_ckpt_dir: str | None = field(
        help="Folder of non-persistent checkpoints on a shared disk.",
        fallback="non_persistent in --save and --load",
    )
    non_persistent_local_ckpt_dir: str | None = field(
        help="Folder of non-persistent checkpoints on a disk of each machine."
    )
    load: str | None = field(
        help="Folder or place in an object store to resume from: what --save was given, or one of"
        " its iter_XXXXXXX folders."
    )
    ckpt_step: int | None = field(help="Step to load instead of the newest one.", units="steps")
    no_ckpt_fallback: bool = field(
        False,
        help="End with an error when the newest checkpoint is damaged, instead of loading the one"
        " before it.",
    )
    ckpt_fully_parallel_load: bool = field(
        False,
        help="Let replicas divide the reading of a checkpoint and send each other what they read.",
    )
    ckpt_format: str = field("torch_dist", choices=("torch_dist",), help="Format of checkpoints.")
    no_save_optim: bool = field(False, help="Leave the optimizer out of checkpoints.")
    no_save_rng: bool = field(False, help="Leave the random state out of checkpoints.")
    no_load_optim: bool = field(False, help="Do not load the optimizer.")
    no_load_rng: bool = field(False, help="Do not load the random state.")
    finetune: bool = field(
        False, help="Load weights only and start at step 0 with fresh optimizer and data."
    )
    exit_on_missing_checkpoint: bool = field(
        False, help="Leave with an error when --load holds no checkpoint."
    )
    use_checkpoint_args: bool = field(
        False, help="Take the model's shape from the checkpoint; explicit flags must agree with it."
    )
    override_opt_param_scheduler: bool = field(
        False,
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
        help="Follow this run's learning-rate and weight-decay schedule, not the checkpoint's.",
    )
    use_checkpoint_opt_param_scheduler: bool = field(
        False,
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
        help="Follow the checkpoint's learning-rate and weight-decay schedule, not this run's.",
    )
