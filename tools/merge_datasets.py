#!/usr/bin/env python3
"""Make one .bin/.idx corpus of all corpora in a folder.

    python tools/merge_datasets.py --input parts/ --output-prefix data/corpus

They are written one behind the other, sorted by name, in blocks: memory does not depend on their
sizes. The output appears complete or not at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.tool_flags import ToolParser, run_tool, stop_on_sigterm
from megatron.core.datasets import origin
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.text_input import refuse_address
from megatron.core.errors import DataError, MegatronError, complaint


def find_corpora(folder: str) -> list[str]:
    """Return the prefixes of all corpora in a folder, sorted.

    Raises:
        DataError: There is none, or half of one.
    """
    if not os.path.isdir(folder):
        raise DataError(
            complaint("--input", folder, "There is no such folder", "Name a folder of corpora")
        )
    names = os.listdir(folder)
    halves = [{name[:-4] for name in names if name.endswith(end)} for end in (".bin", ".idx")]
    lone = sorted(halves[0] ^ halves[1])
    if lone:
        raise DataError(
            complaint(
                "--input",
                folder,
                f"Of {lone[0]} it has only one of .bin and .idx",
                "Copy the other file, or move this one away",
            )
        )
    if not halves[0]:
        raise DataError(
            complaint("--input", folder, "There is no .bin/.idx pair in it", "Check the path")
        )
    return [os.path.join(folder, name) for name in sorted(halves[0])]


def merge(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Write several corpora as one.

    Args:
        prefixes: The corpora, in the order of the output.
        output: Prefix of the result; its folder is made.

    Returns:
        Documents and tokens of the result.

    Raises:
        DataError: One cannot be read, or they are of different tokenizers.
    """
    target = os.path.abspath(output)
    if target in map(os.path.abspath, prefixes):
        raise DataError(
            complaint("--output-prefix", output, "It is one of the inputs", "Choose another name")
        )
    kinds: dict[str, str] = {}
    documents, tokens = 0, 0
    for prefix in prefixes:  # all are looked at before anything is written
        corpus = IndexedDataset(prefix)
        kinds.setdefault(corpus.dtype.name, prefix)
        documents += corpus.document_indices.size - 1
        tokens += int(corpus.sequence_lengths.sum(dtype="int64"))
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise DataError(
            complaint(
                "--input",
                f"{first} with {one} and {second} with {other}",
                "The type follows the size of the vocabulary, so they are of different tokenizers",
                "Tokenize all texts with the same one",
            )
        )
    known = _origin(prefixes)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    origin.forget(target)
    with IndexedDatasetBuilder(target, next(iter(kinds))) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        builder.finalize()
    if known is not None:
        origin.write(target, known)
    return documents, tokens


def _origin(prefixes: Sequence[str]) -> dict[str, Any] | None:
    """Return what all corpora say about their tokenizer, None if some say nothing.

    Raises:
        DataError: Two of them differ.
    """
    known = {prefix: origin.read(prefix, "--input") for prefix in prefixes}
    said = {prefix: found for prefix, found in known.items() if found is not None}
    if not said:
        return None
    first = next(iter(said))
    for prefix, found in said.items():
        why = origin.difference(said[first], found)
        if why:
            raise DataError(
                complaint(
                    "--input",
                    f"{first} and {prefix}",
                    f"By their {origin.ENDING} files {why}",
                    "Tokenize all texts with the same tokenizer and options; or remove these files "
                    "if they belong to other corpora",
                )
            )
    silent = [prefix for prefix in prefixes if prefix not in said]
    if silent:
        print(
            f"NOTE: {silent[0]} has no {origin.ENDING} file"
            + (f", like {len(silent) - 1} others" if len(silent) > 1 else "")
            + "; whether its tokenizer is that of the others cannot be told",
            file=sys.stderr,
        )
        return None
    return said[first]


def make_parser() -> ToolParser:
    """Return the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--input", required=True, help="folder of .bin/.idx pairs")
    parser.add_argument("--output-prefix", required=True, help="the result, without ending")
    parser.add_argument("--multimodal", action="store_true", help="not supported")
    return parser


def run(args: argparse.Namespace) -> None:
    """Do what the command line says."""
    if args.multimodal:
        raise DataError(
            complaint("--multimodal", "it", "Corpora here hold text only", "Leave the flag out")
        )
    refuse_address("--input", args.input)
    refuse_address("--output-prefix", args.output_prefix)
    prefixes = find_corpora(args.input)
    documents, tokens = merge(prefixes, args.output_prefix)
    print(f"{args.output_prefix}: {len(prefixes)} corpora, {documents} documents, {tokens} tokens")


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
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_tool(main)
