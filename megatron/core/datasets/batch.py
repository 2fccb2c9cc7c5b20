"""One microbatch, and how it is cut from windows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.mesh import Axis
from megatron.core.transformer.context_parallel import take_local

# Shape legend: b microbatch, s sequence.


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads; every field is [b, s], on a context-parallel rank its part.

    Attributes:
        tokens: int64 inputs.
        labels: int64, the token after each input.
        loss_mask: float32, 1 where the label counts and 0 elsewhere.
        position_ids: int64.
        document_starts: int64, where in the sequence each position's document starts, if attention
            must not look across documents. Always of the whole sequence and on the CPU: attention
            is planned from it.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_starts: Tensor | None = None

    @classmethod
    def stack(cls, samples: Sequence[Mapping[str, Tensor]]) -> Batch:
        """Collate samples of `GPTDataset`, each field [s]."""
        names = ["tokens", "labels", "loss_mask", "position_ids"]
        if "document_starts" in samples[0]:
            names.append("document_starts")
        return cls(**{name: torch.stack([sample[name] for sample in samples]) for name in names})

    def context_shard(self, axis: Axis) -> Batch:
        """Return the tokens of one context-parallel rank: two chunks of every sequence.

        Raises:
            MeshError: The sequence has no 2 * `axis.size` equal chunks.
        """
        if axis.size == 1:
            return self
        return Batch(
            take_local(self.tokens, axis),
            take_local(self.labels, axis),
            take_local(self.loss_mask, axis),
            take_local(self.position_ids, axis),
            self.document_starts,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; copies from pinned memory do not block."""
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.document_starts,
        )


def cut_window(
    window: Tensor,
    *,
    eod: int | None,
    pad: int | None,
    eod_mask_loss: bool,
    reset_position_ids: bool,
    reset_attention_mask: bool = False,
) -> dict[str, Tensor]:
    """Turn a window of tokens into one sample.

    Args:
        window: int64 [s + 1].
        eod: End-of-document id; None if there is none, then neither option below has an effect.
        pad: Padding id whose labels do not count; None if the vocabulary has none of its own.
        eod_mask_loss: Give no loss where the *input* is an end of document: what follows there is
            the start of an unrelated text.
        reset_position_ids: Count positions from 0 again after every end of document.
        reset_attention_mask: Say where documents start, so that attention stays inside them.

    Returns:
        ``tokens``, ``labels``, ``loss_mask``, ``position_ids``, each [s], and if attention is to
        stay inside documents ``document_starts`` [s].
    """
    tokens, labels = window[:-1].clone(), window[1:].clone()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    position_ids = torch.arange(tokens.numel(), dtype=torch.int64)
    document_starts = torch.zeros_like(position_ids)
    if eod is not None:
        ends = tokens == eod
        if eod_mask_loss:
            loss_mask[ends] = 0.0
        if reset_position_ids or reset_attention_mask:
            # Position of the latest start of a document, carried forward to the next one.
            document_starts[1:] = torch.where(ends[:-1], position_ids[1:], 0)
            document_starts = torch.cummax(document_starts, dim=0).values
        if reset_position_ids:
            position_ids = position_ids - document_starts
    if pad is not None:
        loss_mask[labels == pad] = 0.0
        # Any in-vocabulary id will do where nothing is learned; 0 always exists.
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
    sample = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }
    if reset_attention_mask:
        sample["document_starts"] = document_starts
    return sample
