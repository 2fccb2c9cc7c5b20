"""Show what a run is going to do, without running it.

    python tools/show.py schedule --pp 4 --microbatches 8
    python tools/show.py schedule --pp 4 --microbatches 8 --schedule interleaved --vpp 2
    python tools/show.py schedule --pp 4 --microbatches 8 --schedule zb-h1
    python tools/show.py comm --config configs/llama3_8b.yaml --fake-world-size 64
    python tools/show.py gemm --device-capability 9.0
    python tools/show.py gemm --config configs/llama3_8b.yaml --fp8-format e4m3 --fp8-recipe mxfp8

schedule: one line a pipeline rank and one column a time step; ``3`` is the forward pass of
microbatch 3, ``3'`` its backward pass, ``3w`` its weight pass in a schedule that has them, ``.``
idle time. With virtual stages a letter names the rank's stage, as in ``a3``.

comm: what a rank sends in a training step, by part of the step, and what FP8 saves of it and
spends on scales, with the flags that decide about it. It takes the flags of pretrain_gpt.py, needs
no other process, and shows ranks that send the same once.

gemm: which kernel multiplies FP8 operands, and why, on this machine or on a device of another
compute capability: for every recipe, or with a run's flags for every layer of its model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config import ConfigError
from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool
from megatron.core.errors import MegatronError, complaint
from megatron.core.pipeline_parallel.schedule import KINDS, Op, generate, lower, to_text
from megatron.core.pipeline_parallel.simulate import Report, ideal_bubble, simulate

_MAX_COLUMNS = 400
_MARKS = {Op.F: "", Op.B: "'", Op.W: "w"}
_FORMULAS = {
    "zb-h1": "((p - 1) (f + b) - (min(m, p) - 1) min(f, b, w)) / (m (f + b + w))",
    "other": "(p - 1) / (v m)",
}


def grid(report: Report, pipeline_size: int, virtual_size: int) -> str:
    """Return the time axis as text, one line a rank.

    Args:
        report: From a simulation in which every cost is a whole number.
        pipeline_size: Ranks.
        virtual_size: Stages a rank.
    """
    rows = []
    for number, spans in enumerate(report.spans):
        cells = ["."] * round(report.makespan)
        for span in spans:
            action = span.action
            stage = chr(ord("a") + action.stage // pipeline_size) if virtual_size > 1 else ""
            for step in range(round(span.start), round(span.end)):
                cells[step] = f"{stage}{action.microbatch}{_MARKS[action.op]}"
        rows.append((number, cells))
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    return "\n".join(
        f"rank {number}: " + " ".join(cell.ljust(width) for cell in cells).rstrip()
        for number, cells in rows
    )


def describe(report: Report, args: argparse.Namespace) -> str:
    """Return the figures below the grid."""
    costs = {"backward_cost": args.backward_cost, "weight_cost": args.weight_cost}
    ideal = ideal_bubble(args.microbatches, args.pp, args.vpp, args.schedule, **costs)
    formula = _FORMULAS.get(args.schedule, _FORMULAS["other"])
    backward = f"backward {args.backward_cost:g}"
    if args.schedule == "zb-h1":
        backward += f", of which {args.weight_cost:g} for the weights"
    what = "(stage, microbatch) pairs" if args.vpp > 1 else "microbatches"
    live = ", ".join(str(n) for n in report.peak_live)
    return (
        f"bubble: {report.bubble:.1%} of the computing time; {formula} = {ideal:.1%}\n"
        f"time: {report.makespan:g} with forward 1 and {backward}\n"
        f"peak of {what} whose activations are kept, by rank: {live}"
    )


def show_schedule(args: argparse.Namespace) -> int:
    """Print a schedule's grid and figures, or its actions; returns the exit code."""
    if args.vpp is None:
        args.vpp = 2 if args.schedule == "interleaved" else 1
    if args.schedule != "interleaved" and args.vpp > 1:
        fix = "Add --schedule interleaved"
        why = "Several stages a rank are interleaved"
        return _refused(complaint("--vpp", args.vpp, why, fix))
    if args.schedule == "zb-h1" and not 0 < args.weight_cost < args.backward_cost:
        why = f"It is a part of the backward pass, which takes {args.backward_cost}"
        fix = "Make it at least 1 and --backward-cost larger"
        return _refused(complaint("--weight-cost", args.weight_cost, why, fix))
    schedule = lower(
        generate(
            args.microbatches,
            pipeline_size=args.pp,
            virtual_size=args.vpp,
            kind="1f1b" if args.schedule == "interleaved" else args.schedule,
            group_size=args.group_size,
        )
    )
    report = simulate(schedule, backward_cost=args.backward_cost, weight_cost=args.weight_cost)
    if args.actions:
        print(to_text(schedule))
    elif report.makespan <= _MAX_COLUMNS:
        print(grid(report, args.pp, args.vpp))
    else:
        print(f"(no grid: it would be {report.makespan:g} columns wide)")
    print(describe(report, args))
    return 0


def _refused(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return BAD_ARGUMENTS


def show_communication(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Print what ranks send in a step.

    Args:
        args: `rank` and `json`.
        flags: Those of the run.
    """
    # Here, so that a schedule is shown without paying for torch.
    from megatron.config.cli import parse
    from megatron.training.communication import (
        as_dict,
        lines,
        readable,
        saving_lines,
        savings,
        sent_bytes,
    )
    from megatron.training.dry_run import communication, complete
    from megatron.training.dry_run.ranks import spans
    from megatron.training.providers import saved_config

    config, _ = parse([*flags, "--dry-run"], 1, saved_config)
    found = communication(complete(config)[0], args.rank)
    what = "pipeline_ranks" if args.rank is None else "ranks"
    if args.json:
        entries = [
            {
                what: where,
                "sent_bytes": sent_bytes(rows),
                "rows": as_dict(rows),
                "savings": as_dict(savings(rows)),
            }
            for where, rows in found
        ]
        print(json.dumps({"world_size": config.world_size, "communication": entries}, indent=1))
        return
    for where, rows in found:
        name = what.replace("_", " ").removesuffix("s")
        total = readable(sent_bytes(rows))
        print(f"{name} {spans(where)}, a step of {config.world_size} rank(s): {total} sent")
        print("\n".join(f"  {line}" for line in (*lines(rows), *saving_lines(rows))))


def show_products(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print which kernel multiplies what.

    Args:
        args: `device_capability` and `json`.
        flags: Those of the run; none for a table of recipes.
    """
    from megatron.core.fp8 import kernels
    from megatron.training.products import Place, rows_of_recipes, table

    wanted = args.device_capability
    try:
        place = Place.here() if wanted is None else Place.imagined(wanted)
    except ValueError:
        why = "It is neither cpu nor a compute capability"
        return _refused(complaint("--device-capability", wanted, why, "Write cpu, or as in 9.0"))
    result: dict[str, object] = {"device": place.describe()}
    if flags:
        result["layers"], text = _layers_on(place, flags)
    else:
        rows = rows_of_recipes(place)
        result["recipes"], text = rows, table(rows)
    if place.device is not None:
        result["casts"] = kernels.describe(place.device)
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"FP8 products on {result['device']}")
    print(text)
    for group, why in kernels.describe(place.device).items() if place.device is not None else ():
        print(f"kernels that cast ({group}): {why}")
    return 0


def _layers_on(place: Any, flags: Sequence[str]) -> tuple[list[dict[str, object]], str]:
    """The precision table of a run's model on a device, as entries and as text."""
    from dataclasses import asdict

    from megatron.config.alignment import padding
    from megatron.observe.lines import precision_table
    from megatron.training.precision import summarize
    from megatron.training.preflight import read_run
    from megatron.training.products import layers_on_paper, rows_of_layers

    config = read_run(flags)
    layers = layers_on_paper(config)
    found = summarize(rows_of_layers(layers, place), cfg=config)
    recipes = {layer.state.recipe for layer in layers} - {None}
    padded = any(place.verdict(recipe).hardware for recipe in recipes) and padding(config)
    text = "\n".join(filter(None, (precision_table(found.lines, shares=found.shares), padded)))
    return [asdict(line) for line in found.lines], text


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = ToolParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="schedule|comm|gemm", required=True)
    _add_schedule(commands.add_parser("schedule", help="a pipeline schedule on a time axis"))
    comm = commands.add_parser("comm", help="what a rank sends in a step; takes a run's flags")
    comm.add_argument("--rank", type=int, help="one rank (default: all that send something else)")
    comm.add_argument("--json", action="store_true", help="machine-readable, in bytes")
    gemm = commands.add_parser("gemm", help="which kernel multiplies FP8 operands, and why")
    gemm.add_argument("--device-capability", help="cpu, or a compute capability (default: here)")
    gemm.add_argument("--json", action="store_true", help="machine-readable")
    args, flags = parser.parse_known_args(argv)
    if args.command == "schedule" and flags:
        parser.parse_args(argv)  # says what is wrong with them
    try:
        if args.command == "schedule":
            return show_schedule(args)
        if args.command == "gemm":
            return show_products(args, flags)
        show_communication(args, flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_ARGUMENTS
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _add_schedule(one: argparse.ArgumentParser) -> None:
    """Declare the arguments of `schedule`."""
    one.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    one.add_argument("--microbatches", type=int, required=True, help="microbatches of a step")
    one.add_argument(
        "--schedule",
        choices=(*KINDS, "interleaved"),
        default="1f1b",
        help="interleaved is 1f1b with several stages a rank",
    )
    one.add_argument("--vpp", type=int, help="virtual stages a rank (default: 2 if interleaved)")
    one.add_argument("--group-size", type=int, help="microbatches in a group (default: --pp)")
    one.add_argument(
        "--backward-cost", type=int, default=2, help="time of a backward pass; a forward takes 1"
    )
    one.add_argument(
        "--weight-cost", type=int, default=1, help="part of it that is zb-h1's weight pass"
    )
    one.add_argument("--actions", action="store_true", help="list the actions instead")


if __name__ == "__main__":
    run_tool(main)
