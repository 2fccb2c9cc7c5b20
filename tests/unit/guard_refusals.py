"""What rules about guards refuse: (processes, settings, first flag, words of the message)."""

from __future__ import annotations

FP8 = {"fp8_format": "hybrid"}
TE_FP8 = {**FP8, "transformer_impl": "transformer_engine"}
FALLBACK = {"fp8_auto_fallback": True}
ROLLBACK = {"fp8_spike_rollback": True}

GUARDS_REFUSED = [
    (1, FALLBACK, "--fp8-auto-fallback", ["no --fp8-format", "nothing can fall back"]),
    (
        1,
        {**FP8, **FALLBACK, "fp8_stats_interval": 0},
        "--fp8-auto-fallback",
        ["--fp8-stats-interval 0", "figures of FP8 casts"],
    ),
    (
        1,
        {**TE_FP8, **FALLBACK},
        "--fp8-auto-fallback",
        ["transformer_engine", "--transformer-impl native"],
    ),
    (
        1,
        {**FP8, "fp8_auto_fallback_patience": 5},
        "--fp8-auto-fallback-patience",
        ["Add --fp8-auto-fallback"],
    ),
    (
        1,
        {**FP8, **FALLBACK, "fp8_auto_fallback_patience": 0},
        "--fp8-auto-fallback-patience",
        ["got 0", "at least 1"],
    ),
    (
        1,
        {"fp8_spike_rollback_interval": 5, "fp8_spike_rollback_limit": 3},
        "--fp8-spike-rollback-interval",
        ["got 5, 3", "Add --fp8-spike-rollback"],
    ),
    (
        1,
        {**ROLLBACK, "fp8_spike_rollback_ratio": 0.5},
        "--fp8-spike-rollback-ratio",
        ["got 0.5", "at least 1"],
    ),
    (
        1,
        {**ROLLBACK, "fp8_spike_rollback_precision": "bf16"},
        "--fp8-spike-rollback-precision",
        ["no --fp8-format", "nothing to switch off"],
    ),
    (
        1,
        {**FP8, **ROLLBACK, "fp8_spike_rollback_precision_iters": 9},
        "--fp8-spike-rollback-precision-iters",
        ["9 and same", "Add --fp8-spike-rollback-precision bf16"],
    ),
    (
        1,
        {
            **FP8,
            **ROLLBACK,
            "fp8_spike_rollback_precision": "bf16",
            "fp8_dot_product_attention": True,
        },
        "--fp8-spike-rollback-precision",
        ["FP8 attention", "precision same"],
    ),
    (
        1,
        {**TE_FP8, **ROLLBACK, "fp8_spike_rollback_precision": "bf16"},
        "--fp8-spike-rollback-precision",
        ["transformer_engine and delayed", "another --fp8-recipe"],
    ),
]
