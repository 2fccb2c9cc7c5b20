"""What watches over a run: layers that leave FP8, going back after a loss spike."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class Fp8GuardsConfig:
    """What a run does by itself when training goes wrong."""

    fp8_auto_fallback: bool = field(
        False,
        help="Let a layer that FP8 does harm to run in high precision for a while, and try again.",
    )
    fp8_auto_fallback_amax_ratio: float = field(
        20.0,
        help="Automatic fallback: trouble is a largest magnitude of so many times its recent"
        " median; 0 means never.",
    )
    fp8_auto_fallback_saturation: float = field(
        0.01,
        help="Automatic fallback: trouble is more than this share of a tensor beyond the format's"
        " largest value; 0 means never.",
    )
    fp8_auto_fallback_underflow: float = field(
        0.1,
        help="Automatic fallback: trouble is more than this share of a tensor that became zero; 0"
        " means never.",
    )
    fp8_auto_fallback_grad_norm_ratio: float = field(
        4.0,
        help="Automatic fallback: a spike is a gradient norm of so many times its recent median; 0"
        " means never.",
    )
    fp8_auto_fallback_patience: int = field(
        3,
        help="Automatic fallback: looks with trouble before a layer falls back, spikes of the"
        " gradient norm before the worst layer does, and steps that a trial lasts.",
    )
    fp8_auto_fallback_probe_interval: int = field(
        500,
        help="Automatic fallback: time until a layer tries FP8 again; doubled with every fall.",
        units="steps",
    )
    fp8_spike_rollback: bool = field(
        False,
        help="After a loss spike return to the last snapshot in memory and leave out the batches"
        " since then.",
    )
    fp8_spike_rollback_interval: int = field(
        20, help="Spike rollback: take a snapshot every so many steps.", units="steps"
    )
    fp8_spike_rollback_memory: str = field(
        "cpu",
        choices=("cpu", "device"),
        help="Spike rollback: keep the snapshot in (pinned) host memory, or next to the model.",
    )
    fp8_spike_rollback_window: int = field(
        64, help="Spike rollback: losses to compare with.", units="steps"
    )
    fp8_spike_rollback_deviations: float = field(
        10.0,
        help="Spike rollback: a spike is so many median deviations above the median of the window.",
    )
    fp8_spike_rollback_ratio: float = field(
        1.2, help="Spike rollback: a spike is at least so many times the median of the window."
    )
    fp8_spike_rollback_limit: int = field(
        10, help="Spike rollback: the run stops at the spike after so many rollbacks."
    )
    fp8_spike_rollback_precision: str = field(
        "same",
        choices=("same", "bf16"),
        help="Spike rollback: go on as before, or without FP8 for a while.",
    )
    fp8_spike_rollback_precision_iters: int = field(
        100, help="Spike rollback: how long to go on without FP8.", units="steps"
    )
