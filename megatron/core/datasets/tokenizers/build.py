"""From ``--tokenizer-type`` and its files to a tokenizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Protocol

from megatron.config.data import TOKENIZER_TYPES
from megatron.core.datasets.tokenizers.base import ByteLevelTokenizer, NullTokenizer, Tokenizer
from megatron.core.datasets.tokenizers.json_model import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.datasets.tokenizers.rank_model import TikTokenizer
from megatron.core.datasets.tokenizers.sentencepiece_model import (
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megatron.core.errors import DataError, complaint


class TokenizerSettings(Protocol):
    """The fields that choose a tokenizer; the data section of a configuration has them."""

    @property
    def tokenizer_type(self) -> str | None:
        """``--tokenizer-type``."""

    @property
    def tokenizer_model(self) -> str | None:
        """``--tokenizer-model``."""

    @property
    def vocab_file(self) -> str | None:
        """``--vocab-file``."""

    @property
    def merge_file(self) -> str | None:
        """``--merge-file``."""

    @property
    def vocab_size(self) -> int | None:
        """``--vocab-size``."""

    @property
    def tiktoken_pattern(self) -> str | None:
        """``--tiktoken-pattern``."""

    @property
    def tiktoken_num_special_tokens(self) -> int | None:
        """``--tiktoken-num-special-tokens``."""

    @property
    def tiktoken_special_tokens(self) -> tuple[str, ...] | None:
        """``--tiktoken-special-tokens``."""


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """`TokenizerSettings` for callers without a configuration."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None
    tiktoken_special_tokens: tuple[str, ...] | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> TokenizerOptions:
        """Return what the flags of `megatron.config.tool_flags.add_tokenizer_flags` say."""
        names = args.tiktoken_special_tokens
        return cls(
            tokenizer_type=args.tokenizer_type,
            tokenizer_model=args.tokenizer_model,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            vocab_size=args.vocab_size,
            tiktoken_pattern=args.tiktoken_pattern,
            tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
            tiktoken_special_tokens=None if names is None else tuple(names),
        )


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Build the tokenizer that some settings describe.

    Args:
        settings: The data section of a configuration, or `TokenizerOptions`.

    Raises:
        DataError: The type is unknown, a file or package is missing, or ``--vocab-size`` has no
            room for the tokenizer's ids.
    """
    kind = settings.tokenizer_type
    if kind == "NullTokenizer":
        return NullTokenizer(int(_needed(settings, "vocab_size", kind)))
    tokenizer: Tokenizer
    if kind == "ByteLevelTokenizer":
        tokenizer = ByteLevelTokenizer()
    elif kind == "GPT2BPETokenizer":
        vocab, merges = (_needed(settings, name, kind) for name in ("vocab_file", "merge_file"))
        tokenizer = GPT2BPETokenizer(vocab, merges)
    elif kind == "HuggingFaceTokenizer":
        tokenizer = HuggingFaceTokenizer(_needed(settings, "tokenizer_model", kind))
    elif kind == "TikTokenizer":
        tokenizer = TikTokenizer(
            _needed(settings, "tokenizer_model", kind),
            _needed(settings, "tiktoken_pattern", kind),
            num_special=settings.tiktoken_num_special_tokens,
            special=settings.tiktoken_special_tokens,
            vocab_size=settings.vocab_size,
        )
    elif kind == "Llama2Tokenizer":
        tokenizer = Llama2Tokenizer(_needed(settings, "tokenizer_model", kind))
    elif kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        tokenizer = SentencePieceTokenizer(_needed(settings, "tokenizer_model", kind), kind)
    else:
        raise DataError(
            complaint(
                "--tokenizer-type",
                kind,
                "There is no such tokenizer",
                f"Choose one of {', '.join(TOKENIZER_TYPES)}",
            )
        )
    if settings.vocab_size is not None and settings.vocab_size < tokenizer.vocab_size:
        raise DataError(
            complaint(
                "--vocab-size",
                settings.vocab_size,
                f"--tokenizer-type {kind} has {tokenizer.vocab_size} ids",
                "Leave out --vocab-size",
            )
        )
    return tokenizer


def _needed(settings: TokenizerSettings, name: str, kind: str) -> str:
    value: str | None = getattr(settings, name)
    if value is None:
        flag = "--" + name.replace("_", "-")
        raise DataError(
            complaint(flag, "nothing", f"--tokenizer-type {kind} is built from it", f"Give {flag}")
        )
    return value
