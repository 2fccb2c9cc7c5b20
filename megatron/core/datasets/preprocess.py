"""Text to corpora: read, tokenize in parallel, write in the order of the input.

Only a few chunks of text per worker are under way at any time, so memory does not grow with the
input. The output does not depend on the number of workers, and appears only when everything was
read. Progress is stored on the way, so that a run that was interrupted can go on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.datasets import origin
from megatron.core.datasets.encoding import Encoded, EncodeOptions, Encoder, encoders
from megatron.core.datasets.indexed import IndexedDatasetBuilder, publish
from megatron.core.datasets.text_input import Chunk, Position, TextInput
from megatron.core.datasets.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megatron.core.datasets.unfinished import UnfinishedOutput
from megatron.core.errors import DataError, complaint

# How often progress is put on the disk; what was done since then is repeated after a crash.
SAVE_SECONDS = 10.0


@dataclass
class Summary:
    """What was read and written.

    Attributes:
        documents: Documents per key.
        tokens: Tokens per key.
        empty: Texts without a token, which are left out, per key.
        lines: Lines with content.
        bad: Lines that were left out because they cannot be used, by reason.
        examples: The first line for each reason: where it is and what is wrong.
        input_bytes: Bytes of uncompressed text read.
        stored: Bytes that what was read takes on the disk.
        total: Bytes that the whole input takes on the disk, 0 if unknown.
        resumed: Where the run was taken up again, 0 if it was not: lines, and bytes as in `stored`
            and `input_bytes`.
        seconds: Time taken since then.
    """

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    input_bytes: int = 0
    stored: int = 0
    total: int = 0
    resumed: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0

    @property
    def bad_lines(self) -> int:
        """How many lines were left out because they cannot be used."""
        return sum(self.bad.values())

    def rate(self) -> str:
        """Return the progress so far in words."""
        taken = max(self.seconds, 1e-9)
        lines, stored, size = self.resumed
        megabytes = (self.input_bytes - size) / 1e6
        words = (
            f"{self.lines} documents, {self.input_bytes / 1e6:.1f} MB "
            f"({(self.lines - lines) / taken:.0f} documents/s, {megabytes / taken:.2f} MB/s)"
        )
        if self.stored <= stored or self.stored >= self.total:
            return words
        left = round((self.total - self.stored) / (self.stored - stored) * taken)
        done = self.stored / self.total
        return f"{words}, {done:.1%}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    def take(self, encoded: Encoded) -> None:
        """Count a chunk."""
        self.lines += encoded.lines
        self.input_bytes += encoded.input_bytes
        self.stored = encoded.stored
        self.bad = dict(Counter(self.bad) + encoded.bad)
        self.examples = {**encoded.examples, **self.examples}
        for (key, _), column in encoded.columns.items():
            for counts, number in (
                (self.documents, len(column.counts)),
                (self.tokens, column.tokens.size),
                (self.empty, column.empty),
            ):
                counts[key] = counts.get(key, 0) + number


def encode_files(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer_options: TokenizerOptions,
    options: EncodeOptions,
    *,
    workers: int = 1,
    log_interval: int = 1000,
    resume: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Tokenize text into ``{output_prefix}_{key}_document.{bin,idx}``.

    Args:
        inputs: Files of JSON lines (plain, gzip, Zstandard) or Parquet, read one after the other.
        output_prefix: Start of the output names; its folder is made.
        tokenizer_options: Which tokenizer; every worker builds its own.
        options: What becomes of a line.
        workers: Processes that tokenize; 1 works in this one.
        log_interval: Documents between two progress lines.
        resume: Go on where an interrupted run with the same inputs and settings was.
        report: Takes progress lines.

    Returns:
        Counts of what was read and written.

    Raises:
        DataError: A file or line cannot be used, nothing was left to write, or it cannot be
            written. No output then exists that did not exist before; progress that a later run
            can go on from stays in ``{output_prefix}.partial``.
    """
    if workers < 1:
        raise DataError(
            complaint("--workers", workers, "Somebody has to do the work", "Use 1 or more")
        )
    try:
        source = TextInput([os.fspath(path) for path in inputs], options.keys)
        encoder = Encoder(build_tokenizer(tokenizer_options), options)
        run = _Run(os.fspath(output_prefix), source, encoder, tokenizer_options, resume)
        return run.finish(workers, log_interval, report)
    except OSError as error:  # reading reports its own failures
        raise DataError(
            complaint(
                "--output-prefix",
                os.fspath(output_prefix),
                f"It cannot be written ({error.strerror or error})",
                "Name a place in a writable folder with enough space; nothing was written",
            )
        ) from error


def measure_rate(
    inputs: Sequence[str],
    tokenizer_options: TokenizerOptions,
    options: EncodeOptions,
    *,
    workers: int,
    max_documents: int,
) -> float:
    """Tokenize the beginning of an input without writing it.

    Args:
        inputs: As for `encode_files`.
        tokenizer_options: As for `encode_files`.
        options: As for `encode_files`.
        workers: Processes that tokenize.
        max_documents: Stop after this many lines, rounded up to a chunk.

    Returns:
        Documents per second, without the time that processes take to start.

    Raises:
        DataError: A file or line cannot be used.
    """
    source = TextInput(inputs, options.keys)
    encoder = Encoder(build_tokenizer(tokenizer_options), options)
    summary, begun = Summary(), 0.0
    with encoders(workers, encoder, tokenizer_options) as encode:
        for encoded in encode(_up_to(source.chunks(), max_documents)):
            _refuse_bad(encoded, options)
            if begun:
                summary.take(encoded)
            begun = begun or time.perf_counter()
    taken = time.perf_counter() - begun
    if not summary.lines:
        raise DataError(
            complaint(
                "--max-documents",
                max_documents,
                "The documents fill a single piece of work, so no rate can be measured",
                "Raise it, or use a larger input",
            )
        )
    return summary.lines / taken


def _up_to(chunks: Iterator[Chunk], lines: int) -> Iterator[Chunk]:
    for chunk in chunks:
        yield chunk
        if chunk.after.overall >= lines:
            return


class _Run:
    """One output from its beginning, or from where an earlier run was, to its end."""

    def __init__(
        self,
        prefix: str,
        source: TextInput,
        encoder: Encoder,
        tokenizer_options: TokenizerOptions,
        resume: bool,
    ) -> None:
        self.prefix, self.source, self.encoder = prefix, source, encoder
        self.options, self.tokenizer_options = encoder.options, tokenizer_options
        settings = _settings(source, encoder, tokenizer_options)
        self.unfinished = UnfinishedOutput(prefix, settings, resume=resume)
        self.builders: dict[tuple[str, int], IndexedDatasetBuilder] = {}
        self.position, self.summary = Position(), Summary(total=source.total_bytes)
        self.sealed = False

    def finish(self, workers: int, log_interval: int, report: Callable[[str], None]) -> Summary:
        """Do what is left to do."""
        done = False
        try:
            self._restore()
            if not self.sealed:
                self._encode(workers, log_interval, report)
                self._seal()
            known = origin.describe(self.encoder.tokenizer, append_eod=self.options.append_eod)
            for number, key in enumerate(self.options.keys):
                corpus = f"{self.prefix}_{key}_document"
                origin.forget(corpus)
                publish(self._unfinished(number, 0), corpus)
                origin.write(corpus, known)
            done = True
        finally:
            for builder in self.builders.values():
                builder.close()
            if done or not self.unfinished.kept:
                self.unfinished.remove()
            self.unfinished.close()
        return self.summary

    def _restore(self) -> None:
        state: dict[str, Any] = self.unfinished.state or {}
        if state:
            self.position = Position(**state["position"])
            self.summary = Summary(**state["summary"])
            self.sealed = state["sealed"]
        before = self.summary
        before.resumed = (before.lines, before.stored, before.input_bytes)
        before.seconds = 0.0
        if self.sealed:
            return
        written = state.get("written")
        for number, key in enumerate(self.options.keys):
            for part in range(self.options.parts):
                self.builders[key, part] = IndexedDatasetBuilder(
                    f"{self.prefix}_{key}_document",
                    self.encoder.dtype,
                    unfinished=self._unfinished(number, part),
                    written=written[f"{number}.{part}"] if written else None,
                )

    def _unfinished(self, number: int, part: int) -> Path:
        return self.unfinished.folder / f"{number}.{part}"

    def _encode(self, workers: int, log_interval: int, report: Callable[[str], None]) -> None:
        summary = self.summary
        begun = saved = time.perf_counter()
        with encoders(workers, self.encoder, self.tokenizer_options) as encode:
            for encoded in encode(self.source.chunks(self.position)):
                _refuse_bad(encoded, self.options)
                before = summary.lines
                summary.take(encoded)
                for which, column in encoded.columns.items():
                    if column.counts:
                        builder = self.builders[which]
                        builder.add_documents(column.tokens, column.counts, column.lengths)
                self.position = encoded.after
                now = time.perf_counter()
                summary.seconds = now - begun
                if summary.lines // log_interval > before // log_interval:
                    report(summary.rate())
                if self.source.seekable and now - saved >= SAVE_SECONDS:
                    self._save()
                    saved = time.perf_counter()
        _check_output(summary, self.options, self.source.paths)

    def _save(self) -> None:
        names = [
            f"{n}.{p}" for n in range(len(self.options.keys)) for p in range(self.options.parts)
        ]
        marks = [builder.mark() for builder in self.builders.values()]
        self._store(dict(zip(names, marks, strict=True)))

    def _store(self, written: dict[str, dict[str, int]]) -> None:
        self.unfinished.save(
            {
                "position": dataclasses.asdict(self.position),
                "summary": dataclasses.asdict(self.summary),
                "written": written,
                "sealed": self.sealed,
            }
        )

    def _seal(self) -> None:
        for key in self.options.keys:
            first, *others = (self.builders[key, part] for part in range(self.options.parts))
            for other in others:
                first.add_unfinished(other)
            first.seal()
        self.sealed = True
        self._store({})


def _settings(
    source: TextInput, encoder: Encoder, tokenizer_options: TokenizerOptions
) -> dict[str, Any]:
    """Return what the output depends on.

    What to do with bad lines is not in it: up to where a run was there were none, or they were
    skipped.
    """
    stats = [os.stat(path) for path in source.paths if source.seekable]
    return {
        "--input": [
            [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
            for path, stat in zip(source.paths, stats, strict=False)
        ],
        "--json-keys": list(encoder.options.keys),
        "--append-eod": encoder.options.append_eod,
        "--partitions": encoder.options.parts,
        "tokenizer": dataclasses.asdict(tokenizer_options),
        "tokenizer file": _hashes(encoder.tokenizer),
    }


def _hashes(tokenizer: Tokenizer) -> list[str]:
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in tokenizer.files]


def _refuse_bad(encoded: Encoded, options: EncodeOptions) -> None:
    if encoded.bad and not options.skip_bad_lines:
        raise DataError(
            complaint(
                "--input",
                "a line that cannot be used",
                next(iter(encoded.examples.values())),
                "Repair the line, or leave such lines out with --on-bad-line skip",
            )
        )


def _check_output(summary: Summary, options: EncodeOptions, inputs: Sequence[str]) -> None:
    for key in options.keys:
        if not summary.documents.get(key):
            raise DataError(
                complaint(
                    "--input",
                    ", ".join(inputs),
                    f"No text is left for '{key}': {summary.lines} lines, {summary.bad_lines} of "
                    f"them unusable, {summary.empty.get(key, 0)} texts without a token",
                    "Check the input and --json-keys",
                )
            )
