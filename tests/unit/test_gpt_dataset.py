"""Samples of the packed dataset, its cache, its pseudo corpus and its refusals."""

from __future__ import annotations

import json
import logging
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.batch import cut_window
from megatron.core.datasets.gpt import GPTDataset, MockCorpus, MockGPTDataset, SampleConfig
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.split import parse_split, split_documents
from megatron.core.errors import DataError
from tests.golden import corpora


@pytest.fixture
def toy(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "toy", np.uint16) as builder:
        builder.add_documents(np.arange(36), [1] * 8, corpora.LENGTHS)
        builder.finalize()
    return IndexedDataset(tmp_path / "toy")


def dataset(corpus, num_samples, **config):
    settings = {"sequence_length": corpora.SEQUENCE_LENGTH, "split": "100,0,0", **config}
    documents = np.arange(len(corpus), dtype=np.int32)
    return GPTDataset(corpus, documents, num_samples, "train", SampleConfig(**settings))


@pytest.mark.parametrize("num_samples", [8, 20])
def test_recorded_first_sample(toy, num_samples):
    recorded = corpora.ORDERS[num_samples]
    data = dataset(toy, num_samples)
    sample = data[0]
    assert len(data) == len(recorded["shuffle_index"])
    assert sample["tokens"].tolist() == recorded["tokens0"]
    assert sample["labels"].tolist() == recorded.get("labels0", [22, 23, 24, 25])
    assert {name: value.dtype for name, value in sample.items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }


def test_samples_are_windows_of_the_document_stream(toy):
    data = dataset(toy, 20)
    stream = np.concatenate([toy[d] for d in data.order.document_index])
    for i, row in enumerate(data.order.shuffle_index):
        assert data.window(i).tolist() == stream[row * 4 : row * 4 + 5].tolist()
    with pytest.raises(IndexError):
        data.window(len(data))
    with pytest.raises(IndexError):
        data.window(-1)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=20),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_masks_and_positions(window, eod_mask_loss, reset_position_ids, pad):
    """Against loops over positions; 0 is end of document."""
    sample = cut_window(
        torch.tensor(window),
        eod=0,
        pad=pad,
        eod_mask_loss=eod_mask_loss,
        reset_position_ids=reset_position_ids,
    )
    tokens, labels = window[:-1], window[1:]
    position, positions, mask = 0, [], []
    for token, label in zip(tokens, labels, strict=True):
        positions.append(position)
        position = 0 if reset_position_ids and token == 0 else position + 1
        mask.append(0.0 if (eod_mask_loss and token == 0) or label == pad else 1.0)
    assert sample["position_ids"].tolist() == positions
    assert sample["loss_mask"].tolist() == mask
    assert sample["tokens"].tolist() == [0 if token == pad else token for token in tokens]
    assert sample["labels"].tolist() == [0 if label == pad else label for label in labels]


def test_foreign_token_ids_are_named(toy):
    data = dataset(toy, 8, vocab_size=31)
    with pytest.raises(DataError, match=r"toy: got token id 31 in document 7.*0 to 30"):
        [data[i] for i in range(len(data))]
    assert dataset(toy, 8, vocab_size=33)[0]["tokens"].tolist() == [21, 22, 23, 24]


def write(prefix, documents):
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return IndexedDataset(prefix)


def test_too_little_text_is_refused_with_numbers(tmp_path):
    short = write(tmp_path / "short", [[1] * 10])
    with pytest.raises(DataError, match=r"with 10 tokens.*takes 33 tokens \(--seq-length 32"):
        dataset(short, 20, sequence_length=32)
    with pytest.raises(DataError, match="an empty corpus"):
        dataset(write(tmp_path / "none", []), 20)
    with pytest.raises(DataError, match="a valid split of 0 of 1 documents with 0 tokens"):
        GPTDataset(short, np.arange(0), 5, "valid", SampleConfig(sequence_length=4))
    assert len(dataset(short, None, sequence_length=9)) == 1
    with pytest.raises(DataError, match="takes 11 tokens"):
        dataset(short, None, sequence_length=10)


def test_negative_ids_are_named(tmp_path):
    data = dataset(write(tmp_path / "signed", [[3, 3, -7, 3, 3]]), None, vocab_size=10)
    with pytest.raises(DataError, match="token id -7 in document 0"):
        data[0]


def test_cache_files_and_their_reuse(toy, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megatron.core.datasets.cache")
    first = dataset(toy, 8, cache_path=str(tmp_path / "cache"))
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    stem = names[0].split("-")[0]
    assert len(stem) == 32
    assert names == [
        f"{stem}-GPTDataset-train-{rest}"
        for rest in ("description.txt", "document_index.npy", "sample_index.npy")
    ] + [f"{stem}-GPTDataset-train-shuffle_index.npy", f"{stem}-GPTDataset-train.lock"]
    described = json.loads((tmp_path / "cache" / names[0]).read_text())
    assert (described["epochs"], described["separate_last"]) == (1, False)
    base = tmp_path / "cache" / f"{stem}-GPTDataset-train"
    assert [r.getMessage()[:-6] for r in caplog.records] == [
        f"index {base}: not in the cache; built in"
    ]
    caplog.clear()
    again = dataset(toy, 8, cache_path=str(tmp_path / "cache"))
    assert f"index {base}: found in the cache" in caplog.text
    assert isinstance(again.order.shuffle_index, np.memmap)
    assert again.order.shuffle_index.tolist() == first.order.shuffle_index.tolist()


def test_cache_default_place_is_beside_the_corpus(toy, tmp_path):
    dataset(toy, 8)
    assert list((tmp_path / "cache" / "GPTDataset_indices").glob("*-train-sample_index.npy"))


def test_cache_key_holds_everything_that_matters(toy, tmp_path):
    cache = tmp_path / "cache"
    for changes in ({}, {"seed": 1}, {"sequence_length": 5}):
        dataset(toy, 8, cache_path=str(cache), **changes)
    dataset(toy, 9, cache_path=str(cache))
    other = write(tmp_path / "toy", [list(range(20)), list(range(16))])
    assert dataset(other, 8, cache_path=str(cache)).order.document_index.size == 2
    assert len(list(cache.glob("*-description.txt"))) == 5


def test_damaged_cache_is_built_again(toy, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megatron.core.datasets.cache")
    good = dataset(toy, 8, cache_path=str(tmp_path / "cache"))
    path = next((tmp_path / "cache").glob("*-sample_index.npy"))
    whole = path.read_bytes()
    want = good.order.sample_index.tolist()
    replacement = path.with_name("short")
    replacement.write_bytes(whole[:-8])
    os.replace(replacement, path)
    again = dataset(toy, 8, cache_path=str(tmp_path / "cache"))
    assert again.order.sample_index.tolist() == want
    assert path.read_bytes() == whole
    assert "sample_index.npy is unreadable" in caplog.text


def test_interrupted_cache_leaves_no_half(toy, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dataset(toy, 8, cache_path=str(tmp_path / "cache"))
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(dataset(toy, 8, cache_path=str(tmp_path / "cache"))) == 8


def test_unwritable_cache_says_so(toy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path.*cannot be written"):
        dataset(toy, 8, cache_path=str(tmp_path / "file"))


def test_report_counts_epochs_in_words(toy):
    text = dataset(toy, 20).report()
    assert "8 documents, 36 tokens, 8 samples of 4 tokens per epoch" in text
    assert "20 samples wanted, 2.22 epochs, the last one shuffled by itself" in text


def test_pseudo_corpus():
    corpus = MockCorpus(100, 99)
    assert corpus.sequence_lengths[:8].tolist() == corpora.MOCK_FIRST_LENGTHS
    assert int(corpus.sequence_lengths.sum(dtype=np.int64)) == corpora.MOCK_TOTAL
    whole = corpus.get(7)
    assert whole.tolist() == [*range(1, 68), 99]
    assert corpus.get(6)[:100].tolist() == [*range(1, 100), 0]
    assert corpus.get(7, 60, 5).tolist() == whole[60:65].tolist()
    assert corpus.get(7, 60).tolist() == whole[60:].tolist()


def test_pseudo_samples_stay_inside_a_small_vocabulary():
    corpus = MockCorpus(10, 9)
    settings = SampleConfig(sequence_length=64, vocab_size=10, eod=9)
    data = MockGPTDataset(corpus, np.arange(100, dtype=np.int32), 50, "train", settings)
    assert {0, 9} <= set(np.concatenate([data.window(i) for i in range(50)]).tolist())
    assert max(int(data[i]["labels"].max()) for i in range(50)) == 9


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969, 30, 1", [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]),
        ("'99,1,0'", [(0.0, 0.99), (0.99, 1.0), None]),
        ("100,0,0", [(0.0, 1.0), None, None]),
        ("1", [(0.0, 1.0), None, None]),
        ("0,1", [None, (0.0, 1.0), None]),
        ("1,1,1", [(0.0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1.0)]),
    ],
)
def test_split(text, shares):
    for got, want in zip(parse_split(text), shares, strict=True):
        assert got == want if want is None else got == pytest.approx(want)


@pytest.mark.parametrize("text", ["", "a,b", "-1,2", "0,0,0", "1,2,3,4", "1.2.3", "1e3,1"])
def test_split_refuses(text):
    with pytest.raises(DataError, match="--split"):
        parse_split(text)


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any), st.integers(0, 1000))
def test_splits_divide_the_documents(weights, count):
    shares = parse_split(",".join(map(str, weights)))
    parts = [split_documents(share, count) for share in shares if share]
    assert np.concatenate(parts).tolist() == list(range(count))
