"""The corpus format: golden bytes, round trips, atomic writes, and what damaged files say."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed import (
    HEADER,
    MAGIC,
    IndexedDataset,
    IndexedDatasetBuilder,
    bin_path,
    idx_path,
    optimal_dtype,
)
from megatron.core.errors import DataError
from tests.golden import corpora


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return prefix


def toy(prefix):
    edges = np.cumsum((0, *corpora.LENGTHS))
    return write(prefix, [np.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)])


def test_golden_bytes(tmp_path):
    prefix = toy(tmp_path / "toy")
    idx, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    assert len(idx) == 202
    assert idx.startswith(corpora.IDX_START)
    assert hashlib.sha256(idx).hexdigest() == corpora.IDX_SHA256
    assert hashlib.sha256(tokens).hexdigest() == corpora.BIN_SHA256


@pytest.mark.parametrize("how", ["sequences", "batch"])
def test_every_way_of_writing_gives_the_same_bytes(tmp_path, how):
    edges = np.cumsum((0, *corpora.LENGTHS))
    with IndexedDatasetBuilder(tmp_path / "toy", np.uint16) as builder:
        if how == "sequences":
            for a, b in zip(edges[:-1], edges[1:], strict=True):
                builder.add_sequence(np.arange(a, b))
                builder.end_document()
        else:
            builder.add_documents(np.arange(8), [1, 1], [5, 3])
            builder.add_documents(np.arange(8, 36), [1] * 6, corpora.LENGTHS[2:])
        builder.finalize()
    digest = hashlib.sha256(idx_path(tmp_path / "toy").read_bytes()).hexdigest()
    assert digest == corpora.IDX_SHA256


@pytest.mark.parametrize("mmap", [True, False])
def test_read_back(tmp_path, mmap):
    data = IndexedDataset(toy(tmp_path / "toy"), mmap=mmap)
    assert len(data) == data.num_documents == 8
    assert data.num_tokens == 36
    assert data[2].tolist() == list(range(8, 15))
    assert data[-1].tolist() == list(range(28, 36))
    assert data.get(2, 3, 2).tolist() == [11, 12]
    assert data.get(2, 7).tolist() == []
    with pytest.raises(IndexError):
        data.get(2, 3, 5)
    with pytest.raises(IndexError):
        data[8]
    again = pickle.loads(pickle.dumps(data))
    assert again.mmap is mmap
    assert again[0].tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=25)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 127), max_size=6), min_size=1, max_size=3), max_size=6
    ),
    dtype=st.sampled_from(["u1", "i1", "i2", "i4", "i8", "u2", "f4", "f8"]),
    mmap=st.booleans(),
)
def test_round_trip(tmp_path, documents, dtype, mmap):
    prefix = tmp_path / "any"
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sequences in documents:
            flat = [token for sequence in sequences for token in sequence]
            builder.add_document(flat, [len(sequence) for sequence in sequences])
        builder.finalize()
    data = IndexedDataset(prefix, mmap=mmap)
    assert data.dtype == np.dtype(dtype)
    bounds = data.document_indices.tolist()
    got = [
        [data[i].tolist() for i in range(a, b)]
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    assert got == documents


def test_merge_equals_one_write(tmp_path):
    first, second = [[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10]]
    write(tmp_path / "a", first)
    write(tmp_path / "b", second)
    write(tmp_path / "whole", first + second)
    with IndexedDatasetBuilder(tmp_path / "merged", np.uint16) as builder:
        builder.add_index(tmp_path / "a")
        builder.add_index(tmp_path / "b")
        builder.finalize()
    for path in (idx_path, bin_path):
        assert path(tmp_path / "merged").read_bytes() == path(tmp_path / "whole").read_bytes()
    write(tmp_path / "wide", [[1]], np.int32)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder, pytest.raises(DataError):
        builder.add_index(tmp_path / "wide")


def test_nothing_is_left_of_an_interrupted_write(tmp_path):
    toy(tmp_path / "toy")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted():
        with IndexedDatasetBuilder(tmp_path / "toy", np.uint16) as builder:
            builder.add_document([1, 2, 3])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with IndexedDatasetBuilder(tmp_path / "forgotten", np.uint16) as builder:
        builder.add_document([1])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_target_appears_only_when_complete(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "late", np.uint16) as builder:
        builder.add_document([1, 2, 3])
        assert not bin_path(tmp_path / "late").exists()
        builder.finalize()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["late.bin", "late.idx"]


def test_tokens_must_fit_the_type(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for bad in ([70000], [-1]):
            with pytest.raises(DataError, match="uint16 holds 0 to 65535"):
                builder.add_document(bad)
    with pytest.raises(DataError, match="no code"):
        IndexedDatasetBuilder(tmp_path / "x", np.uint32)


def test_optimal_dtype_switches_where_the_format_says():
    assert optimal_dtype(65499) is np.uint16
    assert optimal_dtype(65500) is np.int32
    assert optimal_dtype(None) is np.int32


def patch(path, offset, data):
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda i, b: patch(i, 0, b"NOTMAGIC!"), "not a corpus index"),
        (lambda i, b: patch(i, 9, struct.pack("<Q", 2)), "format version 2"),
        (lambda i, b: patch(i, 17, b"\x09"), "dtype code 9"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:-1]), "201 bytes"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:20]), "20 bytes"),
        (lambda i, b: i.write_bytes(b""), "not a corpus index"),
        (lambda i, b: patch(i, 34, struct.pack("<i", -5)), "length -5 of sequence 0"),
        (lambda i, b: patch(i, 202 - 8, struct.pack("<q", 7)), "from 0 to the number of sequences"),
        (lambda i, b: b.write_bytes(b.read_bytes()[:-2]), "70 bytes.*72 bytes.*cut short"),
        (lambda i, b: b.write_bytes(b.read_bytes() + b"xx"), "74 bytes.*not the one"),
        (lambda i, b: b.unlink(), "toy.bin does not exist"),
        (lambda i, b: i.unlink(), "toy.idx does not exist"),
    ],
)
def test_damage_is_named(tmp_path, damage, says):
    prefix = toy(tmp_path / "toy")
    damage(idx_path(prefix), bin_path(prefix))
    with pytest.raises(DataError, match=says):
        IndexedDataset(prefix)


def test_shrinking_under_a_reader_is_an_error(tmp_path):
    prefix = toy(tmp_path / "toy")
    data = IndexedDataset(prefix, mmap=False)
    os.truncate(bin_path(prefix), 10)
    with pytest.raises(DataError, match="became shorter"):
        data[7]


def test_empty_corpus_opens(tmp_path):
    data = IndexedDataset(write(tmp_path / "none", []))
    assert len(data) == data.num_documents == data.num_tokens == 0


@pytest.mark.parametrize("mmap", [True, False])
def test_offsets_beyond_4_gib(tmp_path, mmap):
    """A sparse 4.5 GiB file: a 32-bit pointer, signed or not, would read something else."""
    lengths = np.array([600_000_000, 600_000_000, 4], dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]).astype("<i8") * 4
    head = HEADER.pack(MAGIC, 1, 4, 3, 4)
    documents = np.arange(4, dtype="<i8")
    (tmp_path / "huge.idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    )
    with (tmp_path / "huge.bin").open("wb") as file:
        file.seek(int(pointers[2]))
        file.write(np.array([11, 12, 13, 14], dtype="<i4").tobytes())
    data = IndexedDataset(tmp_path / "huge", mmap=mmap)
    assert int(data.sequence_pointers[2]) > 2**32
    assert data[2].tolist() == [11, 12, 13, 14]
    assert data.get(1, 599_999_999, 1).tolist() == [0]
    assert data.num_tokens == 1_200_000_004


def test_written_pointers_are_64_bit(tmp_path):
    """The builder's pointers, for lengths whose sum passes 2^31 tokens, without writing tokens."""
    with IndexedDatasetBuilder(tmp_path / "big", np.int64) as builder:
        builder._record(np.array([2**31 - 1, 2**31 - 1, 5]))
        builder._end_documents(np.array([1, 2, 3]))
        builder.finalize()
    raw = idx_path(tmp_path / "big").read_bytes()
    pointers = np.frombuffer(raw, "<i8", 3, HEADER.size + 12)
    assert pointers.tolist() == [0, 8 * (2**31 - 1), 16 * (2**31 - 1)]


def test_fingerprint_tells_corpora_apart(tmp_path):
    one = IndexedDataset(write(tmp_path / "a", [[1, 2], [3]])).fingerprint()
    same = IndexedDataset(write(tmp_path / "b", [[1, 2], [3]])).fingerprint()
    other = IndexedDataset(write(tmp_path / "c", [[1], [2, 3]])).fingerprint()
    assert one == same != other
