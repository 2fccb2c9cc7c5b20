"""The corpus out of the standard library: deterministic, clean, and done only once."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.errors import DataError

TOOL = Path(__file__).resolve().parents[2] / "tools/build_corpus.py"
_spec = importlib.util.spec_from_file_location("build_corpus", TOOL)
build_corpus = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_corpus)


@pytest.fixture(scope="module")
def documents():
    return build_corpus.collect(10_000_000)


def test_enough_text_in_a_fixed_order(documents):
    assert sum(len(text.encode()) for _, text in documents) >= 10_000_000
    texts = [text.strip() for _, text in documents]
    assert len(set(texts)) == len(texts)
    names = [name for name, _ in documents]
    assert names != sorted(names)
    assert {"argparse.py", "topics/for", "help/math"} <= set(names)
    assert not any("site-packages" in name for name in names)


def test_help_of_modules_without_source(documents):
    text = dict(documents)["help/math"]
    assert "math.sqrt\n\nReturn the square root of x." in text
    assert " at 0x" not in text


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("def f(x):\n    return x\n" * 20, True),
        ("short", False),
        ("0x12, 0x34, 0x56,\n" * 40, False),
        ("\u4e2d\u6587\n" * 200, False),
        ("a" * 2000, False),
        ("\0" + "word " * 100, False),
    ],
)
def test_what_reads_like_text(text, good):
    assert build_corpus.reads_like_text(text) is good


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(build_corpus, "source_files", lambda root, excluded: iter(()))
    with pytest.raises(DataError, match="--min-megabytes: got 10. This Python has"):
        build_corpus.collect(10_000_000)


@pytest.fixture
def little(monkeypatch):
    texts = [(f"m{i}.py", f"def function_{i}(x):\n    return x + {i}\n") for i in range(300)]
    monkeypatch.setattr(build_corpus, "collect", lambda size: texts)
    return texts


def build(folder, vocab_size=320):
    return build_corpus.main(["--output-dir", str(folder), "--vocab-size", str(vocab_size)])


def test_build_once(tmp_path, little, capsys):
    assert build(tmp_path) == 0
    lines = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert [(line["source"], line["text"]) for line in lines] == little
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert model.get_piece_size() == 320
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, -1)
    text = "  def \u00e9(x):\n\n\treturn  x "
    assert model.decode(model.encode(text)) == text
    assert "already done" not in capsys.readouterr().out
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()}
    assert build(tmp_path) == 0
    assert "already done" in capsys.readouterr().out
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()} == before


def test_whatever_is_missing_or_changed_is_made_again(tmp_path, little):
    build(tmp_path)
    want = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for name in want:
        (tmp_path / name).write_text("damaged")
        assert build(tmp_path) == 0
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == want
        (tmp_path / name).unlink()
        assert build(tmp_path) == 0
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == want
    assert build(tmp_path, 315) == 0
    assert (tmp_path / "tokenizer.model").read_bytes() != want["tokenizer.model"]


def test_a_vocabulary_too_large_for_the_text(tmp_path, little, capsys):
    assert build(tmp_path, 100_000) == 1
    assert "--vocab-size: got 100000. It cannot be learned" in capsys.readouterr().err
    assert not (tmp_path / "corpus.stamp.json").exists()


def test_statistics(tmp_path, capsys):
    with IndexedDatasetBuilder(tmp_path / "corpus_text_document", np.uint16) as builder:
        builder.add_document([7, 7, 9])
        builder.add_document([11])
        builder.finalize()
    assert build_corpus.main(["--output-dir", str(tmp_path), "--statistics"]) == 0
    found = json.loads((tmp_path / "statistics.json").read_text())
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    assert found["unigram_entropy_nats"] == pytest.approx(entropy, abs=1e-6)
    assert (found["tokens"], found["documents"], found["distinct_tokens"]) == (4, 2, 3)
    assert json.loads(capsys.readouterr().out) == found
    assert build_corpus.main(["--output-dir", str(tmp_path / "none"), "--statistics"]) == 1
