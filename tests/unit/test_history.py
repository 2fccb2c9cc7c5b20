"""Mixes that change during a run: every token of every corpus is counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import make_config
from megatron.core.datasets.build import Position
from megatron.core.datasets.history import Record
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.mixed import MixedDataset
from megatron.core.datasets.source import build_sources
from megatron.core.datasets.tokenizers import build_tokenizer
from megatron.core.errors import DataError
from megatron.core.mesh import ParallelState

LENGTH = 23  # tokens of a document
FAR = 4000  # distance between the tokens of two corpora


def write(folder, name, documents):
    """Write a corpus in which no token occurs twice, nor in another corpus."""
    with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
        for document in range(documents):
            begin = FAR * "abcd".index(name) + document * LENGTH
            builder.add_document(np.arange(begin, begin + LENGTH))
        builder.finalize()


class Run:
    """A run without a model: it reads samples, stops, and goes on with other settings."""

    def __init__(self, folder):
        self.folder, self.record, self.consumed, self.steps = folder, None, 0, 0
        self.read = Counter()

    def open(self, words, steps, **fields):
        self.total = self.steps + steps
        mine = {"seq_length": 8, "global_batch_size": 4, "split": "1,0,0", **fields}
        words = [str(self.folder / w) if str(w).isalpha() else str(w) for w in words]
        cfg = make_config(
            num_layers=1, hidden_size=16, num_attention_heads=2, tokenizer_type="NullTokenizer",
            vocab_size=4 * FAR, data_path=words, train_iters=self.total, num_workers=0,
            data_cache_path=str(self.folder / "cache"), load="x", lr=1.0,
            max_position_embeddings=64, **mine,
        )  # fmt: skip
        at = Position(self.steps, self.consumed, 0, self.record)
        made = build_sources(cfg, build_tokenizer(cfg.data), ParallelState.single(), at)
        return made, cfg.global_batch_size

    def go(self, words, steps, stop=None, **fields):
        """Read `steps` steps (`stop` of them) and save; return the samples' tokens."""
        made, batch = self.open(words, steps, **fields)
        samples = [made.train.dataset[self.consumed + i] for i in range((stop or steps) * batch)]
        rows = [sample["tokens"].tolist() for sample in samples]
        for row in rows:
            self.read.update(row)
        self.consumed += len(rows)
        self.steps += stop or steps
        self.record = Record.of(made.ledger.record(self.consumed).to_dict())
        return rows

    def counts(self, name, documents):
        begin = FAR * "abcd".index(name)
        return [self.read[begin + i] for i in range(documents * LENGTH)]


MORE = {"data_mix_change": "continue"}


@pytest.fixture
def corpora(tmp_path):
    for name, documents in (("a", 60), ("b", 40), ("c", 20)):
        write(tmp_path, name, documents)
    return tmp_path


def test_an_unchanged_mix_is_the_same_data(corpora):
    words = [0.6, "a", 0.4, "b"]
    whole, parts = Run(corpora), Run(corpora)
    rows = whole.go(words, 30)
    assert parts.go(words, 30, stop=7) + parts.go(words, 23) == rows
    made, _ = parts.open(words, 0)
    assert not isinstance(made.train.dataset, MixedDataset)


def test_a_change_is_refused_with_what_changed(corpora):
    run = Run(corpora)
    run.go([0.5, "a", 0.5, "b"], 10, stop=5)
    for words, fields, said in (
        ([0.6, "a", 0.4, "b"], {}, "the share of a went from 0.5 to 0.6"),
        ([0.5, "a", 0.5, "c"], {}, "c is new; b is gone"),
        ([0.5, "a", 0.5, "b"], {"seq_length": 4}, "--seq-length 8 became 4"),
        ([0.5, "a", 0.5, "b"], {"seed": 5}, "--seed 1234 became 5"),
        ([0.5, "a", 0.5, "b"], {"split": "9,1,0"}, "the split takes other documents of a"),
        (["a", "b"], {}, "weights are gone"),
    ):
        with pytest.raises(DataError, match=f"--data-mix-change.*{said}.* a 10, b 10"):
            run.open(words, 5, **fields)


def test_a_change_of_weights_and_corpora_repeats_and_loses_nothing(corpora):
    run = Run(corpora)
    run.go([0.5, "a", 0.5, "b"], 12)
    run.go([2, "a", 1, "b", 1, "c"], 20, stop=6, **MORE)  # c joins
    run.go([2, "a", 1, "b", 1, "c"], 14)  # no flag: the same mix again
    mixed, _ = run.open([2, "a", 1, "b", 1, "c"], 0)
    assert mixed.train.begin == 48
    run.go([1, "a", 1, "c"], 8, **MORE)  # b is left out
    run.go([1, "b"], 10, **MORE)  # and comes back, alone
    taken = {name: 0 for name in "abc"}
    for past in (*run.record.past, run.record.closed()[-1]):
        for name, count in past["samples"]:
            taken[name] += count
    assert sum(taken.values()) == run.consumed
    for name, documents in (("a", 60), ("b", 40), ("c", 20)):
        counts = run.counts(name, documents)
        assert sum(counts) == taken[name] * 8
        passes, rest = divmod(taken[name], (documents * LENGTH - 1) // 8)
        # A pass leaves its last few tokens out, and the next begins before this one's last window.
        assert max(counts) <= passes + (rest > 0)
        assert counts.count(0) <= len(counts) - (len(counts) - 8 if passes else 8 * rest)


def test_a_corpus_goes_on_in_its_own_order(corpora):
    """What is read of a corpus does not depend on the company it keeps."""
    alone, mixed = Run(corpora), Run(corpora)
    rows = alone.go(["a"], 40)
    mixed_rows = mixed.go([0.5, "a", 0.5, "b"], 12)
    mixed_rows += mixed.go([0.25, "a", 0.75, "c"], 16, **MORE)
    of_a = [row for row in mixed_rows if row[0] < FAR]
    assert of_a == rows[: len(of_a)]
    assert len(of_a) > 30


def test_another_sequence_length_cuts_what_is_left(corpora):
    run = Run(corpora)
    samples = (60 * LENGTH - 1) // 8  # 172 of one pass
    run.go(["a"], samples // 4, stop=15, seq_length=8)  # 60 windows of 8
    run.go(["a"], 5, seq_length=16, **MORE)  # 20 of 16
    run.go(["a"], 10, seq_length=4, **MORE)  # 40 of 4
    left = samples * 8 - run.consumed * 0 - 60 * 8 - 20 * 16 - 40 * 4
    counts = run.counts("a", 60)
    assert set(counts) == {0, 1}
    assert sum(counts) == 60 * 8 + 20 * 16 + 40 * 4
    run.go(["a"], left // 8 // 4, seq_length=8, **MORE)  # to the end of the pass
    counts = run.counts("a", 60)
    assert set(counts) == {0, 1}
    assert counts.count(0) < 8 + 4 * 8  # the last step is a whole one; one window fills none
    run.go(["a"], 43, seq_length=8)  # a new pass follows
    assert set(run.counts("a", 60)) <= {0, 1, 2}


def test_a_corpus_that_grew_reads_its_new_documents_next(corpora):
    run = Run(corpora)
    run.go(["a"], 40, stop=30)
    write(corpora, "a", 90)
    with pytest.raises(DataError, match="a went from 60 to 90 documents"):
        run.open(["a"], 10)
    rows = run.go(["a"], 12 + 20, **MORE)
    assert all(row[0] < 60 * LENGTH for row in rows[: 172 - 120])
    counts = run.counts("a", 90)
    assert set(counts) <= {0, 1}
    assert sum(counts[60 * LENGTH :]) == 8 * (128 - 172 + 120)
    write(corpora, "a", 50)  # another one under the same name begins at its beginning
    run.go(["a"], 1, **MORE)
    assert [part.name for part in run.record.mix.gone] == ["a"]


def test_documents_do_not_change_sides(corpora):
    run = Run(corpora)
    run.go(["a"], 30, stop=10, split="9,1,0")
    with pytest.raises(DataError, match="documents 0 to 53.*Leave --split as it was"):
        run.open(["a"], 10, split="8,2,0", **MORE)
    run.go(["a"], 10, split="1,0,0", **MORE)


def test_more_steps_need_no_flag_and_no_new_order(corpora):
    """A run that is made longer finishes the passes it began, and begins new ones then."""
    run = Run(corpora)
    first = run.go(["c"], 20, stop=20)  # 80 samples; a pass has 57
    assert run.record.mix.parts[0].orders[0].epochs == 2
    made, _ = run.open(["c"], 60)
    assert isinstance(made.train.dataset, MixedDataset)
    assert made.train.begin == 0
    again = [made.train.dataset[i]["tokens"].tolist() for i in range(80)]
    assert again == first
    run.go(["c"], 60)
    counts = run.counts("c", 20)
    assert max(counts) - min(counts[:-16]) <= 2


def test_listed_corpora_are_read_once_whatever_happens(corpora):
    run = Run(corpora)
    run.go(["b", "c"], 48, stop=1, global_batch_size=1)  # nothing of c yet
    run.go(["b", "c", "a"], 47, stop=47, global_batch_size=1, **MORE)
    run.go(["b", "c", "a"], 30, **MORE)
    with pytest.raises(DataError, match="which leaves 342 samples, but the run reads 367"):
        run.open(["b", "c", "a"], 50)
    left = (172 + 114 + 57 - run.consumed) // 4
    run.go(["b", "c", "a"], left)
    for name, documents in (("a", 60), ("b", 40), ("c", 20)):
        assert set(run.counts(name, documents)) <= {0, 1}
    assert sum(run.read.values()) == run.consumed * 8


def test_a_batch_of_another_size_reads_on(corpora):
    run, whole = Run(corpora), Run(corpora)
    rows = run.go([0.6, "a", 0.4, "b"], 20, stop=10)
    rows += run.go([0.6, "a", 0.4, "b"], 5, global_batch_size=8)
    assert rows == whole.go([0.6, "a", 0.4, "b"], 20)


phases = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any),
        st.sampled_from([3, 4, 8, 12, 16]),
        st.integers(1, 6),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=25)
@given(phases)
def test_no_token_is_read_twice_before_all_were_read(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("mix")
    sizes = {"a": 30, "b": 20, "c": 12}
    for name, documents in sizes.items():
        write(folder, name, documents)
    run = Run(folder)
    for weights, length, steps in changes:
        words = [w for n, name in zip(weights, "abc", strict=True) if n for w in (n, name)]
        flag = MORE if run.steps else {}
        try:
            run.go(words, steps, seq_length=length, **flag)
        except DataError as error:
            raise AssertionError(str(error)) from error
    for name, documents in sizes.items():
        counts = run.counts(name, documents)
        # Every recut and every pass may leave out the tokens of less than one window.
        lost = 17 * (len(changes) + max(counts))
        assert sum(n < max(counts) - 1 for n in counts) <= lost
