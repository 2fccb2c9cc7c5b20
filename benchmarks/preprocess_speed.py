#!/usr/bin/env python3
"""What preprocessing costs beside the tokenizer library: tokens a second of CPU time, as a ratio.

    python benchmarks/preprocess_speed.py --input quickstart/corpus.jsonl --model tokenizer.model
    python benchmarks/preprocess_speed.py --input quickstart/corpus.jsonl --model tokenizer.json

The library alone gets the texts as a list in memory, one after the other and as one batch on one
thread; the faster of the two counts. Preprocessing reads JSON lines, tokenizes and writes a corpus,
in one process. Both take turns; the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Before the package is imported: a core against a core.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import sentencepiece
import tokenizers

from megatron.core.datasets.encoding import EncodeOptions
from megatron.core.datasets.preprocess import encode_files
from megatron.core.datasets.tokenizers import TokenizerOptions


def libraries(model: Path) -> tuple[str, list[Callable[[list[str]], int]]]:
    """Return the --tokenizer-type and ways to count the tokens of texts with the library."""
    if model.suffix == ".json":
        fast = tokenizers.Tokenizer.from_file(str(model))
        return "HuggingFaceTokenizer", [
            lambda texts: sum(len(fast.encode(text).ids) for text in texts),
            lambda texts: sum(len(one.ids) for one in fast.encode_batch_fast(texts)),
        ]
    piece = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return "SentencePieceTokenizer", [
        lambda texts: sum(len(piece.encode(text)) for text in texts),
        lambda texts: sum(map(len, piece.encode(texts, num_threads=1))),
    ]


def rate(work: Callable[[], int]) -> float:
    """Return tokens a second of CPU time."""
    begun = time.process_time()
    tokens = work()
    return tokens / (time.process_time() - begun)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    kind, ways = libraries(args.model)
    texts = [json.loads(line)["text"] for line in args.input.open()]
    settings = TokenizerOptions(tokenizer_type=kind, tokenizer_model=str(args.model))
    ratios = []
    with tempfile.TemporaryDirectory() as folder:

        def preprocess() -> int:
            done = encode_files([args.input], f"{folder}/out", settings, EncodeOptions())
            return done.tokens["text"]

        for _ in range(args.rounds):
            alone = max(rate(lambda way=way: way(texts)) for way in ways)
            ours = rate(preprocess)
            ratios.append(ours / alone)
            print(f"library {alone:,.0f} tokens/s, preprocessing {ours:,.0f}, {ratios[-1]:.2f}")
    print(f"{kind}: {statistics.median(ratios):.2f} of the library's tokens/s per core")


if __name__ == "__main__":
    main()
