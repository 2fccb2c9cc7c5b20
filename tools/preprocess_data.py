#!/usr/bin/env python3
"""Tokenize JSON lines into the .bin/.idx corpora that training reads.

Every line of the input is a JSON object with a text, or a list of texts, in each of --json-keys.
A call like

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model \
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; train with --data-path data/corpus_text_document.
"""

from __future__ import annotations

import argparse
import glob
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.tool_flags import ToolParser, run_tool
from megatron.core.datasets.preprocess import EncodeOptions, Summary, encode_files
from megatron.core.datasets.tokenizers import TOKENIZER_TYPES, TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError, MegatronError, complaint


def make_parser() -> ToolParser:
    """Return the command line."""
    parser = ToolParser(description=__doc__)
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input", required=True, help="JSON lines, plain or .gz; a pattern reads all that match"
    )
    data.add_argument("--json-keys", nargs="+", default=["text"], help="fields (default: text)")
    data.add_argument(
        "--output-prefix", required=True, help="output is PREFIX_KEY_document.{bin,idx}"
    )
    data.add_argument("--append-eod", action="store_true", help="end documents with the eod token")
    data.add_argument(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="what to do with a line that cannot be used (default: error)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    tokenizer.add_argument("--tokenizer-model", help="SentencePiece .model or tokenizer.json")
    tokenizer.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    tokenizer.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    tokenizer.add_argument("--vocab-size", type=int, help="number of ids of NullTokenizer")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    work.add_argument(
        "--log-interval", type=int, default=1000, help="documents per progress line (default: 1000)"
    )
    work.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="accepted with --keep-sequential-samples, whose order is the only one written here",
    )
    work.add_argument(
        "--keep-sequential-samples", action="store_true", help="always on: input order is kept"
    )
    work.add_argument("--split-sentences", action="store_true", help="not supported")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be honoured.

    Raises:
        DataError: Says which flag and what to do instead.
    """
    if args.split_sentences:
        raise DataError(
            complaint(
                "--split-sentences",
                "given",
                "GPT training packs whole documents, so sentences are not needed",
                "Leave the flag out",
            )
        )
    if args.partitions != 1 and not args.keep_sequential_samples:
        raise DataError(
            complaint(
                "--partitions",
                args.partitions,
                "It would deal the lines out to parts and so reorder them, but the input is "
                "streamed here, with bounded memory and in its own order, whatever its size",
                "Leave it out, or add --keep-sequential-samples",
            )
        )
    if args.log_interval < 1:
        raise DataError(
            complaint("--log-interval", args.log_interval, "It is a count", "Use 1 or more")
        )


def find_inputs(pattern: str) -> list[str]:
    """Return the file, or the files that match a pattern in sorted order.

    Raises:
        DataError: There is none.
    """
    if os.path.exists(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern))
    if not found:
        raise DataError(
            complaint("--input", pattern, "No file has this name", "Check the path or the pattern")
        )
    return found


def run(args: argparse.Namespace) -> Summary:
    """Do what the command line says."""
    check_arguments(args)
    inputs = find_inputs(args.input)
    settings = TokenizerOptions(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
    )
    tokenizer = build_tokenizer(settings)
    print(
        f"tokenizer {tokenizer.name}: vocabulary {tokenizer.vocab_size}, bos {tokenizer.bos}, "
        f"eod {tokenizer.eod}, pad {tokenizer.pad}",
        flush=True,
    )
    summary = encode_files(
        inputs,
        args.output_prefix,
        settings,
        EncodeOptions(
            keys=tuple(args.json_keys),
            append_eod=args.append_eod,
            skip_bad_lines=args.on_bad_line == "skip",
        ),
        workers=args.workers,
        log_interval=args.log_interval,
        report=lambda line: print(f"processed {line}", file=sys.stderr, flush=True),
    )
    print(f"done: {summary.rate()}")
    for key, documents in summary.documents.items():
        print(
            f"{args.output_prefix}_{key}_document: {documents} documents, "
            f"{summary.tokens[key]} tokens, {summary.empty[key]} empty texts left out"
        )
    if summary.bad_lines:
        print(
            f"{summary.bad_lines} unusable lines left out; the first: {summary.first_bad}",
            file=sys.stderr,
        )
    return summary


def _terminate(number: int, frame: FrameType | None) -> None:
    # As an exception it passes through the blocks that remove unfinished files.
    sys.exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(args)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_tool(main)
