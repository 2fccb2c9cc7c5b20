"""JSON lines to corpora: what is written, in which order, and that nothing is left of a failure."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from unit.test_tokenizers import LINES, sentencepiece_model

from megatron.core.datasets import encoding, text_input
from megatron.core.datasets.encoding import EncodeOptions
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.preprocess import encode_files
from megatron.core.datasets.tokenizers import TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/preprocess_data.py"
BYTES = TokenizerOptions(tokenizer_type="ByteLevelTokenizer")


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def encode(
    path, output, tokenizer=BYTES, workers=1, report=lambda line: None, resume=False, **options
):
    paths = path if isinstance(path, list) else [path]
    options = EncodeOptions(**options)
    return encode_files(
        paths, output, tokenizer, options, workers=workers, report=report, resume=resume
    )


def documents(prefix):
    data = IndexedDataset(prefix)
    bounds = data.document_indices.tolist()
    return [
        [data[i].tolist() for i in range(a, b)]
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def test_documents_and_their_ends(tmp_path):
    texts = ["abc", "", "é", "   "]
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    summary = encode(path, tmp_path / "out", append_eod=True)
    want = [[[*text.encode(), 256]] for text in texts if text]
    assert documents(tmp_path / "out_text_document") == want
    assert summary.documents == {"text": 3}
    assert summary.empty == {"text": 1}
    assert summary.tokens == {"text": 3 + 2 + 3 + 3}
    data = IndexedDataset(tmp_path / "out_text_document")
    assert data.dtype.name == "uint16"
    size = os.path.getsize(tmp_path / "out_text_document.bin")
    assert int(data.sequence_lengths.sum()) * 2 == size
    encode(path, tmp_path / "plain")
    assert documents(tmp_path / "plain_text_document")[0] == [[97, 98, 99]]


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
@pytest.mark.parametrize("append_eod", [False, True])
def test_begin_and_end_are_added_as_asked(tmp_path, kind, append_eod):
    """Begin and end are two tokens, and neither takes the place of the other."""
    model = sentencepiece_model(tmp_path / "tokenizer.model")
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in LINES[:2]])
    settings = TokenizerOptions(tokenizer_type=kind, tokenizer_model=model)
    encode(path, tmp_path / "out", settings, append_eod=append_eod)
    found = [sequence for (sequence,) in documents(tmp_path / "out_text_document")]
    begin, end = int(kind == "Llama2Tokenizer"), len(found[0]) - append_eod
    assert [ids.count(1) for ids in found] == [begin] * 2  # <s>
    assert [ids.count(2) for ids in found] == [append_eod] * 2  # </s>
    assert found[0][:begin] == [1] * begin
    assert found[0][end:] == [2] * append_eod
    tokenizer = build_tokenizer(settings)
    assert [tokenizer.detokenize(ids) for ids in found] == LINES[:2]


def test_a_list_of_texts_is_one_document(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": ["ab", "", "c"]}, {"text": []}])
    summary = encode(path, tmp_path / "out", append_eod=True)
    assert documents(tmp_path / "out_text_document") == [[[97, 98], [99, 256]]]
    assert summary.empty == {"text": 1}


def test_each_key_is_a_corpus(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"a": "x", "b": "yy"}, {"a": "z", "b": ""}])
    encode(path, tmp_path / "out", keys=("a", "b"))
    assert documents(tmp_path / "out_a_document") == [[[120]], [[122]]]
    assert documents(tmp_path / "out_b_document") == [[[121, 121]]]


def test_the_element_type_follows_the_vocabulary(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "59999 7"}])
    for size, name in ((65499, "uint16"), (65500, "int32")):
        numbers = TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=size)
        encode(path, tmp_path / "out", tokenizer=numbers)
        assert IndexedDataset(tmp_path / "out_text_document").dtype.name == name


def many(path, count):
    values = [{"text": f"document {i} " + "word " * (i % 7)} for i in range(count)]
    return write_lines(path, values)


def test_any_number_of_workers_writes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(text_input, "CHUNK_BYTES", 500)
    path = many(tmp_path / "in.jsonl", 1000)
    lines = []
    encode(path, tmp_path / "one", append_eod=True)
    encode(path, tmp_path / "two", append_eod=True, workers=2, report=lines.append)
    for ending in ("bin", "idx"):
        one = (tmp_path / f"one_text_document.{ending}").read_bytes()
        assert one == (tmp_path / f"two_text_document.{ending}").read_bytes()
    assert len(documents(tmp_path / "one_text_document")) == 1000
    assert len(lines) == 1
    assert lines[0].startswith("1000 documents, ")


def test_only_a_few_chunks_are_read_ahead(tmp_path, monkeypatch):
    """Memory is bounded because reading waits for the writer."""
    monkeypatch.setattr(text_input, "CHUNK_BYTES", 1)
    read, written = 0, 0

    def submit(chunk):
        done = Future()
        done.set_result(chunk)
        return done

    def chunks():
        nonlocal read
        paths = [str(many(tmp_path / "in.jsonl", 100))]
        for chunk in text_input.TextInput(paths, ["text"]).chunks():
            read += 1
            yield chunk

    for chunk in encoding.in_order(submit, chunks(), 8):
        written += 1
        assert chunk.first == written
        assert read - written < 8
    assert read == written == 100


def test_several_and_compressed_inputs_are_one_stream(tmp_path):
    first = write_lines(tmp_path / "1.jsonl", [{"text": "a"}])
    second = tmp_path / "2.jsonl.gz"
    second.write_bytes(gzip.compress(b'{"text": "b"}\n\n{"text": "c"}'))
    encode([first, second], tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == [[[97]], [[98]], [[99]]]


BAD = [
    (b"{not json", "Expecting property name"),
    (b'["text"]', "JSON list, not an object"),
    (b'{"txt": "a"}', "no field 'text'; the fields are txt"),
    (b'{"text": 5}', "holds a JSON int"),
    (b'{"text": ["a", 5]}', "holds a JSON list"),
    (b'{"text": "\xff"}', "can't decode byte"),
    (b'{"text": "\\ud800"}', "surrogates not allowed"),
    (b"[" * 100_000, "recursion"),
]


@pytest.mark.parametrize(("line", "says"), BAD)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, line, says):
    path = tmp_path / "in.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 300 + line + b"\n" + good)
    with pytest.raises(DataError, match=f"in.jsonl:301: .*{says}"):
        encode(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_bad_lines_can_be_skipped(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"\n".join(line for line, _ in BAD) + b'\n{"text": "b"}')
    summary = encode(path, tmp_path / "out", skip_bad_lines=True)
    assert documents(tmp_path / "out_text_document") == [[[97]], [[98]]]
    assert summary.bad_lines == len(BAD)
    assert "in.jsonl:2: " in summary.examples["not JSON"]
    assert summary.bad["not JSON"] == 1


def test_a_bad_line_keeps_the_previous_output(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "old"}])
    encode(path, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    path.write_text("bad\n")
    with pytest.raises(DataError):
        encode(path, tmp_path / "out")
    path.write_bytes(before["in.jsonl"])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_nothing_to_write_is_an_error(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": ""}, {"text": ""}])
    with pytest.raises(DataError, match="2 lines, 0 of them unusable, 2 texts without a token"):
        encode(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_unreadable_inputs(tmp_path):
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 5000)[:-20])
    with pytest.raises(DataError, match="cut.jsonl.gz. It cannot be read after line"):
        encode(cut, tmp_path / "out")
    with pytest.raises(DataError, match="gone.jsonl"):
        encode(tmp_path / "gone.jsonl", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["cut.jsonl.gz"]


def tool(*args, **kwargs):
    command = [sys.executable, str(TOOL), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


def test_command_line(tmp_path):
    many(tmp_path / "part1.jsonl", 5)
    many(tmp_path / "part2.jsonl", 5)
    done = tool(
        *("--input", tmp_path / "part*.jsonl", "--output-prefix", tmp_path / "deep/out"),
        *("--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--log-interval", 5),
    )
    assert done.returncode == 0, done.stderr
    assert "vocabulary 257, bos None, eod 256, pad None" in done.stdout
    assert "out_text_document: 10 documents" in done.stdout
    assert len(documents(tmp_path / "deep/out_text_document")) == 10
    (tmp_path / "part2.jsonl").write_text("bad\n")
    done = tool(
        *("--input", tmp_path / "part*.jsonl", "--output-prefix", tmp_path / "again"),
        *("--tokenizer-type", "ByteLevelTokenizer"),
    )
    assert done.returncode == 1
    assert "part2.jsonl:1: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("again*"))


def test_flags_that_cannot_be_honoured(tmp_path):
    spec = importlib.util.spec_from_file_location("preprocess_data", TOOL)
    preprocess_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(preprocess_data)
    many(tmp_path / "in.jsonl", 3)
    base = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    base += ["--tokenizer-type", "ByteLevelTokenizer"]
    for extra, flag in (
        (["--split-sentences"], "--split-sentences"),
        (["--lang", "english"], "--lang"),
        (["--keep-newlines"], "--keep-newlines"),
        (["--partitions", "0"], "--partitions"),
        (["--workers", "0"], "--workers"),
        (["--log-interval", "0"], "--log-interval"),
    ):
        args = preprocess_data.make_parser().parse_args(base + extra)
        with pytest.raises(DataError, match=f"^{flag}: got"):
            preprocess_data.run(args)
    extra = ["--partitions", "4", "--keep-sequential-samples"]
    preprocess_data.run(preprocess_data.make_parser().parse_args(base + extra))
    assert len(documents(tmp_path / "out_text_document")) == 3


def start_on_a_pipe(tmp_path, workers):
    """Start the tool on a pipe that never ends, so that it is surely busy when it is hit."""
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen(
        [sys.executable, str(TOOL), "--input", str(tmp_path / "pipe"), "--output-prefix"]
        + [str(tmp_path / "out"), "--tokenizer-type", "ByteLevelTokenizer"]
        + ["--workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pipe = os.open(tmp_path / "pipe", os.O_WRONLY)
    os.write(pipe, b'{"text": "some text"}\n' * 15000)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out.partial/*tokens")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return process, pipe


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_nothing(tmp_path, number):
    process, pipe = start_on_a_pipe(tmp_path, workers=1)
    try:
        assert list(tmp_path.glob("out.partial/*tokens"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        os.close(pipe)
        process.kill()
    assert process.returncode == 128 + number, errors
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def worker_ids(parent):
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
def test_a_killed_worker_ends_the_run(tmp_path):
    process, pipe = start_on_a_pipe(tmp_path, workers=2)
    try:
        deadline = time.monotonic() + 120
        while not worker_ids(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in worker_ids(process.pid):
            os.kill(worker, signal.SIGKILL)
        os.close(pipe)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "a worker process that died" in errors
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
