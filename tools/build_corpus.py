#!/usr/bin/env python3
"""Make a small real corpus and its vocabulary out of what every Python installation holds.

    python tools/build_corpus.py --output-dir DIR             # corpus.jsonl and tokenizer.model
    python tools/preprocess_data.py --input DIR/corpus.jsonl --output-prefix DIR/corpus ...
    python tools/build_corpus.py --output-dir DIR --statistics   # statistics.json

The text is the standard library's source code and its documentation: the language reference
topics and the help of modules that have no Python source. Each document is one module or one
topic. Documents are ordered by a hash of their content, so a split by position is a random split.
Nothing is downloaded. A second call finds its own output and changes nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.tool_flags import ToolParser, run_tool
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.errors import DataError, MegatronError, complaint

# Sources are taken tier by tier until there is enough. Some distributions leave out the library's
# own tests; numpy is there whenever this project runs.
TIERS = ("standard library", "tests of the standard library", "numpy")
NOT_LIBRARY = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})
# Help of these is not in any source file.
BUILT_IN = tuple(sorted({*sys.builtin_module_names, "math", "array", "zlib", "select", "pyexpat"}))

SMALLEST_DOCUMENT = 200
LONGEST_LINE = 1000
MOST_DIGITS = 0.2
MOST_FOREIGN = 0.02

# The vocabulary is learned from a part of the text: more of it takes longer and changes little.
TRAIN_BYTES = 12_000_000
STAMP_VERSION = 1

CORPUS, MODEL = "corpus.jsonl", "tokenizer.model"
STAMP, STATISTICS = "corpus.stamp.json", "statistics.json"


def reads_like_text(text: str) -> bool:
    """Return whether a file is code or prose rather than a table of numbers or code points."""
    if len(text) < SMALLEST_DOCUMENT or "\0" in text:
        return False
    digits = sum(text.count(digit) for digit in "0123456789")
    foreign = len(text) - len(text.encode("ascii", "ignore"))
    return (
        digits < MOST_DIGITS * len(text)
        and foreign < MOST_FOREIGN * len(text)
        and max(map(len, text.splitlines())) <= LONGEST_LINE
        # Character sets of `encodings`: 256 nearly equal lines per file, sixty times over.
        and "decoding_table" not in text
    )


def source_files(root: Path, excluded: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of the Python sources below a folder, sorted by path."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if excluded.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a test of other encodings, or a dangling link
        yield relative.as_posix(), text.replace("\r\n", "\n")


def module_help(module: ModuleType) -> str:
    """Return the documentation strings of a module and of what it defines, one after the other."""
    parts = [f"{module.__name__}\n\n{inspect.getdoc(module) or ''}"]
    for name, value in sorted(vars(module).items()):
        described = inspect.getdoc(value)
        if name.startswith("_") or not described or not callable(value):
            continue
        parts.append(f"{module.__name__}.{name}\n\n{described}")
        if inspect.isclass(value):
            for member, attribute in sorted(vars(value).items()):
                help_text = getattr(attribute, "__doc__", None)
                if not member.startswith("_") and isinstance(help_text, str) and help_text:
                    parts.append(f"{module.__name__}.{name}.{member}\n\n{help_text}")
    return "\n\n".join(parts) + "\n"


def documentation() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the documentation that no source file shows."""
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}  # left out by some distributions
    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    for name in BUILT_IN:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        yield f"help/{name}", module_help(module)


def collect(min_bytes: int) -> list[tuple[str, str]]:
    """Return (name, text) documents of at least `min_bytes` in all, ordered by content hash.

    Raises:
        DataError: This installation has less text than that.
    """
    library = Path(sysconfig.get_path("stdlib"))
    tiers: tuple[Iterator[tuple[str, str]], ...] = (
        source_files(library, NOT_LIBRARY),
        source_files(library / "test", frozenset({"__pycache__"})),
        source_files(Path(np.__file__).parent, frozenset({"__pycache__"})),
    )
    chosen: dict[str, tuple[str, str]] = {}
    size = 0

    def add(name: str, text: str) -> None:
        nonlocal size
        key = hashlib.sha256(text.strip().encode()).hexdigest()
        # The topics come as documents of their own, not as one file of escaped strings.
        if key not in chosen and name != "pydoc_data/topics.py" and reads_like_text(text):
            chosen[key] = (name, text)
            size += len(text.encode())

    for name, text in documentation():
        add(name, text)
    for number, tier in enumerate(tiers):
        for name, text in tier:
            if number and size >= min_bytes:
                break
            add(name, text)
    if size < min_bytes:
        raise DataError(
            complaint(
                "--min-megabytes",
                f"{min_bytes / 1e6:g}",
                f"This Python has {size / 1e6:.1f} MB of text in its {', '.join(TIERS)}",
                "Ask for less",
            )
        )
    return [chosen[key] for key in sorted(chosen)]


def train_vocabulary(documents: Sequence[tuple[str, str]], vocab_size: int) -> bytes:
    """Return a SentencePiece BPE model, the same for the same documents.

    Spaces are kept as they are (code needs its indentation), and whatever has no piece of its own
    is spelled in bytes, so every text survives a round trip.

    Raises:
        DataError: The package is missing or the text cannot fill the vocabulary.
    """
    try:
        import sentencepiece  # noqa: PLC0415 - optional
    except ImportError as error:
        raise DataError(
            complaint(
                "--vocab-size",
                vocab_size,
                "Learning a vocabulary takes the package sentencepiece",
                "Run pip install sentencepiece",
            )
        ) from error
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_training_lines(documents),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=LONGEST_LINE,
            num_threads=2,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=1,
        )
    except RuntimeError as error:
        raise DataError(
            complaint(
                "--vocab-size", vocab_size, f"It cannot be learned: {error}", "Use another size"
            )
        ) from error
    return model.getvalue()


def _training_lines(documents: Sequence[tuple[str, str]]) -> Iterator[str]:
    taken = 0
    for _, text in documents:
        for line in text.splitlines():
            if line:
                yield line
        taken += len(text)
        if taken >= TRAIN_BYTES:
            return


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy of a token histogram in nats: the loss of the best contextless model."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def write_statistics(directory: Path) -> dict[str, float | int]:
    """Count the tokens of ``corpus_text_document`` and write ``statistics.json``.

    Raises:
        DataError: The corpus was not preprocessed or has no tokens.
    """
    data = IndexedDataset(directory / "corpus_text_document")
    if not data.num_tokens:
        raise DataError(
            complaint(data.prefix, "no tokens", "There is nothing to count", "Preprocess again")
        )
    counts = np.zeros(0, dtype=np.int64)
    for sequence in range(len(data)):
        part = np.bincount(data[sequence])
        if part.size > counts.size:
            counts = np.pad(counts, (0, part.size - counts.size))
        counts[: part.size] += part
    entropy = unigram_entropy(counts)
    statistics: dict[str, float | int] = {
        "unigram_entropy_nats": round(entropy, 6),
        "unigram_perplexity": round(math.exp(entropy), 3),
        "tokens": data.num_tokens,
        "documents": data.num_documents,
        "distinct_tokens": int((counts > 0).sum()),
    }
    corpus = directory / CORPUS
    if corpus.is_file():
        with corpus.open(encoding="utf-8") as lines:
            size = sum(len(json.loads(line)["text"].encode()) for line in lines)
        statistics["bytes_per_token"] = round(size / data.num_tokens, 4)
    _replace(directory / STATISTICS, (json.dumps(statistics, indent=2) + "\n").encode())
    return statistics


def wanted_bytes(megabytes: float) -> int:
    """Return an amount of text in bytes.

    Raises:
        DataError: It is not a positive number.
    """
    if not 0 < megabytes < math.inf:
        raise DataError(
            complaint("--min-megabytes", megabytes, "It is an amount of text", "Use more than 0")
        )
    return int(megabytes * 1e6)


def build(directory: Path, vocab_size: int, min_bytes: int) -> None:
    """Write ``corpus.jsonl`` and ``tokenizer.model`` unless they are there already."""
    directory.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    documents = collect(min_bytes)
    lines = [json.dumps({"text": text, "source": name}) + "\n" for name, text in documents]
    corpus = "".join(lines).encode()
    stamp = {
        "version": STAMP_VERSION,
        "corpus_sha256": hashlib.sha256(corpus).hexdigest(),
        "vocab_size": vocab_size,
    }
    size = sum(len(text.encode()) for _, text in documents)
    print(f"corpus: {len(documents)} documents, {size / 1e6:.1f} MB of text", flush=True)
    if _stamped(directory) == {**stamp, "model_sha256": _digest(directory / MODEL)}:
        print(f"{directory}: already done")
        return
    model = train_vocabulary(documents, vocab_size)
    (directory / STAMP).unlink(missing_ok=True)
    _replace(directory / CORPUS, corpus)
    _replace(directory / MODEL, model)
    stamp["model_sha256"] = hashlib.sha256(model).hexdigest()
    _replace(directory / STAMP, json.dumps(stamp, indent=2).encode())
    print(f"{directory}: {CORPUS} and {MODEL} in {time.perf_counter() - begun:.1f} s")


def _stamped(directory: Path) -> dict[str, object] | None:
    path = directory / STAMP
    if not path.is_file():
        return None
    try:
        found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return found if _digest(directory / CORPUS) == found.get("corpus_sha256") else None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096, help="default: 4096")
    parser.add_argument(
        "--min-megabytes", type=float, default=10.5, help="amount of text (default: 10.5)"
    )
    parser.add_argument(
        "--statistics",
        action="store_true",
        help="only count the tokens of DIR/corpus_text_document into DIR/statistics.json",
    )
    args = parser.parse_args(argv)
    try:
        if args.statistics:
            print(json.dumps(write_statistics(args.output_dir)))
        else:
            build(args.output_dir, args.vocab_size, wanted_bytes(args.min_megabytes))
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        problem = f"It cannot be written ({error.strerror or error})"
        print(
            f"error: {complaint('--output-dir', args.output_dir, problem, 'Name another folder')}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
