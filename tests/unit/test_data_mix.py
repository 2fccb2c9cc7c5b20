"""Corpora per split, lists of corpora in files, and several validation sets."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import torch
from unit.test_source import SEQ, config, corpus

from megatron.core.datasets.build import Turn, set_names
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.datasets.source import build_sources
from megatron.core.datasets.tokenizers import build_tokenizer
from megatron.core.mesh import ParallelState
from megatron.observe.events import EvalEnd
from megatron.observe.lines import validation_lines
from megatron.training import trainer
from megatron.training.initialize import Launch, start
from tests.spikes import Recorder


def sources(tmp_path, **fields):
    cfg = config(tmp_path, **fields)
    return build_sources(cfg, build_tokenizer(cfg.data), ParallelState.single())


def read(source):
    return torch.stack([source.dataset[i]["tokens"] for i in range(len(source.dataset))])


def paths(tmp_path):
    return [corpus(tmp_path, name, first=200 * i) for i, name in enumerate("abc")]


def test_files_say_what_flags_say(tmp_path):
    a, b, c = paths(tmp_path)
    listed = tmp_path / "list.txt"
    listed.write_text(f"0.7 {a}\n0.3 {b}\n")
    flags = sources(tmp_path, data_path=["0.7", a, "0.3", b], split="8,1,1")
    file = sources(tmp_path, data_args_path=str(listed), split="8,1,1")
    assert torch.equal(read(flags.train), read(file.train))

    per_split = tmp_path / "splits.json"
    per_split.write_text(json.dumps({"train": [0.7, a, 0.3, b], "valid": c, "test": None}))
    file = sources(tmp_path, per_split_data_args_path=str(per_split))
    flags = sources(tmp_path, train_data_path=["0.7", a, "0.3", b], valid_data_path=[c])
    assert torch.equal(read(flags.train), read(file.train))
    assert torch.equal(read(flags.valid[""]), read(file.valid[""]))
    assert file.test is None


def test_a_split_with_corpora_of_its_own_reads_all_of_them(tmp_path):
    a, b, _ = paths(tmp_path)
    own = sources(tmp_path, train_data_path=["2.0", a], valid_data_path=[b])
    alone = sources(tmp_path, data_path=[a], split="1,0,0", eval_interval=None)
    assert isinstance(own.train.dataset, GPTDataset)  # a single weight says nothing here
    assert own.train.dataset.documents.tolist() == list(range(40))
    assert torch.equal(read(own.train), read(alone.train))
    assert own.valid[""].dataset.corpus.prefix == b


def test_every_validation_set_is_read_by_itself(tmp_path):
    a, b, c = paths(tmp_path)
    fields = {"train_data_path": [a], "valid_data_path": [b, c], "multiple_validation_sets": True}
    made = sources(tmp_path, **fields)
    assert list(made.valid) == ["b", "c"]
    assert [len(one.dataset) >= 3 * 2 * 4 for one in made.valid.values()] == [True, True]
    for name, path in (("b", b), ("c", c)):
        alone = sources(tmp_path, train_data_path=[a], valid_data_path=[path])
        assert torch.equal(read(made.valid[name]), read(alone.valid[""]))
    named = sources(tmp_path, **fields, validation_set_names=["left", "right"])
    assert list(named.valid) == ["left", "right"]
    assert set_names(["x/one", "y/one", "y/two"]) == ["one-0", "one-1", "two"]


def test_processes_start_with_different_corpora(tmp_path):
    begun = []
    tasks = [lambda i=i: begun.append(i) or i for i in range(5)]
    for number in range(3):
        begun.clear()
        assert Turn(number, 3).run(tasks) == list(range(5))
        assert begun[0] == number * 5 // 3
    assert Turn(threads=4).run(tasks) == list(range(5))


def test_threads_build_the_same_files(tmp_path):
    a, b, c = paths(tmp_path)
    fields = {"data_path": ["1", a, "2", b, "3", c], "split": "8,1,1"}
    one = sources(tmp_path, **fields, data_cache_path=str(tmp_path / "one"))
    many = sources(
        tmp_path, **fields, data_cache_path=str(tmp_path / "many"), num_dataset_builder_threads=3
    )
    assert torch.equal(read(one.train), read(many.train))
    assert read(one.train).shape[1] == SEQ
    names = [
        sorted((p.name, np.load(p).tobytes()) for p in (tmp_path / d).glob("*.npy"))
        for d in ("one", "many")
    ]
    assert names[0] == names[1]


def evaluations(tmp_path, **fields):
    cfg = config(tmp_path, num_workers=0, device="cpu", lr=1e-2, train_iters=4, eval_interval=2,
                 log_interval=4, **fields)  # fmt: skip
    recorder = Recorder()
    with mock.patch.object(trainer, "build_sinks", return_value=([recorder], [])):
        made = trainer.Trainer(start(cfg, Launch()))
        made.run()
    return recorder.kinds(EvalEnd), made.progress


def test_each_set_has_its_own_loss(tmp_path):
    a, b, c = paths(tmp_path)
    fields = {"train_data_path": [a], "valid_data_path": [b, c]}
    found, progress = evaluations(tmp_path, **fields, multiple_validation_sets=True)
    assert [(one.iteration, one.name) for one in found] == [
        (at, name) for at in (2, 4, 4) for name in "bc"
    ]
    assert progress.consumed_valid_samples == 3 * 2 * 4
    for name, path in (("b", b), ("c", c)):
        alone, _ = evaluations(tmp_path, train_data_path=[a], valid_data_path=[path])
        assert [one.losses for one in alone] == [one.losses for one in found if one.name == name]
    assert found[0].losses != found[1].losses
    assert " validation-b loss at iteration 2 | lm loss value" in validation_lines(found[0])
