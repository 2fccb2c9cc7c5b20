#!/usr/bin/env python3
"""Look into a corpus, or at what a training run reads.

    python tools/inspect_data.py corpus data/corpus_text_document
    python tools/inspect_data.py corpus data/corpus_text_document --document 17 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
    python tools/inspect_data.py step --iteration 1200 --rank 3 --fake-world-size 8 FLAGS

corpus: documents, tokens and a histogram of lengths, or one document, decoded if a tokenizer is
given.

step: what a rank reads in an iteration, sample by sample, with the corpus, document and offset of
every piece. FLAGS are those of pretrain_gpt.py, and --fake-world-size says how many ranks the run
has; with --load it goes on from that checkpoint. The index files of the run are built if they are
not there yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron.config import ConfigError
from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, add_tokenizer_flags, run_tool
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError, MegatronError, complaint
from megatron.training.data_trace import Step, read_step
from megatron.training.preflight import read_run

_BAR = 40


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Count lengths by powers of two: entries with ``from``, ``to`` (inclusive), ``documents``."""
    bits = np.zeros(lengths.size, dtype=np.int64)
    filled = lengths > 0
    bits[filled] = np.floor(np.log2(lengths[filled])).astype(np.int64) + 1
    counts = np.bincount(bits)
    return [
        {"from": 1 << bit >> 1, "to": (1 << bit) - 1, "documents": int(count)}
        for bit, count in enumerate(counts)
        if count
    ]


def document_lengths(corpus: IndexedDataset) -> np.ndarray:
    """Return the tokens of each document."""
    ends = np.concatenate([[0], np.cumsum(corpus.sequence_lengths, dtype=np.int64)])
    return np.diff(ends[corpus.document_indices])


def describe_corpus(prefix: str) -> dict[str, object]:
    """Return the figures of a corpus."""
    corpus = IndexedDataset(prefix)
    lengths = document_lengths(corpus)
    spread = {"shortest": 0, "median": 0, "longest": 0}
    if lengths.size:
        found = (lengths.min(), np.median(lengths), lengths.max())
        spread = {name: int(value) for name, value in zip(spread, found, strict=True)}
    return {
        "corpus": prefix,
        "dtype": corpus.dtype.name,
        "documents": int(lengths.size),
        "sequences": len(corpus),
        "tokens": int(lengths.sum()),
        **spread,
        "histogram": histogram(lengths),
    }


def read_document(prefix: str, number: int, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return the ids of a document, by sequence, and its text if there is a tokenizer.

    Raises:
        DataError: There is no such document, or it has ids that the tokenizer does not have.
    """
    corpus = IndexedDataset(prefix)
    ends = corpus.document_indices
    if not 0 <= number < ends.size - 1:
        fix = f"Documents are 0 to {ends.size - 2}" if ends.size > 1 else "The corpus is empty"
        raise DataError(complaint("--document", number, "There is no such document", fix))
    ids = [corpus[i].tolist() for i in range(int(ends[number]), int(ends[number + 1]))]
    result: dict[str, object] = {"corpus": prefix, "document": number, "sequences": ids}
    if tokenizer is not None:
        most = max((max(one) for one in ids if one), default=0)
        if most >= tokenizer.vocab_size:
            why = f"Document {number} has id {most}, and this tokenizer {tokenizer.vocab_size} ids"
            fix = "Give the tokenizer that wrote the corpus"
            raise DataError(complaint("--tokenizer-type", tokenizer.name, why, fix))
        result["text"] = [tokenizer.detokenize(one) for one in ids]
    return result


def show_corpus(args: argparse.Namespace) -> None:
    """Print figures of a corpus, or one document."""
    tokenizer = None
    if args.tokenizer_type is not None:
        tokenizer = build_tokenizer(TokenizerOptions.of(args))
    if args.document is not None:
        found = read_document(args.prefix, args.document, tokenizer)
        print(json.dumps(found) if args.json else _document_text(found))
        return
    figures = describe_corpus(args.prefix)
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if name != "histogram":
            print(f"{name}: {value}")
    rows = histogram(document_lengths(IndexedDataset(args.prefix)))
    most = max((row["documents"] for row in rows), default=1)
    for row in rows:
        bar = "#" * max(1, row["documents"] * _BAR // most)
        print(f"{row['from']:>10} to {row['to']:>10} tokens: {row['documents']:>10} {bar}")


def _document_text(found: dict[str, object]) -> str:
    content = found.get("text", found["sequences"])
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part) for part in parts)


def show_step(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Print what a rank reads in an iteration."""
    config = read_run(flags)
    tokenizer = build_tokenizer(config.data)
    step = read_step(config, tokenizer, args.iteration, args.rank)
    texts = [tokenizer.detokenize(sample.tokens) for sample in step.samples]
    if args.json:
        found = asdict(step)
        for entry, text in zip(found["samples"], texts, strict=True):
            entry["text"] = text
        print(json.dumps(found))
        return
    print(_heading(step, config.world_size))
    for sample, text in zip(step.samples, texts, strict=True):
        print(f"sample {sample.number}, microbatch {sample.microbatch}:")
        for piece in sample.pieces:
            end = piece.offset + piece.length
            inside = "" if piece.sequence == piece.document else f" (sequence {piece.sequence})"
            print(f"  {piece.corpus} document {piece.document}{inside} tokens {piece.offset}:{end}")
        print("".join(f"    | {line}\n" for line in text.splitlines()), end="")


def _heading(step: Step, world_size: int) -> str:
    last = step.consumed_samples + step.global_batch_size - 1
    return (
        f"iteration {step.iteration} reads samples {step.consumed_samples} to {last}; rank "
        f"{step.rank} of {world_size} (data-parallel rank {step.data_parallel_rank}) reads "
        f"{len(step.samples)} of them"
    )


def make_parser() -> ToolParser:
    """Return the command line."""
    parser = ToolParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="corpus|step", required=True)
    corpus = commands.add_parser("corpus", help="figures of a corpus, or one document")
    corpus.add_argument("prefix", help="the .bin/.idx pair without ending")
    corpus.add_argument("--document", type=int, help="show this one, from 0")
    add_tokenizer_flags(corpus.add_argument_group("tokenizer, which decodes documents"))
    corpus.add_argument("--json", action="store_true", help="machine-readable")
    step = commands.add_parser("step", help="what a rank reads; takes a run's flags")
    step.add_argument("--iteration", type=int, required=True, help="from 1")
    step.add_argument("--rank", type=int, default=0, help="global rank (default: 0)")
    step.add_argument("--json", action="store_true", help="machine-readable, with token ids")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = make_parser()
    args, flags = parser.parse_known_args(argv)
    if args.command == "corpus" and flags:
        parser.parse_args(argv)  # says what is wrong with them
    try:
        if args.command == "corpus":
            show_corpus(args)
        else:
            show_step(args, flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_ARGUMENTS
    except BrokenPipeError:
        raise  # nobody reads on: `run_tool` ends the program quietly
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
