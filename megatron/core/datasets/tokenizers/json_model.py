"""Tokenizers that the ``tokenizers`` package runs: a tokenizer.json, or GPT-2's two files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.tokenizers.base import GPT2_EOD, USUAL_NAMES, Tokenizer
from megatron.core.errors import DataError, complaint

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAME = "special_tokens_map.json"


class _PackageTokenizer(Tokenizer):
    """What a tokenizer of the package does once it is loaded."""

    _model: Any

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        # The batch call spares the offsets of tokens in the text. A batch of one keeps the package
        # from starting threads, which would compete with the processes of preprocessing.
        ids: list[int] = self._model.encode_batch_fast([text])[0].ids
        return ids

    def tokenize_part(self, text: str) -> list[int]:
        """Return the ids of a piece of a text, without what the post-processor adds."""
        ids: list[int] = self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def token_id(self, name: str) -> int | None:
        """Return the id of a token of this name, None if there is none."""
        number: int | None = self._model.token_to_id(name)
        return number

    def token_name(self, number: int) -> str | None:
        """Return the token of an id, None if there is none."""
        token: str | None = self._model.id_to_token(number)
        return token

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens spelled out."""
        text: str = self._model.decode([int(number) for number in ids], skip_special_tokens=False)
        return text


class HuggingFaceTokenizer(_PackageTokenizer):
    """A ``tokenizer.json``, with special tokens as its ``tokenizer_config.json`` names them.

    Texts get what the file's own post-processor adds, e.g. a begin-of-text token.

    Args:
        model: The file, or the folder that holds it.

    Raises:
        DataError: The package or a file is missing or unreadable.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, model: str | Path) -> None:
        package = _package(str(model))
        path = Path(model)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise DataError(
                complaint(
                    "--tokenizer-model",
                    str(model),
                    f"There is no file {path}; nothing is downloaded by name",
                    f"Name a {FILE_NAME} or a folder that holds one",
                )
            )
        try:
            self._model = package.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise DataError(
                complaint(
                    "--tokenizer-model",
                    str(path),
                    f"It is not a tokenizer description: {error}",
                    "A SentencePiece .model belongs to --tokenizer-type SentencePieceTokenizer",
                )
            ) from error
        # Some files ask for a length that a model once had; documents are stored as they are.
        self._model.no_truncation()
        self._model.no_padding()
        others = [path.parent / name for name in (CONFIG_NAME, SPECIAL_NAME)]
        self.files = (path, *(other for other in others if other.is_file()))
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        names = _special_names(self.files[1:])
        self.eod, self.bos, self.pad = (self._id(role, names) for role in ("eos", "bos", "pad"))

    def _id(self, role: str, names: dict[str, str]) -> int | None:
        candidates = (names[role],) if role in names else USUAL_NAMES[role]
        found = (self._model.token_to_id(candidate) for candidate in candidates)
        return next((number for number in found if number is not None), None)


class GPT2BPETokenizer(_PackageTokenizer):
    """GPT-2's byte-level BPE out of ``vocab.json`` and ``merges.txt``.

    A text that spells out ``<|endoftext|>`` gets ordinary tokens for it, so that no document can
    end another.

    Args:
        vocab_file: ``--vocab-file``.
        merge_file: ``--merge-file``.

    Raises:
        DataError: The package or a file is missing or unreadable.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        package = _package(str(vocab_file))
        for flag, given in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not Path(given).is_file():
                raise DataError(
                    complaint(flag, str(given), "There is no such file", "Name an existing file")
                )
        try:
            bpe = package.models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise DataError(
                complaint(
                    "--vocab-file, --merge-file",
                    f"{vocab_file}, {merge_file}",
                    f"They are not a BPE vocabulary and its merges: {error}",
                    "Name the vocab.json and merges.txt of one GPT-2 tokenizer",
                )
            ) from error
        self._model = package.Tokenizer(bpe)
        self._model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = package.decoders.ByteLevel()
        self.files = (Path(vocab_file), Path(merge_file))
        self.vocab_size = max(self._model.get_vocab().values()) + 1
        self.eod = self._model.token_to_id(GPT2_EOD)


def _package(model: str) -> Any:
    try:
        import tokenizers  # noqa: PLC0415 - optional
    except ImportError as error:
        raise DataError(
            complaint(
                "--tokenizer-type",
                f"a tokenizer for {model}",
                "Running it takes the package tokenizers, which is not installed",
                "Run pip install tokenizers",
            )
        ) from error
    return tokenizers


def _special_names(paths: Sequence[Path]) -> dict[str, str]:
    """Read which strings are eos, bos and pad; the first file that names one decides."""
    names: dict[str, str] = {}
    for path in paths:
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(
                complaint(
                    str(path), "text that is not JSON", str(error), "Repair or remove the file"
                )
            ) from error
        for role in USUAL_NAMES:
            value = described.get(f"{role}_token")
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names.setdefault(role, value)
    return names
