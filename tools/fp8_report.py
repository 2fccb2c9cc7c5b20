"""Write what FP8 did to a run as one HTML page that needs nothing else.

    python pretrain_gpt.py ... --fp8-format hybrid --dllogger-json runs/a/log.json
    python tools/fp8_report.py runs/a                     writes runs/a/fp8_report.html
    python tools/fp8_report.py runs/a -o a.html

The page shows the loss with everything that happened marked in it, a heat map of layers by steps
(signal-to-noise ratio, scale, magnitude, saturation, underflow of inputs, weights and output
gradients), the precision table, and alerts, decisions and incidents as a list. It works while the
run goes on, and for a run that measured nothing: then it says why.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool
from megatron.core.errors import complaint
from megatron.observe.run_log import LoggedEvent, RunLog, RunLogError, find_log, read_log

PAGE = Path(__file__).with_name("fp8_report_page.html")
MAX_COLUMNS = 120
MAX_POINTS = 2000
MAX_EVENTS = 500
# What a cell shows that stands for several steps: the worst of them.
METRICS: dict[str, Callable[[list[float]], float]] = {
    "snr_db": min,
    "scale": min,
    "amax": max,
    "saturated": max,
    "underflow": max,
}
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_COLUMNS = {"kind", "what", "reason", "iteration", "role", "others", "path", "layer", "where"}
_ALERTS, _QUIET = ("Fp8Alert", "Incident"), ("CheckpointSaved", "RunEnd")


def buckets(items: Sequence[int], most: int) -> list[list[int]]:
    """Cut a series into at most `most` parts of about equal length, each as it comes."""
    size = max(1, -(-len(items) // most))
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _mean(values: list[float]) -> float | None:
    known = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return sum(known) / len(known) if known else None


def curve(log: RunLog) -> dict[str, Any]:
    """Return losses and gradient norm, thinned by means, with what was left behind."""
    parts = buckets(sorted(log.steps), MAX_POINTS)
    names = [n for n in next(iter(log.steps.values()), {}) if n.endswith("loss")]
    name = "lm loss" if "lm loss" in names or not names else names[0]

    def series(key: str) -> list[float | None]:
        return [_mean([log.steps[i].get(key) for i in part]) for part in parts]

    left = log.abandoned[:: max(1, len(log.abandoned) // MAX_POINTS)]
    return {
        "name": name,
        "iterations": [part[-1] for part in parts],
        "loss": series(name),
        "grad_norm": series("grad_norm"),
        "validation": [[i, _mean([v.get(name)])] for i, v in sorted(log.validation.items())],
        "abandoned": [[i, _mean([data.get(name)])] for i, data in left],
        "thinned": len(log.steps) > MAX_POINTS,
    }


def heat(log: RunLog) -> dict[str, Any] | None:
    """Return the cells: `cells[role][metric][row][column]`; None where nothing was measured."""
    steps = sorted(i for i, columns in log.stats.items() if columns.get("path"))
    if not steps:
        return None
    parts = buckets(steps, MAX_COLUMNS)
    roles: dict[str, None] = {}
    rows: dict[str, int] = {}
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for column, part in enumerate(parts):
        for step in part:
            columns = log.stats[step]
            for k, (path, role) in enumerate(zip(columns["path"], columns["role"], strict=True)):
                roles.setdefault(role)
                row = rows.setdefault(path, len(rows))
                for metric in METRICS:
                    value = columns[metric][k]
                    if value is not None:
                        found.setdefault((role, metric, row, column), []).append(value)
    cells = {
        role: {
            metric: [
                [
                    worst(values) if (values := found.get((role, metric, r, c))) else None
                    for c in range(len(parts))
                ]
                for r in range(len(rows))
            ]
            for metric, worst in METRICS.items()
        }
        for role in roles
    }
    return {
        "first": [part[0] for part in parts],
        "last": [part[-1] for part in parts],
        "paths": list(rows),
        "roles": list(roles),
        "cells": cells,
        "thinned": len(steps) > len(parts),
        "measured": len(steps),
    }


def _rest(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of an event that have no column of their own, in words."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _rest(value)
        elif key not in _IN_COLUMNS and value not in ("", None, (), []):
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            yield f"{key.replace('_', ' ')} {shown}"


def event_line(event: LoggedEvent) -> dict[str, Any]:
    """Return an event of any kind as a line of the list."""
    data = event.data
    category = "decision"
    if event.kind in _ALERTS:
        category = "alert"
    elif event.kind in _QUIET:
        category = "quiet"
    kind = str(data.get("kind") or _WORDS.sub(" ", event.kind).lower())
    where = str(data.get("path") or data.get("layer") or data.get("where") or "")
    if data.get("role"):
        where += f" {data['role']}"
    text = str(data.get("what") or data.get("reason") or "")
    rest = "" if event.kind in _ALERTS else ", ".join(_rest(data))
    if event.kind == "CheckpointSaved":
        where, text, rest = "", str(data.get("path", "")), ""
    if rest:
        text += f" ({rest})" if text else rest
    return {
        "iteration": event.iteration,
        "kind": kind,
        "category": category,
        "where": where,
        "text": text,
        "others": [str(name) for name in data.get("others") or []],
    }


def why_nothing(log: RunLog) -> str:
    """Return why there is no heat map, in one sentence."""
    config = log.start.get("config") or {}
    if config and not (config.get("fp8_format") or config.get("fp4_format")):
        return "This run is not in FP8 (no --fp8-format), so there are no casts to measure."
    if config.get("fp8_stats_interval") == 0:
        return "This run measured no casts: it has --fp8-stats-interval 0."
    if log.stats:
        return "No layer was cast to FP8 in the steps that were measured."
    return "The log has no figures of FP8 casts (yet)."


def notes(log: RunLog) -> list[str]:
    """Return what a reader should know about the log itself."""
    out = []
    if log.only_the_end_is_missing:
        out.append("The last line of the log is incomplete; the run may still be writing.")
    elif log.unreadable:
        named = ", ".join(str(n) for n in log.unreadable[:5])
        more = f" and {len(log.unreadable) - 5} more" if len(log.unreadable) > 5 else ""
        out.append(f"Lines that could not be read and are left out: {named}{more}.")
    if log.earlier_runs:
        out.append("Earlier runs in the same log are left out.")
    if log.starts > 1:
        out.append(f"The run was started {log.starts} times; the newest record of a step counts.")
    if log.abandoned:
        out.append("Grey points: steps that the run went back behind.")
    return out


def page_data(log: RunLog) -> dict[str, Any]:
    """Return everything that the page shows, as plain values without NaN."""
    config = log.start.get("config") or {}
    kind = next((k for k in ("fp4", "fp8") if config.get(f"{k}_format")), None)
    lines = [event_line(event) for event in log.events]
    data = {
        "source": log.path.name,
        "folder": log.path.resolve().parent.name,
        "run": {
            "iteration": log.last_iteration,
            "train_iters": config.get("train_iters"),
            "kind": (kind or "fp8").upper(),
            "recipe": config.get(f"{kind}_recipe"),
            "format": config.get(f"{kind}_format"),
            "interval": config.get("fp8_stats_interval"),
            "ranks": log.start.get("world_size"),
            "device": log.start.get("device"),
            "backend": log.start.get("backend"),
            "parameters": log.start.get("parameters"),
        },
        "curve": curve(log),
        "heat": heat(log),
        "why_nothing": why_nothing(log),
        "precision": log.precision,
        "events": lines[-MAX_EVENTS:],
        "events_left_out": max(0, len(lines) - MAX_EVENTS),
        "notes": notes(log),
    }
    plain: dict[str, Any] = _finite(data)
    return plain


def _finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON in a browser does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def render(data: dict[str, Any]) -> str:
    """Return the page. Text of the log cannot end the element that holds it."""
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
    for mark in "<>&":
        packed = packed.replace(mark, f"\\u{ord(mark):04x}")
    return PAGE.read_text(encoding="utf-8").replace("__DATA__", packed)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and write the page."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="folder with the run's log")
    parser.add_argument("-o", "--output", type=Path, help="default: RUN_DIR/fp8_report.html")
    args = parser.parse_args(argv)
    try:
        log = read_log(find_log(args.run))
    except RunLogError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    output = args.output or log.path.with_name("fp8_report.html")
    data = page_data(log)
    try:
        output.write_text(render(data), encoding="utf-8")
    except OSError as error:
        fix = "Name a file in a folder that can be written"
        why = f"It cannot be written: {error}"
        print(f"error: {complaint('--output', output, why, fix)}", file=sys.stderr)
        return BAD_ARGUMENTS
    shown = data["heat"]
    figures = f"{len(shown['paths'])} layers, {shown['measured']} steps" if shown else "no figures"
    print(f"wrote {output}: {figures} of FP8 casts, {len(log.events)} events")
    for note in data["notes"]:
        print(f"note: {note}")
    return 0


if __name__ == "__main__":
    run_tool(main)
