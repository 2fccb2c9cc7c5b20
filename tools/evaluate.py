#!/usr/bin/env python3
"""Measure how well a checkpoint predicts a corpus or a text.

    python tools/evaluate.py --load runs/tiny --data-path data/held_out_text_document
    python tools/evaluate.py --load runs/tiny --text book.txt --json

Every token but the first is predicted once, from what precedes it in its window of --seq-length
tokens. The result does not depend on the layout the checkpoint was saved in, nor on the batch size
(except in FP8 with --fp8-recipe tensorwise, whose scales come from the batch at hand).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError
from megatron.config.tool_flags import ToolParser, run_tool
from megatron.core.errors import DataError, MegatronError, complaint
from megatron.observe.lines import perplexity
from megatron.training.perplexity import read_corpus, read_text, total_loss
from megatron.training.restore import add_flags, restore_from


def make_parser() -> ToolParser:
    """Return the command line."""
    parser = ToolParser(description=__doc__)
    add_flags(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data-path", help="prefix of a .bin/.idx pair")
    what.add_argument("--text", type=Path, help="text file, tokenized as one document")
    parser.add_argument("--seq-length", type=int, help="window (default: the checkpoint's)")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, help="stop after so many tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def check_arguments(args: argparse.Namespace, positions: int) -> None:
    """Refuse counts that cannot work.

    Raises:
        DataError: One of them cannot.
    """
    for flag in ("seq_length", "micro_batch_size", "max_tokens"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            name = "--" + flag.replace("_", "-")
            raise DataError(complaint(name, value, "It is a count", "Use at least 1"))
    if args.seq_length is not None and args.seq_length > positions:
        raise DataError(
            complaint(
                "--seq-length",
                args.seq_length,
                f"The model has {positions} positions (--max-position-embeddings)",
                f"Use at most {positions}",
            )
        )


def run(args: argparse.Namespace) -> dict[str, float | int | str]:
    """Load, measure, and return the figures."""
    # What is to be read is looked at first: loading takes long.
    text, tokens = "", np.empty(0, dtype=np.int64)
    if args.text is not None:
        text = read_text(args.text, "--text")
    else:
        tokens = read_corpus(args.data_path, args.max_tokens)
    restored = restore_from(args)
    config = restored.config
    check_arguments(args, config.max_position_embeddings)
    num_bytes = None
    if args.text is not None:
        tokens = np.asarray(restored.tokenizer.tokenize(text), dtype=np.int64)[: args.max_tokens]
        whole = args.max_tokens is None or len(tokens) < args.max_tokens
        num_bytes = len(text.encode("utf-8")) if whole else None
    if len(tokens) < 2:
        raise DataError(
            complaint(
                "--text" if args.text is not None else "--data-path",
                f"{len(tokens)} tokens",
                "There is nothing to predict",
                "Give at least two tokens",
            )
        )
    length = args.seq_length or config.seq_length
    with restored.fp8.not_recording():
        total, count = total_loss(restored.model, tokens, length, args.micro_batch_size)
    loss = total / count
    figures: dict[str, float | int | str] = {
        "load": args.load,
        "iteration": restored.iteration,
        "lm loss": loss,
        "ppl": perplexity(loss),
        "tokens": count,
        "seq_length": length,
    }
    if num_bytes:
        figures["bits_per_byte"] = total / math.log(2) / num_bytes
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 after a message about what is wrong."""
    args = make_parser().parse_args(argv)
    try:
        figures = run(args)
    except (MegatronError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(figures))
        return 0
    line = (
        f" loss at iteration {figures['iteration']} on {figures['tokens']} tokens"
        f" | lm loss value: {figures['lm loss']:.6E} | lm loss PPL: {figures['ppl']:.6E} |"
    )
    if "bits_per_byte" in figures:
        line += f" bits per byte: {figures['bits_per_byte']:.4f} |"
    print(line)
    return 0


if __name__ == "__main__":
    run_tool(main)
