"""The datasets that a configuration describes: corpora, splits, blends and validation sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from megatron.config import RunConfig
from megatron.config.data_mix import per_split
from megatron.core.datasets import origin
from megatron.core.datasets.blend import (
    BlendedDataset,
    BlendSpec,
    dataset_targets,
    parse_blend,
    with_surplus,
)
from megatron.core.datasets.cache import note
from megatron.core.datasets.fim import FillInTheMiddle
from megatron.core.datasets.gpt import (
    MOCK_SPLIT,
    Corpus,
    GPTDataset,
    MockCorpus,
    MockGPTDataset,
    SampleConfig,
)
from megatron.core.datasets.history import (
    Mix,
    Part,
    Record,
    continued,
    differences,
    keys,
    recognized,
)
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.mixed import CorpusStream, Ledger, MixedDataset, evaluated, mix_of
from megatron.core.datasets.split import SPLIT_NAMES, Range, parse_split, split_documents
from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, complaint

Dataset = GPTDataset | BlendedDataset | MixedDataset
T = TypeVar("T")


class Targets(NamedTuple):
    """How many samples of each split a run reads."""

    train: int
    valid: int = 0
    test: int = 0


@dataclass(frozen=True)
class Position:
    """Where a resumed run is in its data.

    Attributes:
        iteration: Steps that were taken.
        trained: Training samples of these steps.
        valid: Validation samples that were read of each set.
        record: What the checkpoint says about the data, None if nothing.
    """

    iteration: int = 0
    trained: int = 0
    valid: int = 0
    record: Record | None = None


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    Attributes:
        train: None if the run trains on nothing.
        valid: Validation sets by name; a single one has the name "".
        test: None without one.
        ledger: What a checkpoint has to know of the training data.
    """

    train: Dataset | None = None
    valid: Mapping[str, Dataset] = field(default_factory=dict)
    test: Dataset | None = None
    ledger: Ledger | None = None

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
        DataError: An option about ends of documents, and the tokenizer marks none; or it lacks
            tokens for fill-in-the-middle.
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
        fim=FillInTheMiddle(tokenizer, config.fim) if config.fim_data else None,
        planned=planned,
    )


def build_datasets(
    config: RunConfig,
    samples: SampleConfig,
    tokenizer: Tokenizer,
    targets: Targets,
    turn: Turn,
    position: Position | None = None,
) -> Datasets:
    """Build the datasets of the three splits.

    Args:
        config: The finished configuration.
        samples: See `sample_config`.
        tokenizer: The tokenizer the corpus was written with.
        targets: How much of each split is read.
        turn: This process's part in building index files.
        position: Where the run is in its data.

    Raises:
        DataError: The data are unusable, or another mix than the one the run was reading.
    """
    opened: dict[str, Corpus] = {}
    at = position or Position()
    train, test, ledger = None, None, None
    valid: Mapping[str, Dataset] = {}
    plain = per_split(config)
    for split in _splits(config, samples, targets):
        spec = BlendSpec((MockCorpus.prefix,), None)
        if not config.mock_data:
            spec = parse_blend(split.words, split.flag)
        for prefix in spec.prefixes:
            if prefix not in opened:
                opened[prefix] = _open(config, tokenizer, prefix, split.flag)
        make = _Maker(split, opened, samples, turn)
        if split.name == "train":
            train, ledger = make.training(spec, plain, at.record, config.data_mix_change)
        elif split.name == "test":
            test = make.dataset(spec, plain)
        elif config.multiple_validation_sets:
            names = config.validation_set_names or set_names(spec.prefixes)
            valid = make.sets(spec, names)
        else:
            valid = {"": make.dataset(spec, plain)}
    if ledger is not None:
        before = {} if at.record is None else at.record.evaluated
        ledger.evaluated = evaluated(valid) or before
        for name in before.keys() & ledger.evaluated.keys():
            _compare_validation(name, before[name], ledger.evaluated[name], at.valid)
    return Datasets(train, valid, test, ledger)


def _compare_validation(name: str, before: list[str], now: list[str], read: int) -> None:
    if before != now:
        note(
            f"NOTE: validation{f' {name}' if name else ''} reads other documents than before: "
            f"{', '.join(before)} became {', '.join(now)}. Losses from here on do not compare with "
            f"those before. It goes on at sample {read} of the new order"
        )


def _open(config: RunConfig, tokenizer: Tokenizer, prefix: str, flag: str) -> Corpus:
    if config.mock_data:
        return MockCorpus(tokenizer.vocab_size, tokenizer.eod)
    corpus = open_corpus(prefix, config.mmap_bin_files, flag)
    origin.check(prefix, tokenizer, flag)
    return corpus


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


@dataclass(frozen=True)
class _Maker:
    """Makes the datasets of one split."""

    split: _Split
    corpora: Mapping[str, Corpus]
    samples: SampleConfig
    turn: Turn

    def _parts(self, wanted: Sequence[tuple[str, int | None]]) -> list[GPTDataset]:
        def task(prefix: str, num_samples: int | None) -> Callable[[], GPTDataset]:
            corpus = self.corpora[prefix]
            documents = split_documents(self.split.share, len(corpus))
            kind = MockGPTDataset if isinstance(corpus, MockCorpus) else GPTDataset
            return lambda: kind(corpus, documents, num_samples, self.split.name, self.samples)

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

    def training(
        self, spec: BlendSpec, plain: bool, record: Record | None, on_change: str
    ) -> tuple[Dataset, Ledger | None]:
        """Make the training data, and what keeps count of them.

        Args:
            spec: The corpora and their weights.
            plain: Whether a weight of a single corpus says nothing.
            record: What a checkpoint says about the data it was trained on.
            on_change: ``refuse`` or ``continue`` another mix.

        Raises:
            DataError: The mix is another one and is to be refused, or cannot go on.
        """
        resumed, past = None, []
        if record is not None:
            new = self._mix(spec, plain)
            mix, renamed = recognized(record.mix, new)
            for line in renamed:
                note(f"NOTE: corpus {line}")
            record = replace(record, mix=mix)
            resumed = self._resumed(spec, new, record, on_change)
            changed = resumed is not None and resumed.begin != record.mix.begin
            past = record.closed() if changed else record.past
        made = self.dataset(spec, plain) if resumed is None else resumed
        return made, None if self.samples.planned else Ledger(made, spec.read_once, past)

    def _mix(self, spec: BlendSpec, plain: bool) -> Mix:
        """Return what `dataset` reads, as a run from its beginning."""
        # Whether corpora that are read once last is judged by what is left of them.
        split = replace(self.split, target=1) if spec.read_once else self.split
        planned = replace(self.samples, planned=True)
        ahead = _Maker(split, self.corpora, planned, Turn()).dataset(spec, plain)
        return mix_of(ahead, spec.read_once)

    def _resumed(
        self, spec: BlendSpec, new: Mix, record: Record, on_change: str
    ) -> MixedDataset | None:
        """Return the dataset that goes on where a checkpoint stopped, None for `dataset`'s."""
        if new == record.mix:
            return None
        target = self.split.target
        changes = differences(record.mix, new)
        if changes and on_change == "refuse":
            raise _changed(record, changes)
        corpora = dict(zip(keys(new.parts), (self.corpora[p] for p in spec.prefixes), strict=True))
        if changes:
            mix = continued(record, new, list(corpora.values()), target)
        else:
            lengths = [corpora[key].sequence_lengths for key in keys(record.mix.parts)]
            mix = record.mix.with_samples(target - record.mix.begin, lengths)
        name, samples = self.split.name, self.samples

        def task(corpus: Corpus, part: Part) -> Callable[[], CorpusStream]:
            return lambda: CorpusStream(corpus, part, name, samples)

        keyed = zip(keys(mix.parts), mix.parts, strict=True)
        streams = self.turn.run([task(corpora[key], part) for key, part in keyed])
        return MixedDataset(mix, streams, target, name, samples, changes)


def _changed(record: Record, changes: Sequence[str]) -> DataError:
    taken = ", ".join(
        f"{part.name} {count}" for part, count in zip(record.mix.parts, record.read, strict=True)
    )
    return DataError(
        complaint(
            "--data-mix-change",
            "refuse",
            f"The checkpoint was trained on other data: {'; '.join(changes)}. It has read since "
            f"sample {record.mix.begin}: {taken}",
            "Give the same data as before, or --data-mix-change continue to go on with each corpus "
            "where it stopped",
        )
    )


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
