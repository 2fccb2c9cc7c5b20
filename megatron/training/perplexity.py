"""Predicting every token of a text: its windows, their losses, and where texts come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.errors import DataError, complaint
from megatron.core.models.gpt.gpt_model import GPTModel


def windows(tokens: np.ndarray, length: int, rows: int) -> Iterator[torch.Tensor]:
    """Cut a stream into batches `[rows, length + 1]`; each window repeats the last token before it.

    The windows of the end, too few for a batch or shorter, come in batches of their own.
    """
    count = max(0, len(tokens) - 1)
    full = count // length
    for first in range(0, full, rows):
        last = min(first + rows, full)
        yield torch.stack(
            [
                torch.from_numpy(tokens[i * length : (i + 1) * length + 1].astype(np.int64))
                for i in range(first, last)
            ]
        )
    if count % length:
        yield torch.from_numpy(tokens[full * length :].astype(np.int64))[None]


@torch.no_grad()
def total_loss(model: GPTModel, tokens: np.ndarray, length: int, rows: int) -> tuple[float, int]:
    """Return the sum of the losses of all predicted tokens, and their number."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for batch in windows(tokens, length, rows):
        inputs, labels = batch[:, :-1].to(device), batch[:, 1:].to(device)
        positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
        losses = model(inputs, positions, labels)
        total += float(losses.double().sum())
        count += losses.numel()
    return total, count


def read_corpus(prefix: str, limit: int | None) -> np.ndarray:
    """Return the tokens of a corpus, document after document, at most `limit` of them."""
    corpus = IndexedDataset(prefix)
    parts, have = [np.empty(0, dtype=corpus.dtype)], 0
    for index in range(len(corpus)):
        if limit is not None and have >= limit:
            break
        parts.append(corpus[index])
        have += len(parts[-1])
    return np.concatenate(parts)[:limit]


def read_text(path: Path, flag: str) -> str:
    """Return a file's text.

    Args:
        path: The file.
        flag: What named it, for messages.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(complaint(flag, path, str(error), "Name a UTF-8 text file")) from error
