"""Pipeline runs on the command line: resuming, other layouts, tools that run in one process."""

from __future__ import annotations

import pytest
import torch

from megatron.training.restore import restore
from tests.e2e.launch import ROOT, launch
from tests.e2e.test_resume import DELAYED, FP32, QUIET, SMALL, assert_same, content

PP2 = ["--pipeline-model-parallel-size", "2"]
VPP2 = ["--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
TP2 = ["--tensor-model-parallel-size", "2"]
TEN = ["--train-iters", "8", "--lr-decay-iters", "8", "--save-interval", "100"]


def run(ranks, flags):
    done = launch(ranks, flags)
    assert done.codes == [0] * ranks, done.out
    return done


@pytest.mark.parametrize(
    ("precision", "layout", "ranks"),
    [(DELAYED, PP2, 2), ([], [*PP2, *VPP2], 2), (DELAYED, [*PP2, *SHARDED], 4)],
    ids=["delayed", "bf16-interleaved", "delayed-sharded"],
)
def test_stop_and_go_is_bitwise(tmp_path, precision, layout, ranks):
    flags = [*SMALL, *precision, *layout, *TEN]
    straight = run(ranks, [*flags, "--save", f"{tmp_path}/straight"])
    parts = ["--save", f"{tmp_path}/parts", "--load", f"{tmp_path}/parts"]
    first = run(ranks, [*flags, *parts, "--exit-interval", "4"])
    second = run(ranks, [*flags, *parts])
    assert len(straight.losses()) == 8
    assert first.losses() + second.losses() == straight.losses()
    assert_same(content(tmp_path / "straight", 8), content(tmp_path / "parts", 8))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of 6 steps with tied embeddings, saved after 4, with an evaluation at the end."""
    done = {}

    def get(name, ranks, *layout):
        if name not in done:
            root = tmp_path_factory.mktemp("trained")
            flags = [*FP32, *QUIET, *DELAYED, *layout, *STEPS, "--save", str(root)]
            done[name] = (root, run(ranks, [*flags, "--save-interval", "4"]))
        return done[name]

    return get


STEPS = [
    "--train-iters", "6", "--lr-decay-iters", "6", "--num-layers", "4",
    "--eval-interval", "6", "--eval-iters", "1", "--global-batch-size", "4",
]  # fmt: skip
LAYOUTS = {
    "single": (1, []),
    "pp2": (2, PP2),
    "pp2-vpp2": (2, [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "tp2-pp2": (4, [*PP2, *TP2, "--sequence-parallel", "--tp-comm-overlap"]),
    "pp2-dp2": (4, [*PP2, *SHARDED]),
    "pp2-dp2-zb": (4, [*PP2, *SHARDED, "--pipeline-schedule", "zb-h1"]),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("pp2", "single"),
        ("single", "pp2"),
        ("pp2", "pp2-vpp2"),
        ("pp2-vpp2", "tp2-pp2"),
        ("tp2-pp2", "single"),
        ("pp2", "pp2-dp2"),
        ("pp2-dp2-zb", "pp2-dp2"),
        ("pp2-dp2", "pp2-vpp2"),
    ],
)
def test_another_layout_goes_on(trained, source, target):
    """Weights, optimizer and FP8 scales: every layout continues with the same losses."""
    ranks, layout = LAYOUTS[source]
    root, before = trained(source, ranks, *layout)
    ranks, layout = LAYOUTS[target]
    flags = [*FP32, *QUIET, *DELAYED, *layout, *STEPS, "--load", str(root), "--ckpt-step", "4"]
    after = run(ranks, flags)
    assert len(after.losses()) == 2
    assert "FP8 state:" not in after.out  # nothing was dropped
    said = after.lines("tensor-parallel overlap: ag, rs, bulk-dgrad, bulk-wgrad")
    assert len(said) == ("--tp-comm-overlap" in layout)
    # A sum in another order can push a value over a boundary of the FP8 grid.
    assert after.losses() == pytest.approx(before.losses()[4:], abs=5e-3)
    assert validation(after) == pytest.approx(validation(before), abs=5e-3)


def validation(done):
    lines = done.lines("lm loss value:")
    assert lines
    return [float(line.split("lm loss value: ")[1].split()[0]) for line in lines]


def test_the_layout_leaves_no_trace_in_a_checkpoint(trained):
    alone, _ = trained("single", 1)
    ranks, layout = LAYOUTS["pp2-vpp2"]
    split, done = trained("pp2-vpp2", ranks, *layout)
    (tensors, plain), (others, other_plain) = content(alone, 4), content(split, 4)
    assert tensors.keys() == others.keys()
    assert [t.shape for t in tensors.values()] == [others[key].shape for key in tensors]
    assert plain["fp8"] == other_plain["fp8"]
    assert plain["optimizer_scalars"] == other_plain["optimizer_scalars"]
    # The table of precisions covers all stages: one line a GEMM, for four layers.
    table = done.lines("decoder.layers.*.mlp.linear_fc2")
    assert [line.split()[-1] for line in table] == ["4", "4", "4"]


def test_tools_run_a_pipeline_checkpoint_in_one_process(trained, tmp_path):
    root, _ = trained("pp2", 2, *PP2)
    model = restore(str(root), step=4, device="cpu").model
    names = dict(model.named_parameters())
    assert len([name for name in names if name.endswith("linear_fc2.weight")]) == 4
    stored, _ = content(root, 4)
    layers = stored["decoder.layers.mlp.linear_fc2.weight"]
    for i in range(4):
        assert torch.equal(names[f"decoder.layers.{i}.mlp.linear_fc2.weight"], layers[i])
    folder = tmp_path / "hf"
    args = ["--model-type", "GPT", "--loader", "megatron", "--saver", "hf"]
    args += ["--load-dir", str(root), "--save-dir", str(folder)]
    done = launch(1, args, script=ROOT / "tools" / "checkpoint" / "convert.py")
    assert done.codes == [0], done.out
    assert (folder / "config.json").is_file()


def test_a_failure_names_the_stage(tmp_path):
    """All ranks end when one stage fails, and the message says where."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import runpy, sys, torch\n"
        "from megatron.core.models.gpt import gpt_model\n"
        "from megatron.core.errors import DataError\n"
        "def fail(*a, **k): raise DataError('no loss today')\n"
        "gpt_model.vocab_parallel_cross_entropy = fail\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    done = launch(2, [str(ROOT / "pretrain_gpt.py"), *SMALL, *PP2], script=script)
    assert done.codes[1] == 1
    assert "pp1" in done.lines("no loss today")[0]
    assert "1F0" in done.lines("no loss today")[0]
