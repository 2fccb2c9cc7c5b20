#!/usr/bin/env python3
"""Continue texts with a checkpoint.

    python tools/generate.py --load runs/tiny --prompt "Once upon a time" --max-new-tokens 64

The model, its precision and its tokenizer are the checkpoint's; any layout it was saved in will do.
Several prompts, or a file with one prompt a line, are continued together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError
from megatron.config.tool_flags import ToolParser, run_tool
from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, MegatronError, complaint
from megatron.core.models.gpt.generation import Sampling, generate
from megatron.training.perplexity import read_text
from megatron.training.restore import add_flags, restore_from


def make_parser() -> ToolParser:
    """Return the command line."""
    parser = ToolParser(description=__doc__)
    add_flags(parser)
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument("--prompt-file", type=Path, help="one prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--greedy", action="store_true", help="the same as --temperature 0")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0: all")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--ignore-eod", action="store_true", help="go on after the end of document")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """All prompts, in the order given.

    Raises:
        DataError: There is none, or the file cannot be read.
    """
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        lines = read_text(args.prompt_file, "--prompt-file").splitlines()
        prompts += [line for line in lines if line]
    if not prompts:
        raise DataError(
            complaint("--prompt", "nothing", "There is nothing to continue", "Give --prompt")
        )
    return prompts


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt; an empty one starts a new document."""
    ids = tokenizer.tokenize(prompt)
    if not ids and tokenizer.eod is not None:
        return [tokenizer.eod]
    return ids


def run(args: argparse.Namespace) -> None:
    """Load, continue, print."""
    prompts = read_prompts(args)
    sampling = Sampling(0.0 if args.greedy else args.temperature, args.top_k, args.top_p, args.seed)
    restored = restore_from(args)
    tokenizer = restored.tokenizer
    with restored.fp8.not_recording():
        continuations = generate(
            restored.model,
            [encode(tokenizer, prompt) for prompt in prompts],
            args.max_new_tokens,
            sampling,
            eod=None if args.ignore_eod else tokenizer.eod,
            vocab_size=tokenizer.vocab_size,
        )
    for prompt, ids in zip(prompts, continuations, strict=True):
        text = tokenizer.detokenize(ids)
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": ids}, ensure_ascii=False))
        else:
            print(joined(tokenizer, prompt, ids))


def joined(tokenizer: Tokenizer, prompt: str, ids: Sequence[int]) -> str:
    """Prompt and continuation as one text, with the spaces that the tokenizer puts between."""
    return tokenizer.detokenize([*tokenizer.tokenize(prompt), *ids])


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 after a message about what is wrong."""
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except (MegatronError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
