"""tools/merge_datasets.py: several corpora as one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import DataError

TOOL = Path(__file__).resolve().parents[2] / "tools/merge_datasets.py"
spec = importlib.util.spec_from_file_location("merge_datasets", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def corpus(prefix, documents, dtype=np.uint16):
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sequences in documents:
            flat = [token for sequence in sequences for token in sequence]
            builder.add_document(flat, [len(sequence) for sequence in sequences])
        builder.finalize()


def test_merged_is_what_one_run_would_have_written(tmp_path):
    rng = np.random.default_rng(0)
    parts = [
        [[rng.integers(0, 99, n).tolist() for n in (i % 3 + 1, 2)] for i in range(part % 4)]
        for part in range(60)
    ]
    for number, part in enumerate(parts):
        corpus(tmp_path / "in" / f"part{number:03}", part)
    corpus(tmp_path / "want", [document for part in parts for document in part])
    assert tool.main(["--input", str(tmp_path / "in"), "--output-prefix", f"{tmp_path}/o/got"]) == 0
    for end in (".bin", ".idx"):
        assert Path(f"{tmp_path}/o/got{end}").read_bytes() == (tmp_path / f"want{end}").read_bytes()
    assert len(IndexedDataset(tmp_path / "o/got")) == sum(2 * len(part) for part in parts)


def test_what_cannot_be_merged(tmp_path):
    folder = tmp_path / "in"
    corpus(folder / "a", [[[1]]])
    corpus(folder / "b", [[[1]]], np.int32)
    with pytest.raises(DataError, match="a with uint16 and .*b with int32"):
        tool.merge(tool.find_corpora(str(folder)), str(tmp_path / "out"))
    (folder / "b.bin").unlink()
    with pytest.raises(DataError, match="Of b it has only one"):
        tool.find_corpora(str(folder))
    with pytest.raises(DataError, match="There is no such folder"):
        tool.find_corpora(str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"no .bin/.idx pair"):
        tool.find_corpora(str(tmp_path))
    with pytest.raises(DataError, match="It is one of the inputs"):
        tool.merge([str(folder / "a")], str(folder / "a"))
    arguments = tool.make_parser().parse_args(
        ["--input", "x", "--output-prefix", "y", "--multimodal"]
    )
    with pytest.raises(DataError, match="--multimodal"):
        tool.run(arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
