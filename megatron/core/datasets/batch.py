"""One microbatch, and how it is cut from windows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Shape legend: b microbatch, s sequence.


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads; every field is [b, s].

    Attributes:
        tokens: int64 inputs.
        labels: int64, the token after each input.
        loss_mask: float32, 1 where the label counts and 0 elsewhere.
        position_ids: int64.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor

    @classmethod
    def stack(cls, samples: Sequence[Mapping[str, Tensor]]) -> Batch:
        """Collate samples of `GPTDataset`, each field [s]."""
        return cls(
            **{
                name: torch.stack([sample[name] for sample in samples])
                for name in ("tokens", "labels", "loss_mask", "position_ids")
            }
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; copies from pinned memory do not block."""
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
        )


def cut_window(
    window: Tensor,
    *,
    eod: int | None,
    pad: int | None,
    eod_mask_loss: bool,
    reset_position_ids: bool,
) -> dict[str, Tensor]:
    """Turn a window of tokens into one sample.

    Args:
        window: int64 [s + 1].
        eod: End-of-document id; None if there is none, then neither option below has an effect.
        pad: Padding id whose labels do not count; None if the vocabulary has none of its own.
        eod_mask_loss: Give no loss where the *input* is an end of document: what follows there is
            the start of an unrelated text.
        reset_position_ids: Count positions from 0 again after every end of document.

    Returns:
        ``tokens``, ``labels``, ``loss_mask``, ``position_ids``, each [s].
    """
    tokens, labels = window[:-1].clone(), window[1:].clone()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    position_ids = torch.arange(tokens.numel(), dtype=torch.int64)
    if eod is not None:
        ends = tokens == eod
        if eod_mask_loss:
            loss_mask[ends] = 0.0
        if reset_position_ids:
            # Position of the latest start of a document, carried forward to the next one.
            starts = torch.zeros_like(position_ids)
            starts[1:] = torch.where(ends[:-1], position_ids[1:], 0)
            position_ids = position_ids - torch.cummax(starts, dim=0).values
    if pad is not None:
        loss_mask[labels == pad] = 0.0
        # Any in-vocabulary id will do where nothing is learned; 0 always exists.
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }
