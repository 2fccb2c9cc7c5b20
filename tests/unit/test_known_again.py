"""Which corpora a resumed run takes for those it has read: moved, renamed, replaced, of a split."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from unit.test_history import FAR, LENGTH, MORE, Run, write
from unit.test_source import config, corpus

from megatron.core.datasets.build import Position
from megatron.core.datasets.history import Record
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.mixed import MixedDataset
from megatron.core.datasets.source import build_sources
from megatron.core.datasets.tokenizers import build_tokenizer
from megatron.core.errors import DataError
from megatron.core.mesh import ParallelState

MIX = [0.6, "a", 0.4, "b"]


@pytest.fixture
def folder(tmp_path):
    for name, documents in (("a", 60), ("b", 40), ("c", 20)):
        write(tmp_path, name, documents)
    return tmp_path


@pytest.fixture
def heard(caplog):
    """What a run says about its data, but for the index cache."""
    caplog.set_level(logging.INFO, logger="megatron.core.datasets.cache")
    return lambda: [text for text in caplog.messages if not text.startswith("index ")]


def rename(folder, old, new):
    (folder / new).parent.mkdir(exist_ok=True)
    for ending in (".bin", ".idx"):
        (folder / f"{old}{ending}").rename(folder / f"{new}{ending}")


def stopped(folder, words=MIX):
    """A run that has read 7 of 20 steps, and what the other 13 read."""
    run, whole = Run(folder), Run(folder)
    rows = whole.go(words, 20)
    assert run.go(words, 20, stop=7) == rows[:28]
    return run, rows[28:]


def test_a_corpus_in_another_folder_is_the_same(folder, heard):
    run, rest = stopped(folder)
    rename(folder, "a", "elsewhere/a")
    assert run.go([0.6, str(folder / "elsewhere/a"), 0.4, "b"], 13) == rest
    assert heard() == []


def test_a_corpus_with_another_name_is_the_same(folder, heard):
    run, rest = stopped(folder)
    rename(folder, "a", "new")
    words = [0.6, "new", 0.4, "b"]
    assert run.go(words, 13) == rest
    assert heard() == ["NOTE: corpus a is now called new"]
    assert [part.name for part in run.record.mix.parts] == ["new", "b"]
    assert not isinstance(run.open(words, 0)[0].train.dataset, MixedDataset)
    assert len(heard()) == 1  # the next checkpoint has the new name


def test_other_weights_at_the_same_time_are_a_change(folder, heard):
    run, _ = stopped(folder)
    rename(folder, "a", "new")
    words = [0.3, "new", 0.7, "b"]
    with pytest.raises(DataError, match="other data: the share of new went from 0.6 to 0.3"):
        run.open(words, 13)
    run.go(words, 13, **MORE)
    counts = run.counts("a", 60)
    assert max(counts) == 1  # it went on where it stopped
    assert heard()[-1] == "NOTE: corpus a is now called new"


def test_a_corpus_that_was_left_out_may_come_back_under_another_name(folder):
    run, _ = stopped(folder)
    run.go([1, "b"], 2, **MORE)
    rename(folder, "a", "new")
    run.go([1, "b", 1, "new"], 20, **MORE)
    assert max(run.counts("a", 60)) == 1
    assert not run.record.mix.gone


def test_two_names_of_one_text_are_two_corpora(folder):
    """Each keeps its own place, also when one of them gets a third name."""
    with IndexedDatasetBuilder(folder / "twin", np.uint16) as builder:
        held = IndexedDataset(folder / "a")
        for i in range(len(held)):
            builder.add_document(held[i])
        builder.finalize()
    run, rest = stopped(folder, [0.7, "twin", 0.3, "a"])
    rename(folder, "a", "new")
    assert run.go([0.3, "new", 0.7, "twin"], 13) == rest


def replaced(folder, name, like):
    with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
        for document in range(like):
            builder.add_document(3 * FAR + document * LENGTH + np.arange(LENGTH))
        builder.finalize()


def test_another_text_of_the_same_lengths_is_another_corpus(folder):
    run, _ = stopped(folder)
    rename(folder, "a", "kept")
    replaced(folder, "a", 60)
    with pytest.raises(DataError, match="other data: a has other documents"):
        run.open(MIX, 13)
    run.go(MIX, 5, **MORE)
    assert [part.name for part in run.record.mix.gone] == ["a"]
    (old,), taken = run.record.mix.gone, run.record.past[-1]["samples"]
    assert [old.name, old.start] == taken[0]
    assert run.record.mix.parts[0].start == 0  # begins at its beginning
    rename(folder, "a", "other")
    rename(folder, "kept", "a")
    run.go(MIX, 5, **MORE)  # the first one comes back, to its place
    assert run.record.mix.parts[0].start == old.start
    assert max(run.counts("a", 60)) == 1


def test_a_corpus_that_grew_has_its_old_text(folder):
    run, _ = stopped(folder, ["a"])
    replaced(folder, "a", 70)  # longer, but not the old text in front
    run.go(["a"], 2, **MORE)
    assert [part.name for part in run.record.mix.gone] == ["a"]
    assert run.record.mix.parts[0].start == 0


def test_a_checkpoint_that_does_not_know_the_tokens(folder, heard):
    run, rest = stopped(folder)
    mix = run.record.mix
    unknown = tuple(replace(part, content="") for part in mix.parts)
    saved = replace(run.record, mix=replace(mix, parts=unknown)).to_dict()
    del saved["evaluated"]
    for part in saved["mix"]["parts"]:
        del part["content"]
    run.record = Record.of(saved)
    assert run.go(MIX, 13) == rest
    assert heard() == []
    assert all(part.content for part in run.record.mix.parts)


def evaluating(tmp_path, record, **fields):
    cfg = config(tmp_path, load="x", num_workers=0, **fields)
    at = None if record is None else Position(5, 20, 16, record)
    made = build_sources(cfg, build_tokenizer(cfg.data), ParallelState.single(), at)
    return made, Record.of(made.ledger.record(20).to_dict())


def test_other_validation_data_are_said_and_change_no_training(tmp_path, heard):
    a, b, c = (corpus(tmp_path, name, first=200 * i) for i, name in enumerate("abc"))
    one, record = evaluating(tmp_path, None, train_data_path=[a], valid_data_path=[b])
    again, _ = evaluating(tmp_path, record, train_data_path=[a], valid_data_path=[b])
    assert heard() == []
    other, after = evaluating(tmp_path, record, train_data_path=[a], valid_data_path=["3", b, "1",
                              c])  # fmt: skip
    (said,) = heard()
    assert said.startswith("NOTE: validation reads other documents than before: 1 b (documents 0 ")
    assert "became 0.75 b (documents 0 to 39, " in said
    assert ", 0.25 c (documents 0 to 39, " in said
    assert said.endswith("It goes on at sample 16 of the new order")
    for made in (again, other):
        for i in range(len(one.train)):
            assert made.train.dataset.window(i).tolist() == one.train.dataset.window(i).tolist()
    # A run without evaluation does not forget what the ones before it evaluated on.
    _, kept = evaluating(tmp_path, after, train_data_path=[a], eval_interval=None)
    assert kept.evaluated == after.evaluated != record.evaluated
    sets = {"multiple_validation_sets": True, "validation_set_names": ["x", "y"]}
    _, two = evaluating(tmp_path, record, train_data_path=[a], valid_data_path=[b, c], **sets)
    assert len(heard()) == 1  # sets of other names are other sets
    evaluating(tmp_path, two, train_data_path=[a], valid_data_path=[b, a], **sets)
    assert "NOTE: validation y reads other documents" in heard()[-1]
