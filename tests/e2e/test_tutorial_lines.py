"""Launch lines as tutorials print them, scaled down: fewer layers, narrower, fewer processes.

Everything else stays as written, with nothing added but sizes: no data, no learning rate, no
positions. What a line leaves out must have a default that works and is named.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.e2e.launch import ROOT, free_port, launch


def shown(out: str, name: str) -> str:
    """Value of one setting in the dump of all settings."""
    return re.search(rf"^  {name} \.+ (.*)$", out, re.MULTILINE)[1]


def test_benchmark_line():
    done = launch(4, [
        "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1",
        "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4",
        "--seq-length", "32", "--micro-batch-size", "4", "--global-batch-size", "16",
        "--fp8-format", "hybrid", "--fp8-amax-history-len", "1024",
        "--fp8-amax-compute-algo", "max", "--train-iters", "10", "--log-interval", "10", "--bf16",
    ])  # fmt: skip
    assert done.codes == [0] * 4, done.out
    assert len(done.losses()) == 2  # iterations 1 and 10
    assert shown(done.out, "fp8_recipe") == "delayed"
    assert shown(done.out, "max_position_embeddings") == "32"
    assert len(done.lines("NO TRAINING DATA WAS GIVEN")) == 1
    assert [x for x in done.lines("linear_fc1") if "fp8 e5m2xe4m3 delayed" in x]


def test_line_with_sequence_parallel_and_no_model():
    # The original names no model; its default is too large for a test, so the last lines add one.
    done = launch(4, [
        "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "1",
        "--sequence-parallel", "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed",
        "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max", "--fp8-margin", "0",
        "--fp8-wgrad",
        "--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "4",
        "--seq-length", "64", "--train-iters", "2", "--log-interval", "1",
    ])  # fmt: skip
    assert done.codes == [0] * 4, done.out
    assert len(done.losses()) == 2
    assert len(done.lines("--fp8-wgrad")) == 1
    assert shown(done.out, "fp8_wgrad") == "True"


LAUNCH_LINE = [
    "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1",
    "--fp8-format", "hybrid", "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max",
    "--fp8-margin", "0", "--fp8-wgrad", "--num-layers", "2", "--hidden-size", "64",
    "--num-attention-heads", "4", "--seq-length", "64", "--micro-batch-size", "2",
    "--global-batch-size", "8", "--lr", "1.5e-4", "--clip-grad", "1.5", "--bf16",
    "--train-iters", "2", "--log-interval", "1",
]  # fmt: skip


@pytest.mark.slow
def test_line_of_the_old_launcher():
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch",
               "--nproc_per_node=2", f"--master-port={free_port()}", "pretrain_gpt.py"]  # fmt: skip
    done = subprocess.run(
        [*command, *LAUNCH_LINE], capture_output=True, text=True, cwd=ROOT, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| lm loss: ") == 2


@pytest.fixture(scope="module")
def with_local_rank():
    return launch(2, ["--local-rank=0", *LAUNCH_LINE])


def test_the_old_launchers_local_rank_is_accepted(with_local_rank):
    assert with_local_rank.codes == [0, 0], with_local_rank.out


def test_a_pipeline_of_two_trains_the_same_model(with_local_rank):
    line = ["2" if before == "--pipeline-model-parallel-size" else word
            for before, word in zip(["", *LAUNCH_LINE], LAUNCH_LINE, strict=False)]  # fmt: skip
    done = launch(4, line)
    assert done.codes == [0] * 4, done.out
    # bf16 sums over other ranks: the replicas became stages.
    assert done.losses() == pytest.approx(with_local_rank.losses(), rel=2e-3)


def test_from_bf16_to_fp8_and_back(tmp_path):
    sizes = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4",
             "--seq-length", "32", "--mock-data", "--log-interval", "1",
             "--lr-decay-iters", "100"]  # fmt: skip
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    first = launch(1, [*sizes, *save, "--bf16", "--train-iters", "2"])
    assert first.codes == [0], first.out

    # As the tutorial resumes: a folder of one iteration, FP8 flags, and no model size.
    second = launch(1, [
        "--load", str(tmp_path / "iter_0000002"), "--fp8-format", "hybrid",
        "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max", "--bf16",
        "--save", str(tmp_path), "--save-interval", "2", "--train-iters", "4",
    ])  # fmt: skip
    assert second.codes == [0], second.out
    assert shown(second.out, "hidden_size") == "64"
    assert len(second.lines("FP8 state: the checkpoint has none")) == 1
    assert second.losses()[0] < first.losses()[0] + 0.05

    back = launch(1, [*sizes, "--bf16", "--load", str(tmp_path), "--train-iters", "6"])
    assert back.codes == [0], back.out
    assert len(back.lines("this run is not in FP8; it is ignored")) == 1
    assert len(back.losses()) == 2

    other = launch(1, [*sizes, "--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise",
                       "--load", str(tmp_path), "--train-iters", "6"])  # fmt: skip
    assert other.codes == [0], other.out
    assert len(other.lines("it is dropped")) == 1
