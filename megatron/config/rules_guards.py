"""Rules about what watches over a run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.fp8 import recipe_of
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of

_ROLLBACK = tuple(n for n in SPECS if n.startswith("fp8_spike_rollback_"))
_FALLBACK = tuple(n for n in SPECS if n.startswith("fp8_auto_fallback_"))
_SMALLEST = {
    "fp8_auto_fallback_amax_ratio": 0,
    "fp8_auto_fallback_saturation": 0,
    "fp8_auto_fallback_underflow": 0,
    "fp8_auto_fallback_grad_norm_ratio": 0,
    "fp8_auto_fallback_patience": 1,
    "fp8_auto_fallback_probe_interval": 1,
    "fp8_spike_rollback_interval": 1,
    "fp8_spike_rollback_window": 4,
    "fp8_spike_rollback_deviations": 0,
    "fp8_spike_rollback_ratio": 1,
    "fp8_spike_rollback_limit": 1,
    "fp8_spike_rollback_precision_iters": 1,
}


def _changed(c: Draft, names: tuple[str, ...]) -> list[str]:
    return [n for n in names if c.values[n] != SPECS[n].default]


@rule
def guards_are_in_range(c: Draft) -> Iterator[Problem]:
    """Intervals, windows and thresholds of the guards are large enough to mean something."""
    for name, least in _SMALLEST.items():
        if c.values[name] < least:
            meaning = SPECS[name].setting.help.rstrip(".")
            yield Problem(
                (flag_of(name),),
                c.values[name],
                f"It must be at least {least}",
                f"Correct it. It is: {meaning}",
            )


@rule
def fallback_has_what_it_needs(c: Draft) -> Iterator[Problem]:
    """--fp8-auto-fallback needs FP8 on the native layers, and figures of its casts."""
    if not c.fp8_auto_fallback:
        changed = _changed(c, _FALLBACK)
        if changed:
            yield Problem(
                tuple(flag_of(n) for n in changed),
                ", ".join(str(c.values[n]) for n in changed),
                "No layer falls back without --fp8-auto-fallback",
                f"Add --fp8-auto-fallback, or remove {' and '.join(flag_of(n) for n in changed)}",
            )
        return
    if recipe_of(c) is None and "fp8_format" not in c.broken:
        yield Problem(
            ("--fp8-auto-fallback", "--fp8-format"),
            "no --fp8-format",
            "Nothing runs in FP8, so nothing can fall back",
            "Add --fp8-format hybrid, or remove --fp8-auto-fallback",
        )
    elif c.fp8_stats_interval < 1:
        yield Problem(
            ("--fp8-auto-fallback", "--fp8-stats-interval"),
            f"--fp8-stats-interval {c.fp8_stats_interval}",
            "Decisions are made from the figures of FP8 casts",
            "Remove --fp8-stats-interval, or measure every so many steps",
        )
    if c.transformer_impl == "transformer_engine":
        yield Problem(
            ("--fp8-auto-fallback", "--transformer-impl"),
            "transformer_engine",
            "Its casts take place inside the library, where nobody can measure them",
            "Remove --fp8-auto-fallback, or use --transformer-impl native",
        )


@rule
def rollback_settings_are_read(c: Draft) -> Iterator[Problem]:
    """Settings of the rollback are given only with --fp8-spike-rollback."""
    changed = _changed(c, _ROLLBACK)
    if changed and not c.fp8_spike_rollback:
        yield Problem(
            tuple(flag_of(n) for n in changed),
            ", ".join(str(c.values[n]) for n in changed),
            "Nothing is rolled back without --fp8-spike-rollback",
            f"Add --fp8-spike-rollback, or remove {' and '.join(flag_of(n) for n in changed)}",
        )


@rule
def rollback_changes_a_precision_there_is(c: Draft) -> Iterator[Problem]:
    """--fp8-spike-rollback-precision bf16 needs FP8, and a length needs it."""
    leaves = c.fp8_spike_rollback_precision == "bf16"
    if leaves and recipe_of(c) is None and "fp8_format" not in c.broken:
        yield Problem(
            ("--fp8-spike-rollback-precision", "--fp8-format"),
            "bf16 and no --fp8-format",
            "Nothing runs in FP8, so there is nothing to switch off",
            "Remove --fp8-spike-rollback-precision",
        )
    if not leaves and _changed(c, ("fp8_spike_rollback_precision_iters",)):
        yield Problem(
            ("--fp8-spike-rollback-precision-iters", "--fp8-spike-rollback-precision"),
            f"{c.fp8_spike_rollback_precision_iters} and {c.fp8_spike_rollback_precision}",
            "The precision stays the same after a rollback, so no time is counted",
            "Add --fp8-spike-rollback-precision bf16, or remove the number of steps",
        )
    if leaves and c.fp8_dot_product_attention:
        yield Problem(
            ("--fp8-spike-rollback-precision", "--fp8-dot-product-attention"),
            "bf16 and FP8 attention",
            "What attention's scales depend on exists in FP8 attention only, so they would be out"
            " of date when it is switched on again",
            "Use --fp8-spike-rollback-precision same, or remove --fp8-dot-product-attention",
        )
    if leaves and c.transformer_impl == "transformer_engine" and c.fp8_recipe == "delayed":
        yield Problem(
            ("--fp8-spike-rollback-precision", "--transformer-impl", "--fp8-recipe"),
            "bf16, transformer_engine and delayed",
            "Transformer Engine records no magnitudes while FP8 is off, so the scales would be"
            " out of date when it is switched on again",
            "Use --fp8-spike-rollback-precision same, another --fp8-recipe, or"
            " --transformer-impl native",
        )
