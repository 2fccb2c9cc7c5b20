"""The real command line: layouts, precisions, resume, exit codes, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.e2e.launch import ROOT, free_port, launch, wait_for

SMALL = [
    "--mock-data", "--vocab-size", "256", "--num-layers", "2", "--hidden-size", "64",
    "--num-attention-heads", "4", "--seq-length", "64", "--micro-batch-size", "1",
    "--global-batch-size", "4", "--train-iters", "4", "--log-interval", "1", "--lr", "1e-3",
    "--lr-decay-iters", "8", "--hidden-dropout", "0", "--attention-dropout", "0", "--device", "cpu",
]  # fmt: skip
FP8 = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe"]
TP2 = ["--tensor-model-parallel-size", "2"]


def run(world_size: int, *args: str, **kw):
    return launch(world_size, [*SMALL, *args], **kw)


@pytest.fixture(scope="module")
def fp32_losses():
    done = run(1)
    assert done.codes == [0], done.out
    assert len(done.losses()) == 4
    return done.losses()


@pytest.mark.parametrize(
    "layout", [(2, *TP2), (2, *TP2, "--sequence-parallel"), (2,)], ids=["tp2", "tp2sp", "dp2"]
)
def test_every_layout_gives_the_same_fp32_losses(layout, fp32_losses):
    done = run(*layout)
    assert done.codes == [0, 0], done.out
    # The sums run in another order; six digits are printed.
    assert done.losses() == pytest.approx(fp32_losses, rel=2e-6)


def test_fp8_runs_with_sequence_parallel_and_says_so(fp32_losses):
    one = run(1, *FP8, "delayed")
    two = run(2, *TP2, "--sequence-parallel", *FP8, "delayed")
    assert (one.codes, two.codes) == ([0], [0, 0]), one.out + two.out
    assert two.losses() != fp32_losses
    # FP8 and BF16 noise on a loss of 5.5; the layouts differ by a good deal less than the formats.
    assert one.losses() == pytest.approx(fp32_losses, rel=2e-3)
    assert two.losses() == pytest.approx(one.losses(), rel=5e-4)
    rows = [x.split() for x in two.lines("decoder.layers.*") if " fp8 " in x]
    assert len(rows) == 12  # four layers, three products each
    assert all(row[4] == row[7] == "delayed" and "2" in row for row in rows), two.out
    assert len(two.lines("output_layer")) == 1


def test_block_scales_in_sizes_that_divide_by_nothing():
    sizes = ["--hidden-size", "60", "--ffn-hidden-size", "100", "--seq-length", "36", "--bf16",
             "--train-iters", "2"]  # fmt: skip
    plain = run(2, *TP2, "--sequence-parallel", *sizes)
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "blockwise"]
    done = run(2, *TP2, "--sequence-parallel", *sizes, *fp8)
    assert (plain.codes, done.codes) == ([0, 0], [0, 0]), plain.out + done.out
    assert done.losses() != plain.losses()
    assert done.losses() == pytest.approx(plain.losses(), rel=2e-3)
    assert len(done.lines("gradients are E5M2")) == 1
    assert len([x for x in done.lines("decoder.layers.*") if "e5m2xe4m3 blockwise" in x]) > 0


def test_fp16_searches_its_loss_scale():
    done = run(2, *TP2, "--fp16", "--initial-loss-scale", "1e12", "--train-iters", "30")
    assert done.codes == [0, 0], done.out
    scales = [float(s) for s in re.findall(r"loss scale: ([0-9.]+) ", done.out)]
    assert scales[0] == 1e12
    assert scales[-1] < 1e9
    assert len(done.lines("number of skipped iterations:   1")) > 5
    losses = done.losses()
    assert len(losses) > 5
    assert losses[-1] < losses[0]


def test_log_lines_of_a_run(tmp_path):
    path = tmp_path / "dllogger.json"
    done = run(
        2, "--eval-interval", "2", "--eval-iters", "1", "--log-throughput",
        "--log-num-zeros-in-grad", "--log-params-norm", "--dllogger-json", str(path),
        "--tensorboard-dir", str(tmp_path / "tb"),
    )  # fmt: skip
    assert done.codes == [0, 0], done.out
    line = done.lines("iteration        4/")[0]
    assert re.fullmatch(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        4/       4 \|"
        r" consumed samples:           16 \| elapsed time per iteration \(ms\): [0-9.]+ \|"
        r" throughput per GPU \(TFLOP/s/GPU\): [0-9.]+ \| tokens per second: [0-9.]+ \|"
        r" learning rate: 5\.000000E-04 \| global batch size:     4 \| lm loss: 5\.\d{6}E\+00 \|"
        r" loss scale: 1\.0 \| grad norm: \d\.\d{3} \| num zeros: \d+ \| params norm: \d+\.\d{3} \|"
        r" number of skipped iterations:   0 \| number of nan iterations:   0 \|",
        line,
    ), line
    for text in [
        "using world size: 2, tp 1 x cp 1 x pp 1 x dp 2",
        "setting number of microbatches to constant 2",
        "------------------------ arguments ------------------------",
        " > datasets target sizes (minimum size):",
        "[after model, optimizer, and learning rate scheduler are built] datetime: ",
        "[after dataloaders are built] datetime: ",
        "done with setup ...",
        "training ...",
        "[before the start of training step] datetime: ",
        " validation loss at iteration 2 | lm loss value: ",
        "[after training is done] datetime: ",
        " validation loss at iteration 4 on validation set | lm loss value: ",
        " validation loss at iteration 4 on test set | lm loss value: ",
        "[Rank 0] (after 1 iterations) memory (MB) | ",
        "Theoretical memory footprints: ",
    ]:
        assert len(done.lines(text)) == 1, text
    records = [json.loads(x[5:]) for x in path.read_text().splitlines()]
    assert [r["step"] for r in records if "lm loss" in r["data"]] == [1, 2, 3, 4]
    assert list((tmp_path / "tb").iterdir())


def test_evaluation_leaves_no_trace():
    plain = run(1, *FP8, "delayed", "--fp8-amax-history-len", "4")
    with_eval = run(1, *FP8, "delayed", "--fp8-amax-history-len", "4", "--eval-interval", "1",
                    "--eval-iters", "2")  # fmt: skip
    assert with_eval.losses() == plain.losses()


def test_stop_and_go_is_the_same_run_in_fp16(tmp_path):
    """In other precisions: `test_resume`."""
    args = ["--fp16", "--initial-loss-scale", "65536"]
    save = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    whole = run(2, *TP2, *args, *dropout)
    first = run(2, *TP2, *args, *dropout, *save, "--exit-interval", "2")
    assert first.codes == [0, 0], first.out
    assert "could not find the metadata file" in first.out
    assert len(first.lines("[exiting program at iteration 2] datetime: ")) == 1
    second = run(2, *TP2, *args, *dropout, *save)
    assert second.codes == [0, 0], second.out
    assert first.losses() + second.losses() == whole.losses()
    norms = re.findall(r"grad norm: \S+", first.out + second.out)
    assert norms == re.findall(r"grad norm: \S+", whole.out)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_another_lr_needs_a_word(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    assert run(1, *save, "--train-iters", "2").codes == [0]
    other = ["--load", str(tmp_path), "--lr", "5e-4", "--lr-decay-style", "cosine"]
    refused = run(2, *TP2, *other)
    assert refused.codes == [1, 1]
    assert "linear" in refused.out
    assert "--override-opt_param-scheduler" in refused.out
    allowed = run(2, *TP2, *other, "--override-opt_param-scheduler")
    assert allowed.codes == [0, 0], allowed.out
    # 12 of 32 samples into a cosine from 5e-4.
    assert "learning rate: 3.456709E-04" in allowed.lines("iteration        3/")[0]


def test_bad_configuration_is_told_once_and_ends_every_rank():
    done = run(2, "--num-attention-heads", "3", "--fp8-formatt", "hybrid")
    assert done.codes == [2, 2], done.out
    assert len(done.lines("Did you mean --fp8-format?")) == 1
    assert len(done.lines("--num-attention-heads")) == 1
    assert "Traceback" not in done.out


def test_a_pipeline_that_does_not_fit_is_refused_in_words():
    done = run(2, "--pipeline-model-parallel-size", "2", "--num-layers", "3")
    assert done.codes == [2, 2]
    assert "--num-layers, --pipeline-model-parallel-size: got 3 layers over 2 stages." in done.out


def test_a_backend_that_cannot_run_is_refused_on_every_rank():
    done = run(2, *TP2, "--transformer-impl", "transformer_engine")
    assert done.codes == [1, 1]
    assert len(done.lines("--transformer-impl: got transformer_engine.")) == 1  # told once
    assert "Traceback" not in done.out


DRIVER = """
import os, sys
sys.path.insert(0, {root!r})
import pretrain_gpt
from megatron.core.models.gpt.gpt_model import GPTModel

forward, calls = GPTModel.forward, 0

def broken(self, *args, **kwargs):
    global calls
    loss = forward(self, *args, **kwargs)
    iteration = calls // 2 + 1  # two microbatches on each of two ranks
    calls += 1
    if iteration {when} and os.environ["RANK"] == "1":
        {what}
    return loss

GPTModel.forward = broken
os._exit(pretrain_gpt.main())
"""


def driver(tmp_path, what: str, when: str = "== 3"):
    """A script like pretrain_gpt.py whose second rank misbehaves."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(root=str(ROOT), what=what, when=when))
    return script


def test_a_failing_rank_is_named_and_ends_the_others(tmp_path):
    script = driver(tmp_path, "raise ValueError('boom')")
    done = run(2, script=script)
    assert done.codes == [1, 1], done.out
    assert "[rank 1 tp0 pp0 dp1, iteration 3, 0F0] ValueError: boom" in done.out
    # It may also be noticed between two actions.
    noticed = r"\[rank 0 tp0 pp0 dp0, iteration 3(, 0GRAD_SYNC)?\] rank 1 tp0 pp0 dp1 \(process "
    assert re.search(noticed, done.out), done.out


def test_nan_on_one_rank_skips_everywhere_and_stops_after_three(tmp_path):
    script = driver(tmp_path, "loss = loss * float('nan')", when=">= 3")
    args = ["--train-iters", "9", "--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    done = run(2, *FP8, "delayed", *args, script=script)
    assert done.codes == [1, 1], done.out
    assert len(done.lines("number of nan iterations:   1")) == 3
    assert len(done.losses()) == 2
    assert "iteration        6/" not in done.out
    assert len(done.lines("WARNING: iteration 3 is not finite: ")) == 1
    assert len(done.lines("WARNING: iteration")) == 1
    assert len(done.lines("Last good checkpoint: ")) == 1  # told once, by the first rank
    assert "iter_0000002" in done.lines("Last good checkpoint: ")[0]


def test_one_bad_step_is_skipped_and_training_goes_on(tmp_path):
    script = driver(tmp_path, "loss = loss * float('inf')", when="== 2")
    done = run(2, *FP8, "delayed", script=script)
    assert done.codes == [0, 0], done.out
    assert (
        "number of skipped iterations:   1 | number of nan iterations:   1"
        in (done.lines("iteration        2/")[0])
    )
    assert len(done.losses()) == 3
    # The skipped step does not advance the schedule.
    assert "learning rate: 6.250000E-04" in done.lines("iteration        4/")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("moment", ["iteration        3/", "validation loss at iteration 1 "])
def test_a_signal_to_one_rank_saves_and_leaves(number, moment, tmp_path):
    def interrupt(pids, log):
        wait_for(log, moment)
        os.kill(pids[1], number)

    evaluation = ["--eval-interval", "1", "--eval-iters", "3"]
    save = ["--save", str(tmp_path), "--save-interval", "100000"]
    done = run(2, *evaluation, *save, "--train-iters", "100000", "--exit-signal-handler",
               during=interrupt)  # fmt: skip
    assert done.codes == [0, 0], done.out
    assert len(done.lines(f"[exiting program after receiving {number.name}.] datetime: ")) == 1
    last = int(re.findall(r"iteration +(\d+)/", done.out)[-1])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)


def test_help_needs_no_torch():
    script = (
        "import runpy, sys; sys.argv = ['pretrain_gpt.py', '--help']\n"
        "try: runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert "--fp8-format" in done.stdout
    assert done.stdout.rstrip().endswith("False")


@pytest.mark.slow
def test_torchrun_shows_a_mistake_once():
    """It trains under the real launcher in `test_tutorial_lines` and `test_lost_ranks`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-port", str(free_port()), "pretrain_gpt.py", *SMALL, *TP2,
               "--hidden-size", "63"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    bad = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)
    assert bad.returncode != 0
    assert bad.stderr.count("1 configuration problem:") == 1


def test_saving_at_once_what_was_loaded_carries_the_fp8_state_over(tmp_path):
    args = [*FP8, "delayed", "--fp8-amax-history-len", "4", "--save-interval", "4"]
    assert run(1, *args, "--save", str(tmp_path / "a")).codes == [0]
    copied = run(1, *args, "--load", str(tmp_path / "a"), "--save", str(tmp_path / "b"))
    assert copied.codes == [0], copied.out
    assert copied.losses() == []
    longer = [*args, "--train-iters", "6"]
    original = run(1, *longer, "--load", str(tmp_path / "a"))
    copy = run(1, *longer, "--load", str(tmp_path / "b"))
    assert len(copy.losses()) == 2
    assert copy.losses() == original.losses()
    again = run(1, *args, "--load", str(tmp_path / "a"), "--save", str(tmp_path / "a"))
    assert again.codes == [0], again.out
    assert not again.lines("saving checkpoint")
