"""What a run measures and says about its FP8 casts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class Fp8StatsConfig:
    """Figures of every FP8 cast: magnitude, scale, saturation, underflow, signal-to-noise ratio."""

    fp8_stats_interval: int = field(
        50,
        help="Measure the FP8 casts of every so many steps, and of the first; 0 means never.",
        units="steps",
    )
    fp8_stats_samples: int = field(
        4096,
        help="About how many elements of a tensor are compared with what they became; 0 means all.",
        units="elements",
    )
    fp8_alert_amax_ratio: float = field(
        32.0,
        help="Warn when the largest magnitude of a tensor is so many times its recent median, or"
        " the median of like layers; 0 means never.",
    )
    fp8_alert_saturation: float = field(
        0.01,
        help="Warn when more than this share of a tensor is beyond the format's largest value; 0"
        " means never.",
    )
    fp8_alert_underflow: float = field(
        0.25, help="Warn when more than this share of a tensor became zero; 0 means never."
    )
    fp8_debug_dump: str | None = field(
        help="File that receives amax and scale of every module and measured step, one JSON object"
        " a line without times, so that two runs can be compared with diff."
    )
    nvtx_ranges: bool = field(
        False,
        help="Name every layer, with its precision, for profilers: NVTX ranges on CUDA, and records"
        " of torch.profiler.",
    )
