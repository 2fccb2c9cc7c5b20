"""Rules about the measurement of FP8 casts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.fp8 import recipe_of
from megatron.config.problems import Problem, rule
from megatron.config.schema import flag_of


@rule
def fp8_stats_counts_are_not_negative(c: Draft) -> Iterator[Problem]:
    """--fp8-stats-interval and --fp8-stats-samples are 0 or more."""
    for name, zero in (("fp8_stats_interval", "never"), ("fp8_stats_samples", "every element")):
        value = getattr(c, name)
        if value < 0:
            yield Problem((flag_of(name),), value, f"The value 0 means {zero}", "Use 0 or more")


@rule
def fp8_alert_limits_are_shares(c: Draft) -> Iterator[Problem]:
    """--fp8-alert-saturation and --fp8-alert-underflow are 0 to 1; the ratio is 0 or above 1."""
    for name in ("fp8_alert_saturation", "fp8_alert_underflow"):
        value = getattr(c, name)
        if not 0.0 <= value <= 1.0:
            why = "It is a share of a tensor's elements"
            yield Problem((flag_of(name),), value, why, "Use 0 to 1, e.g. 0.01")
    ratio = c.fp8_alert_amax_ratio
    if ratio and not ratio > 1.0:
        why = "Half of all values are above their median"
        yield Problem((flag_of("fp8_alert_amax_ratio"),), ratio, why, "Use more than 1, or 0")


@rule
def fp8_dump_needs_measured_steps(c: Draft) -> Iterator[Problem]:
    """--fp8-debug-dump needs FP8 and steps that are measured."""
    if not c.fp8_debug_dump:
        return
    flags = (flag_of("fp8_debug_dump"),)
    if recipe_of(c) is None:
        yield Problem(flags, c.fp8_debug_dump, "The run is not in FP8", "Add --fp8-format")
    elif not c.fp8_stats_interval:
        why = "With --fp8-stats-interval 0 no step is measured, and the file would stay empty"
        yield Problem(flags, c.fp8_debug_dump, why, "Use --fp8-stats-interval 1")
