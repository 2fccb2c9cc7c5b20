"""Training data and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.field import field

TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)
# Everything that decides which tokenizer a run has.
TOKENIZER_FIELDS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tiktoken_special_tokens",
)
TIKTOKEN_PATTERNS = ("v1", "v2", "cl100k", "o200k")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where sequences come from and how text becomes tokens."""

    data_path: tuple[str, ...] | None = field(
        nargs="*",
        help="Prefix of a .bin/.idx pair, or several, or weight-prefix pairs of a blend.",
    )
    split: str | None = field(
        help="Shares of training, validation and test documents.", fallback="969, 30, 1"
    )
    data_cache_path: str | None = field(
        help="Folder for index files.", fallback="a folder next to each dataset"
    )
    mock_data: bool = field(False, help="Train on synthetic sequences; needs no files.")
    mmap_bin_files: bool = field(
        True,
        flags="--no-mmap-bin-files",
        help="Map .bin files into memory instead of reading them.",
    )
    num_workers: int = field(2, help="Threads that prepare batches ahead of the training step.")
    eod_mask_loss: bool = field(
        False, help="Leave positions that hold an end-of-document token out of the loss."
    )
    reset_position_ids: bool = field(
        False, help="Restart positions after every end-of-document token."
    )
    reset_attention_mask: bool = field(
        False, help="Attention does not look across end-of-document tokens."
    )
    tokenizer_type: str | None = field(
        choices=TOKENIZER_TYPES,
        help="Kind of tokenizer.",
        fallback="GPT2BPETokenizer with --vocab-file, SentencePieceTokenizer for a .model file,"
        " else NullTokenizer",
    )
    tokenizer_model: str | None = field(help="Tokenizer file, folder or name.")
    vocab_file: str | None = field(help="Vocabulary of a GPT-2 BPE tokenizer.")
    merge_file: str | None = field(help="Merges of a GPT-2 BPE tokenizer.")
    tiktoken_pattern: str | None = field(
        choices=TIKTOKEN_PATTERNS,
        help="How TikTokenizer cuts a text into words: v1 or v2 of Megatron-LM, or as the"
        " encodings cl100k (Llama 3 too) and o200k do.",
    )
    tiktoken_num_special_tokens: int | None = field(
        help="Ids that TikTokenizer keeps for special tokens.",
        fallback="1000 for a JSON file, else the number of names",
    )
    tiktoken_special_tokens: tuple[str, ...] | None = field(
        flags=("--tiktoken-special-tokens", "--tokenizer-special-tokens"),
        nargs="*",
        help="Names of TikTokenizer's special tokens.",
        fallback="<unk> <s> </s> <mask> <pad> <cls> <sep> for a JSON file, else <|endoftext|>",
    )
    vocab_size: int | None = field(
        help="Vocabulary before padding; needed only for NullTokenizer.",
        fallback="the tokenizer's size; 50257 for NullTokenizer",
    )
