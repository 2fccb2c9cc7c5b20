"""Which tokens form sample ``i``: the three index arrays of a packed corpus, as pure functions.

A sample is a window of ``sequence_length + 1`` consecutive tokens of the stream that results when
the documents of all epochs are laid end to end in shuffled order; the next window starts at the
last token of the previous one, because that token was only a label so far.

- ``document_index`` [epochs * documents]: the documents in stream order;
- ``sample_index`` [samples + 1, 2]: (position in ``document_index``, offset in that document) of
  the first token of every window;
- ``shuffle_index`` [samples]: the order in which windows are visited.

Order and random draws are Megatron-LM's for the same seed, so that a corpus is read in the same
order by both. Everything is vectorised, and sizes are chosen so that nothing overflows: int32 where
documents, windows and offsets fit, int64 where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# A last epoch of which less than this share is used is shuffled by itself. Otherwise the few
# samples taken of it would be spread over the whole run and earlier epochs would not be complete
# permutations of the corpus.
SEPARATE_BELOW = 0.80

_INT32 = np.iinfo(np.int32).max
_BLOCK = 1 << 20  # documents at a time
_UINT32 = np.iinfo(np.uint32).max

# Signed or unsigned, 32 or 64 bits: the smallest that fits.
IntArray = npt.NDArray[Any]


@dataclass(frozen=True)
class EpochPlan:
    """How often a corpus is repeated to yield the samples that a run wants.

    Attributes:
        epochs: Passes over the corpus, the last one possibly in part.
        samples: Windows in that many passes.
        samples_before_last: Windows that end before the last pass.
        separate_last: Whether the last pass is shuffled by itself.
    """

    epochs: int
    samples: int
    samples_before_last: int
    separate_last: bool

    @classmethod
    def of(cls, tokens_per_epoch: int, sequence_length: int, num_samples: int | None) -> EpochPlan:
        """Plan the epochs.

        Args:
            tokens_per_epoch: Tokens in one pass, at least 1.
            sequence_length: Tokens a sample advances by.
            num_samples: Samples that are wanted; one pass if None.
        """
        epochs = 1
        if num_samples is not None:
            epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
        if num_samples is None or epochs == 1:
            return cls.of_epochs(tokens_per_epoch, sequence_length, epochs, False)
        before = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length
        per_epoch = (tokens_per_epoch - 1) // sequence_length
        separate = num_samples - before < int(SEPARATE_BELOW * per_epoch)
        return cls.of_epochs(tokens_per_epoch, sequence_length, epochs, separate)

    @classmethod
    def of_epochs(
        cls, tokens_per_epoch: int, sequence_length: int, epochs: int, separate_last: bool
    ) -> EpochPlan:
        """Plan a number of passes over `tokens_per_epoch` tokens."""
        samples = (epochs * tokens_per_epoch - 1) // sequence_length
        before = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length
        return cls(epochs, samples, samples if epochs == 1 else before, separate_last)


def _blocks(count: int) -> list[slice]:
    """Cut a long array up, so that what is held beside it does not grow with it."""
    return [slice(i, i + _BLOCK) for i in range(0, count, _BLOCK)]


def count_tokens(lengths: npt.NDArray[np.int32], documents: IntArray) -> int:
    """Return the tokens of some documents, of which any may occur several times."""
    blocks = _blocks(documents.size)
    return sum(int(lengths[documents[block]].sum(dtype=np.int64)) for block in blocks)


def document_index(documents: IntArray, plan: EpochPlan, rng: np.random.RandomState) -> IntArray:
    """Return the documents of all epochs in shuffled order.

    Args:
        documents: Document numbers of the split, [documents].
        plan: The epochs.
        rng: Advanced by the shuffles; `shuffle_index` must use it next.
    """
    largest = int(documents.max()) if documents.size else 0
    order = np.empty(plan.epochs * documents.size, np.int32 if largest <= _INT32 else np.int64)
    order.reshape(plan.epochs, documents.size)[:] = documents
    together = (plan.epochs - plan.separate_last) * documents.size
    rng.shuffle(order[:together])
    if plan.separate_last:
        rng.shuffle(order[together:])
    return order


def sample_index(
    lengths: npt.NDArray[np.int32],
    order: IntArray,
    sequence_length: int,
) -> IntArray:
    """Return where every window starts.

    Args:
        lengths: Tokens of each document of the whole corpus, indexed by the values of `order`.
        order: `document_index`.
        sequence_length: Tokens a window advances by.

    Returns:
        [samples + 1, 2]; the last row is where the window after the last one would start.
    """
    total = count_tokens(lengths, order)
    if not total:
        return np.zeros((1, 2), dtype=np.int32)
    # Window i starts at token i * sequence_length of the stream, so document d holds the starts of
    # windows ceil(starts[d] / sequence_length) up to the same of d + 1; empty documents hold none.
    rows = -(-total // sequence_length)
    out = np.empty((rows, 2), dtype=np.int64 if order.size > _INT32 else np.int32)
    before, row = 0, 0
    for block in _blocks(order.size):
        ordered = lengths[order[block]]
        starts = np.empty(ordered.size + 1, dtype=np.int64)
        starts[0] = before
        np.cumsum(ordered, dtype=np.int64, out=starts[1:])
        starts[1:] += before
        windows = np.diff(-(-starts // sequence_length))
        end = row + int(windows.sum())
        documents = np.arange(block.start, block.start + ordered.size)
        out[row:end, 0] = np.repeat(documents, windows)
        offsets = np.arange(row, end) * sequence_length
        offsets -= np.repeat(starts[:-1], windows)
        out[row:end, 1] = offsets
        before, row = int(starts[-1]), end
    # The first window starts at the very beginning, leading empty documents included.
    out[0] = 0
    return out


def shuffle_index(plan: EpochPlan, rng: np.random.RandomState) -> IntArray:
    """Return the order in which windows are visited, [samples].

    Args:
        plan: The epochs.
        rng: The generator `document_index` has used before.
    """
    dtype = np.int64 if plan.samples >= _UINT32 - 1 else np.uint32
    order = np.arange(plan.samples, dtype=dtype)
    if plan.separate_last:
        rng.shuffle(order[: plan.samples_before_last])
        rng.shuffle(order[plan.samples_before_last :])
    else:
        rng.shuffle(order)
    return order


@dataclass(frozen=True)
class SampleOrder:
    """The three arrays of one split of one corpus."""

    document_index: IntArray
    sample_index: IntArray
    shuffle_index: IntArray

    @classmethod
    def build(
        cls,
        lengths: npt.NDArray[np.int32],
        documents: IntArray,
        plan: EpochPlan,
        *,
        sequence_length: int,
        seed: int,
    ) -> SampleOrder:
        """Build all three from one seed.

        Args:
            lengths: Tokens of each document of the whole corpus.
            documents: Document numbers of the split.
            plan: The epochs, see `EpochPlan.of`.
            sequence_length: Tokens a sample advances by.
            seed: Seed of the one generator behind both shuffles.
        """
        rng = np.random.RandomState(seed)
        order = document_index(documents, plan, rng)
        samples = sample_index(lengths, order, sequence_length)
        return cls(order, samples, shuffle_index(plan, rng))
