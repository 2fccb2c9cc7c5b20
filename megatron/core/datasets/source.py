"""Batches as a pure function of position, and the datasets behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.config import RunConfig
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.build import (
    Datasets,
    Position,
    Targets,
    Turn,
    build_datasets,
    sample_config,
)
from megatron.core.datasets.mixed import Ledger
from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, complaint, on_every_rank
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

    @property
    def begin(self) -> int:
        """First sample that the dataset has: 0 but after a change of the data."""
        return getattr(self.dataset, "begin", 0)

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
        if first < self.begin or first + self.micro_batch_size > len(self.dataset):
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


def sample_targets(config: RunConfig, position: Position | None = None) -> Targets:
    """Return how many training, validation and test samples a run reads.

    Evaluation takes place if ``--eval-interval`` is set and ``--eval-iters`` is positive; without
    it there is neither validation nor test data. There is one validation more than the interval
    fits into the run, for the one at the end.

    Args:
        config: The finished configuration.
        position: Where a resumed run is, which may have had other batch sizes until there.
    """
    at = position or Position()
    batch, iterations = int(config.global_batch_size), int(config.train_iters)
    train = config.train_samples or at.trained + max(0, iterations - at.iteration) * batch
    if not config.eval_interval or not config.eval_iters:
        return Targets(train)
    if config.train_samples:
        iterations = at.iteration + config.batches().steps(at.trained, train)
    evaluation, interval = int(config.eval_iters) * batch, int(config.eval_interval)
    due = iterations // interval + 1
    left = at.valid + (due - at.iteration // interval) * evaluation
    return Targets(train, max(due * evaluation, left), evaluation)


@dataclass(frozen=True)
class Sources:
    """The batches of each split.

    Attributes:
        train: Training; None for a run without.
        valid: Validation sets by name; a single one has the name "".
        test: The test at the end; None for a run without.
        ledger: What a checkpoint has to know of the training data, None if nothing.
    """

    train: Source | None
    valid: Mapping[str, Source]
    test: Source | None
    ledger: Ledger | None = None

    def all(self) -> list[Source]:
        """Return all of them."""
        return [one for one in (self.train, *self.valid.values(), self.test) if one is not None]

    def close(self) -> None:
        """Stop background threads."""
        for source in self.all():
            source.close()


def build_sources(
    config: RunConfig, tokenizer: Tokenizer, mesh: ParallelState, position: Position | None = None
) -> Sources:
    """Build the training, validation and test sources that a configuration describes.

    Every rank calls this and maps the files itself. Ranks of one file system share one index
    cache; at the end all ranks compare what they have, so a node with another copy of the corpus
    is found before training and a rank that fails does not leave the others waiting.

    Args:
        config: The finished configuration.
        tokenizer: The tokenizer the corpus was written with.
        mesh: The process mesh.
        position: Where a resumed run is in its data.

    Raises:
        DataError: The data are unusable, differ between ranks, or are another mix than the one
            that the run was reading.
    """
    problem: DataError | None = None
    datasets = Datasets()
    try:
        datasets = _datasets(config, tokenizer, mesh.world, position)
    except DataError as error:
        problem = error
    _agree(mesh.world, datasets, problem)

    def source(dataset: SampleDataset) -> Source:
        return Source(
            dataset,
            micro_batch_size=config.micro_batch_size,
            data_parallel_size=mesh.dp.size,
            prefetch=config.num_workers,
        )

    return Sources(
        None if datasets.train is None else source(datasets.train),
        {name: source(one) for name, one in datasets.valid.items()},
        None if datasets.test is None else source(datasets.test),
        datasets.ledger,
    )


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
    return [one.report() for _, one in _datasets(config, tokenizer).named()]


def _datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    world: Axis | None = None,
    position: Position | None = None,
) -> Datasets:
    """Build the datasets, or plan them without a world; what stops it is a DataError."""
    targets = sample_targets(config, position)
    turn = Turn()
    if world is not None:
        turn = Turn(world.rank, world.size, config.num_dataset_builder_threads)
    try:
        samples = sample_config(config, tokenizer, planned=world is None)
        return build_datasets(config, samples, tokenizer, targets, turn, position)
    except OSError as error:
        why = f"It cannot be read ({error.strerror}: {error.filename})"
        fix = "Check the file and its rights"
        words = config.data_path or config.train_data_path or ()
        raise DataError(complaint("--data-path", " ".join(words), why, fix)) from error
    except MemoryError as error:
        why = f"Their order does not fit into memory ({error})"
        fix = "Lower --train-iters or --train-samples, or use a longer --seq-length"
        raise DataError(complaint("data", f"{targets.train} training samples", why, fix)) from error


def _agree(world: Axis, datasets: Datasets, problem: DataError | None) -> None:
    """Compare the data between all ranks and raise on every rank if any failed or differs."""
    if world.size == 1:
        if problem is not None:
            raise problem
        return
    mine = str(problem) if problem else [(n, d.fingerprint()) for n, d in datasets.named()]
    theirs: list[object] = gather_objects(mine, world)
    if problem is not None:
        raise on_every_rank(problem)
    for rank, other in enumerate(theirs):
        if isinstance(other, str):
            raise on_every_rank(DataError(f"rank {rank} cannot read the data. {other}"))
        if other != theirs[0]:
            text = complaint(
                "--data-path",
                f"data on rank {rank} that differ from those on rank 0",
                "Their files have different documents or were indexed differently",
                "Copy the same .bin and .idx files to every node",
            )
            raise on_every_rank(DataError(text))
