"""Context parallelism and packed documents on the real command line."""

from __future__ import annotations

import pytest

from tests.e2e.launch import launch
from tests.e2e.test_resume import FP32

PACKED = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
CP2 = ["--context-parallel-size", "2"]
LEVELS = ["--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2"]
LAYOUTS = {
    "cp2": (2, CP2),
    "cp2-tp2-sp": (4, [*CP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "cp2-gather": (2, [*CP2, "--cp-comm-type", "p2p", "all_gather"]),
    "cp2-heads": (2, [*CP2, "--cp-comm-type", "a2a"]),
    "cp4-levels": (4, [*LEVELS, "--cp-comm-type", "a2a+p2p"]),
}


def figures(ranks, *flags):
    run = ["--train-iters", "4", "--eval-interval", "4", "--eval-iters", "2"]
    # Sequences long enough for several of the mock documents.
    long = ["--seq-length", "1024", "--hidden-dropout", "0", "--attention-dropout", "0"]
    done = launch(ranks, [*FP32, *run, *long, *flags])
    assert done.codes == [0] * ranks, done.out
    validation = [
        float(line.split("lm loss value: ")[1].split()[0])
        for line in done.lines("validation loss at") + done.lines("on test set")
        if "lm loss value: " in line
    ]
    assert validation
    return done.losses() + validation


@pytest.fixture(scope="module")
def alone():
    return figures(1, *PACKED)


def test_documents_matter_here(alone):
    assert figures(1)[0] != pytest.approx(alone[0], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_evaluation_give_the_losses_of_one_process(alone, layout):
    ranks, flags = LAYOUTS[layout]
    # The printed figures have seven digits; Adam spreads differences in the order of sums.
    assert figures(ranks, *PACKED, *flags) == pytest.approx(alone, rel=1e-5)


def test_a_loss_that_is_not_finite_ends_every_rank(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, runpy, sys\n"
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "forward = GPTModel.forward\n"
        "def broken(self, *args, **kwargs):\n"
        "    nan = float('nan') if os.environ['RANK'] == '1' else 1.0\n"
        "    return forward(self, *args, **kwargs) * nan\n"
        "GPTModel.forward = broken\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    from tests.e2e.launch import ROOT

    done = launch(2, [str(ROOT / "pretrain_gpt.py"), *FP32, *CP2], script=script)
    assert done.codes == [1, 1]
    # Both ranks skip the same updates, though only one of them saw the NaN.
    assert len(done.lines("iteration 3] loss: got nan or inf")) == 1, done.out
