"""A corpus as fixed-length training samples: the packed GPT dataset and its pseudo corpus."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.datasets.batch import cut_window
from megatron.core.datasets.cache import Arrays, cached_arrays
from megatron.core.datasets.fim import FillInTheMiddle
from megatron.core.datasets.index import EpochPlan, IntArray, SampleOrder, count_tokens
from megatron.core.errors import DataError, complaint

# Shape legend: s sequence.

MOCK_DOCUMENTS = 100_000
MOCK_LONGEST = 4096
MOCK_SPLIT = "1,1,1"
# Documents whose first tokens stand for those of a corpus, and how many of each.
_LOOKED_AT, _LOOKED_FAR = 8, 64

_ARRAYS = ("document_index", "sample_index", "shuffle_index")


class Corpus(Protocol):
    """What a dataset needs of a corpus; `IndexedDataset` is one."""

    prefix: str
    sequence_lengths: npt.NDArray[np.int32]

    def __len__(self) -> int: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return tokens of a document."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the documents' lengths."""
        ...


def tokens_digest(corpus: Corpus, sequences: int) -> str:
    """Return a hash of tokens at a few places of the first `sequences` documents of a corpus."""
    digest = hashlib.blake2b(digest_size=16)
    for index in np.linspace(0, sequences - 1, _LOOKED_AT).astype(np.int64).tolist():
        count = min(_LOOKED_FAR, int(corpus.sequence_lengths[index]))
        digest.update(corpus.get(index, 0, count).astype("<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What shapes the samples of a run.

    Attributes:
        sequence_length: Tokens per sample.
        seed: Seed of the order.
        split: The split text, for the cache key and messages; None if nothing is divided.
        cache_path: Folder for index files; None puts them next to the corpus.
        vocab_size: Ids from here on are an error in the corpus; None does not check.
        eod: End-of-document id.
        pad: Padding id, None unless it stands for nothing else.
        eod_mask_loss: No loss at end-of-document inputs.
        reset_position_ids: Positions restart after each end of document.
        reset_attention_mask: Attention stays inside documents.
        fim: Rearranges the documents of samples, None if they stay as they are.
        planned: Whether datasets only say how many samples there will be; nothing can be read.
    """

    sequence_length: int
    seed: int = 1234
    split: str | None = "969, 30, 1"
    cache_path: str | None = None
    vocab_size: int | None = None
    eod: int | None = None
    pad: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    fim: FillInTheMiddle | None = None
    planned: bool = False


class Windows(ABC):
    """Samples that are windows of a text, visited in a shuffled order.

    Attributes:
        corpus: The documents.
        name: ``train``, ``valid`` or ``test``.
        config: See `SampleConfig`.
        directory: Folder of its index files, None if it has none.
        shuffle: Number of the window that each sample is.
    """

    corpus: Corpus
    name: str
    config: SampleConfig
    directory: Path | None
    shuffle: IntArray

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def tokens(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return tokens ``[start, start + count)`` of the text."""

    @abstractmethod
    def description(self) -> dict[str, object]:
        """Return everything that determines the order, for the cache key."""

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the ``sequence_length + 1`` tokens of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.corpus.prefix} {self.name}")
        length = self.config.sequence_length
        return self.tokens(int(self.shuffle[index]) * length, length + 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window, padding = self.window(index), 0
        if self.config.fim is not None:
            window, padding = self.config.fim.rearranged(window, self.config.seed, index)
        sample = cut_window(
            torch.from_numpy(window),
            eod=self.config.eod,
            pad=self.config.pad,
            eod_mask_loss=self.config.eod_mask_loss,
            reset_position_ids=self.config.reset_position_ids,
            reset_attention_mask=self.config.reset_attention_mask,
        )
        sample["loss_mask"][window.size - 1 - padding :] = 0.0
        return sample


class GPTDataset(Windows):
    """One split of one corpus, shuffled and cut into samples of equal length.

    Documents are packed: a sample may hold the end of one, several whole ones and the start of
    another, and attention runs across their borders.

    Args:
        corpus: The documents.
        documents: Document numbers of this split.
        num_samples: Samples that are wanted; the corpus is repeated as often as that takes. None
            means one pass.
        name: ``train``, ``valid`` or ``test``.
        config: See `SampleConfig`.
        plan: How often the corpus is repeated, instead of `num_samples`.

    Raises:
        DataError: The split is empty or shorter than one sample, or the cache cannot be written.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: IntArray,
        num_samples: int | None,
        name: str,
        config: SampleConfig,
        plan: EpochPlan | None = None,
    ) -> None:
        self.corpus, self.documents, self.name, self.config = corpus, documents, name, config
        self.num_samples = num_samples
        self.tokens_per_epoch = count_tokens(corpus.sequence_lengths, documents)
        self._check_size()
        self.plan = plan or EpochPlan.of(self.tokens_per_epoch, config.sequence_length, num_samples)
        self.directory = self._cache_directory()
        if not config.planned:
            self.order = SampleOrder(**self._cached())
            self.shuffle = self.order.shuffle_index

    def _check_size(self) -> None:
        need = self.config.sequence_length + 1
        if self.tokens_per_epoch >= need:
            return
        if not len(self.corpus):
            got, fix = "an empty corpus", "Check the input of tools/preprocess_data.py"
        else:
            split = self.config.split
            got = (
                f"a {self.name} split of {self.documents.size} of {len(self.corpus)} documents "
                f"with {self.tokens_per_epoch} tokens" + (f", --split {split}" if split else "")
            )
            fix = (
                "Add text, or shorten --seq-length"
                if split is None
                else (
                    "Give this split a larger share, add text, or shorten --seq-length"
                    if self.name == "train"
                    else "Give this split a larger share in --split, or none (0) to leave it out; "
                    "--eval-iters 0 switches evaluation off"
                )
            )
        raise DataError(
            complaint(
                f"--data-path {self.corpus.prefix}",
                got,
                f"One sample takes {need} tokens (--seq-length {need - 1} and the last label)",
                fix,
            )
        )

    def _build(self) -> Arrays:
        order = SampleOrder.build(
            self.corpus.sequence_lengths,
            self.documents,
            self.plan,
            sequence_length=self.config.sequence_length,
            seed=self.config.seed,
        )
        return {name: getattr(order, name) for name in _ARRAYS}

    def _cached(self) -> Arrays:
        if self.directory is None:
            return self._build()
        return cached_arrays(
            self.directory, type(self).__name__, self.name, self.description(), _ARRAYS, self._build
        )

    def _cache_directory(self) -> Path | None:
        if self.config.cache_path is not None:
            return Path(self.config.cache_path)
        return Path(self.corpus.prefix).parent / "cache" / f"{type(self).__name__}_indices"

    def description(self) -> dict[str, object]:
        """Return everything that determines the order, for the cache key."""
        first, last = (int(self.documents[i]) for i in (0, -1))
        return {
            "class": type(self).__name__,
            "dataset_path": self.corpus.prefix,
            "dataset_fingerprint": self.corpus.fingerprint(),
            "epochs": self.plan.epochs,
            "separate_last": self.plan.separate_last,
            "index_split": self.name,
            "random_seed": self.config.seed,
            "sequence_length": self.config.sequence_length,
            "split": self.config.split,
            "documents": [first, last, int(self.documents.size)],
        }

    def fingerprint(self) -> str:
        """Return a hash of the corpus and the order, to compare between ranks."""
        shaped_by = self.description()
        del shaped_by["dataset_path"]  # nodes may keep their copies at different places
        tokens = tokens_digest(self.corpus, len(self.corpus))
        digest = hashlib.blake2b(repr((shaped_by, tokens)).encode(), digest_size=16)
        for name in _ARRAYS:
            array = getattr(self.order, name)
            digest.update(repr(array.shape).encode())
            # Both ends of a shuffled array tell orders apart without reading all of it.
            for part in (array[:1024], array[-1024:]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def report(self) -> str:
        """Say in words how much text there is and how often it is read."""
        per_epoch = (self.tokens_per_epoch - 1) // self.config.sequence_length
        wanted = len(self) if self.num_samples is None else self.num_samples
        # The first window of a pass needs one token more than the others.
        passes = wanted * self.config.sequence_length / self.tokens_per_epoch
        tail = ", the last one shuffled by itself" if self.plan.separate_last else ""
        return (
            f"{self.name}: {self.corpus.prefix}: {self.documents.size} documents, "
            f"{self.tokens_per_epoch} tokens, {per_epoch} samples of "
            f"{self.config.sequence_length} tokens per epoch; {wanted} samples wanted, "
            f"{passes:.2f} epochs{tail}"
        )

    def __len__(self) -> int:
        return self.plan.samples

    def tokens(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return tokens ``[start, start + count)`` of the shuffled documents laid end to end."""
        row, ahead = divmod(start, self.config.sequence_length)
        place, offset = self.order.sample_index[row].tolist()
        offset += ahead
        documents, parts = [], []
        while count > 0:
            document = int(self.order.document_index[place])
            length = int(self.corpus.sequence_lengths[document])
            take = min(length - offset, count)
            if take > 0:
                documents.append(document)
                parts.append(self.corpus.get(document, offset, take))
                count -= take
            place, offset = place + 1, max(0, offset - length)
        text = np.concatenate(parts).astype(np.int64, copy=False)
        limit = self.config.vocab_size
        if limit is not None and (int(text.min()) < 0 or int(text.max()) >= limit):
            raise self._foreign_id(documents, parts, limit)
        return text

    def _foreign_id(
        self, documents: list[int], parts: list[npt.NDArray[Any]], limit: int
    ) -> DataError:
        found = next(
            (int(token), document)
            for document, part in zip(documents, parts, strict=True)
            for token in part
            if not 0 <= int(token) < limit
        )
        return DataError(
            complaint(
                f"--data-path {self.corpus.prefix}",
                f"token id {found[0]} in document {found[1]}",
                f"The tokenizer has ids 0 to {limit - 1}",
                "Train with the tokenizer that wrote the corpus "
                "(--tokenizer-type, --tokenizer-model, --vocab-size)",
            )
        )


class MockCorpus:
    """Documents that count upwards: data without files, the same on every machine.

    Args:
        vocab_size: Ids wrap here.
        eod: Last token of every document; None continues the count.
    """

    prefix = "mock"

    def __init__(self, vocab_size: int, eod: int | None) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.sequence_lengths: npt.NDArray[np.int32] = np.random.default_rng(0).integers(
            1, MOCK_LONGEST, size=MOCK_DOCUMENTS, dtype=np.int32
        )

    def __len__(self) -> int:
        return int(self.sequence_lengths.size)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        """Return tokens ``[offset, offset + length)`` of a document."""
        size = int(self.sequence_lengths[index])
        stop = size if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == size and tokens.size and self.eod is not None:
            tokens[-1] = self.eod
        return tokens

    def fingerprint(self) -> str:
        """Return what tells one pseudo corpus from another."""
        return f"mock-{self.vocab_size}-{self.eod}"


class MockGPTDataset(GPTDataset):
    """`GPTDataset` over `MockCorpus`; its order is cheap and not cached."""

    def _cache_directory(self) -> Path | None:
        return None
