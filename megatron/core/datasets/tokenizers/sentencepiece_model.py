"""SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.tokenizers.base import Tokenizer
from megatron.core.errors import DataError, complaint

FILE_NAME = "tokenizer.model"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its end-of-sentence id ends documents.

    Args:
        model: The ``.model`` file, or a folder with a ``tokenizer.model``.
        name: The ``--tokenizer-type`` it stands for.

    Raises:
        DataError: The package or the file is missing, or the file is no such model.
    """

    def __init__(self, model: str | Path, name: str = "SentencePieceTokenizer") -> None:
        self.name = name
        path = Path(model)
        path = path / FILE_NAME if path.is_dir() else path
        self._model = _load(path)
        self.files = (path,)
        self.vocab_size = int(self._model.get_piece_size())
        self.bos, self.eod, self.pad = (
            _present(getattr(self._model, f"{role}_id")()) for role in ("bos", "eos", "pad")
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without begin or end."""
        ids: list[int] = self._model.encode(text)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each of several texts."""
        # More threads would compete with the processes that preprocessing starts.
        ids: list[list[int]] = self._model.encode(list(texts), num_threads=1)
        return ids

    def token_id(self, name: str) -> int | None:
        """Return the id of a piece of this name, None if there is none."""
        number = int(self._model.piece_to_id(name))
        return number if self._model.id_to_piece(number) == name else None

    def token_name(self, number: int) -> str | None:
        """Return the piece of an id, None if there is none."""
        return self._model.id_to_piece(number) if 0 <= number < self.vocab_size else None

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; begin, end and padding have none."""
        text: str = self._model.decode([int(number) for number in ids])
        return text


class Llama2Tokenizer(SentencePieceTokenizer):
    """A SentencePiece model that begins every text with its begin-of-sentence id.

    Args:
        model: The ``.model`` file, or a folder with a ``tokenizer.model``.

    Raises:
        DataError: See `SentencePieceTokenizer`; or the model has no such id.
    """

    def __init__(self, model: str | Path) -> None:
        super().__init__(model, "Llama2Tokenizer")
        if self.bos is None:
            raise DataError(
                complaint(
                    "--tokenizer-model",
                    str(model),
                    "Llama2Tokenizer begins every text with <s>, which this model does not have",
                    "Use --tokenizer-type SentencePieceTokenizer",
                )
            )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with the begin id in front."""
        begin = [] if self.bos is None else [self.bos]
        return begin + super().tokenize(text)

    def tokenize_part(self, text: str) -> list[int]:
        """Return the ids of a piece of a text, without the begin id."""
        return super().tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each of several texts, with the begin id in front of each."""
        begin = [] if self.bos is None else [self.bos]
        return [begin + ids for ids in super().tokenize_batch(texts)]


def _present(number: int) -> int | None:
    return number if number >= 0 else None


def _load(path: Path) -> Any:
    try:
        import sentencepiece  # noqa: PLC0415 - optional
    except ImportError as error:
        raise DataError(
            complaint(
                "--tokenizer-model",
                str(path),
                "Reading it takes the package sentencepiece, which is not installed",
                "Run pip install sentencepiece",
            )
        ) from error
    if not path.is_file():
        raise DataError(
            complaint(
                "--tokenizer-model",
                str(path),
                "There is no such file",
                "Name a SentencePiece .model file or a folder that holds tokenizer.model",
            )
        )
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise DataError(
            complaint(
                "--tokenizer-model",
                str(path),
                f"It is not a SentencePiece model: {error}",
                "A tokenizer.json belongs to --tokenizer-type HuggingFaceTokenizer",
            )
        ) from error
