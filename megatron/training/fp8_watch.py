"""What a run measures about its FP8 casts, and what it says about them."""

from __future__ import annotations

from megatron.core.fp8.stats import StatsCollector
from megatron.training.initialize import Runtime


def collector(runtime: Runtime) -> StatsCollector | None:
    """Return what measures the casts of a run; None where it is not to."""
    cfg, mesh = runtime.config, runtime.mesh
    if not cfg.fp8_format or not cfg.fp8_stats_interval:
        return None
    return StatsCollector(
        cfg.fp8_stats_interval, cfg.fp8_stats_samples, mesh.tp_cp_dp, mesh.pp, runtime.device
    )
