"""Text to token ids and back."""

from __future__ import annotations

from megatron.config.data import TOKENIZER_TYPES
from megatron.core.datasets.tokenizers.base import Tokenizer
from megatron.core.datasets.tokenizers.build import TokenizerOptions, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "TokenizerOptions", "build_tokenizer"]
