"""Chunks of text to token ids, in this process or in several, in the order of the input."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.indexed import optimal_dtype
from megatron.core.datasets.text_input import Chunk, Position
from megatron.core.datasets.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError, MegatronError, complaint

CHUNKS_PER_WORKER = 4

Text = str | list[str]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What becomes of a line.

    Attributes:
        keys: Fields of the JSON object, or columns; each makes a corpus of its own.
        append_eod: End every document with the tokenizer's end-of-document token.
        skip_bad_lines: Leave out lines that cannot be used instead of failing.
        parts: Deal lines out to so many parts that are written one behind the other.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_bad_lines: bool = False
    parts: int = 1


@dataclass
class Column:
    """Documents of one key and part: tokens flat, sequences per document, tokens per sequence."""

    tokens: npt.NDArray[Any]
    counts: list[int]
    lengths: list[int]
    empty: int


@dataclass
class Encoded:
    """What became of a chunk.

    Attributes:
        columns: By key and part.
        after: The position behind the chunk.
        stored: Bytes that the inputs up to there take on the disk.
        input_bytes: Bytes of text in the chunk.
        lines: Lines with content.
        bad: How many lines could not be used, by reason.
        examples: The first line for each reason: where it is and what is wrong.
    """

    columns: dict[tuple[str, int], Column]
    after: Position
    stored: int
    input_bytes: int
    lines: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


class _BadLine(Exception):  # noqa: N818 - no failure of the program
    def __init__(self, reason: str, details: str) -> None:
        super().__init__(details)
        self.reason = reason


class Encoder:
    """Tokenizes chunks; one per process.

    Args:
        tokenizer: Does the work.
        options: What becomes of a line.

    Raises:
        DataError: The tokenizer has no end of document but is to append it.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.eod = tokenizer.require_eod("--append-eod") if options.append_eod else None
        self.dtype = optimal_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokenize a chunk."""
        out = Encoded({}, chunk.after, chunk.stored, chunk.size)
        overall = chunk.after.overall - chunk.after.lines  # of the first line of the file
        documents: list[dict[str, Text]] = []
        numbers: list[int] = []
        for number, line in enumerate(_split(chunk.content), chunk.first):
            if isinstance(line, bytes) and not line.strip():
                continue
            out.lines += 1
            try:
                documents.append(_texts(line, self.options.keys))
                numbers.append(number)
            except _BadLine as error:
                self._reject(out, chunk.path, number, error)
        sequences = self._sequences(documents, numbers, out, chunk.path)
        parts = self.options.parts
        for part in range(parts):
            mine = [i for i, n in enumerate(numbers) if (overall + n - 1) % parts == part]
            for key, column in sequences.items():
                chosen = column if parts == 1 else [column[i] for i in mine]
                out.columns[key, part] = self._column(chosen)
        return out

    def _reject(self, out: Encoded, path: str, number: int, error: _BadLine) -> None:
        out.bad[error.reason] += 1
        out.examples.setdefault(error.reason, f"{path}:{number}: {error}")

    def _sequences(
        self, documents: list[dict[str, Text]], numbers: list[int], out: Encoded, path: str
    ) -> dict[str, list[list[list[int]]]]:
        """Tokenize documents; those that the tokenizer refuses leave both lists."""
        keys = self.options.keys
        try:
            return {key: self._tokenized([text[key] for text in documents]) for key in keys}
        except (ValueError, TypeError, MegatronError):
            # One by one, to find out which it is.
            good: list[tuple[int, dict[str, list[list[int]]]]] = []
            for number, text in zip(numbers, documents, strict=True):
                try:
                    good.append((number, {key: self._tokenized([text[key]])[0] for key in keys}))
                except (ValueError, TypeError, MegatronError) as error:
                    refused = _BadLine("refused by the tokenizer", str(error))
                    self._reject(out, path, number, refused)
            numbers[:] = [number for number, _ in good]
            return {key: [encoded[key] for _, encoded in good] for key in keys}

    def _tokenized(self, texts: Sequence[Text]) -> list[list[list[int]]]:
        """Return the sequences of each document."""
        pieces = [[text] if isinstance(text, str) else text for text in texts]
        flat = [piece for document in pieces for piece in document if piece]
        ids = iter(self.tokenizer.tokenize_batch(flat))
        documents = []
        for document in pieces:
            sequences = [s for s in itertools.islice(ids, sum(map(bool, document))) if s]
            if sequences and self.eod is not None:
                sequences[-1].append(self.eod)
            documents.append(sequences)
        return documents

    def _column(self, documents: list[list[list[int]]]) -> Column:
        filled = [document for document in documents if document]
        sequences = list(itertools.chain.from_iterable(filled))
        lengths = list(map(len, sequences))
        flat = itertools.chain.from_iterable(sequences)
        return Column(
            np.fromiter(flat, self.dtype, sum(lengths)),
            list(map(len, filled)),
            lengths,
            len(documents) - len(filled),
        )


def _split(content: bytes | list[dict[str, Any] | str]) -> Iterable[bytes | dict[str, Any] | str]:
    return content.split(b"\n") if isinstance(content, bytes) else content


def _texts(line: bytes | dict[str, Any] | str, keys: Sequence[str]) -> dict[str, Text]:
    value = _parsed(line) if isinstance(line, bytes) else line
    if isinstance(value, str) and not isinstance(line, bytes):
        raise _BadLine("unreadable value", value)
    if not isinstance(value, dict):
        raise _BadLine("not an object", f"the line is a JSON {type(value).__name__}, not an object")
    texts: dict[str, Text] = {}
    for key in keys:
        if key not in value:
            raise _BadLine(
                "no such field", f"no field '{key}'; the fields are {', '.join(value) or 'none'}"
            )
        text = value[key]
        parts = text if isinstance(text, list) else [text]
        if not all(isinstance(part, str) for part in parts):
            kind = type(text).__name__
            raise _BadLine("not a text", f"field '{key}' holds a JSON {kind}, not a text")
        if isinstance(line, bytes) and b"\\u" in line:
            _check_characters(parts)
        texts[key] = text
    return texts


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise _BadLine("not UTF-8", str(error)) from error
    except ValueError as error:
        raise _BadLine("not JSON", str(error)) from error
    except RecursionError as error:
        raise _BadLine("nested too deeply", str(error)) from error


def _check_characters(parts: Iterable[str]) -> None:
    # An escape can spell half of a surrogate pair, which is no character.
    for part in parts:
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise _BadLine("not a character", str(error)) from error


class _Worker:
    """A process that tokenizes, with a pipe of its own: nothing is shared that it could break."""

    def __init__(self, tokenizer_options: TokenizerOptions, options: EncodeOptions) -> None:
        # Spawned processes share no locks or threads with this one, whatever it has loaded.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, tokenizer_options, options), daemon=True
        )
        self._process.start()
        theirs.close()  # so that the death of the process is the end of the pipe

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokenize a chunk there.

        Raises:
            DataError: The process died.
        """
        try:
            self._pipe.send(chunk)
            answer: Encoded | BaseException = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                complaint(
                    "--workers",
                    "a worker process that died",
                    "It was killed, most often because memory ran out, or could not start",
                    "Use fewer workers",
                )
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, tokenizer_options: TokenizerOptions, options: EncodeOptions) -> None:
    # Ctrl-C reaches the whole group; the parent alone decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encoder = Encoder(build_tokenizer(tokenizer_options), options)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            chunk = pipe.recv()
            try:
                answer: Encoded | BaseException = encoder(chunk)
            except Exception as error:
                traceback.print_exc()
                answer = RuntimeError(f"a worker failed on {chunk.path}: {error!r}")
            pipe.send(answer)


@contextlib.contextmanager
def encoders(
    workers: int, encoder: Encoder, tokenizer_options: TokenizerOptions
) -> Iterator[Callable[[Iterator[Chunk]], Iterator[Encoded]]]:
    """Provide a function that tokenizes chunks and returns the results in order.

    Reading waits for results: a few chunks per worker are under way at any time.

    Args:
        workers: Processes; 1 works in this one.
        encoder: Does the work in this process.
        tokenizer_options: From these every other process builds its own.
    """
    if workers == 1:
        yield lambda chunks: map(encoder, chunks)
        return
    with contextlib.ExitStack() as stack:
        # A thread a worker, which waits for it.
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(workers):
            worker = _Worker(tokenizer_options, encoder.options)
            stack.callback(worker.stop)
            idle.put(worker)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)

        def encode(chunk: Chunk) -> Encoded:
            worker = idle.get()
            try:
                return worker(chunk)
            finally:
                idle.put(worker)

        yield lambda chunks: in_order(
            lambda chunk: threads.submit(encode, chunk), chunks, CHUNKS_PER_WORKER * workers
        )


def in_order(
    submit: Callable[[Chunk], Future[Encoded]], chunks: Iterator[Chunk], under_way: int
) -> Iterator[Encoded]:
    """Tokenize chunks elsewhere, never more than `under_way` at a time."""
    waiting: deque[Future[Encoded]] = deque()
    for chunk in chunks:
        waiting.append(submit(chunk))
        if len(waiting) >= under_way:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
