"""The datasets that a configuration describes: corpora, splits, blends and validation sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from megatron.config import RunConfig
from megatron.config.data_mix import per_split
from megatron.core.datasets.blend import (
    BlendedDataset,
    BlendSpec,
    dataset_targets,
    parse_blend,
    with_surplus,
)
from megatron.core.datasets.gpt import (
    MOCK_SPLIT,
    GPTDataset,
    MockCorpus,
    MockGPTDataset,
    SampleConfig,
)
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.split import SPLIT_NAMES, Range, parse_split, split_documents
from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, complaint

Dataset = GPTDataset | BlendedDataset
T = TypeVar("T")


class Targets(NamedTuple):
    """How many samples of each split a run reads."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    Attributes:
        train: None if the run trains on nothing.
        valid: Validation sets by name; a single one has the name "".
        test: None without one.
    """

    train: Dataset | None = None
    valid: Mapping[str, Dataset] = field(default_factory=dict)
    test: Dataset | None = None

    def named(self) -> list[tuple[str, Dataset]]:
        """Return all of them with a name each."""
        found = {"train": self.train, "test": self.test}
        found |= {f"valid {name}".strip(): one for name, one in self.valid.items()}
        return [(name, one) for name, one in found.items() if one is not None]


@dataclass(frozen=True)
class Turn:
    """How this process takes part in building index files.

    Several processes start with different corpora, so that they build different files at the
    same time: whoever comes second finds a file in the cache, or waits for its lock.

    Attributes:
        number: Number of the process.
        count: Number of processes.
        threads: Files that this process builds at a time.
    """

    number: int = 0
    count: int = 1
    threads: int = 1

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all tasks and return their results in their own order."""
        shift = self.number * len(tasks) // self.count
        order = [(i + shift) % len(tasks) for i in range(len(tasks))]
        if self.threads == 1 or len(tasks) == 1:
            done = {i: tasks[i]() for i in order}
        else:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="index") as pool:
                waiting = {i: pool.submit(tasks[i]) for i in order}
                done = {i: future.result() for i, future in waiting.items()}
        return [done[i] for i in range(len(tasks))]


@dataclass(frozen=True)
class _Split:
    """What one split reads."""

    name: str
    flag: str
    words: tuple[str, ...]
    share: Range
    target: int


def sample_config(config: RunConfig, tokenizer: Tokenizer, planned: bool) -> SampleConfig:
    """Return what shapes the samples of a run.

    Raises:
        DataError: An option about ends of documents, and the tokenizer marks none.
    """
    for flag, given in (
        ("--eod-mask-loss", config.eod_mask_loss),
        ("--reset-position-ids", config.reset_position_ids),
        ("--reset-attention-mask", config.reset_attention_mask),
    ):
        if given:
            tokenizer.require_eod(flag)
    return SampleConfig(
        sequence_length=config.seq_length,
        seed=config.seed,
        split=MOCK_SPLIT if config.mock_data else config.split,
        cache_path=config.data_cache_path,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        pad=_own_pad(tokenizer),
        eod_mask_loss=config.eod_mask_loss,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        planned=planned,
    )


def build_datasets(
    config: RunConfig, samples: SampleConfig, tokenizer: Tokenizer, targets: Targets, turn: Turn
) -> Datasets:
    """Build the datasets of the three splits.

    Args:
        config: The finished configuration.
        samples: See `sample_config`.
        tokenizer: The tokenizer the corpus was written with.
        targets: How much of each split is read.
        turn: This process's part in building index files.

    Raises:
        DataError: The data are unusable.
    """
    splits = _splits(config, samples, targets)
    if config.mock_data:
        return _mock(tokenizer, samples, splits)
    opened: dict[str, IndexedDataset] = {}
    built: dict[str, dict[str, Dataset]] = {name: {} for name in SPLIT_NAMES}
    for split in splits:
        spec = parse_blend(split.words, split.flag)
        for prefix in spec.prefixes:
            if prefix not in opened:
                opened[prefix] = open_corpus(prefix, config.mmap_bin_files, split.flag)
        make = _Maker(split, opened, samples, turn)
        if split.name == "valid" and config.multiple_validation_sets:
            names = config.validation_set_names or set_names(spec.prefixes)
            built["valid"] = make.sets(spec, names)
        else:
            built[split.name] = {"": make.dataset(spec, plain=per_split(config))}
    return Datasets(built["train"].get(""), built["valid"], built["test"].get(""))


def set_names(prefixes: Sequence[str]) -> list[str]:
    """Return a name for each validation set: the last part of its path, numbered if not unique."""
    last = [prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes]
    return [
        name if last.count(name) == 1 else f"{name}-{last[:i].count(name)}"
        for i, name in enumerate(last)
    ]


def _splits(config: RunConfig, samples: SampleConfig, targets: Targets) -> list[_Split]:
    """Return the splits that are read."""
    wanted = (targets.train, targets.valid, targets.test)
    if not config.mock_data and per_split(config):
        words = (config.train_data_path, config.valid_data_path, config.test_data_path)
        flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
        return [
            _Split(name, flag, tuple(named), (0.0, 1.0), target)
            for name, flag, named, target in zip(SPLIT_NAMES, flags, words, wanted, strict=True)
            if named and target
        ]
    text = samples.split or ""
    found = []
    for name, share, target in zip(SPLIT_NAMES, parse_split(text), wanted, strict=True):
        # A test split is a choice; training, and validation that was asked for, are not.
        if share is None and target and name != "test":
            fix = "; or leave out --eval-interval" if name == "valid" else ""
            raise DataError(
                complaint(
                    "--split",
                    text,
                    f"The {name} split is empty but the run reads {target} samples of it",
                    f"Give it a share, e.g. 969,30,1{fix}",
                )
            )
        if share is not None and target:
            words = tuple(config.data_path or ())
            found.append(_Split(name, "--data-path", words, share, target))
    return found


def _own_pad(tokenizer: Tokenizer) -> int | None:
    # An id that also means end of document must not be masked as padding.
    return None if tokenizer.pad in (tokenizer.eod, tokenizer.bos) else tokenizer.pad


def open_corpus(prefix: str, mmap: bool, flag: str = "--data-path") -> IndexedDataset:
    """Open a corpus of tokens.

    Raises:
        DataError: It cannot be opened, or holds something else.
    """
    corpus = IndexedDataset(prefix, mmap=mmap)
    if not np.issubdtype(corpus.dtype, np.integer):
        raise DataError(
            complaint(
                f"{flag} {prefix}",
                f"elements of type {corpus.dtype.name}",
                "Token ids are integers",
                "Write the corpus with tools/preprocess_data.py",
            )
        )
    return corpus


def _mock(tokenizer: Tokenizer, samples: SampleConfig, splits: Sequence[_Split]) -> Datasets:
    corpus = MockCorpus(tokenizer.vocab_size, tokenizer.eod)
    made: dict[str, Dataset] = {
        split.name: MockGPTDataset(
            corpus, split_documents(split.share, len(corpus)), split.target, split.name, samples
        )
        for split in splits
    }
    valid = {"": made["valid"]} if "valid" in made else {}
    return Datasets(made.get("train"), valid, made.get("test"))


@dataclass(frozen=True)
class _Maker:
    """Makes the datasets of one split."""

    split: _Split
    corpora: Mapping[str, IndexedDataset]
    samples: SampleConfig
    turn: Turn

    def _parts(self, wanted: Sequence[tuple[str, int | None]]) -> list[GPTDataset]:
        def task(prefix: str, num_samples: int | None) -> Callable[[], GPTDataset]:
            corpus = self.corpora[prefix]
            documents = split_documents(self.split.share, len(corpus))
            return lambda: GPTDataset(corpus, documents, num_samples, self.split.name, self.samples)

        return self.turn.run([task(*one) for one in wanted])

    def sets(self, spec: BlendSpec, names: Sequence[str]) -> dict[str, Dataset]:
        """Make a dataset of every corpus by itself."""
        parts = self._parts([(prefix, self.split.target) for prefix in spec.prefixes])
        return dict(zip(names, parts, strict=True))

    def dataset(self, spec: BlendSpec, plain: bool) -> Dataset:
        """Make the dataset of a blend.

        Args:
            spec: The corpora and their weights.
            plain: Whether a weight of a single corpus says nothing.
        """
        split, cache = self.split, self.samples.cache_path
        if len(spec.prefixes) == 1 and (plain or spec.weights is None):
            return self._parts([(spec.prefixes[0], split.target)])[0]
        if spec.weights is not None:
            shares = dataset_targets(spec.weights, split.target)
            parts = self._parts(
                [(p, with_surplus(n)) for p, n in zip(spec.prefixes, shares, strict=True)]
            )
            return BlendedDataset(parts, spec.weights, sum(shares), split.name, cache)
        parts = self._parts([(prefix, None) for prefix in spec.prefixes])
        lengths = [len(part) for part in parts]
        if sum(lengths) < split.target:
            raise once_only(split.flag, len(parts), sum(lengths), split.name, split.target)
        weights = [float(n) for n in lengths]
        return BlendedDataset(parts, weights, split.target, split.name, cache)


def once_only(flag: str, corpora: int, samples: int, name: str, target: int) -> DataError:
    """Return what to raise when corpora without weights do not last."""
    return DataError(
        complaint(
            flag,
            f"{corpora} corpora without weights",
            f"Each is read once, which makes {samples} {name} samples, but the run reads {target}",
            "Give weights (repetition is then allowed) or read fewer samples",
        )
    )
