"""A small Mixtral on the command line: FP8, experts on two ranks, stopped and continued."""

from __future__ import annotations

import json

import pytest
import torch

from megatron.training.restore import restore
from tests.e2e.launch import ROOT, launch
from tests.e2e.test_resume import DELAYED, SMALL, assert_same, content

MIXTRAL = [
    *SMALL, *DELAYED, "--hidden-dropout", "0", "--num-experts", "4", "--moe-ffn-hidden-size", "64",
    "--moe-router-topk", "2", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall",
    "--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss",
    "--moe-aux-loss-coeff", "1e-2", "1e-3", "--moe-z-loss-coeff", "1e-3",
    "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
    "--train-iters", "6", "--lr-decay-iters", "6", "--save-interval", "100",
]  # fmt: skip
EP2 = ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"]
TERMS = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


def run(ranks, *flags):
    done = launch(ranks, [*MIXTRAL, *flags])
    assert done.codes == [0] * ranks, done.out
    return done


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    root = tmp_path_factory.mktemp("straight")
    done = run(2, *EP2, "--save", str(root), "--dllogger-json", str(root / "log"),
               "--moe-per-layer-logging")  # fmt: skip
    return root, done


def terms(line):
    return {name: float(line.split(f"| {name}: ")[1].split()[0]) for name in TERMS}


def test_stop_and_go_is_bitwise(straight, tmp_path):
    root, done = straight
    parts = ["--save", str(tmp_path), "--load", str(tmp_path)]
    first = run(2, *EP2, *parts, "--exit-interval", "3")
    second = run(2, *EP2, *parts)
    assert len(done.losses()) == 6
    assert first.losses() + second.losses() == done.losses()
    lines = [x for one in (first, second) for x in one.lines("| lm loss: ")]
    assert [terms(x) for x in lines] == [terms(x) for x in done.lines("| lm loss: ")]
    tensors, plain = content(root, 6)
    assert_same((tensors, plain), content(tmp_path, 6))
    assert tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (2, 4, 128, 32)
    bias = tensors["decoder.layers.mlp.router.expert_bias"]
    assert (bias.shape, bias.dtype) == ((2, 4), torch.float32)
    assert bias.abs().max() > 0


def test_the_log_shows_the_balancing_losses(straight):
    root, done = straight
    for line in done.lines("| lm loss: "):
        assert all(0.5 < value < 3 for value in terms(line).values())
        assert terms(line)["load_balancing_loss"] >= 1 - 1e-3
    table = done.lines("mlp.experts.linear_fc1")
    assert table
    assert all("fp8" in line for line in table)
    records = [json.loads(x[5:])["data"] for x in (root / "log").read_text().splitlines()]
    (first, *_) = [data for data in records if "lm loss" in data]
    by_layer = [first[f"moe/load_balancing_loss_layer_{i}"] for i in range(2)]
    assert sum(by_layer) / 2 == pytest.approx(first["load_balancing_loss"])
    assert 0 < first["moe/load_entropy"] <= 1


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, []),
        (2, ["--tensor-model-parallel-size", "2", "--moe-token-dispatcher-type", "allgather"]),
    ],
    ids=["one process", "tp2"],
)
def test_another_layout_goes_on(straight, ranks, layout):
    root, _ = straight
    more = ["--load", str(root), "--train-iters", "8", "--lr-decay-iters", "8",
            "--override-opt-param-scheduler"]  # fmt: skip
    expected = run(2, *EP2, *more)
    found = run(ranks, *layout, *more)
    assert len(found.losses()) == 2
    # A sum in another order can push a value over a boundary of the FP8 or the BF16 grid.
    assert found.losses() == pytest.approx(expected.losses(), abs=5e-3)


def test_tools_run_it_in_one_process(straight, tmp_path):
    root, _ = straight
    model = restore(str(root), device="cpu").model
    stored, _ = content(root, 6)
    router = model.decoder.layers[1].mlp.router
    assert torch.equal(router.expert_bias, stored["decoder.layers.mlp.router.expert_bias"][1])
    weight = stored["decoder.layers.mlp.experts.experts.linear_fc2.weight"][1, 3]
    assert torch.equal(model.decoder.layers[1].mlp.experts.linear_fc2.weight3, weight)
    text = tmp_path / "text"
    text.write_text(" ".join(str(i % 250) for i in range(100)))
    args = ["--load", str(root), "--text", str(text), "--device", "cpu", "--json"]
    done = launch(1, args, script=ROOT / "tools" / "evaluate.py")
    assert done.codes == [0], done.out
    assert '"tokens": 99' in done.out
    args = ["--load", str(root), "--prompt", "1 2 3", "--max-new-tokens", "5", "--greedy"]
    done = launch(1, [*args, "--device", "cpu"], script=ROOT / "tools" / "generate.py")
    assert done.codes == [0], done.out
