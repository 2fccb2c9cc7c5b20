"""The tokenizer of an export: which ids end and begin texts, and what transformers loads.

A model that came from a HuggingFace directory keeps that directory's own files and ids. Another
one was trained with a tokenizer of this project, whose special ids go into ``config.json`` and
whose files get the ``tokenizer_config.json`` that makes transformers' tokenizer do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.datasets.tokenizers import (
    Tokenizer,
    TokenizerOptions,
    build_tokenizer,
)
from megatron.core.errors import CheckpointError, DataError, complaint
from megatron.training import hf_files
from megatron.training.hf_sources import Say, Source

# What tokenizers differ in: spaces, line ends, letters beyond ASCII, signs that need several bytes.
TEXTS = (
    "Hello, world! 12345",
    "def f(x):\n    return x + 1\n\n\ty = 2\n",
    "two  spaces and one at the end ",  # with one in front, LlamaTokenizer adds no further one
    "Z\u00fcrich, na\u00efve caf\u00e9 \u2013 \u6771\u4eac \U0001f642",
)
_CONFIG = "tokenizer_config.json"
_PIECES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_SPACE = "\u2581"  # how pieces spell a space
_ROLES = {"bos_token": "bos", "eos_token": "eod", "pad_token": "pad"}


def of_run(source: Source, say: Say = print) -> Tokenizer | None:
    """Build the tokenizer that a model was trained with.

    Args:
        source: The model.
        say: Receives a line if it cannot be built.

    Returns:
        None if there are no files of one, or if they are those of a HuggingFace directory.
    """
    options = None if source.kept else _options(source.tokenizer, source.tokenizer_settings)
    if options is None:
        return None
    try:
        return build_tokenizer(options)
    except DataError as error:
        say(f"NOTE: the export names no special tokens; its tokenizer cannot be built: {error}")
        return None


def _options(files: Mapping[str, Path], settings: Mapping[str, Any]) -> TokenizerOptions | None:
    """Settings of the tokenizer that these files are, of the run's own type if they fit it."""
    kind = settings.get("tokenizer_type")
    model = files.get("tokenizer.model")
    if kind == "TikTokenizer":
        names = settings.get("tiktoken_special_tokens")
        return TokenizerOptions(
            tokenizer_type=kind,
            tokenizer_model=str(model or files.get("tokenizer.json") or ""),
            vocab_size=settings.get("vocab_size"),
            tiktoken_pattern=settings.get("tiktoken_pattern"),
            tiktoken_num_special_tokens=settings.get("tiktoken_num_special_tokens"),
            tiktoken_special_tokens=None if names is None else tuple(names),
        )
    if "tokenizer.json" in files:
        path = str(files["tokenizer.json"])
        return TokenizerOptions(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)
    if model is not None:
        kind = kind if kind in _PIECES else _PIECES[0]
        return TokenizerOptions(tokenizer_type=kind, tokenizer_model=str(model))
    if {"vocab.json", "merges.txt"} <= files.keys():
        vocab, merges = str(files["vocab.json"]), str(files["merges.txt"])
        kind = "GPT2BPETokenizer"
        return TokenizerOptions(tokenizer_type=kind, vocab_file=vocab, merge_file=merges)
    return None


def special_tokens(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a tokenizer's special ids by the names they have in ``config.json``."""
    if tokenizer is None:
        return {}
    ids = {f"{role}_id": getattr(tokenizer, own) for role, own in _ROLES.items()}
    return {name: number for name, number in ids.items() if number is not None}


def describe(directory: Path, tokenizer: Tokenizer) -> None:
    """Write the ``tokenizer_config.json`` of an export, unless it has one.

    Args:
        directory: The export, with the tokenizer's files.
        tokenizer: The run's.
    """
    path = directory / _CONFIG
    if path.exists() or tokenizer.name == "TikTokenizer":  # transformers has none that reads it
        return
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if tokenizer.name in _PIECES:
        first = tokenizer.tokenize_part("a")[:1]
        prefix = any(_name(tokenizer, number).startswith(_SPACE) for number in first)
        config |= {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": tokenizer.name == "Llama2Tokenizer",
            "add_eos_token": False,
            "add_prefix_space": prefix,
        }
    elif tokenizer.name == "GPT2BPETokenizer":
        config |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for role, own in _ROLES.items():
        number = getattr(tokenizer, own)
        if number is not None:
            config[role] = _name(tokenizer, number)
    hf_files.write_json(path, config)


def _name(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.token_name(number) or ""


def compare(directory: Path, tokenizer: Tokenizer, library: Any) -> str:
    """Load an export's tokenizer as its users will, and compare ids with the run's.

    Args:
        directory: The export.
        tokenizer: The run's.
        library: The package ``transformers``.

    Returns:
        A line that says the outcome.

    Raises:
        CheckpointError: It cannot be loaded, or gives other ids.
    """
    if tokenizer.name == "TikTokenizer":
        return (
            "NOTE: transformers has no tokenizer that reads the file of --tokenizer-type"
            " TikTokenizer: it travels along as it is, and nothing was compared"
        )
    try:
        theirs = library.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever its many readers raise
        first = str(error).strip().splitlines()[:1]
        raise _refused(
            f"AutoTokenizer cannot load it ({type(error).__name__}: {''.join(first)})"
        ) from error
    for text in TEXTS:
        own, other = tokenizer.tokenize(text), list(theirs(text)["input_ids"])
        if own != other:
            pairs = zip(own, other, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))
            raise _refused(
                f"{type(theirs).__name__} of transformers gives other ids for {text!r}: "
                f"{other[at : at + 4]} instead of {own[at : at + 4]} from token {at} on"
            )
    return f"verified: AutoTokenizer gives the run's ids for {len(TEXTS)} texts"


def _refused(why: str) -> CheckpointError:
    fix = "Pass --no-verify to export it all the same, and tokenize with this project's tokenizer"
    return CheckpointError(complaint("--verify", "another tokenizer", why, fix))
