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
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError
from megatron.config.tool_flags import ToolParser, run_tool
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.errors import DataError, MegatronError, complaint
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.observe.lines import perplexity
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


def windows(tokens: np.ndarray, length: int, rows: int) -> Iterator[torch.Tensor]:
    """Cut a stream into batches `[rows, length + 1]`; each window repeats the last token before it.

    The windows of the end, too few for a batch or shorter, come in batches of their own.
    """
    count = max(0, len(tokens) - 1)
    full = count // length
    for first in range(0, full, rows):
        last = min(first + rows, full)
        yield torch.stack(
            [
                torch.from_numpy(tokens[i * length : (i + 1) * length + 1].astype(np.int64))
                for i in range(first, last)
            ]
        )
    if count % length:
        yield torch.from_numpy(tokens[full * length :].astype(np.int64))[None]


@torch.no_grad()
def total_loss(model: GPTModel, tokens: np.ndarray, length: int, rows: int) -> tuple[float, int]:
    """Sum of the losses of all predicted tokens, and their number."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for batch in windows(tokens, length, rows):
        inputs, labels = batch[:, :-1].to(device), batch[:, 1:].to(device)
        positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
        losses = model(inputs, positions, labels)
        total += float(losses.double().sum())
        count += losses.numel()
    return total, count


def read_corpus(prefix: str, limit: int | None) -> np.ndarray:
    """The tokens of a corpus, document after document."""
    corpus = IndexedDataset(prefix)
    parts, have = [np.empty(0, dtype=corpus.dtype)], 0
    for index in range(len(corpus)):
        if limit is not None and have >= limit:
            break
        parts.append(corpus[index])
        have += len(parts[-1])
    return np.concatenate(parts)[:limit]


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(complaint("--text", path, str(error), "Name a UTF-8 text file")) from error


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
    restored = restore_from(args)
    config = restored.config
    check_arguments(args, config.max_position_embeddings)
    num_bytes = None
    if args.text is not None:
        text = read_text(args.text)
        tokens = np.asarray(restored.tokenizer.tokenize(text), dtype=np.int64)[: args.max_tokens]
        whole = args.max_tokens is None or len(tokens) < args.max_tokens
        num_bytes = len(text.encode("utf-8")) if whole else None
    else:
        tokens = read_corpus(args.data_path, args.max_tokens)
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
