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
