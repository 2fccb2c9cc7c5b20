"""The index arrays: recorded orders, and the vectorised code against plain loops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets import index
from megatron.core.datasets.gpt import GPTDataset, SampleConfig
from megatron.core.datasets.index import EpochPlan, SampleOrder, document_index, sample_index
from megatron.core.datasets.indexed import HEADER, MAGIC, IndexedDataset
from tests.golden import corpora


def build(lengths, sequence_length, num_samples, seed=corpora.SEED):
    lengths = np.array(lengths, dtype=np.int32)
    plan = EpochPlan.of(int(lengths.sum()), sequence_length, num_samples)
    documents = np.arange(lengths.size, dtype=np.int32)
    order = SampleOrder.build(lengths, documents, plan, sequence_length=sequence_length, seed=seed)
    return plan, order


@pytest.mark.parametrize("num_samples", corpora.ORDERS)
def test_recorded_orders(num_samples):
    recorded = corpora.ORDERS[num_samples]
    plan, order = build(corpora.LENGTHS, corpora.SEQUENCE_LENGTH, num_samples)
    assert (plan.epochs, plan.separate_last) == (recorded["epochs"], recorded["separate"])
    for name in ("document_index", "sample_index", "shuffle_index"):
        if name in recorded:
            assert getattr(order, name).tolist() == recorded[name]
    assert order.document_index.dtype == order.sample_index.dtype == np.int32
    assert order.shuffle_index.dtype == np.uint32


def slow_plan(tokens, sequence_length, num_samples):
    """Count epochs up one by one, and windows by walking."""
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * sequence_length + 1:
        epochs += 1

    def windows(total):
        count = 0
        while count * sequence_length + sequence_length + 1 <= total:
            count += 1
        return count

    before = windows((epochs - 1) * tokens) if epochs > 1 else windows(tokens)
    separate = epochs > 1 and num_samples - before < int(0.80 * windows(tokens))
    return epochs, windows(epochs * tokens), before, separate


@given(st.integers(1, 60), st.integers(1, 20), st.none() | st.integers(1, 60))
def test_epoch_plan(tokens, sequence_length, num_samples):
    plan = EpochPlan.of(tokens, sequence_length, num_samples)
    slow = slow_plan(tokens, sequence_length, num_samples)
    assert (plan.epochs, plan.samples, plan.samples_before_last, plan.separate_last) == slow
    if num_samples is not None:
        assert plan.samples >= num_samples


def slow_sample_index(lengths, order, sequence_length):
    """Read sequence_length + 1 tokens one at a time, then step back by the shared one."""
    stream = [(p, offset) for p, d in enumerate(order) for offset in range(lengths[d])]
    rows, at = [(0, 0)], 0
    while at + sequence_length < len(stream):
        at += sequence_length
        rows.append(stream[at])
    return rows


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_sample_index(lengths, sequence_length, random):
    """Empty documents included."""
    order = [d for d in range(len(lengths)) for _ in range(2)]
    random.shuffle(order)
    got = sample_index(np.array(lengths, np.int32), np.array(order, np.int32), sequence_length)
    slow = slow_sample_index(lengths, order, sequence_length)
    assert [tuple(row) for row in got.tolist()] == slow


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=10),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
)
def test_every_epoch_is_read_completely(lengths, sequence_length, num_samples, seed):
    plan, order = build(lengths, sequence_length, num_samples, seed)
    assert Counter(order.document_index.tolist()) == dict.fromkeys(range(len(lengths)), plan.epochs)
    assert sorted(order.shuffle_index.tolist()) == list(range(plan.samples))
    if plan.separate_last:
        # What comes first are all windows of the earlier epochs, each once, and their documents.
        cut = plan.samples_before_last
        assert sorted(order.shuffle_index[:cut].tolist()) == list(range(cut))
        last = order.document_index[-len(lengths) :]
        assert sorted(last.tolist()) == list(range(len(lengths)))


def test_wide_types_are_chosen_when_needed():
    """More documents than 32 bits hold cannot be built here; their numbers can."""
    plan = EpochPlan(1, 0, 0, False)
    documents = np.array([2**31, 2**31 + 1], dtype=np.int64)
    assert document_index(documents, plan, np.random.RandomState(0)).dtype == np.int64
    assert document_index(documents - 2**31, plan, np.random.RandomState(0)).dtype == np.int32


def test_counts_beyond_32_bits():
    """Two billion documents of 3,000 tokens, many epochs: the plan is exact."""
    tokens = 2_000_000_000 * 3_000
    plan = EpochPlan.of(tokens, 4096, 10_000_000_000)
    assert plan.epochs == -(-(10_000_000_000 * 4096 + 1) // tokens) == 7
    assert plan.samples == (7 * tokens - 1) // 4096


def test_blocks_and_wide_numbers_change_nothing(monkeypatch):
    lengths = np.array([0, 7, 3, 0, 0, 11, 2, 5, 1, 1, 9, 0], dtype=np.int32)
    order = np.random.RandomState(0).permutation(np.tile(np.arange(12, dtype=np.int32), 3))
    whole = sample_index(lengths, order, 4)
    for size in (1, 2, 5, 35, 36):
        monkeypatch.setattr(index, "_BLOCK", size)
        assert sample_index(lengths, order, 4).tolist() == whole.tolist()
    monkeypatch.setattr(index, "_INT32", 35)
    wide = sample_index(lengths, order, 4)
    assert (whole.dtype, wide.dtype) == (np.int32, np.int64)
    assert wide.tolist() == whole.tolist()


def test_samples_beyond_32_bits(tmp_path):
    """Three documents of 2^31 - 1 tokens in a sparse file: every position is exact."""
    size, length = 2**31 - 1, 1 << 20
    lengths = np.full(3, size, dtype="<i4")
    pointers = (2 * size * np.arange(3)).astype("<i8")
    head = HEADER.pack(MAGIC, 1, 8, 3, 4)
    documents = np.arange(4, dtype="<i8")
    (tmp_path / "huge.idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    )
    marks = {int(pointers[d]) + 2 * at: 1 + d * 10 + at % 7
             for d in range(3) for at in (0, 5, 2**30, size - 1)}  # fmt: skip
    with (tmp_path / "huge.bin").open("wb") as file:
        for at, mark in marks.items():
            file.seek(at)
            file.write(np.uint16(mark).tobytes())
    corpus = IndexedDataset(tmp_path / "huge")
    settings = SampleConfig(sequence_length=length, cache_path=str(tmp_path / "cache"))
    data = GPTDataset(corpus, np.arange(3, dtype=np.int32), None, "train", settings)
    assert len(data) == (3 * size - 1) // length
    order = data.order.document_index.tolist()
    for place, document in enumerate(order):
        for at in (0, 5, 2**30, size - 1):
            mark = marks[int(pointers[document]) + 2 * at]
            assert data.tokens(place * size + at, 1).tolist() == [mark]
    row = data.shuffle.tolist().index(
        2**31 // length
    )  # holds token 2^31: the second document's 2nd
    assert data.window(row)[3] == 0
    assert data.window(row)[4] == marks[int(pointers[order[1]]) + 10]
