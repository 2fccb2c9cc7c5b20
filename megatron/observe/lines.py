"""What the console shows, as text: Megatron's line formats, because people parse them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from megatron.observe.events import (
    EvalEnd,
    Fp8Alert,
    IntervalEnd,
    MemoryUse,
    PrecisionChange,
    PrecisionLine,
    Rollback,
)

_DOTS = 48
_MIB = 1024.0 * 1024.0
_FIRST = ("all", "qk")  # products of which every attention has one
_NAMED = 3
# Rows of the precision table that are no linear layers: shown, but not counted.
_NOT_LINEAR = ("word_embeddings", "core_attention", "router", "dispatcher")


def training_line(interval: IntervalEnd, now: datetime, log_throughput: bool = False) -> str:
    """Return the line of one log interval.

    Args:
        interval: The summary.
        now: Timestamp of the line.
        log_throughput: Whether TFLOP/s and tokens per second are shown.
    """
    step = interval.last
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {step.iteration:8d}/{step.train_iters:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {interval.seconds_per_iteration * 1000.0:.1f}",
    ]
    if log_throughput:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {interval.tflops_per_rank:.1f}")
        parts.append(f"tokens per second: {interval.tokens_per_second:.1f}")
    parts.append(f"learning rate: {step.learning_rate:.6E}")
    parts.append(f"global batch size: {step.global_batch_size:5d}")
    parts += [f"{name}: {value:.6E}" for name, value in interval.losses.items()]
    parts.append(f"loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f"num zeros: {step.num_zeros}")
    if step.params_norm is not None:
        parts.append(f"params norm: {step.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {interval.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {interval.nan_iterations:3d}")
    return " | ".join(parts) + " |"


def perplexity(loss: float) -> float:
    """Return exp(loss), bounded so that a bad loss stays printable."""
    return math.exp(min(20.0, loss))


def validation_lines(event: EvalEnd) -> str:
    """Return the validation result between two rules of its own length."""
    line = f" {event.title} loss at {event.prefix} | "
    for name, value in event.losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def arguments_dump(config: Mapping[str, object]) -> str:
    """Return every setting on a line of its own, sorted by name."""
    lines = ["------------------------ arguments ------------------------"]
    for name in sorted(config, key=str.lower):
        dots = "." * (_DOTS - len(name))
        lines.append(f"  {name} {dots} {config[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def stamp(text: str, now: datetime) -> str:
    """Return a stage of the run with its time."""
    return f"[{text}] datetime: {now:%Y-%m-%d %H:%M:%S} "


def change_line(event: PrecisionChange) -> str:
    """Return which layer changes its precision, why, and when it tries again."""
    then = f"; tries FP8 again after iteration {event.probe_at}" if event.probe_at else ""
    return (
        f"PRECISION of {event.layer}: {event.before} -> {event.after} after iteration"
        f" {event.iteration} ({event.what}){then}"
    )


def rollback_line(event: Rollback) -> str:
    """Return what happened, which samples it costs and how the run goes on."""
    how = ""
    if event.without_fp8_until:
        how = f", without FP8 until iteration {event.without_fp8_until}"
    return (
        f"ROLLBACK {event.count} of {event.limit}: {event.reason} at iteration {event.iteration};"
        f" back to iteration {event.back_to}; samples {event.first_sample} to"
        f" {event.end_sample - 1} are left out{how}"
    )


def alert_line(alert: Fp8Alert) -> str:
    """Return a warning about FP8 casts; it names the worst tensor and a few more."""
    text = f"WARNING: FP8 {alert.kind} at iteration {alert.iteration}: "
    if alert.where:
        text += f"[{alert.where}] "
    text += f"{alert.path} {alert.role}: {alert.what}"
    if alert.others:
        count, named = len(alert.others), alert.others[:_NAMED]
        text += f"; also {', '.join(named)}"
        text += f" and {count - len(named)} more" if count > len(named) else ""
    return text


def memory_line(use: MemoryUse) -> str:
    """Return one rank's memory in Megatron's form; resident memory of the process off CUDA."""
    labels = ("allocated", "max allocated", "reserved", "max reserved")
    values = (
        use.allocated_bytes,
        use.peak_allocated_bytes,
        use.reserved_bytes,
        use.peak_reserved_bytes,
    )
    if use.source != "cuda":
        labels, values = ("resident", "max resident"), values[:2]  # type: ignore[assignment]
    shown = " | ".join(f"{a}: {b / _MIB:.2f}" for a, b in zip(labels, values, strict=True))
    return f"[Rank {use.rank}] (after {use.iteration} iterations) memory (MB) | {shown}"


def precision_table(
    lines: Sequence[PrecisionLine], changed: bool = False, shares: Sequence[float] = ()
) -> str:
    """Return which GEMM runs in which precision, one row a group of equal layers.

    Args:
        lines: The whole model.
        changed: Whether to show only layers that do not run as requested, in few words.
        shares: As of `PrecisionTable`.
    """
    head = ("layer", "gemm", "requested", "delivered", "kernel", "modules", "reason")
    rows = [
        (x.module, x.gemm, x.requested, x.delivered, x.kernel, str(x.count), x.reason)
        for x in lines
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    layers = [x for x in lines if x.gemm in ("all", "fprop") and not x.module.endswith(_NOT_LINEAR)]
    in_fp8, in_fp4 = (
        sum(x.count for x in layers if x.delivered.startswith(kind)) for kind in ("fp8", "fp4")
    )
    every = f"of {sum(x.count for x in layers)} linear layers"
    if in_fp4 and not in_fp8:
        text = [f"precision: {in_fp4} {every} in FP4"]
    else:
        text = [f"precision: {in_fp8} {every} in FP8" + (f", {in_fp4} in FP4" if in_fp4 else "")]
    attention = [x for x in lines if x.module.endswith("core_attention") and x.gemm in _FIRST]
    inside = sum(x.count for x in attention if x.delivered.startswith("fp8"))
    if inside:
        text[0] += f", and the attention of {inside} of {sum(x.count for x in attention)} layers"
    if changed:
        held = (x for x in lines if x.requested != x.delivered)
        text += dict.fromkeys(f"  {x.module}: {x.delivered}, {x.reason}" for x in held)
        return "\n".join(text)
    if shares and (in_fp8 or in_fp4 or inside):
        kind = "FP4" if in_fp4 and not (in_fp8 or inside) else "FP8 or FP4" if in_fp4 else "FP8"
        whose = ("of the linear layers'", "with attention's")
        parts = (f"{share:.1%} {of}" for share, of in zip(shares, whose, strict=False))
        text.append(f"  FLOPs of a step in {kind}: {', '.join(parts)}")
    for row in [head, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        text.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(text)
