"""Byte-pair encodings stored as a list of ranks, run by the ``tiktoken`` package."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.tokenizers.base import USUAL_NAMES, Tokenizer
from megatron.core.errors import DataError, complaint

NUM_SPECIAL = 1000
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
# Used unless --vocab-size says otherwise; ranks beyond it are cut off.
MAX_VOCABULARY = 1 << 17

_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# How a text is cut into words before merging. v1 and v2 are Megatron-LM's; the files themselves do
# not say which one they were made with.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _CASED % ("", "", r"\p{N}"),
    "cl100k": _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": _CASED % (_ENDINGS + "?", _ENDINGS + "?", r"\p{N}{1,3}"),
}


class TikTokenizer(Tokenizer):
    """A list of ranks and special tokens.

    A JSON file, a list of ``{"rank": 0, "token_bytes": base64}``, has the layout of Megatron-LM:
    special tokens come first and ranks follow. In a plain file, ``base64 rank`` a line, ids are
    ranks and special tokens follow. A text that spells out a special token gets ordinary tokens
    for it, so that no document can end another. Nothing is downloaded.

    Args:
        model: The file.
        pattern: Name in `PATTERNS`.
        num_special: Ids kept for special tokens; for JSON `NUM_SPECIAL` if None, else as many as
            there are names.
        special: Names of the special tokens; for JSON `SPECIAL` if None, else ``<|endoftext|>``.
        vocab_size: For JSON: all ids; ranks beyond are cut off. `MAX_VOCABULARY` if None.

    Raises:
        DataError: The package or the file is missing, or the settings do not fit it.
    """

    name = "TikTokenizer"

    def __init__(
        self,
        model: str | Path,
        pattern: str,
        *,
        num_special: int | None = None,
        special: Sequence[str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        package, path = _package(str(model)), Path(model)
        if not path.is_file():
            why = "There is no such file; nothing is downloaded by name"
            raise _unfit("--tokenizer-model", model, why, "Name a JSON or .tiktoken file")
        data = path.read_bytes()
        listed = data.lstrip()[:1] == b"["
        try:
            ranks = _ranks_of_json(data) if listed else _ranks_of_lines(data)
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            why = f"It is not a list of ranks: {error!r}"
            fix = "Files of other tokenizers need another --tokenizer-type"
            raise _unfit("--tokenizer-model", path, why, fix) from error
        names = self._names(special, listed)
        count = (NUM_SPECIAL if listed else len(names)) if num_special is None else num_special
        if count < len(names):
            why = f"There are {len(names)} of them"
            raise _unfit("--tiktoken-num-special-tokens", count, why, "Raise it")
        self._special = [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]
        if listed:
            size = MAX_VOCABULARY if vocab_size is None else vocab_size
            ranks = {token: rank for token, rank in ranks.items() if rank < size - count}
        lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if lacking:
            flag, got = "--tokenizer-model", str(path)
            if listed and vocab_size is not None:
                flag, got = "--vocab-size", str(vocab_size)
            why = f"{len(lacking)} of the 256 bytes have no rank, so some texts have no ids"
            raise _unfit(flag, got, why, "Use a complete file, and all of it")
        top = max(ranks.values()) + 1
        self._shift, self._first_special = (count, 0) if listed else (0, top)
        self.vocab_size, self.files = top + count, (path,)
        self._model = package.Encoding(
            path.name, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
        )
        self._known = frozenset(ranks.values())
        self.eod, self.bos, self.pad = (self._id(role) for role in ("eos", "bos", "pad"))

    def _names(self, special: Sequence[str] | None, listed: bool) -> list[str]:
        if special is None:
            return list(SPECIAL) if listed else ["<|endoftext|>"]
        if len(set(special)) < len(special):
            got = " ".join(special)
            raise _unfit("--tiktoken-special-tokens", got, "One is named twice", "Name it once")
        return list(special)

    def _id(self, role: str) -> int | None:
        found = (self.token_id(name) for name in USUAL_NAMES[role])
        return next((number for number in found if number is not None), None)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._model.encode_ordinary(text)
        return [number + self._shift for number in ids] if self._shift else ids

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token of this name, None if there is none."""
        known = name in self._special
        return self._first_special + self._special.index(name) if known else None

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, special tokens spelled out; unused ids vanish."""
        last = self._first_special + len(self._special)

        def is_special(number: int) -> bool:
            return self._first_special <= number < last

        text = ""
        for special, run in itertools.groupby(map(int, ids), is_special):
            if special:
                text += "".join(self._special[number - self._first_special] for number in run)
            else:
                ranks = (number - self._shift for number in run)
                text += self._model.decode([rank for rank in ranks if rank in self._known])
        return text


def _ranks_of_json(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for place, entry in enumerate(json.loads(data)):
        if entry["rank"] != place:
            raise ValueError(f"entry {place} has rank {entry['rank']}")
        ranks[base64.b64decode(entry["token_bytes"], validate=True)] = place
    return ranks


def _ranks_of_lines(data: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in data.splitlines() if line.strip())
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def _package(model: str) -> Any:
    try:
        import tiktoken  # noqa: PLC0415 - optional
    except ImportError as error:
        why = "Running it takes the package tiktoken, which is not installed"
        got = f"a tokenizer for {model}"
        raise _unfit("--tokenizer-type", got, why, "Run pip install tiktoken") from error
    return tiktoken


def _unfit(flag: str, got: object, why: str, fix: str) -> DataError:
    return DataError(complaint(flag, str(got), why, fix))
