"""Dry runs by the real command line: large configurations, and refusals in a launch's words."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from megatron.core.datasets.indexed import bin_path
from tests.e2e.launch import ROOT, launch
from tests.e2e.refusals import MOCK, MODEL, changed, corpus, cut, messages

GIB = 2**30
PAPER = ["--dry-run", "--fake-world-size"]


# A process counts what its parent had when it began: here one that is small, unlike pytest.
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def program(*args):
    """Exit code, output and the largest resident memory of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, sys.executable, ROOT / "pretrain_gpt.py", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    out, _, resident = done.stdout.rstrip().rpartition("\n")
    return done.returncode, out, int(resident) * 1024


def memory_rows(out):
    table = out[out.index("memory of a rank") :].splitlines()[2:]
    return [line.split() for line in table if re.match(r"  \d", line)]


def test_gpt3_175b_on_4096_ranks():
    code, out, resident = program(
        "--config", "configs/gpt3_175b.yaml", "--pipeline-model-parallel-size", 16,
        "--global-batch-size", 2048, "--use-distributed-optimizer", *PAPER, 4096,
    )  # fmt: skip
    assert code == 0, out
    assert resident < 2 * GIB
    assert "4096 rank(s) on paper, tp 8 x cp 1 x pp 16 x dp 32" in out
    assert "tp: 512 x 8; dp: 128 x 32; pp: 256 x 16; tp-cp-dp: 16 x 256" in out
    assert "parameters: 174,615,846,912 in 16 tensors" in out
    rows = memory_rows(out)
    assert [row[0] for row in rows] == [str(stage) for stage in range(16)]
    assert {row[1] for row in rows} == {"256"}
    # Passes that 1F1B with two stages a rank keeps: 2 (p - 1 - rank) + p before the first backward
    # pass, and the one under way.
    assert [int(row[8]) for row in rows] == [2 * (15 - rank) + 17 for rank in range(16)]
    first, middle = rows[0], rows[7]
    h = 12288
    layer = 12 * h * h // 8 + 7 * h // 8 + 6 * h  # matrices, their split biases, the other vectors
    assert int(middle[2].replace(",", "")) == 6 * layer
    assert float(first[-1]) > float(middle[-1]) > float(rows[-1][-1])


def test_llama3_8b_in_fp8():
    code, out, resident = program(
        "--config", "configs/llama3_8b.yaml", "--config", "configs/fp8/delayed.yaml", *PAPER, 8
    )
    assert code == 0, out
    assert resident < 2 * GIB
    assert "parameters: 8,03" in out
    (row,) = memory_rows(out)
    weights, gradients, optimizer, fp8 = map(float, row[3:7])
    # Figures have three decimals.
    assert gradients == pytest.approx(2 * weights, abs=0.002)
    assert optimizer == pytest.approx(6 * weights, abs=0.004)
    assert fp8 == pytest.approx(weights * 0.87, rel=0.02)  # all but embedding and output layer


def refusals(tmp_path):
    short = corpus(tmp_path, "short")
    cut(bin_path(short), 7)
    good = corpus(tmp_path, "good")
    data = ["--tokenizer-type", "NullTokenizer", "--data-path"]
    (tmp_path / "file").touch()
    return {
        "settings": [*MOCK, "--fp16", "--bf16", "--hiden-size", "3", "--hidden-size", "30"],
        "a broken corpus": [*MODEL, *data, str(short)],
        "too little text": changed([*MODEL, *data, str(good)], "--split", "1,98,1"),
        "a folder": [*MOCK, "--save", str(tmp_path / "file" / "x"), "--save-interval", "1"],
        "a checkpoint": [*MOCK, "--load", str(tmp_path), "--exit-on-missing-checkpoint"],
    }


def sentences(out):
    return {re.sub(r"^\[rank [^]]+\] ", "", line) for line in messages(out)}


@pytest.mark.parametrize("what", ["settings", "a broken corpus", "too little text", "a folder",
                                  "a checkpoint"])  # fmt: skip
def test_a_dry_run_refuses_what_a_launch_refuses(what, tmp_path):
    args = refusals(tmp_path)[what]
    real = launch(2, args)
    dry = launch(1, [*args, *PAPER, "2"])
    assert set(real.codes) == set(dry.codes)
    assert dry.codes[0] in (1, 2)
    assert sentences(dry.out) == sentences(real.out) != set()


def test_the_launchers_processes_are_the_world():
    done = launch(2, [*MOCK, "--dry-run"])
    assert done.codes == [0, 0]
    assert done.out.count("2 rank(s) on paper") == 1
