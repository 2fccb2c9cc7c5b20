"""Samples of a mix of corpora that does not begin at the beginning (see `history`)."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.core.datasets.blend import BlendedDataset, blending_indices
from megatron.core.datasets.cache import Arrays, cached_arrays
from megatron.core.datasets.gpt import (
    Corpus,
    GPTDataset,
    MockCorpus,
    MockGPTDataset,
    SampleConfig,
    Windows,
    tokens_digest,
)
from megatron.core.datasets.history import Mix, Order, Part, Record, lengths_digest

_RUNS = ("run_start", "run_place", "shuffle_index")
_TURNS = ("dataset_index", "dataset_sample_index")


class RestDataset(Windows):
    """The windows that an order has not visited, as one text that is cut anew.

    Neighbouring windows are joined; where two that are none meet, the text goes on as it does
    from one document to the next. Every token of the unvisited windows is an input once, but for
    those at the end that fill no window.

    Args:
        parent: The samples whose order was left.
        read: How many of them were visited.
        name: ``train``, ``valid`` or ``test``.
        config: The new sequence length and seed.
    """

    def __init__(self, parent: Windows, read: int, name: str, config: SampleConfig) -> None:
        self.parent, self.read, self.name, self.config = parent, read, name, config
        self.corpus, self.directory = parent.corpus, parent.directory
        old = parent.config.sequence_length
        self.total = (len(parent) - read) * old // config.sequence_length
        arrays = self._build() if self.directory is None else self._cached(self.directory)
        self.run_start, self.run_place = arrays["run_start"], arrays["run_place"]
        self.shuffle = arrays["shuffle_index"]

    def _build(self) -> Arrays:
        old = self.parent.config.sequence_length
        left = np.sort(self.parent.shuffle[self.read :].astype(np.int64))
        begins = np.flatnonzero(np.diff(left, prepend=-2) != 1)
        shuffle = np.arange(self.total, dtype=np.int64)
        np.random.RandomState(self.config.seed).shuffle(shuffle)
        return {
            "run_start": left[begins] * old,
            "run_place": begins * old,
            "shuffle_index": shuffle,
        }

    def _cached(self, directory: Path) -> Arrays:
        kind, about = type(self).__name__, self.description()
        return cached_arrays(directory, kind, self.name, about, _RUNS, self._build)

    def description(self) -> dict[str, object]:
        """Return everything that determines the order, for the cache key."""
        return {
            "class": type(self).__name__,
            "rest_of": self.parent.description(),
            "read": self.read,
            "random_seed": self.config.seed,
            "sequence_length": self.config.sequence_length,
        }

    def __len__(self) -> int:
        return self.total

    def tokens(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return tokens `[start, start + count)` of the text."""
        parts = []
        run = bisect.bisect_right(self.run_place, start) - 1
        while count > 0:
            place = int(self.run_place[run])
            last = run + 1 == len(self.run_place)
            take = count if last else min(count, int(self.run_place[run + 1]) - start)
            parts.append(self.parent.tokens(int(self.run_start[run]) + start - place, take))
            start, count, run = start + take, count - take, run + 1
        return np.concatenate(parts)


class CorpusStream:
    """The samples of one corpus, order after order, from where it stopped.

    Args:
        corpus: Its documents.
        part: Its orders.
        name: ``train``, ``valid`` or ``test``.
        config: What shapes samples.
    """

    def __init__(self, corpus: Corpus, part: Part, name: str, config: SampleConfig) -> None:
        self.part = part
        self.orders = [_windows(corpus, order, name, config) for order in part.orders]
        self.ends = np.cumsum([len(one) for one in self.orders]).tolist()

    def __len__(self) -> int:
        return (self.ends[-1] if self.ends else 0) - self.part.start

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = index + self.part.start
        number = bisect.bisect_right(self.ends, at)
        return self.orders[number][at - (self.ends[number - 1] if number else 0)]


def _windows(corpus: Corpus, order: Order, name: str, config: SampleConfig) -> Windows:
    own = replace(config, sequence_length=order.sequence_length, seed=order.seed)
    if order.rest_of is not None:
        return RestDataset(_windows(corpus, order.rest_of, name, config), order.read, name, own)
    kind = MockGPTDataset if isinstance(corpus, MockCorpus) else GPTDataset
    documents = np.arange(order.first, order.first + order.count, dtype=np.int64)
    if order.first + order.count <= np.iinfo(np.int32).max:
        documents = documents.astype(np.int32)
    plan = order.plan(corpus.sequence_lengths)
    return kind(corpus, documents, None, name, own, plan)


class MixedDataset:
    """The samples of a run from the beginning of a mix on, numbered as in the whole run.

    Args:
        mix: The mix.
        streams: The samples of its corpora.
        end: Samples of the whole run.
        name: ``train``, ``valid`` or ``test``.
        config: What shapes samples.
        changes: What distinguishes the mix from the one before, in words.

    Attributes:
        begin: First sample that can be read.
    """

    def __init__(
        self,
        mix: Mix,
        streams: Sequence[CorpusStream],
        end: int,
        name: str,
        config: SampleConfig,
        changes: Sequence[str] = (),
    ) -> None:
        self.mix, self.name, self.end, self.begin = mix, name, max(end, mix.begin), mix.begin
        self.changes, self.config = tuple(changes), config
        self.streams = tuple(streams)
        self.turns: Arrays | None = None
        if len(self.streams) > 1:
            cached = config.cache_path is not None
            self.turns = self._cached(Path(str(config.cache_path))) if cached else self._build()

    def _build(self) -> Arrays:
        turns = blending_indices(self.mix.shares, self.end - self.begin)
        return dict(zip(_TURNS, turns, strict=True))

    def _cached(self, directory: Path) -> Arrays:
        about = {"shares": list(self.mix.shares), "size": self.end - self.begin}
        return cached_arrays(directory, type(self).__name__, self.name, about, _TURNS, self._build)

    def fingerprint(self) -> str:
        """Return a hash of the corpora and their orders, to compare between ranks."""
        text = repr((asdict(self.mix), self.end, self.config.vocab_size))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def report(self) -> str:
        """Say in words what changed and where each corpus goes on."""
        mix = self.mix
        lines = [f"{self.name}: from sample {mix.begin} on, {self.end - mix.begin} samples"]
        lines += [f"  changed: {change}" for change in self.changes]
        for part, share, stream in zip(mix.parts, mix.shares, self.streams, strict=True):
            lines.append(
                f"  {share:.4f} {part.name}: {part.tokens} tokens were read before, {len(stream)} "
                f"samples of {mix.sequence_length} tokens follow in {len(part.orders)} order(s)"
            )
        lines += [f"  left out: {p.name}, after {p.tokens} tokens" for p in mix.gone]
        return "\n".join(lines)

    def __len__(self) -> int:
        return self.end

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not self.begin <= index < self.end:
            raise IndexError(f"sample {index} of {self.begin} to {self.end} in {self.name}")
        at = index - self.begin
        if self.turns is None:
            return self.streams[0][at]
        stream = self.streams[int(self.turns["dataset_index"][at])]
        return stream[int(self.turns["dataset_sample_index"][at])]


Trained = GPTDataset | BlendedDataset | MixedDataset


def part_of(dataset: GPTDataset) -> Part:
    """Return how a dataset that begins at its beginning reads its corpus."""
    first, count = int(dataset.documents[0]), int(dataset.documents.size)
    order = Order(
        sequence_length=dataset.config.sequence_length,
        seed=dataset.config.seed,
        first=first,
        count=count,
        epochs=dataset.plan.epochs,
        separate_last=dataset.plan.separate_last,
    )
    return Part(
        name=Path(dataset.corpus.prefix).name,
        sequences=len(dataset.corpus),
        digest=lengths_digest(dataset.corpus.sequence_lengths),
        first=first,
        count=count,
        orders=(order,),
        passes=1,
        content=tokens_digest(dataset.corpus, len(dataset.corpus)),
    )


def mix_of(dataset: Trained, once: bool) -> Mix:
    """Return what a dataset reads.

    Args:
        dataset: The training data.
        once: Whether its corpora were listed without weights.
    """
    if isinstance(dataset, MixedDataset):
        return dataset.mix
    parts = (dataset,) if isinstance(dataset, GPTDataset) else dataset.datasets
    return Mix(
        begin=0,
        sequence_length=parts[0].config.sequence_length,
        seed=parts[0].config.seed,
        parts=tuple(part_of(one) for one in parts),
        shares=(1.0,) if isinstance(dataset, GPTDataset) else tuple(dataset.weights),
        once=once,
    )


class Ledger:
    """Knows how much of every corpus a run has read.

    Args:
        dataset: The training data.
        once: Whether its corpora were listed without weights.
        past: Earlier mixes, see `Record`.

    Attributes:
        evaluated: The corpora of each validation set, in words.
    """

    def __init__(self, dataset: Trained, once: bool, past: Sequence[dict[str, Any]] = ()) -> None:
        self.mix, self._past = mix_of(dataset, once), list(past)
        self.evaluated: dict[str, list[str]] = {}
        turns = getattr(dataset, "dataset_index", None)
        if isinstance(dataset, MixedDataset) and dataset.turns is not None:
            turns = dataset.turns["dataset_index"]
        self._turns, self._size = turns, len(dataset) - self.mix.begin

    def record(self, consumed: int) -> Record:
        """Return what a checkpoint has to know after `consumed` samples of the run."""
        taken = min(max(consumed - self.mix.begin, 0), self._size)
        read = [taken]
        if self._turns is not None:
            read = np.bincount(self._turns[:taken], minlength=len(self.mix.parts)).tolist()
        return Record(self.mix, consumed, read, self._past, self.evaluated)


def evaluated(valid: Mapping[str, Trained]) -> dict[str, list[str]]:
    """Say in words which corpora each validation set has."""
    found = {}
    for name, dataset in valid.items():
        mix = mix_of(dataset, once=False)
        found[name] = [
            f"{share:.4g} {part.name} (documents {part.first} to {part.first + part.count - 1}, "
            f"{(part.digest + part.content)[::8]})"
            for part, share in zip(mix.parts, mix.shares, strict=True)
        ]
    return found
