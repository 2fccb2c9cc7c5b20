"""Batches are a pure function of position; sources follow the configuration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import make_config
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.source import Source, build_sources, sample_targets
from megatron.core.datasets.tokenizers import build_tokenizer
from megatron.core.errors import DataError
from megatron.core.mesh import ParallelState

SEQ = 8


class Numbers:
    """Sample i holds i everywhere."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.read.append(index)
        return {
            name: torch.full((3,), index, dtype=dtype)
            for name, dtype in (
                ("tokens", torch.int64),
                ("labels", torch.int64),
                ("loss_mask", torch.float32),
                ("position_ids", torch.int64),
            )
        }


def samples_of(batch):
    return batch.tokens[:, 0].tolist()


def test_shapes_and_order():
    source = Source(Numbers(100), micro_batch_size=2, data_parallel_size=3)
    batch = source.batch(10, 1, 2)
    assert samples_of(batch) == [20, 21]
    assert batch.tokens.shape == batch.position_ids.shape == (2, 3)
    assert batch.loss_mask.dtype == torch.float32


@given(st.data(), st.integers(0, 50))
def test_every_division_of_a_step_reads_the_same_samples(data, consumed):
    size = data.draw(st.sampled_from([1, 4, 6, 12, 24]))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    dp = data.draw(st.sampled_from(divisors))
    mbs = data.draw(st.sampled_from([n for n in divisors if size % (n * dp) == 0]))
    source = Source(Numbers(200), micro_batch_size=mbs, data_parallel_size=dp)
    read = [
        sample
        for microbatch in range(size // (mbs * dp))
        for rank in range(dp)
        for sample in samples_of(source.batch(consumed, microbatch, rank))
    ]
    assert read == list(range(consumed, consumed + size))


def test_prefetching_changes_nothing():
    plain = Source(Numbers(97), micro_batch_size=2, data_parallel_size=2)
    ahead = Source(Numbers(97), micro_batch_size=2, data_parallel_size=2, prefetch=3)
    steps = [(8 * step, microbatch, 1) for step in range(11) for microbatch in range(2)]
    jumps = [(0, 0, 0), (50, 0, 1), (50, 0, 1), (3, 1, 0), (93, 0, 0), (0, 0, 0)]
    for place in steps + jumps:
        assert samples_of(ahead.batch(*place)) == samples_of(plain.batch(*place))
    ahead.close()
    assert samples_of(ahead.batch(0, 0, 0)) == [0, 1]
    ahead.close()


def test_the_end_is_an_error_with_numbers():
    source = Source(Numbers(10), micro_batch_size=4, data_parallel_size=1, prefetch=2)
    assert samples_of(source.batch(4, 0, 0)) == [4, 5, 6, 7]
    with pytest.raises(DataError, match="samples 8 to 11.*built for 10"):
        source.batch(4, 1, 0)
    source.close()


def config(tmp_path, **fields):
    settings = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": SEQ,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 10,
        "eval_interval": 5,
        "eval_iters": 2,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 1000,
        "data_cache_path": str(tmp_path / "cache"),
        **fields,
    }
    return make_config(**settings)


def corpus(tmp_path, name="corpus", documents=40, length=20, first=0):
    with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
        for document in range(documents):
            builder.add_document(first + (np.arange(length) + document) % 400)
        builder.finalize()
    return str(tmp_path / name)


def sources(cfg):
    made = build_sources(cfg, build_tokenizer(cfg.data), ParallelState.single())
    return made.train, made.valid.get(""), made.test


def test_targets(tmp_path):
    assert sample_targets(config(tmp_path)) == (40, 3 * 2 * 4, 2 * 4)
    assert sample_targets(config(tmp_path, train_iters=11, eval_interval=4)) == (44, 24, 8)
    assert sample_targets(config(tmp_path, eval_interval=None)) == (40, 0, 0)
    assert sample_targets(config(tmp_path, eval_iters=0)) == (40, 0, 0)
    assert sample_targets(config(tmp_path, train_iters=None, train_samples=37))[0] == 37


def test_one_corpus(tmp_path):
    train, valid, test = sources(config(tmp_path, data_path=[corpus(tmp_path)], split="8,1,1"))
    assert train.dataset.documents.tolist() == list(range(32))
    assert valid.dataset.documents.tolist() == list(range(32, 36))
    assert test.dataset.documents.tolist() == list(range(36, 40))
    assert (len(train) >= 40, len(valid) >= 24, len(test) >= 8) == (True, True, True)
    batch = train.batch(36, 1, 0)
    assert batch.tokens.shape == (2, SEQ)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])


def test_reading_files_without_mmap_gives_the_same(tmp_path):
    path = corpus(tmp_path)
    cfg = config(tmp_path, data_path=[path], split="8,1,1")
    mapped, _, _ = sources(cfg)
    plain, _, _ = sources(cfg.replace(mmap_bin_files=False))
    assert plain.dataset.corpus.mmap is False
    assert torch.equal(mapped.batch(8, 1, 0).tokens, plain.batch(8, 1, 0).tokens)


def test_no_evaluation_no_sources(tmp_path):
    path = corpus(tmp_path)
    for off in ({"eval_interval": None}, {"eval_iters": 0}):
        train, valid, test = sources(config(tmp_path, data_path=[path], split="1,0,0", **off))
        assert train is not None
        assert valid is test is None


def test_test_split_may_be_left_out_but_validation_may_not(tmp_path):
    path = corpus(tmp_path)
    _, valid, test = sources(config(tmp_path, data_path=[path], split="9,1,0"))
    assert valid is not None
    assert test is None
    with pytest.raises(DataError, match="--split: got 100,0,0. The valid split is empty.*24"):
        sources(config(tmp_path, data_path=[path], split="100,0,0"))
    with pytest.raises(DataError, match="train split is empty.*40"):
        sources(config(tmp_path, data_path=[path], split="0,1,1"))


def test_a_split_too_narrow_for_a_document_is_refused(tmp_path):
    cfg = config(tmp_path, data_path=[corpus(tmp_path)], split="969,30,1")
    with pytest.raises(DataError, match="a test split of 0 of 40 documents.*larger share"):
        sources(cfg)


def test_weighted_blend(tmp_path):
    a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b", first=500)
    cfg = config(tmp_path, data_path=["3", a, "1", b], split="8,1,1")
    train, valid, _ = sources(cfg)
    assert train.dataset.counts == [30, 10]
    assert len(train) == 40
    assert len(valid) == 24
    first = [int(train.dataset[i]["tokens"].min()) for i in range(40)]
    assert sum(value >= 500 for value in first) == 10
    assert "a: 32 documents" in train.report()


def test_one_weighted_corpus_is_a_blend_of_one(tmp_path):
    path = corpus(tmp_path)
    blended, _, _ = sources(config(tmp_path, data_path=["1", path], split="8,1,1"))
    assert blended.dataset.counts == [40]


def test_unweighted_blend_reads_each_once(tmp_path):
    a, b = corpus(tmp_path, "a", 40), corpus(tmp_path, "b", 80, first=500)
    cfg = config(tmp_path, data_path=[a, b], split="6,2,2")
    train, _, _ = sources(cfg)
    assert len(train) == 40
    assert train.dataset.weights == pytest.approx([59 / 178, 119 / 178])
    with pytest.raises(DataError, match=r"Each is read once, which makes \d+ train samples.*400"):
        sources(cfg.replace(train_iters=100))


def test_mock_data_needs_no_files(tmp_path):
    cfg = config(tmp_path, mock_data=True, vocab_size=16, split="100,0,0", seq_length=128)
    train, valid, test = sources(cfg)
    assert int(train.batch(0, 0, 0).tokens.max()) < 16
    assert valid.dataset.documents[0] == 33333
    assert test is not None
    assert not (tmp_path / "cache").exists()


def test_unusable_corpora(tmp_path):
    with pytest.raises(DataError, match="nowhere.idx does not exist"):
        sources(config(tmp_path, data_path=[str(tmp_path / "nowhere")]))
    with IndexedDatasetBuilder(tmp_path / "floats", np.float32) as builder:
        builder.add_document([0.5] * 100)
        builder.finalize()
    with pytest.raises(DataError, match="elements of type float32"):
        sources(config(tmp_path, data_path=[str(tmp_path / "floats")]))
    small = config(tmp_path, data_path=[corpus(tmp_path)], split="8,1,1", vocab_size=30)
    train, _, _ = sources(small)
    with pytest.raises(DataError, match="token id .* in document .*0 to 29"):
        [train.batch(4 * step, 0, 0) for step in range(10)]


def test_more_iterations_continue_within_the_same_data(tmp_path):
    """One epoch is enough for both lengths: a longer run reads the same samples first."""
    path = corpus(tmp_path)
    short, _, _ = sources(config(tmp_path, data_path=[path], split="8,1,1"))
    longer, _, _ = sources(config(tmp_path, data_path=[path], split="8,1,1", train_iters=15))
    for step in range(10):
        assert torch.equal(short.batch(4 * step, 1, 0).tokens, longer.batch(4 * step, 1, 0).tokens)


def test_options_about_document_ends_need_such_a_token(tmp_path):
    path = corpus(tmp_path)
    tokenizer = build_tokenizer(config(tmp_path).data)
    for flag in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        cfg = config(tmp_path, data_path=[path], split="8,1,1", **{flag: True})
        train, _, _ = sources(cfg)
        assert getattr(train.dataset.config, flag) is True
        tokenizer.eod = None
        with pytest.raises(DataError, match=f"^--{flag.replace('_', '-')}: got"):
            build_sources(cfg, tokenizer, ParallelState.single())
