"""Blends: the recorded order, the same order from a plain loop, and the --data-path grammar."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets import blend
from megatron.core.datasets.blend import (
    BlendedDataset,
    blending_indices,
    dataset_targets,
    normalized,
    parse_blend,
)
from megatron.core.datasets.gpt import GPTDataset, SampleConfig
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import DataError
from tests.golden import corpora

weights = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(normalized)


def test_recorded_order():
    dataset, sample = blending_indices(corpora.BLEND_WEIGHTS, 12)
    assert dataset.tolist() == corpora.BLEND_DATASETS
    assert sample.tolist() == corpora.BLEND_SAMPLES
    assert (dataset.dtype, sample.dtype) == (np.int16, np.int64)


def slow_order(shares, size):
    counts, order = [0] * len(shares), []
    for i in range(size):
        lags = [share * max(i, 1) - count for share, count in zip(shares, counts, strict=True)]
        chosen = lags.index(max(lags))
        order.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return order


@given(weights, st.integers(0, 60))
def test_order_equals_a_plain_loop(shares, size):
    dataset, sample = blending_indices(shares, size)
    assert list(zip(dataset.tolist(), sample.tolist(), strict=True)) == slow_order(shares, size)


@given(weights, st.integers(1, 200))
def test_no_part_supplies_more_than_its_share_rounded_up(shares, size):
    dataset, _ = blending_indices(shares, size)
    counts = np.bincount(dataset, minlength=len(shares))
    targets = dataset_targets(shares, size)
    assert all(count <= target for count, target in zip(counts, targets, strict=True))


@given(weights, st.integers(0, 300))
def test_the_loop_that_is_compiled_gives_the_same_order(shares, size):
    want = blending_indices(shares, size)
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    counts = np.zeros(len(shares), np.int64)
    blend._take_turns(np.array(shares), dataset, sample, counts)
    assert dataset.tolist() == want[0].tolist()
    assert sample.tolist() == want[1].tolist()


def test_compiled_order(monkeypatch):
    pytest.importorskip("numba")
    shares = normalized([3, 1, 7, 2])
    want = blending_indices(shares, 5000)
    monkeypatch.setattr(blend, "_COMPILE_FROM", 0)
    got = blending_indices(shares, 5000)
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("words", "prefixes", "shares"),
    [
        (["a"], ("a",), None),
        (["a", "b"], ("a", "b"), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["0.5", "a", "1.5", "b"], ("a", "b"), (0.25, 0.75)),
        (["30", "a"], ("a",), (1.0,)),
        (["1", "2", "3"], ("1", "2", "3"), None),
    ],
)
def test_grammar(words, prefixes, shares):
    spec = parse_blend(words)
    assert (spec.prefixes, spec.weights) == (prefixes, shares)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing"),
        (["0.7", "a", "0.3"], "come in pairs, and these are 3 words"),
        (["1", "a", "b"], "come in pairs"),
        (["a", "0.3", "b"], "come in pairs"),
        (["1", "a", "b", "c"], "Every other word must be a weight"),
        (["0", "a", "1", "b"], "must be positive"),
        (["-1", "a", "1", "b"], "must be positive"),
        (["nan", "a", "1", "b"], "must be positive"),
        (["inf", "a", "1", "b"], "must be positive"),
        (["1e308", "a", "1e308", "b"], "must be positive"),
    ],
)
def test_grammar_refuses(words, says):
    with pytest.raises(DataError, match=says):
        parse_blend(words)


def part(tmp_path, name, first, num_samples):
    with IndexedDatasetBuilder(tmp_path / name, np.int32) as builder:
        builder.add_document(np.arange(first, first + 41))
        builder.finalize()
    corpus = IndexedDataset(tmp_path / name)
    settings = SampleConfig(sequence_length=4)
    return GPTDataset(corpus, np.arange(1, dtype=np.int32), num_samples, "train", settings)


def test_samples_come_from_the_parts(tmp_path):
    parts = [part(tmp_path, "a", 0, 8), part(tmp_path, "b", 1000, 8)]
    data = BlendedDataset(parts, [3, 1], 8, "train", str(tmp_path / "cache"))
    assert len(data) == 8
    assert data.counts == [6, 2]
    taken = [0, 0]
    for i in range(8):
        which = int(data[i]["tokens"][0] >= 1000)
        assert data[i]["tokens"].tolist() == parts[which][taken[which]]["tokens"].tolist()
        taken[which] += 1
    assert taken == [6, 2]
    with pytest.raises(IndexError):
        data[8]
    again = BlendedDataset(parts, [3, 1], 8, "train", str(tmp_path / "cache"))
    assert isinstance(again.dataset_index, np.memmap)
    assert list((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_sample_index.npy"))
    assert "0.7500 6 samples, 0.59 epochs" in data.report()


def test_too_small_parts_are_refused(tmp_path):
    parts = [part(tmp_path, "a", 0, 8), part(tmp_path, "b", 1000, 8)]
    with pytest.raises(DataError, match="10 samples.*blend of 30 samples takes 15"):
        BlendedDataset(parts, [1, 1], 30, "train")
