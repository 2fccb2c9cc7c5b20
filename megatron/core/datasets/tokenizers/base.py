"""What every tokenizer offers, and the two that need no files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from megatron.core.errors import DataError, complaint

GPT2_EOD = "<|endoftext|>"
# What files that do not say which are their special tokens usually call them.
USUAL_NAMES = {
    "eos": (GPT2_EOD, "</s>", "<|end_of_text|>", "<eos>"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
}


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        name: The ``--tokenizer-type``.
        vocab_size: One more than the largest id.
        eod: Id that ends a document, None if there is none.
        bos: Id that begins a text, None if there is none.
        pad: Id of padding, None if there is none.
        files: The files it was read from, for exports that ship the tokenizer with the model.
    """

    name: str
    vocab_size: int
    eod: int | None = None
    bos: int | None = None
    pad: int | None = None
    files: tuple[Path, ...] = ()

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each of several texts."""
        return [self.tokenize(text) for text in texts]

    def tokenize_part(self, text: str) -> list[int]:
        """Return the ids of a piece of a text: what `tokenize` adds at the ends is left out."""
        return self.tokenize(text)

    def token_id(self, name: str) -> int | None:
        """Return the id of a token of this name, None if there is none."""
        del name
        return None

    def token_name(self, number: int) -> str | None:
        """Return how the tokenizer's files spell an id, None if they do not."""
        del number
        return None

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""

    def require_eod(self, because: str) -> int:
        """Return the end-of-document id.

        Args:
            because: The flag that needs it, for the message.

        Raises:
            DataError: The tokenizer has none.
        """
        if self.eod is None:
            source = f" ({', '.join(str(path) for path in self.files)})" if self.files else ""
            raise DataError(
                complaint(
                    because,
                    f"--tokenizer-type {self.name}{source}",
                    "This tokenizer has no end-of-document token",
                    f"Leave out {because} or choose a tokenizer that has one",
                )
            )
        return self.eod


class NullTokenizer(Tokenizer):
    """Numbers in, the same numbers out: for corpora that are tokenized already.

    Args:
        vocab_size: Number of ids; the last one, ``vocab_size - 1``, ends documents.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise DataError(
                complaint(
                    "--vocab-size", vocab_size, "A vocabulary has at least one id", "Use 1 or more"
                )
            )
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        """Read ids separated by spaces."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                complaint(
                    "--tokenizer-type",
                    self.name,
                    f"It reads numbers separated by spaces, but the text has others: {error}",
                    "Choose the tokenizer the text is meant for",
                )
            ) from error
        wrong = [number for number in ids if not 0 <= number < self.vocab_size]
        if wrong:
            raise DataError(
                complaint(
                    "--vocab-size",
                    self.vocab_size,
                    f"The text has id {wrong[0]}",
                    f"Ids are 0 to {self.vocab_size - 1}",
                )
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Write ids separated by spaces."""
        return " ".join(str(int(number)) for number in ids)


class ByteLevelTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and an end-of-document token, 256."""

    name = "ByteLevelTokenizer"

    def __init__(self) -> None:
        self.vocab_size = 257
        self.eod = 256

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text; ids beyond the bytes vanish, broken UTF-8 becomes U+FFFD."""
        return bytes(number for number in ids if number < 256).decode("utf-8", errors="replace")
