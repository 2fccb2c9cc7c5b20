"""What the run reports, and where."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Console line, JSON lines, TensorBoard and Weights & Biases."""

    log_interval: int = field(100, help="Report every so many steps.", units="steps")
    log_throughput: bool = field(False, help="Report TFLOP/s per device.")
    log_num_zeros_in_grad: bool = field(False, help="Report the number of zeros in the gradient.")
    log_params_norm: bool = field(False, help="Report the norm of the parameters.")
    dllogger_json: str | None = field(help="File that receives one JSON object a line.")
    tensorboard_dir: str | None = field(help="Folder for TensorBoard event files.")
    tensorboard_log_interval: int = field(
        1, help="Write to TensorBoard every so many steps.", units="steps"
    )
    tensorboard_queue_size: int = field(1000, help="Events TensorBoard may hold back.")
    log_timers_to_tensorboard: bool = field(False, help="Write step times to TensorBoard.")
    log_memory_to_tensorboard: bool = field(False, help="Write memory use to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = field(
        False, help="Write validation perplexity to TensorBoard."
    )
    log_loss_scale_to_tensorboard: bool = field(
        True,
        flags=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
        help="Write the loss scale to TensorBoard.",
    )
    log_world_size_to_tensorboard: bool = field(
        False, help="Write the number of processes to TensorBoard."
    )
    wandb_project: str | None = field(help="Weights & Biases project; switches that sink on.")
    wandb_exp_name: str | None = field(help="Weights & Biases run name.")
    wandb_save_dir: str | None = field(help="Folder for Weights & Biases files.")
    wandb_entity: str | None = field(help="Weights & Biases user or team.")
