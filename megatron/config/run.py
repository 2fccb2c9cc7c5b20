"""The process itself."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device, randomness and the process's housekeeping."""

    dry_run: bool = field(
        False,
        help="Try the run out on paper: check everything, show memory and communication, leave.",
    )
    fake_world_size: int | None = field(
        None,
        help="With --dry-run: how many processes the run has.",
        fallback="as many as the launcher started",
    )
    device: str = field(
        "auto",
        choices=("auto", "cpu", "cuda"),
        help="Where to run: CUDA where there is one (auto), or one by name.",
    )
    seed: int = field(1234, help="Seed of initialization, dropout and data order.")
    deterministic_mode: bool = field(
        False, help="Refuse kernels whose results change from run to run."
    )
    manual_gc: bool = field(
        False, help="Collect Python garbage at chosen steps, on all ranks at once."
    )
    manual_gc_interval: int = field(
        0, help="Steps between two collections; 0 means only around evaluation.", units="steps"
    )
    manual_gc_eval: bool = field(
        True,
        flags=("--no-manual-gc-eval", "--disable-manual-gc-eval"),
        help="With --manual-gc, collect before and after an evaluation.",
    )
