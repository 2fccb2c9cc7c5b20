"""What a rank of a run reads in an iteration, and where that comes from.

Nothing is computed anew here: the training data are built as the trainer builds them, the batch is
read through the trainer's `Source`, and the corpora note which of their tokens were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import RunConfig
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.gpt import Corpus, Windows
from megatron.core.datasets.mixed import MixedDataset, RestDataset
from megatron.core.datasets.source import SampleDataset, Source, build_sources
from megatron.core.datasets.tokenizers import Tokenizer
from megatron.core.errors import DataError, complaint
from megatron.core.mesh import ParallelState
from megatron.training.checkpointing import counters_of
from megatron.training.dry_run.trace import paper_mesh
from megatron.training.finding import read_newest_common
from megatron.training.progress import Progress
from megatron.training.providers import data_position


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document.

    Attributes:
        corpus: Prefix of its files.
        document: Number of the document there.
        sequence: Number of the sequence there; the same, but for documents of several sequences.
        offset: First token, within the sequence.
        length: How many.
    """

    corpus: str
    document: int
    sequence: int
    offset: int
    length: int


@dataclass(frozen=True)
class Sample:
    """One training sample.

    Attributes:
        number: Its number in the training data of the run.
        microbatch: The forward pass of the iteration that reads it.
        pieces: Where its tokens, and the label of the last one, come from.
        tokens: Token ids.
        labels: The token after each.
        loss_mask: 1 where the label counts.
    """

    number: int
    microbatch: int
    pieces: tuple[Piece, ...]
    tokens: list[int]
    labels: list[int]
    loss_mask: list[float]


@dataclass(frozen=True)
class Step:
    """What one rank reads in one iteration, before context parallelism divides sequences.

    Attributes:
        iteration: The iteration, from 1.
        rank: The global rank.
        data_parallel_rank: Its place among those that read different samples.
        consumed_samples: First sample of the iteration.
        global_batch_size: Samples of the iteration.
        samples: What the rank reads of them.
    """

    iteration: int
    rank: int
    data_parallel_rank: int
    consumed_samples: int
    global_batch_size: int
    samples: list[Sample] = field(default_factory=list)


class _Noting:
    """A corpus that notes what is read of it."""

    def __init__(self, corpus: Corpus, read: list[Piece]) -> None:
        self._corpus, self._read = corpus, read
        self.prefix, self.sequence_lengths = corpus.prefix, corpus.sequence_lengths

    def __len__(self) -> int:
        return len(self._corpus)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return tokens of a document."""
        found = self._corpus.get(index, offset, length)
        ends = getattr(self._corpus, "document_indices", None)
        document = index if ends is None else int(np.searchsorted(ends, index, "right")) - 1
        self._read.append(Piece(self.prefix, document, index, offset, len(found)))
        return found

    def fingerprint(self) -> str:
        """Return a hash of the documents' lengths."""
        return self._corpus.fingerprint()


def _windows(dataset: SampleDataset) -> Iterator[Windows]:
    """Yield everything that reads a corpus for a dataset."""
    parts: list[Any] = []
    if isinstance(dataset, BlendedDataset):
        parts = list(dataset.datasets)
    elif isinstance(dataset, MixedDataset):
        parts = [order for stream in dataset.streams for order in stream.orders]
    elif isinstance(dataset, Windows):
        yield dataset
        parts = [dataset.parent] if isinstance(dataset, RestDataset) else []
    for part in parts:
        yield from _windows(part)


def read_step(cfg: RunConfig, tokenizer: Tokenizer, iteration: int, rank: int) -> Step:
    """Read what a rank reads in an iteration.

    Args:
        cfg: The complete configuration of the run, with ``world_size`` ranks. If it names a
            checkpoint, the run goes on from there.
        tokenizer: The tokenizer the corpus was written with.
        iteration: From 1.
        rank: A global rank.

    Raises:
        DataError: There is no such rank or iteration, or the data are unusable.
    """
    if not 0 <= rank < cfg.world_size:
        fix = f"Ranks are 0 to {cfg.world_size - 1}; --fake-world-size says how many there are"
        raise DataError(complaint("--rank", rank, "The run has no such rank", fix))
    mesh = paper_mesh(cfg, rank)
    progress, sizes = _progress(cfg), cfg.batches()
    if iteration <= progress.iteration:
        why = f"The run goes on from the checkpoint of iteration {progress.iteration}"
        fix = "Name a later one, or leave out --load for a run from its beginning"
        raise DataError(complaint("--iteration", iteration, why, fix))
    # Data do not differ between ranks, so that one process can build them for any.
    sources = build_sources(cfg, tokenizer, ParallelState.single(), data_position(progress))
    if sources.train is None:
        fix = "Give --train-iters or --train-samples"
        raise DataError(complaint("data", "no training split", "Nothing is trained on", fix))
    dataset = sources.train.dataset
    source = Source(dataset, micro_batch_size=cfg.micro_batch_size, data_parallel_size=mesh.dp.size)
    size = sizes.size(progress.trained_samples)
    for _ in range(iteration - progress.iteration - 1):
        progress.consumed_train_samples += size
        size = sizes.size(progress.trained_samples)
    start = progress.next_samples(len(source), size, source.begin)
    step = Step(iteration, rank, mesh.dp.rank, start, size)
    read: list[Piece] = []
    noting: dict[int, Any] = {}
    for windows in _windows(dataset):
        corpus = windows.corpus
        windows.corpus = noting.setdefault(id(corpus), _Noting(corpus, read))
    for microbatch in range(cfg.with_batch(size).num_microbatches):
        batch = source.batch(start, microbatch, mesh.dp.rank)
        first = source.first_sample(start, microbatch, mesh.dp.rank)
        for i, pieces in enumerate(_by_sample(read, cfg.seq_length + 1)):
            step.samples.append(
                Sample(
                    first + i,
                    microbatch,
                    tuple(pieces),
                    batch.tokens[i].tolist(),
                    batch.labels[i].tolist(),
                    batch.loss_mask[i].tolist(),
                )
            )
        read.clear()
    return step


def _by_sample(read: list[Piece], length: int) -> Iterator[list[Piece]]:
    """Divide what was read among samples, each of which takes `length` tokens."""
    pieces: list[Piece] = []
    for piece in read:
        pieces.append(piece)
        if sum(one.length for one in pieces) >= length:
            yield pieces
            pieces = []


def _progress(cfg: RunConfig) -> Progress:
    progress = Progress()
    if cfg.load is not None and not cfg.finetune:
        common = read_newest_common(str(cfg.load), cfg.ckpt_step)
        if common is not None:
            progress.update(counters_of(common, Path(cfg.load)))
    return progress
