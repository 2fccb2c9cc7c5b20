"""Fill-in-the-middle: documents whose middle is to be predicted from what surrounds it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """How many documents are rearranged, how, and by which tokens."""

    fim_data: bool = field(
        False,
        help="Rearrange documents so that the model learns to fill in the middle of a text from"
        " what stands before and after it.",
    )
    fim_rate: float = field(0.5, help="Share of the documents of a sample that are rearranged.")
    fim_spm_rate: float = field(
        0.5, help="Share of these in which the suffix comes first; in the others, the prefix."
    )
    fim_split_sample: str | None = field(
        help="Token at which a document is split into fragments that are rearranged one by one,"
        " e.g. what separates the files of a repository."
    )
    fim_fragment_rate: float | None = field(
        help="Share of the fragments that are rearranged, in documents that are."
    )
    fim_no_prefix: str | None = field(help="Texts that begin with this stay as they are.")
    fim_prefix_token: str = field("<fim_prefix>", help="Token in front of the prefix.")
    fim_middle_token: str = field("<fim_middle>", help="Token in front of the middle.")
    fim_suffix_token: str = field("<fim_suffix>", help="Token in front of the suffix.")
    fim_pad_token: str = field("<fim_pad>", help="Token that fills up samples that became shorter.")
    fim_eod_token: str = field("<|endoftext|>", help="Token that ends documents in the corpus.")
