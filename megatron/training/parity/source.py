"""Training samples that depend on their number and on nothing else."""

from __future__ import annotations

import torch

from megatron.config import RunConfig
from megatron.core.datasets.source import Source


class SyntheticSamples:
    """Generated samples whose loss masks are uneven.

    One sample in four has no token that counts, one in four counts in its second half only: a loss
    that is a mean of means, over ranks or microbatches, differs from the mean over all tokens. Text
    follows a rule nine times in ten, so that a model learns something within a few steps. With
    ``--reset-attention-mask`` every sample is packed from documents of other lengths.

    Args:
        cfg: The configuration, with its vocabulary size.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.seq, self.vocab = cfg.seq_length, cfg.vocab_size or cfg.padded_vocab_size
        self.packed, self.restart = cfg.reset_attention_mask, cfg.reset_position_ids

    def __len__(self) -> int:
        return 1 << 31

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        window = torch.randint(0, self.vocab, (self.seq + 1,), generator=generator).tolist()
        ruled = torch.rand(self.seq, generator=generator) < 0.9
        for i in ruled.nonzero().flatten().tolist():
            window[i + 1] = (5 * window[i] + 7) % self.vocab
        kept = torch.rand(self.seq, generator=generator) < (index % 4) / 3
        if index % 4 == 2:
            kept[: self.seq // 2] = False
        positions = torch.arange(self.seq)
        sample = {
            "tokens": torch.tensor(window[:-1]),
            "labels": torch.tensor(window[1:]),
            "loss_mask": kept.float(),
            "position_ids": positions,
        }
        if self.packed:  # three documents, others in every sample
            borders = (3 + index % 7, 11 + index % 3)
            number = torch.stack([positions >= border for border in borders]).sum(0)
            sample["document_starts"] = torch.tensor((0, *borders))[number]
            if self.restart:
                sample["position_ids"] = positions - sample["document_starts"]
        return sample


class SyntheticSource(Source):
    """Batches of `SyntheticSamples`.

    Args:
        cfg: The configuration, with its vocabulary size.
        dp_size: Data-parallel size.
    """

    def __init__(self, cfg: RunConfig, dp_size: int) -> None:
        super().__init__(
            SyntheticSamples(cfg),
            micro_batch_size=cfg.micro_batch_size,
            data_parallel_size=dp_size,
        )
