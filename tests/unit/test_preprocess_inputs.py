"""Kinds of input, and going on after an interruption."""

from __future__ import annotations

import bz2
import gzip
import json
import sys

import numpy as np
import pytest

from megatron.core.datasets import preprocess, text_input
from megatron.core.datasets.encoding import EncodeOptions
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.preprocess import encode_files, measure_rate
from megatron.core.datasets.text_input import Position, TextInput, find_inputs
from megatron.core.datasets.tokenizers import TokenizerOptions
from megatron.core.errors import DataError

BYTES = TokenizerOptions(tokenizer_type="ByteLevelTokenizer")


def line(text):
    return json.dumps({"text": text, "other": text.upper()}).encode() + b"\n"


LINES = [line(f"text {i} " + "word " * (i % 7)) for i in range(400)]


def write(path, kind):
    data = b"".join(LINES)
    if kind == "plain":
        path.write_bytes(data)
    elif kind == "gzip":
        path.write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    elif kind == "zstd":
        zstandard = pytest.importorskip("zstandard")
        pack = zstandard.ZstdCompressor().compress
        path.write_bytes(pack(data[:5000]) + pack(data[5000:]))
    else:
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        rows = [json.loads(one) for one in LINES]
        parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=90)
    return path


def encode(paths, out, **more):
    options = EncodeOptions(append_eod=True, **more.pop("options", {}))
    return encode_files(paths, out, BYTES, options, **more)


def written(prefix):
    return [open(f"{prefix}_text_document.{end}", "rb").read() for end in ("bin", "idx")]


@pytest.mark.parametrize("kind", ["gzip", "zstd", "parquet"])
def test_every_kind_of_file_is_read_alike(tmp_path, kind, monkeypatch):
    encode([write(tmp_path / "in", "plain")], tmp_path / "want")
    encode([write(tmp_path / "packed", kind)], tmp_path / "got")
    assert written(tmp_path / "got") == written(tmp_path / "want")


def joined(chunks):
    """Return all lines; where batches of rows begin is no concern of a reader's."""
    files = [chunk.content for chunk in chunks]
    if isinstance(files[0], bytes):
        return files
    return [row for rows in files for row in rows]


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd", "parquet"])
def test_reading_goes_on_from_any_position(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(text_input, "CHUNK_BYTES", 700)
    source = TextInput([str(write(tmp_path / "in", kind))] * 2, ["text"])
    chunks = list(source.chunks())
    assert chunks[-1].after.overall == 2 * len(LINES)
    assert chunks[-1].stored == source.total_bytes
    for at in (0, 3, len(chunks) // 2, len(chunks) - 2):
        again = list(source.chunks(Position(**vars(chunks[at].after))))
        assert joined(again) == joined(chunks[at + 1 :])
        assert again[0].first == chunks[at + 1].first
        assert again[-1].after == chunks[-1].after


@pytest.mark.parametrize("kind", ["plain", "zstd", "parquet"])
@pytest.mark.parametrize("parts", [1, 3])
def test_an_interrupted_run_goes_on(tmp_path, kind, parts, monkeypatch):
    monkeypatch.setattr(text_input, "CHUNK_BYTES", 700)
    monkeypatch.setattr(preprocess, "SAVE_SECONDS", 0.0)
    paths, options = [write(tmp_path / "in", kind)], {"parts": parts}
    encode(paths, tmp_path / "want", options=options)

    class Killed(BaseException):
        pass

    def kill_at(moment):
        def report(text):
            if int(text.split()[0]) >= moment:
                raise Killed

        return report

    for moment in (1, 150, 320):
        with pytest.raises(Killed):
            encode(paths, tmp_path / "got", options=options, resume=moment > 1, log_interval=1,
                   report=kill_at(moment))  # fmt: skip
        if moment > 1:
            # What a crash leaves behind the last progress is cut off.
            with open(tmp_path / "got.partial" / "0.0.tokens", "ab") as log:
                log.write(b"garbage")
    assert not list(tmp_path.glob("got_text*"))
    with pytest.raises(DataError, match="Add --resume to go on"):
        encode(paths, tmp_path / "got", options=options)
    with pytest.raises(DataError, match="--resume: got another --partitions"):
        encode(paths, tmp_path / "got", options={"parts": 7}, resume=True)
    seen = []
    summary = encode(paths, tmp_path / "got", options=options, resume=True, log_interval=1,
                     report=seen.append)  # fmt: skip
    assert int(seen[0].split()[0]) > 150, "it began again"
    assert summary.lines == len(LINES)
    assert written(tmp_path / "got") == written(tmp_path / "want")
    assert not (tmp_path / "got.partial").exists()


def test_a_crash_between_the_corpora_of_two_keys(tmp_path, monkeypatch):
    paths, keys = [write(tmp_path / "in", "plain")], {"keys": ("text", "other")}
    publish = preprocess.publish

    def crash(unfinished, prefix):
        if "other" in prefix:
            raise KeyboardInterrupt
        publish(unfinished, prefix)

    monkeypatch.setattr(preprocess, "publish", crash)
    with pytest.raises(KeyboardInterrupt):
        encode(paths, tmp_path / "out", options=keys)
    monkeypatch.setattr(preprocess, "publish", publish)
    summary = encode(paths, tmp_path / "out", options=keys, resume=True)
    assert summary.documents == {"text": len(LINES), "other": len(LINES)}
    for key in keys["keys"]:
        assert len(IndexedDataset(tmp_path / f"out_{key}_document")) == len(LINES)


def test_partitions_deal_lines_out(tmp_path):
    path = write(tmp_path / "in", "plain")
    encode([path], tmp_path / "out", options={"parts": 3})
    data = IndexedDataset(tmp_path / "out_text_document")
    texts = [json.loads(LINES[i])["text"] for part in range(3) for i in range(part, 400, 3)]
    for number in (0, 1, 133, 134, 399):
        assert bytes(data[number][:-1].astype(np.uint8)).decode() == texts[number]


def test_two_runs_do_not_write_one_output(tmp_path):
    path = write(tmp_path / "in", "plain")

    def second(text):
        with pytest.raises(DataError, match="Another run is writing it"):
            encode([path], tmp_path / "out")

    encode([path], tmp_path / "out", log_interval=400, report=second)
    assert len(IndexedDataset(tmp_path / "out_text_document")) == len(LINES)


def test_folders_and_patterns(tmp_path):
    for name in ("b.jsonl", "a/c.jsonl.gz", "a/notes.txt", ".hidden.jsonl", "d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found, others = find_inputs([str(tmp_path)])
    names = [one[len(str(tmp_path)) + 1 :] for one in found]
    assert names == ["a/c.jsonl.gz", "b.jsonl", "d.jsonl"]
    assert others == [str(tmp_path / "a/notes.txt")]
    found, _ = find_inputs([str(tmp_path / "d.jsonl"), str(tmp_path / "?.jsonl")[:-7] + "b*"])
    assert [one[-7:] for one in found] == ["d.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match="It is named twice"):
        find_inputs([str(tmp_path), str(tmp_path / "d.jsonl")])
    with pytest.raises(DataError, match="No file has this name"):
        find_inputs([str(tmp_path / "x*")])


def test_links_are_followed_and_nothing_is_left_out_or_read_twice(tmp_path):
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for name in ("in/sub/b.jsonl", "elsewhere/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(LINES[0])
    (folder / "linked").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    want = [str(folder / name) for name in ("linked/c.jsonl", "sub/b.jsonl")]
    assert find_inputs([str(folder)])[0] == want
    assert find_inputs([str(folder / "s*"), str(folder / "l*d")])[0] == want[::-1]
    (folder / "loop").unlink()
    assert find_inputs([f"{folder}/**"])[0] == want  # matches folders and what is in them
    with pytest.raises(DataError, match="It is named twice, also as"):
        find_inputs([want[1], str(folder / "sub" / ".." / "sub" / "b.jsonl")])
    (folder / "gone.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.jsonl\. It is a link to nothing"):
        find_inputs([str(folder)])


def test_what_pzstd_writes_begins_with_a_frame_without_text(tmp_path):
    path = write(tmp_path / "in", "zstd")
    path.write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0\1\2\3\4" + path.read_bytes())
    assert encode([path], tmp_path / "out").lines == len(LINES)


def test_other_packers_are_named(tmp_path):
    (tmp_path / "in").write_bytes(bz2.compress(LINES[0]))
    with pytest.raises(DataError, match="packed with bzip2"):
        encode([tmp_path / "in"], tmp_path / "out", options={"skip_bad_lines": True})


def test_a_value_that_python_cannot_hold_is_a_bad_line(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    times = arrow.array([2**62], arrow.timestamp("us"))
    parquet.write_table(arrow.table({"text": times}), tmp_path / "in")
    with pytest.raises(DataError, match=r"in:1: .*out of range"):
        encode([tmp_path / "in"], tmp_path / "out")


def interrupted(tmp_path, monkeypatch, prefix):
    """Leave the progress of a run whose input has a bad last line."""
    monkeypatch.setattr(preprocess, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(text_input, "CHUNK_BYTES", 500)
    (tmp_path / "in.jsonl").write_bytes(b"".join(LINES) + b"{\n")
    with pytest.raises(DataError, match="not JSON|cannot be used"):
        encode([tmp_path / "in.jsonl"], prefix)


def test_an_output_in_the_folder_of_its_input_can_be_resumed(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, tmp_path / "out")
    assert find_inputs([str(tmp_path)])[0] == [str(tmp_path / "in.jsonl")]


@pytest.mark.parametrize("damage", ["shorter", "missing", "not JSON"])
def test_progress_that_lost_something_is_refused(tmp_path, monkeypatch, damage):
    interrupted(tmp_path, monkeypatch, tmp_path / "out")
    partial = tmp_path / "out.partial"
    if damage == "not JSON":
        (partial / "progress").write_text("{")
    elif damage == "missing":
        (partial / "0.0.lengths").unlink()
    else:  # it would be filled up with zeros
        (partial / "0.0.tokens").write_bytes(b"12")
    with pytest.raises(DataError, match=r"cannot be used: .*Remove .*out\.partial to start again"):
        encode([tmp_path / "in.jsonl"], tmp_path / "out", resume=True)


@pytest.mark.parametrize(("kind", "package"), [("zstd", "zstandard"), ("parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path, kind, package, monkeypatch):
    path = write(tmp_path / "in", kind)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"pip install {package}"):
        encode([path], tmp_path / "out")


@pytest.mark.parametrize("kind", ["zstd", "parquet"])
def test_a_file_that_is_cut_short(tmp_path, kind):
    path = write(tmp_path / "in", kind)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="It cannot be read after line"):
        encode([path], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_bad_lines_are_counted_by_reason(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(LINES[0] + b"{\n[\n7\n" + LINES[1])
    summary = encode([path], tmp_path / "out", options={"skip_bad_lines": True})
    assert summary.bad == {"not JSON": 2, "not an object": 1}
    assert summary.examples["not an object"].startswith(f"{path}:4: ")


def test_progress_tells_the_time_left():
    summary = preprocess.Summary(
        lines=300, input_bytes=3_000_000, stored=300, total=900, resumed=(100, 100, 1_000_000),
        seconds=2.0,
    )  # fmt: skip
    assert summary.rate() == (
        "300 documents, 3.0 MB (100 documents/s, 1.00 MB/s), 33.3%, 0:00:06 left"
    )


def test_the_rate_of_a_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(text_input, "CHUNK_BYTES", 700)
    path = str(write(tmp_path / "in", "plain"))
    options = EncodeOptions()
    assert measure_rate([path], BYTES, options, workers=1, max_documents=100) > 0
    with pytest.raises(DataError, match="--max-documents: got 1"):
        measure_rate([path], BYTES, options, workers=1, max_documents=1)
