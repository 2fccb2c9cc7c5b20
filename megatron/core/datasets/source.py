"""Batches as a pure function of position, and the datasets behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron.config import RunConfig
from megatron.core.datasets.batch import Batch
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
from megatron.core.mesh import Axis, ParallelState
from megatron.core.tensor_parallel.mappings import gather_objects


class SampleDataset(Protocol):
    """What a source reads: a fixed sequence of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample."""
        ...


class Source:
    """The batches of one split.

    The batch of a step depends on how many samples were consumed before it and on nothing else:
    there is no iterator to save. Whatever way a step is divided over data-parallel ranks and
    microbatches, it reads the same samples.

    Args:
        dataset: The samples.
        micro_batch_size: Samples per batch.
        data_parallel_size: Number of ranks that read disjoint batches.
        prefetch: Batches to prepare ahead in background threads; results do not depend on it.

    Attributes:
        dataset: The samples.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        data_parallel_size: int,
        prefetch: int = 0,
    ) -> None:
        self.dataset = dataset
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, data_parallel_size
        self._prefetch = prefetch
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Batch]] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def first_sample(self, consumed_samples: int, microbatch: int, dp_rank: int) -> int:
        """Return the number of the first sample of a batch; the others follow it."""
        groups = microbatch * self.data_parallel_size + dp_rank
        return consumed_samples + groups * self.micro_batch_size

    def batch(self, consumed_samples: int, microbatch: int, dp_rank: int) -> Batch:
        """Return one batch, on the CPU.

        Args:
            consumed_samples: Samples that all ranks together have read before this step.
            microbatch: Number of the forward pass within the step.
            dp_rank: Data-parallel rank.

        Raises:
            DataError: The dataset ends before this batch, or a corpus is unusable.
        """
        first = self.first_sample(consumed_samples, microbatch, dp_rank)
        if first < 0 or first + self.micro_batch_size > len(self.dataset):
            raise DataError(
                complaint(
                    "data",
                    f"samples {first} to {first + self.micro_batch_size - 1}",
                    f"The dataset was built for {len(self.dataset)} samples",
                    "Raise --train-iters or --train-samples to the number of samples to train on",
                )
            )
        if self._prefetch < 1:
            return self._read(first)
        return self._read_ahead(first)

    def _read(self, first: int) -> Batch:
        return Batch.stack([self.dataset[first + i] for i in range(self.micro_batch_size)])

    def _read_ahead(self, first: int) -> Batch:
        ready = self._ahead.pop(first, None)
        # The next microbatch, or the first of the next step, starts one global stride further on.
        stride = self.micro_batch_size * self.data_parallel_size
        wanted = [first + k * stride for k in range(1, self._prefetch + 1)]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._prefetch, thread_name_prefix="batches")
        for start in [start for start in self._ahead if start not in wanted]:
            self._ahead.pop(start).cancel()
        for start in wanted:
            if start not in self._ahead and start + self.micro_batch_size <= len(self.dataset):
                self._ahead[start] = self._threads.submit(self._read, start)
        return self._read(first) if ready is None else ready.result()

    def report(self) -> str:
        """Say in words what is read, one or more lines."""
        describe: Callable[[], str] | None = getattr(self.dataset, "report", None)
        return f"{len(self.dataset)} samples" if describe is None else describe()

    def close(self) -> None:
        """Stop the background threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._ahead.clear()


def sample_targets(config: RunConfig) -> tuple[int, int, int]:
    """Return how many training, validation and test samples a run reads.

    Evaluation takes place if ``--eval-interval`` is set and ``--eval-iters`` is positive; without
    it there is neither validation nor test data. There is one validation more than the interval
    fits into the run, for the one at the end.
    """
    batch, iterations = int(config.global_batch_size), int(config.train_iters)
    train = config.train_samples or iterations * batch
    if not config.eval_interval or not config.eval_iters:
        return train, 0, 0
    evaluation = int(config.eval_iters) * batch
    return train, (iterations // int(config.eval_interval) + 1) * evaluation, evaluation


def build_sources(
    config: RunConfig, tokenizer: Tokenizer, mesh: ParallelState
) -> tuple[Source | None, Source | None, Source | None]:
    """Build the training, validation and test sources that a configuration describes.

    Every rank calls this and maps the files itself. Ranks of one file system share one index
    cache; at the end all ranks compare what they have, so a node with another copy of the corpus
    is found before training and a rank that fails does not leave the others waiting.

    Args:
        config: The finished configuration.
        tokenizer: The tokenizer the corpus was written with.
        mesh: The process mesh.

    Returns:
        Train, valid and test; None where the run reads none.

    Raises:
        DataError: The data are unusable, or differ between ranks.
    """
    problem: DataError | None = None
    datasets: list[GPTDataset | BlendedDataset | None] = []
    try:
        datasets = _datasets(config, tokenizer)
    except DataError as error:
        problem = error
    _agree(mesh.world, datasets, problem)
    sources = [
        None
        if dataset is None
        else Source(
            dataset,
            micro_batch_size=config.micro_batch_size,
            data_parallel_size=mesh.dp.size,
            prefetch=config.num_workers,
        )
        for dataset in datasets
    ]
    return sources[0], sources[1], sources[2]


def check_sources(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Refuse what `build_sources` refuses, as far as that is known without an index.

    Opens the files and counts samples; builds and writes nothing. Not collective.

    Args:
        config: The finished configuration.
        tokenizer: The tokenizer the corpus was written with.

    Returns:
        What each split reads, in words, as `Source.report` says it.

    Raises:
        DataError: The data are unusable.
    """
    datasets = _datasets(config, tokenizer, planned=True)
    return [dataset.report() for dataset in datasets if dataset is not None]


def _datasets(
    config: RunConfig, tokenizer: Tokenizer, planned: bool = False
) -> list[GPTDataset | BlendedDataset | None]:
    """Build the datasets of the three splits; whatever stops it is a DataError."""
    targets = sample_targets(config)
    try:
        return _build_datasets(config, tokenizer, targets, planned)
    except OSError as error:
        why = f"It cannot be read ({error.strerror}: {error.filename})"
        fix = "Check the file and its rights"
        name, got = "--data-path", " ".join(config.data_path)
        raise DataError(complaint(name, got, why, fix)) from error
    except MemoryError as error:
        why = f"Their order does not fit into memory ({error})"
        fix = "Lower --train-iters or --train-samples, or use a longer --seq-length"
        raise DataError(complaint("data", f"{targets[0]} training samples", why, fix)) from error


def _build_datasets(
    config: RunConfig, tokenizer: Tokenizer, targets: Sequence[int], planned: bool
) -> list[GPTDataset | BlendedDataset | None]:
    split = MOCK_SPLIT if config.mock_data else config.split
    shares = parse_split(split)
    for name, share, target in zip(SPLIT_NAMES, shares, targets, strict=True):
        # A test split is a choice; training, and validation that was asked for, are not.
        if share is None and target and name != "test":
            fix = "; or leave out --eval-interval" if name == "valid" else ""
            raise DataError(
                complaint(
                    "--split",
                    split,
                    f"The {name} split is empty but the run reads {target} samples of it",
                    f"Give it a share, e.g. 969,30,1{fix}",
                )
            )
    for flag, given in (
        ("--eod-mask-loss", config.eod_mask_loss),
        ("--reset-position-ids", config.reset_position_ids),
        ("--reset-attention-mask", config.reset_attention_mask),
    ):
        if given:
            tokenizer.require_eod(flag)
    samples = SampleConfig(
        sequence_length=config.seq_length,
        seed=config.seed,
        split=split,
        cache_path=config.data_cache_path,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        pad=_own_pad(tokenizer),
        eod_mask_loss=config.eod_mask_loss,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        planned=planned,
    )
    wanted = [target if share else 0 for share, target in zip(shares, targets, strict=True)]
    if config.mock_data:
        return _build_mock(tokenizer, samples, shares, wanted)
    spec = parse_blend(config.data_path)
    corpora = [_open_corpus(prefix, config.mmap_bin_files) for prefix in spec.prefixes]
    return [
        _build_split(spec, corpora, name, share, target, samples) if share and target else None
        for name, share, target in zip(SPLIT_NAMES, shares, wanted, strict=True)
    ]


def _own_pad(tokenizer: Tokenizer) -> int | None:
    # An id that also means end of document must not be masked as padding.
    return None if tokenizer.pad in (tokenizer.eod, tokenizer.bos) else tokenizer.pad


def _open_corpus(prefix: str, mmap: bool) -> IndexedDataset:
    corpus = IndexedDataset(prefix, mmap=mmap)
    if not np.issubdtype(corpus.dtype, np.integer):
        raise DataError(
            complaint(
                f"--data-path {prefix}",
                f"elements of type {corpus.dtype.name}",
                "Token ids are integers",
                "Write the corpus with tools/preprocess_data.py",
            )
        )
    return corpus


def _build_mock(
    tokenizer: Tokenizer,
    samples: SampleConfig,
    shares: Sequence[Range | None],
    wanted: Sequence[int],
) -> list[GPTDataset | BlendedDataset | None]:
    corpus = MockCorpus(tokenizer.vocab_size, tokenizer.eod)
    return [
        MockGPTDataset(corpus, split_documents(share, len(corpus)), target, name, samples)
        if share and target
        else None
        for name, share, target in zip(SPLIT_NAMES, shares, wanted, strict=True)
    ]


def _build_split(
    spec: BlendSpec,
    corpora: Sequence[IndexedDataset],
    name: str,
    share: Range,
    target: int,
    samples: SampleConfig,
) -> GPTDataset | BlendedDataset:
    def dataset(corpus: IndexedDataset, num_samples: int | None) -> GPTDataset:
        documents = split_documents(share, len(corpus))
        return GPTDataset(corpus, documents, num_samples, name, samples)

    if spec.weights is not None:
        parts = dataset_targets(spec.weights, target)
        datasets = [
            dataset(corpus, with_surplus(part)) for corpus, part in zip(corpora, parts, strict=True)
        ]
        return BlendedDataset(datasets, spec.weights, sum(parts), name, samples.cache_path)
    if len(corpora) == 1:
        return dataset(corpora[0], target)
    datasets = [dataset(corpus, None) for corpus in corpora]
    lengths = [len(part) for part in datasets]
    if sum(lengths) < target:
        raise DataError(
            complaint(
                "--data-path",
                f"{len(corpora)} corpora without weights",
                f"Each is read once, which makes {sum(lengths)} {name} samples, but the run reads "
                f"{target}",
                "Give weights (repetition is then allowed) or read fewer samples",
            )
        )
    return BlendedDataset(datasets, [float(n) for n in lengths], target, name, samples.cache_path)


def _agree(
    world: Axis,
    datasets: Sequence[GPTDataset | BlendedDataset | None],
    problem: DataError | None,
) -> None:
    """Compare the data between all ranks and raise on every rank if any failed or differs."""
    if world.size == 1:
        if problem is not None:
            raise problem
        return
    mine = str(problem) if problem else [d and d.fingerprint() for d in datasets]
    theirs: list[object] = gather_objects(mine, world)
    if problem is not None:
        raise problem
    for rank, other in enumerate(theirs):
        if isinstance(other, str):
            raise DataError(f"rank {rank} cannot read the data. {other}")
        if other != theirs[0]:
            raise DataError(
                complaint(
                    "--data-path",
                    f"data on rank {rank} that differ from those on rank 0",
                    "Their files have different documents or were indexed differently",
                    "Copy the same .bin and .idx files to every node",
                )
            )
