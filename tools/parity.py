#!/usr/bin/env python3
"""Check on your own configuration that a layout does not change the mathematics.

    python tools/parity.py --config my.yaml
    python tools/parity.py --config my.yaml --layouts tp2 tp2sp pp2 pp2vpp2 tp2pp2cp1dp2
    python tools/parity.py --layouts ep2 tp2ep2etp1 --num-layers 32 --hidden-size 4096 ...

The model is made small (all its features stay), trained by one process and at each layout by as
many processes of this machine, on the same samples, and compared: losses, gradient norms and the
gradient of every parameter, in fp32 and in the precision of the configuration. Every flag that is
not listed below is one of pretrain_gpt.py. docs/parity.md explains the bands.

A layout is written as axes with sizes (tp pp cp dp ep etp vpp; what is not named is 1) and switches
(sp distopt recompute, with "no" in front to switch off), as in tp2sp or pp2vpp2-distopt; behind a
colon other settings of that kind, as in pp2:pipeline_schedule=gpipe.

Leaves with 0 if everything is inside its band, 1 if something is not or a rank failed, 2 if the
arguments cannot work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError, RunConfig
from megatron.config.cli import parse, read_settings
from megatron.config.draft import own_world_size
from megatron.config.schema import SPECS
from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool
from megatron.core.errors import MegatronError, complaint
from megatron.training.checkpointing import with_checkpoint_args
from megatron.training.parity.check import Plan, Result, check, prepare
from megatron.training.parity.judge import BANDS, Comparison
from megatron.training.providers import saved_config

# What --shrink may set; everything else is settled by a flag, --steps or a layout.
_SECTIONS_WITH_SIZES = ("model", "moe", "fp8")
_OTHER_SIZES = ("vocab_size", "micro_batch_size", "recompute_num_layers", "ddp_num_buckets")
_COLUMNS = ("loss", "grad norm", "gradients", "weights", "scales")
INTERRUPTED = 130
_LONGEST_S = 1e7  # what the system's clocks can wait for
_SHOWN = 6  # diverging parameters of one layout


def make_parser() -> ToolParser:
    """Return the command line, without the flags of a run."""
    parser = ToolParser(description=__doc__, prog="parity.py")
    parser.add_argument(
        "--layouts", nargs="+", help="what to try (default: each axis, and your own combination)"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of each training (default: 4)")
    parser.add_argument(
        "--shrink",
        nargs="+",
        metavar="off | NAME=VALUE",
        default=[],
        help="off: keep every size; or a size of the small model, as in num_layers=4",
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to a file")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds one training may take (default: 600)"
    )
    return parser


# -- input --------------------------------------------------------------------------------------


def read_config(tokens: Sequence[str]) -> RunConfig:
    """Read the user's configuration as a run would.

    Raises:
        ConfigError: It cannot work.
        CheckpointError: It names a checkpoint that is unusable.
    """
    world_size = own_world_size(read_settings(tokens))
    cfg, _ = parse(tokens, world_size, saved_config)
    return with_checkpoint_args(cfg)


def read_sizes(items: Sequence[str]) -> tuple[bool, dict[str, str]]:
    """Read ``--shrink``: whether to shrink at all, and the sizes that were chosen.

    Raises:
        MegatronError: It cannot be read.
    """
    sizes: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if item == "off":
            continue
        if not equals or name not in SPECS or SPECS[name].setting.derived:
            why = "It is neither off nor a setting with a value"
            fix = "Write something like num_layers=4 or seq_length=128"
            raise MegatronError(complaint("--shrink", repr(item), why, fix))
        if SPECS[name].section not in _SECTIONS_WITH_SIZES and name not in _OTHER_SIZES:
            why = f"{name} is no size of a model"
            fix = "The batch follows from the layouts, the rest from --layouts, --steps and flags"
            raise MegatronError(complaint("--shrink", repr(item), why, fix))
        sizes[name] = value
    return "off" not in items, sizes


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is trained.

    Raises:
        MegatronError: Something cannot.
    """
    if args.steps < 1:
        why = "Nothing would be trained"
        raise MegatronError(complaint("--steps", args.steps, why, "Use at least 1; FP8 needs 2"))
    if not 0 < args.timeout < _LONGEST_S:
        why = "It is a duration"
        raise MegatronError(complaint("--timeout", args.timeout, why, "Give seconds"))
    if args.json is not None:
        place = args.json if args.json.exists() else args.json.parent
        if args.json.is_dir() or not os.access(place, os.W_OK):
            why = "It is a folder" if args.json.is_dir() else "It cannot be written"
            fix = "Name a file in a folder that exists"
            raise MegatronError(complaint("--json", args.json, why, fix))


# -- output -------------------------------------------------------------------------------------


def introduction(plan: Plan) -> str:
    """Return what is going to be compared, and how it differs from the user's configuration."""
    sizes = [str(change) for change in plan.model.changes if not change.why]
    lines = ["model:  " + (", ".join(sizes) or "as configured")]
    why: dict[str, list[str]] = {}
    for change in plan.model.changes:
        if change.why:
            why.setdefault(change.why, []).append(str(change))
    lines += [f"set:    {', '.join(items)}: {reason}" for reason, items in why.items()]
    lines += [f"skipped {layout}: {reason}" for layout, reason in plan.skipped]
    lines.append(
        f"each layout: {plan.steps} steps in {' and '.join(plan.precisions)}, against one process"
    )
    return "\n".join(lines)


def first_cells(plan: Plan, layout: str, ranks: object, precision: str) -> str:
    """Return the beginning of a line of the table."""
    width = max(12, *(len(one.text) + 2 for one in plan.layouts))
    wide = max(len(one) + 2 for one in (*plan.precisions, "precision"))
    return f"{layout:<{width}}{ranks:>5}  {precision:<{wide}}"


def heading(plan: Plan) -> str:
    """Return the first line of the table."""
    names = "".join(f"{name:>19}" for name in _COLUMNS)
    return first_cells(plan, "layout", "ranks", "precision") + names + "  verdict"


def row(plan: Plan, result: Result, comparison: Comparison) -> str:
    """Return one line of the table: difference / band of each kind."""
    cells = []
    for name in _COLUMNS:
        measure = comparison.measures.get(name)
        text = "-" if measure is None else f"{measure.error:.1e} / {measure.band:.1e}"
        cells.append(f"{text:>19}")
    verdict = "same" if comparison.inside else "DIVERGES"
    head = first_cells(plan, result.layout, result.ranks, comparison.precision)
    return head + "".join(cells) + f"  {verdict}"


def findings(comparison: Comparison) -> list[str]:
    """Say what is outside of its band, and where it begins."""
    lines = []
    for name, measure in comparison.measures.items():
        if measure.inside:
            continue
        where = f" in {measure.name}" if measure.name != name else ""
        wanted = f"at most {measure.band:.1e}" if measure.band else "the same bits"
        what = measure.name if name == "copies" else f"{measure.error:.2e}{where}"
        lines.append(f"{name}: {what}; accepted: {wanted}")
    outside = comparison.diverging
    if outside:
        lines.append(
            f"gradients of {len(outside)} of {len(comparison.parameters)} parameters diverge;"
            f" first in forward order: {outside[0].name}; last: {outside[-1].name}"
        )
        lines += [f"  {one.name} {one.error:.2e}" for one in outside[:_SHOWN]]
        if len(outside) > _SHOWN:
            lines.append(f"  ... and {len(outside) - _SHOWN} more")
    return lines


def legend() -> str:
    """Say what the columns are and why the bands are where they are."""
    lines = [f"{name:<10} {text}" for name, text in BANDS.items()]
    return "\n".join(["each cell: difference from one process / accepted band", *lines])


def conclusion(plan: Plan, results: Sequence[Result], bad: Sequence[str]) -> str:
    """Return the last line."""
    if not results[0].inside:
        return "one process fails, so there is nothing to compare with"
    if bad:
        return f"{len(bad)} of {len(plan.layouts)} layouts diverge or fail: {', '.join(bad)}"
    return f"all {len(plan.layouts)} layouts do what one process does"


def as_json(plan: Plan, results: Sequence[Result]) -> dict[str, Any]:
    """Return everything that was measured as plain values."""
    return {
        "settings": plan.model.fields,
        "changes": [vars(change) for change in plan.model.changes],
        "skipped": dict(plan.skipped),
        "steps": plan.steps,
        "precisions": list(plan.precisions),
        "bands": BANDS,
        "inside": all(result.inside for result in results),
        "layouts": [
            {
                "layout": result.layout,
                "ranks": result.ranks,
                "inside": result.inside,
                "failures": [{"precision": p, "error": text} for p, text in result.failures],
                "comparisons": [
                    {
                        "precision": one.precision,
                        "inside": one.inside,
                        "measures": {k: vars(m) for k, m in one.measures.items()},
                        "first_diverging": one.diverging[0].name if one.diverging else None,
                        "parameters": [vars(parameter) for parameter in one.parameters],
                    }
                    for one in result.comparisons
                ],
            }
            for result in results
        ],
    }


def plain(value: Any) -> Any:
    """Return a value in JSON's terms, which has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    finite = isinstance(value, float) and math.isfinite(value)
    return value if finite or isinstance(value, int | str | None) else str(value)


def run(plan: Plan, timeout: float) -> list[Result]:
    """Train everything, printing each result as it comes."""
    results = []
    print(introduction(plan), flush=True)
    print(f"\n{heading(plan)}", flush=True)
    for result in check(plan, timeout):
        results.append(result)
        for comparison in result.comparisons:
            print(row(plan, result, comparison))
            for line in findings(comparison):
                print(f"    {line}")
        for precision, text in result.failures:
            print(first_cells(plan, result.layout, result.ranks, precision) + "FAILED")
            print("\n".join(f"    {line}" for line in text.splitlines()))
        sys.stdout.flush()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args, tokens = make_parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    started = time.monotonic()
    try:
        check_arguments(args)
        small, sizes = read_sizes(args.shrink)
        cfg = read_config(tokens)
        plan = prepare(cfg, args.layouts, steps=args.steps, small=small, sizes=sizes)
    except (MegatronError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    try:
        results = run(plan, args.timeout)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    bad = [result.layout for result in results if not result.inside]
    print(f"\n{legend()}\n\n{conclusion(plan, results, bad)} ({time.monotonic() - started:.0f} s)")
    if args.json is not None:
        report = plain(as_json(plan, results))
        args.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    run_tool(main)
