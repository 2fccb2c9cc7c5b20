"""JSON lines to a corpus: read, tokenize in parallel, write in the order of the input.

Chunks of lines go to worker processes and come back in order; only a few chunks per worker are
under way at any time, so memory does not grow with the input. The output does not depend on the
number of workers, and appears only when everything was read.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.indexed import IndexedDatasetBuilder, optimal_dtype
from megatron.core.datasets.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError, MegatronError, complaint

CHUNK_LINES = 256
CHUNK_BYTES = 1 << 20
CHUNKS_PER_WORKER = 4

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What becomes of a line.

    Attributes:
        keys: Fields of the JSON object; each makes a corpus of its own.
        append_eod: End every document with the tokenizer's end-of-document token.
        skip_bad_lines: Leave out lines that cannot be used instead of failing.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_bad_lines: bool = False


@dataclass
class Summary:
    """What was read and written.

    Attributes:
        documents: Documents per key.
        tokens: Tokens per key.
        empty: Texts without a token, which are left out, per key.
        lines: Lines with content.
        bad_lines: Lines that were left out because they cannot be used.
        first_bad: Why, for the first of them.
        input_bytes: Bytes of uncompressed text read.
        seconds: Time taken.
    """

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    bad_lines: int = 0
    first_bad: str | None = None
    input_bytes: int = 0
    seconds: float = 0.0

    def rate(self) -> str:
        """Return the progress so far in words."""
        taken = max(self.seconds, 1e-9)
        return (
            f"{self.lines} documents, {self.input_bytes / 1e6:.1f} MB "
            f"({self.lines / taken:.0f} documents/s, {self.input_bytes / 1e6 / taken:.2f} MB/s)"
        )


@dataclass(frozen=True)
class _Chunk:
    path: str
    first_line: int
    lines: list[bytes]


@dataclass
class _Column:
    """Documents of one key: tokens flat, sequences per document, tokens per sequence."""

    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    empty: int = 0


@dataclass
class _Encoded:
    columns: dict[str, _Column]
    lines: int = 0
    input_bytes: int = 0
    bad: list[str] = field(default_factory=list)


class _Encoder:
    """Tokenizes chunks; one per process."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.eod = tokenizer.require_eod("--append-eod") if options.append_eod else None
        self.dtype = optimal_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: _Chunk) -> _Encoded:
        out = _Encoded({key: _Column() for key in self.options.keys})
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip():
                continue
            out.lines += 1
            out.input_bytes += len(line)
            try:
                texts = _texts(line, self.options.keys)
                encoded = {key: self._document(text) for key, text in texts.items()}
            except (ValueError, RecursionError, MegatronError) as error:
                out.bad.append(f"{chunk.path}:{number}: {error}")
                if not self.options.skip_bad_lines:
                    return out
                continue
            for key, sequences in encoded.items():
                self._add(out.columns[key], sequences)
        return out

    def _document(self, text: str | list[str]) -> list[list[int]]:
        parts = [text] if isinstance(text, str) else text
        sequences = [self.tokenizer.tokenize(part) for part in parts if part]
        sequences = [sequence for sequence in sequences if sequence]
        if sequences and self.eod is not None:
            sequences[-1].append(self.eod)
        return sequences

    def _add(self, column: _Column, sequences: list[list[int]]) -> None:
        if not sequences:
            column.empty += 1
            return
        column.tokens.extend(np.asarray(sequence, dtype=self.dtype) for sequence in sequences)
        column.lengths.extend(len(sequence) for sequence in sequences)
        column.counts.append(len(sequences))


def _texts(line: bytes, keys: Sequence[str]) -> dict[str, str | list[str]]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"the line is a JSON {type(value).__name__}, not an object")
    texts: dict[str, str | list[str]] = {}
    for key in keys:
        if key not in value:
            raise ValueError(f"no field '{key}'; the fields are {', '.join(value) or 'none'}")
        text = value[key]
        if not all(isinstance(part, str) for part in (text if isinstance(text, list) else [text])):
            raise ValueError(f"field '{key}' holds a JSON {type(text).__name__}, not a text")
        texts[key] = text
    return texts


def encode_files(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_options: TokenizerOptions,
    options: EncodeOptions,
    *,
    workers: int = 1,
    log_interval: int = 1000,
    report: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Tokenize JSON lines into ``{output_prefix}_{key}_document.{bin,idx}``.

    Args:
        inputs: Files, plain or gzip, read one after the other.
        output_prefix: Start of the output names; its folder is made.
        tokenizer_options: Which tokenizer; every worker builds its own.
        options: What becomes of a line.
        workers: Processes that tokenize; 1 works in this one.
        log_interval: Documents between two progress lines.
        report: Takes progress lines.

    Returns:
        Counts of what was read and written.

    Raises:
        DataError: A file or line cannot be used, nothing was left to write, or it cannot be
            written. No output then exists that did not exist before.
    """
    if workers < 1:
        raise DataError(
            complaint("--workers", workers, "Somebody has to do the work", "Use 1 or more")
        )
    try:
        return _encode_files(
            inputs, output_prefix, tokenizer_options, options, workers, log_interval, report
        )
    except OSError as error:  # reading reports its own failures
        raise DataError(
            complaint(
                "--output-prefix",
                os.fspath(output_prefix),
                f"It cannot be written ({error.strerror or error})",
                "Name a place in a writable folder with enough space; nothing was written",
            )
        ) from error


def _encode_files(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_options: TokenizerOptions,
    options: EncodeOptions,
    workers: int,
    log_interval: int,
    report: Callable[[str], None],
) -> Summary:
    tokenizer = build_tokenizer(tokenizer_options)
    encoder = _Encoder(tokenizer, options)
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    summary, begun = Summary(), time.perf_counter()
    chunks = (chunk for path in inputs for chunk in _chunks(os.fspath(path)))
    with contextlib.ExitStack() as stack:
        builders = {
            key: stack.enter_context(
                IndexedDatasetBuilder(f"{os.fspath(output_prefix)}_{key}_document", encoder.dtype)
            )
            for key in options.keys
        }
        if workers == 1:
            results: Iterable[_Encoded] = map(encoder, chunks)
        else:
            pool = stack.enter_context(_pool(workers, tokenizer_options, options))
            results = _in_order(pool, chunks, CHUNKS_PER_WORKER * workers)
        for encoded in results:
            before = summary.lines
            _take(encoded, builders, summary, options)
            summary.seconds = time.perf_counter() - begun
            if summary.lines // log_interval > before // log_interval:
                report(summary.rate())
        _check_output(summary, options, inputs)
        for builder in builders.values():
            builder.finalize()
    summary.seconds = time.perf_counter() - begun
    return summary


def _take(
    encoded: _Encoded,
    builders: dict[str, IndexedDatasetBuilder],
    summary: Summary,
    options: EncodeOptions,
) -> None:
    if encoded.bad and not options.skip_bad_lines:
        raise DataError(
            complaint(
                "--input",
                "a line that cannot be used",
                encoded.bad[0],
                "Repair the line, or leave such lines out with --on-bad-line skip",
            )
        )
    summary.lines += encoded.lines
    summary.input_bytes += encoded.input_bytes
    summary.bad_lines += len(encoded.bad)
    if summary.first_bad is None and encoded.bad:
        summary.first_bad = encoded.bad[0]
    for key, column in encoded.columns.items():
        if column.counts:
            flat = np.concatenate(column.tokens)
            builders[key].add_documents(flat, column.counts, column.lengths)
            summary.tokens[key] = summary.tokens.get(key, 0) + flat.size
        summary.documents[key] = summary.documents.get(key, 0) + len(column.counts)
        summary.empty[key] = summary.empty.get(key, 0) + column.empty


def _check_output(
    summary: Summary, options: EncodeOptions, inputs: Sequence[str | os.PathLike[str]]
) -> None:
    for key in options.keys:
        if not summary.documents.get(key):
            raise DataError(
                complaint(
                    "--input",
                    ", ".join(os.fspath(path) for path in inputs),
                    f"No text is left for '{key}': {summary.lines} lines, {summary.bad_lines} of "
                    f"them unusable, {summary.empty.get(key, 0)} texts without a token",
                    "Check the input and --json-keys",
                )
            )


def _chunks(path: str) -> Iterator[_Chunk]:
    first, lines, size = 1, [], 0
    try:
        with open(path, "rb") as raw:
            # Peeking instead of seeking lets the input be a pipe.
            zipped = raw.peek(2)[:2] == _GZIP_MAGIC
            source = gzip.GzipFile(fileobj=raw) if zipped else raw
            for number, line in enumerate(source, 1):
                lines.append(line)
                size += len(line)
                if len(lines) >= CHUNK_LINES or size >= CHUNK_BYTES:
                    yield _Chunk(path, first, lines)
                    first, lines, size = number + 1, [], 0
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            complaint(
                "--input",
                path,
                f"It cannot be read after line {first + len(lines) - 1}: {error}",
                "Check the path and that the file is complete",
            )
        ) from error
    if lines:
        yield _Chunk(path, first, lines)


_worker_encoder: _Encoder | None = None


def _start_worker(tokenizer_options: TokenizerOptions, options: EncodeOptions) -> None:
    global _worker_encoder
    # Ctrl-C reaches the whole group; the parent alone decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker_encoder = _Encoder(build_tokenizer(tokenizer_options), options)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(chunk: _Chunk) -> _Encoded:
    if _worker_encoder is None:
        raise RuntimeError("the worker was not started")
    return _worker_encoder(chunk)


@contextlib.contextmanager
def _pool(
    workers: int, tokenizer_options: TokenizerOptions, options: EncodeOptions
) -> Iterator[ProcessPoolExecutor]:
    # Spawned processes share no locks or threads with this one, whatever it has loaded.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_options, options),
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[_Chunk], under_way: int
) -> Iterator[_Encoded]:
    waiting: deque[Future[_Encoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode, chunk))
            if len(waiting) >= under_way:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            complaint(
                "--workers",
                "a worker process that died",
                "It was killed, most often because memory ran out, or could not start",
                "Use fewer workers",
            )
        ) from error
