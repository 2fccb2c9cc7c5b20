"""Fill-in-the-middle: documents rearranged so that their middle comes last.

A document is cut at two characters into prefix, middle and suffix, and becomes

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

so that a left-to-right model learns to write what belongs between two texts.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022; SPM is
its variant 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megatron.config.fim import FimConfig
from megatron.config.schema import flag_of
from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, complaint

Ids = npt.NDArray[np.int64]

# A text in front of another shows how the other is tokenized where no text begins. Some tokenizers
# do not know one, or melt it into what follows.
_BEFORE = ("\n", "\u263a", "|")
# What stands for a part of a character; characters have at most four bytes.
_BROKEN, _MOST_BROKEN = "\ufffd", 3


class FillInTheMiddle:
    """Rearranges the documents of a sample.

    Nothing is remembered between samples: what becomes of one depends on the seed, its number and
    its tokens, so neither a layout nor a resume changes it.

    Args:
        tokenizer: The tokenizer the corpus was written with.
        settings: Rates and names of tokens.

    Attributes:
        pad: Id that fills up a sample that became shorter.

    Raises:
        DataError: The tokenizer lacks a token, or ends documents with another one.
    """

    def __init__(self, tokenizer: Tokenizer, settings: FimConfig) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        ids = _token_ids(tokenizer, settings)
        self.pad, self._eod = ids["fim_pad_token"], ids["fim_eod_token"]
        self._prefix, self._middle = ids["fim_prefix_token"], ids["fim_middle_token"]
        self._suffix = ids["fim_suffix_token"]
        self._border = ids.get("fim_split_sample")
        self._before = [text for text in _BEFORE if self._shows_inside(text)]

    def rearranged(self, window: Ids, seed: int, number: int) -> tuple[Ids, int]:
        """Return a sample with its documents rearranged, cut or filled up to its old length.

        Args:
            window: Its tokens, int64.
            seed: Seed of the order of samples.
            number: Number of the sample in that order.

        Returns:
            The tokens, and how many of them, at the end, fill it up.
        """
        # The tokens among the seeds make corpora of a blend and splits independent of each other.
        seeds = [seed, number & 0xFFFFFFFF, number >> 32, zlib.crc32(window.tobytes())]
        draw = np.random.RandomState(seeds)
        found = _between(window, self._eod, lambda ids: self._document(ids, draw))[: window.size]
        padding = window.size - found.size
        return np.pad(found, (0, padding), constant_values=self.pad), padding

    def _document(self, ids: Ids, draw: np.random.RandomState) -> Ids:
        rate, border = self._settings.fim_rate, self._border
        if border is None or not (ids == border).any():
            return self._text(ids, rate, draw)
        if draw.random_sample() >= rate:
            return ids
        inner = float(self._settings.fim_fragment_rate or 0.0)
        return _between(ids, border, lambda fragment: self._text(fragment, inner, draw))

    def _text(self, ids: Ids, rate: float, draw: np.random.RandomState) -> Ids:
        """Rearrange a document or fragment, or leave it as it is."""
        begin = int(ids[:1].tolist() == [self._tokenizer.bos])
        if ids.size == begin or draw.random_sample() >= rate:
            return ids
        marks = [self._prefix, self._middle, self._suffix]
        if np.isin(ids, marks).any():
            return ids  # such a text was rearranged before it was written
        head, text, tail = self._whole_characters(ids[begin:].tolist())
        without = self._settings.fim_no_prefix
        if without is not None and text.startswith(without):
            return ids
        first, last = sorted(draw.randint(0, len(text) + 1, size=2).tolist())
        prefix = head + self._part(text[:first], inside=bool(head))
        middle = self._part(text[first:last], inside=first > 0 or bool(head))
        suffix = self._part(text[last:], inside=last > 0 or bool(head)) + tail
        if draw.random_sample() < self._settings.fim_spm_rate:
            parts = [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        else:
            parts = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]
        return np.array([*ids[:begin].tolist(), *parts], dtype=np.int64)

    def _whole_characters(self, ids: list[int]) -> tuple[list[int], str, list[int]]:
        """Return the text of some ids, and those around it that are parts of characters.

        A sample begins and ends anywhere in a document, also inside a character. Parts of one have
        no text that would become the same ids again.
        """
        decode = self._tokenizer.detokenize
        head, tail, text = 0, len(ids), decode(ids)
        for skip in range(1, _MOST_BROKEN + 1):
            # The text is not that of the shorter ids, which may lack a blank in front.
            if text.startswith(_BROKEN) and not decode(ids[skip:]).startswith(_BROKEN):
                head, text = skip, text.lstrip(_BROKEN)
        for skip in range(1, _MOST_BROKEN + 1):
            if text.endswith(_BROKEN) and not decode(ids[head:-skip]).endswith(_BROKEN):
                tail, text = len(ids) - skip, text.rstrip(_BROKEN)
        return ids[:head], text, ids[tail:]

    def _part(self, text: str, inside: bool) -> list[int]:
        """Return the ids of a part of a text, which begins in front or inside of it."""
        plain = self._tokenizer.tokenize_part
        for before in self._before if inside and text else ():
            ids, skipped = plain(before + text), plain(before)
            if ids[: len(skipped)] == skipped:
                return ids[len(skipped) :]
        return plain(text)

    def _shows_inside(self, before: str) -> bool:
        """Return whether a letter behind this text has other ids than in front of a text.

        That is so for tokenizers that put a blank in front of every text, SentencePiece's habit.
        """
        plain, sample = self._tokenizer.tokenize_part, before + "a"
        ids, skipped = plain(sample), plain(before)
        faithful = bool(skipped) and self._tokenizer.detokenize(ids) == sample
        return faithful and ids[: len(skipped)] == skipped and ids[len(skipped) :] != plain("a")


def _between(ids: Ids, border: int, change: Callable[[Ids], Ids]) -> Ids:
    """Change the stretches between tokens of one kind; these stay."""
    parts, start = [], 0
    for end in np.flatnonzero(ids == border).tolist():
        parts += [change(ids[start:end]), ids[end : end + 1]]
        start = end + 1
    return np.concatenate([*parts, change(ids[start:])])


def _token_ids(tokenizer: Tokenizer, settings: FimConfig) -> dict[str, int]:
    """Return the ids of the tokens that the settings name, by field."""
    names = {
        "fim_prefix_token": settings.fim_prefix_token,
        "fim_middle_token": settings.fim_middle_token,
        "fim_suffix_token": settings.fim_suffix_token,
        "fim_pad_token": settings.fim_pad_token,
        "fim_eod_token": settings.fim_eod_token,
    }
    if settings.fim_split_sample is not None:
        names["fim_split_sample"] = settings.fim_split_sample
    found = {field: tokenizer.token_id(name) for field, name in names.items()}
    ids = {field: number for field, number in found.items() if number is not None}
    lacking = [field for field in names if field not in ids]
    kind = f"--tokenizer-type {tokenizer.name}"
    if lacking:
        raise DataError(
            complaint(
                ", ".join(flag_of(field) for field in lacking),
                " ".join(names[field] for field in lacking),
                f"{kind} has no token of this name",
                "Name tokens that it has, or add these to its files",
            )
        )
    if tokenizer.eod is not None and ids["fim_eod_token"] != tokenizer.eod:
        raise DataError(
            complaint(
                flag_of("fim_eod_token"),
                f"{names['fim_eod_token']} (id {ids['fim_eod_token']})",
                f"{kind} ends documents with id {tokenizer.eod}, so texts of different documents "
                "would be mixed",
                "Name the token that ends documents",
            )
        )
    return ids
