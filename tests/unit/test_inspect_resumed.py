"""tools/inspect_data.py step --load: the batches of a run that goes on from a checkpoint."""

from __future__ import annotations

from unittest import mock

import pytest
from unit.test_inspect_data import corpus, shown, tool

from megatron.config.cli import parse
from megatron.core.datasets.source import Source
from megatron.training.initialize import Launch, start
from megatron.training.trainer import Trainer

RAMP = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--max-position-embeddings", "16", "--seq-length", "16", "--micro-batch-size", "1"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--split", "100,0,0"),
    *("--eval-iters", "0", "--lr", "0.1", "--device", "cpu", "--num-workers", "0"),
    *("--global-batch-size", "8", "--rampup-batch-size", "2", "2", "16", "--train-samples", "60"),
]


def train(flags):
    """Run it, and return by iteration's first sample the tokens that it read."""
    read, batch = {}, Source.batch

    def noted(self, consumed, microbatch, dp_rank):
        made = batch(self, consumed, microbatch, dp_rank)
        read.setdefault(consumed, []).append(made.tokens[0].tolist())
        return made

    with mock.patch.object(Source, "batch", noted):
        Trainer(start(parse(flags)[0], Launch())).run()
    return read


def test_the_tool_reads_what_the_resumed_run_reads(tmp_path, capsys):
    a, b, c = (corpus(tmp_path / name, 20 * i) for i, name in enumerate("abc"))
    place = ["--data-cache-path", tmp_path / "cache"]
    mix = ["--data-path", "0.7", a, "0.3", b, *place]
    save = ["--save", tmp_path / "saved", "--save-interval", "100"]
    load = ["--load", tmp_path / "saved"]

    def words(*parts):
        return [str(word) for part in parts for word in part]

    whole = train(words(RAMP, mix))
    sizes = [2, 2, 2, 4, 4, 6, 8, 8, 8, 8, 8]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    assert {begin: len(whole[begin]) for begin in whole} == dict(zip(begins, sizes, strict=True))
    train(words(RAMP, mix, save, ["--exit-interval", "4"]))  # inside the ramp
    capsys.readouterr()

    def step(iteration, *flags):
        found = shown(capsys, "step", "--iteration", iteration, "--json", *words(RAMP, *flags))
        assert found["iteration"] == iteration
        return found["consumed_samples"], [sample["tokens"] for sample in found["samples"]]

    for iteration in (5, 6, 7, 11):
        begin = begins[iteration - 1]
        assert step(iteration, mix, load) == (begin, whole[begin])
    assert step(2, mix) == (2, whole[2])
    assert tool.main(words(["step", "--iteration", "4"], RAMP, mix, load)) == 1
    assert "goes on from the checkpoint of iteration 4" in capsys.readouterr().err

    other = ["--data-path", "0.2", a, "0.3", b, "0.5", c, *place]
    assert tool.main(words(["step", "--iteration", "5"], RAMP, other, load)) == 1
    assert "--data-mix-change: got refuse" in capsys.readouterr().err
    go_on = [*other, "--data-mix-change", "continue"]
    resumed = train(words(RAMP, go_on, save, load, ["--exit-interval", "6"]))
    capsys.readouterr()
    assert sorted(resumed) == begins[4:6]
    assert resumed[begins[4]] != whole[begins[4]]
    # The checkpoint of iteration 6 has the new mix, which takes no flag; that of 4 has the old one.
    for iteration in (5, 6):
        begin = begins[iteration - 1]
        assert step(iteration, go_on, load, ["--ckpt-step", "4"]) == (begin, resumed[begin])
    rest = train(words(RAMP, other, load))
    capsys.readouterr()
    for iteration in (7, 11):
        begin = begins[iteration - 1]
        assert step(iteration, other, load) == (begin, rest[begin])


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_the_resumed_run(tmp_path, capsys, rank):
    """Any number of ranks may go on from the checkpoint of one."""
    mix = ["--data-path", corpus(tmp_path / "a", 0), "--data-cache-path", str(tmp_path / "cache")]
    place = str(tmp_path / "saved")
    save = ["--save", place, "--save-interval", "100"]
    train([*RAMP, *mix, *save, "--exit-interval", "6"])
    whole = train([*RAMP, *mix, "--load", place])
    capsys.readouterr()
    flags = ["--fake-world-size", "4", "--tensor-model-parallel-size", "2", "--load", place]
    found = shown(capsys, "step", "--iteration", 8, "--rank", rank, "--json", *RAMP, *mix, *flags)
    begin = found["consumed_samples"]
    assert begin == 28
    data_parallel = rank // 2
    assert [sample["number"] for sample in found["samples"]] == [
        begin + 2 * i + data_parallel for i in range(4)
    ]
    tokens = [sample["tokens"] for sample in found["samples"]]
    assert tokens == whole[begin][data_parallel::2]
