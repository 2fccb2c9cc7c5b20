#!/usr/bin/env python3
"""Measure which layers FP8 harms most, and write a policy that keeps those in high precision.

    python tools/fp8_sensitivity.py --output policy.yaml --config my.yaml --load checkpoints
    python tools/fp8_sensitivity.py --output policy.yaml --group layer --keep-top 2 --bf16 \
        --fp8-format hybrid --fp8-recipe tensorwise --num-layers 8 ...
    python pretrain_gpt.py --config my.yaml --fp8-policy policy.yaml ...

Every flag that is not listed below is one of pretrain_gpt.py, and the recipe that is judged is the
one that these flags ask for. On the same batches the model runs in high precision, and then with
one group of layers after the other in FP8; no weight changes. The harm of a group is what it
does to the gradient of the whole model (relative error), or with --rank-by loss to the loss. One
process does everything: a layout among the flags is left out. It takes (groups + 4) passes forward
and backward for each batch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError, RunConfig, make_config
from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool
from megatron.core.errors import MegatronError, complaint
from megatron.core.fp8 import Role
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import Launch, start
from megatron.training.parity.layouts import one_process
from megatron.training.progress import Progress
from megatron.training.providers import setup_model, setup_sources, with_tokenizer
from megatron.training.sensitivity import (
    FIGURES,
    KINDS,
    Group,
    Harm,
    Probe,
    chosen,
    groups_of,
    policy_text,
    ranked,
)
from tools.parity import read_config

_DROPPED = (
    *("save", "save_interval", "dry_run", "fake_world_size"),
    *("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
)
_HARM = {"gradient": "gradient error", "loss": "loss change"}
_ROLES = {"input": Role.INPUT, "weight": Role.WEIGHT, "gradient": Role.GRAD_OUTPUT}


def make_parser() -> ToolParser:
    """Return the command line, without the flags of a run."""
    parser = ToolParser(description=__doc__, prog="fp8_sensitivity.py")
    parser.add_argument("--output", type=Path, required=True, help="file for the policy")
    parser.add_argument(
        "--group",
        choices=KINDS,
        default="module",
        help="what is judged together: one linear layer or attention (module), those of a"
        " transformer layer (layer), those of a name in all layers (kind)",
    )
    parser.add_argument("--steps", type=int, default=2, help="batches to measure on (default: 2)")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument("--keep-top", type=int, help="keep that many groups in high precision")
    keep.add_argument(
        "--keep-share",
        type=float,
        help="keep groups that do up to this part of the multiplications (default: 0.1)",
    )
    parser.add_argument(
        "--rank-by", choices=FIGURES, default="gradient", help="what counts as harm"
    )
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is built.

    Raises:
        MegatronError: Something cannot.
    """
    for flag, value in (("--steps", args.steps), ("--keep-top", args.keep_top)):
        if value is not None and value < 1:
            raise MegatronError(complaint(flag, value, "It is a count", "Use at least 1"))
    if args.keep_top is None and args.keep_share is None:
        args.keep_share = 0.1
    if args.keep_share is not None and not 0 < args.keep_share < 1:
        why = "It is a part of the work"
        raise MegatronError(complaint("--keep-share", args.keep_share, why, "Use 0.05, say"))
    if not args.output.absolute().parent.is_dir():
        why = "There is no such folder"
        raise MegatronError(complaint("--output", args.output, why, "Make it, or name another"))


def alone(cfg: RunConfig) -> RunConfig:
    """The user's configuration for one process, with FP8 from the start.

    Raises:
        ConfigError: It cannot work so.
    """
    given = {k: v for k, v in one_process(cfg.given).items() if k not in _DROPPED}
    given |= {"global_batch_size": cfg.global_batch_size, "fp8_warmup_iters": 0}
    return make_config(1, **given)


def window(cfg: RunConfig, progress: Progress, steps: int) -> list[tuple[int, int]]:
    """Number of the iteration and samples read before it, for each batch."""
    first = min(progress.iteration, max(0, cfg.train_iters - steps))
    samples = progress.consumed_train_samples - (progress.iteration - first) * cfg.global_batch_size
    return [(first + i + 1, max(0, samples) + i * cfg.global_batch_size) for i in range(steps)]


def table(ranking: Sequence[tuple[Group, Harm]], kept: Sequence[Group], rank_by: str) -> list[str]:
    """The ranking as text."""
    marks = {figure: " *" if figure == rank_by else "" for figure in FIGURES}
    head = ("rank", "group", f"gradient error{marks['gradient']}", f"loss change{marks['loss']}",
            *(f"{name} SNR (dB)" for name in _ROLES), "work", "")  # fmt: skip
    rows = [
        (
            str(rank),
            group.name,
            f"{harm.gradient_error:.4f}",
            f"{harm.loss_change:+.2e}",
            *(_decibels(harm.snr(role)) for role in _ROLES.values()),
            f"{group.share:.1%}",
            "kept in high precision" if group in kept else "",
        )
        for rank, (group, harm) in enumerate(ranking, 1)
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _decibels(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def run(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Measure, show the ranking, write the policy."""
    check_arguments(args)
    runtime, tokenizer = with_tokenizer(start(alone(read_config(flags)), Launch()))
    cfg, progress = runtime.config, Progress()
    parts = setup_model(cfg, runtime)
    groups = groups_of(cfg, parts, args.group)
    loaded = load_checkpoint(
        cfg, runtime.mesh, model=parts.model, optimizer=None, scheduler=None, fp8=parts.fp8,
        progress=progress, say=print,
    )  # fmt: skip
    if not loaded:
        print("NOTE: no checkpoint: the weights are random, as at the start of a run")
    sources = setup_sources(cfg, tokenizer, runtime)
    try:
        if sources.train is None:
            why = "There is nothing to measure on"
            raise MegatronError(complaint("data", "no training split", why, "Give one"))
        probe = Probe(cfg, runtime, parts, sources.train, groups)
        measure(args, cfg, probe, groups, window(cfg, progress, args.steps))
    finally:
        sources.close()


def measure(
    args: argparse.Namespace,
    cfg: RunConfig,
    probe: Probe,
    groups: Sequence[Group],
    batches: Sequence[tuple[int, int]],
) -> None:
    """Rank the groups, show them, write the policy."""
    recipe = groups[0].layers[0].decision.summary
    print(
        f"{len(groups)} groups ({args.group}) in FP8 one after the other, first {recipe}, on"
        f" {len(batches)} batches of {cfg.global_batch_size} samples"
    )
    probe.calibrate(*batches[0])
    harms = probe.measure(
        [(group,) for group in groups],
        batches,
        lambda done: print(f"batch {done} of {len(batches)}", file=sys.stderr),
    )
    ranking = ranked(groups, harms, args.rank_by)
    kept = chosen(ranking, args.keep_top, args.keep_share)
    print("\n".join(table(ranking, kept, args.rank_by)))
    rest = [group for group in groups if group not in kept]
    everything, chosen_rest = probe.measure([groups, rest], batches)
    share = sum(group.share for group in kept)
    summary = (
        f"{len(kept)} of {len(groups)} groups with {share:.1%} of the work in high precision:\n"
        f"gradient error {chosen_rest.gradient_error:.4f} instead of"
        f" {everything.gradient_error:.4f}, loss change {chosen_rest.loss_change:+.2e} instead of"
        f" {everything.loss_change:+.2e}"
    )
    ranks = {group.name: (rank, harm) for rank, (group, harm) in enumerate(ranking, 1)}
    reasons = [
        (
            group,
            f"{_HARM[args.rank_by]} {ranks[group.name][1].figure(args.rank_by):.3g} in FP8,"
            f" rank {ranks[group.name][0]} of {len(groups)}",
        )
        for group in kept
    ]
    comment = (
        f"Written by tools/fp8_sensitivity.py --group {args.group} --steps {args.steps}"
        f" --rank-by {args.rank_by}.\n{summary}"
    )
    text = policy_text(cfg, reasons, comment)
    cfg.replace(fp8_policy=text)  # a run can follow it
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"It cannot be written: {error.strerror}"
        raise MegatronError(complaint("--output", args.output, why, "Name another")) from error
    print(f"{summary}\nwritten: {args.output} (use it as --fp8-policy {args.output})")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1 after a failure, 2 if the arguments cannot work."""
    args, flags = make_parser().parse_known_args(argv)
    try:
        run(args, flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_ARGUMENTS
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
