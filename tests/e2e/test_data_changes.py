"""A run that stops inside a ramp, goes on with another mix of data, and stops again."""

from __future__ import annotations

import re

import numpy as np

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from tests.e2e.launch import launch
from tests.e2e.refusals import MODEL, check_refused

STEP = re.compile(r"iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) .*")
RAMP = [
    "--global-batch-size", "8", "--rampup-batch-size", "2", "2", "16", "--train-samples", "80",
    "--data-mix-change", "refuse", "--eval-interval", "10", "--eval-iters", "1", "--split", "8,2,0",
]  # fmt: skip


def arguments(*args):
    dropped = ("--global-batch-size", "--train-iters", "--lr-decay-iters")
    kept, skip = [], False
    for word in MODEL:
        skip = word in dropped or (skip and not word.startswith("--"))
        kept += [] if skip else [word]
    return [*kept, *RAMP, *map(str, args)]


def corpus(folder, name, seed):
    with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
        for _ in range(60):
            builder.add_document(np.random.default_rng(seed).integers(0, 127, 50))
        builder.finalize()
    return str(folder / name)


def steps(done):
    """Iteration, iterations in all, consumed samples, and everything else but the time."""
    found = [line for line in done.out.splitlines() if STEP.search(line)]
    return [re.sub(r"elapsed[^|]*\|", "", STEP.search(line)[0]) for line in found]


def test_a_changed_mix_inside_a_ramp(tmp_path):
    a, b, c = (corpus(tmp_path, name, seed) for seed, name in enumerate("abc"))
    place = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--save-interval", "7"]
    first = ["--data-path", "0.5", a, "0.5", b]
    done = launch(2, arguments(*first, *place, "--exit-interval", "4"))
    assert done.codes == [0, 0], done.out
    assert "setting number of microbatches" not in done.out
    assert f"index {tmp_path}" in done.out
    assert "not in the cache; built in" in done.out

    other = ["--data-path", "0.3", a, "0.3", b, "0.4", c]
    said = ("--data-mix-change: got refuse", "c is new", "a 5, b 5")
    refused = launch(2, arguments(*other, *place))
    check_refused(refused, 1, *said)

    go_on = [*other, *place, "--data-mix-change", "continue"]
    whole = launch(2, arguments(*go_on))
    assert whole.codes == [0, 0], whole.out
    assert "changed: c is new" in whole.out
    assert "global batch size is 6 from iteration 6, sample 14" in whole.out
    lines = steps(whole)
    assert [int(STEP.search(line)[3]) for line in lines] == [14, *range(20, 77, 8)]

    again = launch(2, arguments(*other, *place, "--ckpt-step", "7"))  # the same mix: no flag
    assert again.codes == [0, 0], again.out
    assert steps(again) == lines[3:]
    assert "found in the cache" in again.out
