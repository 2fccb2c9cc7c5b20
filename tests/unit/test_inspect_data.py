"""tools/inspect_data.py: figures of a corpus, and what a rank reads in an iteration."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from unit.test_tool_output import with_closed_output

from megatron.config.tool_flags import CLOSED_PIPE
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder

TOOL = Path(__file__).resolve().parents[2] / "tools/inspect_data.py"
spec = importlib.util.spec_from_file_location("inspect_data", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def corpus(prefix, first, documents=40):
    with IndexedDatasetBuilder(prefix) as builder:
        for number in range(documents):
            flat = [first + (number * 7 + i) % 40 for i in range(5 + number % 9)]
            builder.add_document(flat, [2, len(flat) - 2])
        builder.finalize()
    return str(prefix)


def shown(capsys, *arguments):
    assert tool.main([str(a) for a in arguments]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_figures_and_documents(tmp_path, capsys):
    prefix = corpus(tmp_path / "c", 0)
    figures = shown(capsys, "corpus", prefix, "--json")
    lengths = [5 + n % 9 for n in range(40)]
    assert figures["documents"] == 40
    assert figures["sequences"] == 80
    assert figures["tokens"] == sum(lengths)
    assert figures["longest"] == 13
    assert figures["histogram"] == [
        {"from": 4, "to": 7, "documents": sum(4 <= n < 8 for n in lengths)},
        {"from": 8, "to": 15, "documents": sum(8 <= n < 16 for n in lengths)},
    ]
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100)
    found = shown(capsys, "corpus", prefix, "--document", 1, "--json", *null)
    assert found["sequences"] == [[7, 8], [9, 10, 11, 12]]
    assert found["text"] == ["7 8", "9 10 11 12"]
    assert tool.main(["corpus", prefix, "--document", "40"]) == 1
    assert "Documents are 0 to 39" in capsys.readouterr().err
    few = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert tool.main(["corpus", prefix, "--document", "1", *few]) == 1
    assert "Document 1 has id 12" in capsys.readouterr().err


def test_nobody_reads_a_long_document_to_its_end(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "long") as builder:
        builder.add_document([7] * 100_000)
        builder.finalize()
    command = [str(TOOL), "corpus", str(tmp_path / "long"), "--document", "0"]
    assert with_closed_output(*command) == (CLOSED_PIPE, "")


RUN = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--max-position-embeddings", "16", "--seq-length", "16", "--micro-batch-size", "2"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--split", "100,0,0"),
    *("--eval-iters", "0", "--lr", "0.1", "--device", "cpu"),
    *("--tensor-model-parallel-size", "2", "--fake-world-size", "4"),
]


@pytest.mark.parametrize(
    "sizes",
    [
        "--global-batch-size 8 --train-iters 9",
        "--global-batch-size 8 --rampup-batch-size 4 4 12 --train-samples 72",
    ],
)
def test_every_sample_is_read_by_one_rank_and_its_pieces_are_its_tokens(tmp_path, capsys, sizes):
    data = ["--data-path", "0.7", corpus(tmp_path / "a", 0), "0.3", corpus(tmp_path / "b", 50)]
    where = ["--data-cache-path", str(tmp_path / "cache")]
    consumed = 0
    for iteration in (1, 2, 3, 4):
        seen = {}
        for rank in range(4):
            step = shown(capsys, "step", "--iteration", iteration, "--rank", rank, "--json", *RUN,
                         *sizes.split(), *data, *where)  # fmt: skip
            assert step["consumed_samples"] == consumed
            assert step["data_parallel_rank"] == rank // 2
            for sample in step["samples"]:
                text = []
                for piece in sample["pieces"]:
                    held = IndexedDataset(piece["corpus"])
                    first = held.document_indices[piece["document"]]
                    assert piece["sequence"] - first in (0, 1)
                    part = held[piece["sequence"]][piece["offset"] :][: piece["length"]]
                    text += part.tolist()
                assert text == [*sample["tokens"], sample["labels"][-1]]
                assert sample["text"] == " ".join(map(str, sample["tokens"]))
                assert seen.setdefault(sample["number"], sample) == sample
        size = step["global_batch_size"]
        assert sorted(seen) == list(range(consumed, consumed + size))
        consumed += size
    assert consumed == (32 if "ramp" not in sizes else 4 + 4 + 4 + 8)


def test_what_a_run_does_not_read(tmp_path, capsys):
    flags = [
        *RUN,
        "--train-iters",
        "9",
        "--global-batch-size",
        "8",
        "--data-path",
        corpus(tmp_path / "a", 0),
    ]
    for name, value, says in (
        ("--rank", "4", "Ranks are 0 to 3"),
        ("--iteration", "99", "The dataset was built for"),
        ("--iteration", "0", "Name a later one"),
    ):
        rest = ["--iteration", "1"] if name == "--rank" else []
        assert tool.main(["step", name, value, *rest, *flags]) == 1
        assert says in capsys.readouterr().err
    assert tool.main(["step", "--iteration", "1", *flags, "--sequence-length", "7"]) == 2
