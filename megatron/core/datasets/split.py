"""Which documents belong to training, validation and test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.config.values import split_weights
from megatron.core.errors import DataError, complaint

SPLIT_NAMES = ("train", "valid", "test")

Range = tuple[float, float]


def parse_split(text: str) -> tuple[Range | None, ...]:
    """Turn ``969, 30, 1`` into the shares of the corpus that each split covers.

    Args:
        text: One to three non-negative numbers; missing ones are 0. They need not add up to
            anything.

    Returns:
        For train, valid and test the (from, to) share in [0, 1], or None for a width of 0.

    Raises:
        DataError: The text is not such a list, or all numbers are 0.
    """
    try:
        weights = split_weights(text)
    except ValueError as error:
        raise DataError(
            complaint("--split", repr(text), str(error), "Write it like 969,30,1")
        ) from None
    padded = np.array(weights + [0.0] * (len(SPLIT_NAMES) - len(weights)), dtype=np.float64)
    shares = (padded / padded.sum()).tolist()
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share)
    return tuple(
        (low, high) if high > low else None for low, high in zip(edges[:-1], edges[1:], strict=True)
    )


def split_documents(share: Range, count: int) -> npt.NDArray[np.signedinteger]:
    """Return the document numbers of a split.

    Args:
        share: From and to, as parts of the corpus in [0, 1].
        count: Number of documents (sequences of the ``.idx`` file) in the corpus.
    """
    low, high = (int(round(edge * count)) for edge in share)
    dtype = np.int32 if count <= np.iinfo(np.int32).max else np.int64
    return np.arange(low, high, dtype=dtype)
