#!/usr/bin/env python3
"""Tokenize text into the .bin/.idx corpora that training reads.

The input is JSON lines (plain, .gz or .zst) or Parquet: every line is an object with a text, or a
list of texts, in each of --json-keys. A call like

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model \
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; train with --data-path data/corpus_text_document.
The same call with --resume goes on with a run that was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.tool_flags import ToolParser, add_tokenizer_flags, run_tool, stop_on_sigterm
from megatron.core.datasets.encoding import EncodeOptions
from megatron.core.datasets.preprocess import Summary, encode_files, measure_rate
from megatron.core.datasets.text_input import find_inputs, refuse_address
from megatron.core.datasets.tokenizers import TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError, MegatronError, complaint

_SENTENCES = "GPT training packs whole documents, so sentences are not needed"
REFUSED = {
    "--split-sentences": _SENTENCES,
    "--keep-newlines": f"It belongs to --split-sentences. {_SENTENCES}",
    "--lang": f"It belongs to --split-sentences. {_SENTENCES}",
}


def make_parser() -> ToolParser:
    """Return the command line."""
    parser = ToolParser(description=__doc__)
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        help="JSON lines, plain, .gz or .zst, or Parquet: files, folders and quoted patterns",
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
    data.add_argument(
        "--resume", action="store_true", help="go on with a run of this output if there is one"
    )
    add_tokenizer_flags(parser.add_argument_group("tokenizer"), required=True)
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    work.add_argument(
        "--log-interval", type=int, default=1000, help="documents per progress line (default: 1000)"
    )
    work.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="deal lines out to so many parts, which are written one behind the other (default: 1)",
    )
    work.add_argument(
        "--keep-sequential-samples", action="store_true", help="keep the order despite --partitions"
    )
    search = parser.add_argument_group("search for a number of workers")
    search.add_argument(
        "--find-optimal-num-workers", action="store_true", help="measure only; nothing is written"
    )
    search.add_argument(
        "--workers-to-check", type=int, nargs="+", default=[16, 32, 64], help="default: 16 32 64"
    )
    search.add_argument(
        "--max-documents", type=int, default=100_000, help="length of a measurement"
    )
    for flag in REFUSED:
        value = {"nargs": 1} if flag == "--lang" else {"nargs": 0}
        parser.add_argument(flag, action=_Refused, help="not supported", **value)
    return parser


class _Refused(argparse.Action):
    """A flag of Megatron-LM's that has no meaning here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Remember that it was given."""
        refused = getattr(namespace, "refused", [])
        namespace.refused = [*refused, option_string]


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be honoured.

    Raises:
        DataError: Says which flag and what to do instead.
    """
    for flag in getattr(args, "refused", []):
        raise DataError(complaint(flag, "it", REFUSED[flag], "Leave the flag out"))
    counts = {
        "--log-interval": args.log_interval,
        "--partitions": args.partitions,
        "--max-documents": args.max_documents,
        "--workers-to-check": min(args.workers_to_check),
    }
    for flag, value in counts.items():
        if value < 1:
            raise DataError(complaint(flag, value, "It is a count", "Use 1 or more"))
    for path in args.input:
        refuse_address("--input", path)
    refuse_address("--output-prefix", args.output_prefix)
    for key in args.json_keys:
        if set(key) & {"/", "\0"}:
            why = "Keys are part of the names of the output"
            raise DataError(complaint("--json-keys", key, why, "Rename the field in the input"))


def find_workers(
    args: argparse.Namespace, inputs: list[str], settings: TokenizerOptions, options: EncodeOptions
) -> int:
    """Measure every number of --workers-to-check and return the fastest."""
    rates = {}
    for workers in args.workers_to_check:
        rates[workers] = measure_rate(
            inputs, settings, options, workers=workers, max_documents=args.max_documents
        )
        print(f"{workers} workers: {rates[workers]:.0f} documents/s", flush=True)
    best = max(rates, key=lambda workers: rates[workers])
    print(f"fastest: --workers {best}")
    return best


def run(args: argparse.Namespace) -> Summary | None:
    """Do what the command line says."""
    check_arguments(args)
    inputs, others = find_inputs(args.input)
    if others:
        print(f"{len(others)} files of other kinds left out, e.g. {others[0]}", file=sys.stderr)
    settings = TokenizerOptions.of(args)
    options = EncodeOptions(
        keys=tuple(dict.fromkeys(args.json_keys)),
        append_eod=args.append_eod,
        skip_bad_lines=args.on_bad_line == "skip",
        parts=1 if args.keep_sequential_samples else args.partitions,
    )
    tokenizer = build_tokenizer(settings)
    print(
        f"tokenizer {tokenizer.name}: vocabulary {tokenizer.vocab_size}, bos {tokenizer.bos}, "
        f"eod {tokenizer.eod}, pad {tokenizer.pad}",
        flush=True,
    )
    if args.find_optimal_num_workers:
        find_workers(args, inputs, settings, options)
        return None
    summary = encode_files(
        inputs,
        args.output_prefix,
        settings,
        options,
        workers=args.workers,
        log_interval=args.log_interval,
        resume=args.resume,
        report=lambda line: print(f"processed {line}", file=sys.stderr, flush=True),
    )
    print(f"done: {summary.rate()}")
    for key, documents in summary.documents.items():
        print(
            f"{args.output_prefix}_{key}_document: {documents} documents, "
            f"{summary.tokens[key]} tokens, {summary.empty[key]} empty texts left out"
        )
    if summary.bad:
        print(f"{summary.bad_lines} unusable lines left out:", file=sys.stderr)
        for reason, count in summary.bad.items():
            example = summary.examples[reason]
            print(f"  {count} {reason}; the first: {example}", file=sys.stderr)
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    args = make_parser().parse_args(argv)
    stop_on_sigterm()
    try:
        run(args)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no corpus was written, --resume goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_tool(main)
