"""The parity command: right layouts pass, broken ones are found and named, bad input is refused.

The command runs in this process and forks its ranks, so that a fault can be put in beforehand.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from megatron.core.distributed import finalize
from megatron.training.step import TrainStep
from tests.e2e.launch import ROOT

sys.path.insert(0, str(ROOT))

from tools import parity

SMALL = [
    "--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=16",
    "--vocab-size=61", "--tokenizer-type=NullTokenizer",
]  # fmt: skip
FIRST_NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def run(capsys, *args):
    code = parity.main([*args])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_users_launch_line(tmp_path, capsys):
    """YAML and flags, a layout of its own that is too large for this machine, FP8, dropout."""
    config = tmp_path / "my.yaml"
    config.write_text(
        "num_layers: 32\nhidden_size: 512\nnum_attention_heads: 16\ngroup_query_attention: true\n"
        "num_query_groups: 4\nseq_length: 1024\nswiglu: true\nadd_bias_linear: false\n"
        "tensor_model_parallel_size: 4\npipeline_model_parallel_size: 8\nclip_grad: 0.5\n"
    )
    found = tmp_path / "found.json"
    code, out, err = run(
        capsys, "--config", str(config), "--layouts", "tp2sp", "pp2vpp2", "dp2-distopt",
        "--steps", "2", "--json", str(found), "--bf16", "--fp8-format", "hybrid",
        "--global-batch-size", "64", "--data-path", "no/such/corpus",
        "--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", "no.model",
    )  # fmt: skip
    assert code == 0, out + err
    assert "all 3 layouts do what one process does" in out
    for line in ("num_layers 32 -> 4", "num_query_groups 4 -> 2", "hidden_dropout 0.1 -> 0.0",
                 "clip_grad 0.5 -> 0.0", "optimizer adam -> sgd"):  # fmt: skip
        assert line in out
    report = json.loads(found.read_text())
    assert report["inside"]
    assert report["precisions"] == ["fp32", "bf16+fp8 delayed"]
    assert report["settings"]["num_attention_heads"] == 8
    assert [one["layout"] for one in report["layouts"]] == [
        "one process", "tp2sp", "pp2vpp2", "dp2-distopt",
    ]  # fmt: skip
    comparisons = report["layouts"][1]["comparisons"]
    assert [one["precision"] for one in comparisons] == ["fp32", "bf16+fp8 delayed"]
    names = [parameter["name"] for parameter in comparisons[0]["parameters"]]
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[2] == FIRST_NORM
    assert names[-2:] == ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]


def test_a_lost_reduction_of_norm_gradients_is_named(monkeypatch, capsys, tmp_path):
    """Nothing is summed over the tensor-parallel ranks of sequence parallelism."""
    summed = finalize._summed
    monkeypatch.setattr(
        finalize, "_summed", lambda c, mark: [] if "sequence" in mark else summed(c, mark)
    )
    found = tmp_path / "found.json"
    code, out, _ = run(
        capsys, *SMALL, "--position-embedding-type", "rope", "--layouts", "tp2", "tp2sp",
        "--steps", "1", "--json", str(found),
    )  # fmt: skip
    assert code == 1
    assert "1 of 2 layouts diverge or fail: tp2sp" in out
    right, wrong = json.loads(found.read_text())["layouts"][1:]
    assert right["inside"]
    comparison = wrong["comparisons"][0]
    outside = [p["name"] for p in comparison["parameters"] if p["error"] > p["band"]]
    assert comparison["first_diverging"] == FIRST_NORM == outside[0]
    assert not any(name.endswith("linear_qkv.weight") for name in outside)
    assert f"first in forward order: {FIRST_NORM}" in out
    assert "copies: " in out  # the ranks' norms drift apart


def test_a_wrong_loss_denominator_is_found(monkeypatch, capsys):
    """Each context-parallel rank divides by its own tokens."""
    real = finalize.all_reduce

    def forgotten(x, axis, **how):
        return x if axis.name == "dp-cp" else real(x, axis, **how)

    monkeypatch.setattr(finalize, "all_reduce", forgotten)
    code, out, _ = run(capsys, *SMALL, "--layouts", "cp2", "--steps", "1")
    assert code == 1
    assert "DIVERGES" in out
    assert "first in forward order: embedding.word_embeddings.weight" in out
    assert "loss: " in out


def test_a_failing_rank_is_shown_and_the_next_layout_runs(monkeypatch, capsys):
    real = TrainStep.run

    def fail(self, iteration, consumed):
        if self._mesh.pp.rank == 1:
            raise ValueError("broken on purpose")
        if self._mesh.dp.rank == 1:
            os._exit(7)
        return real(self, iteration, consumed)

    monkeypatch.setattr(TrainStep, "run", fail)
    code, out, _ = run(capsys, *SMALL, "--layouts", "pp2", "dp2", "cp2", "--steps", "1")
    assert code == 1
    lines = out.splitlines()
    assert any(line.startswith("pp2 ") and line.endswith("FAILED") for line in lines)
    assert "--- rank 1 of 2 ---" in out
    assert "broken on purpose" in out
    assert "rank 1 died, exit code 7" in out
    assert "2 of 3 layouts diverge or fail: pp2, dp2" in out
    assert any(line.startswith("cp2 ") and line.endswith("same") for line in lines)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--layouts", "tq2"], "--layouts: got 'tq2'"),
        (["--layouts", "tp16"], "It needs 16 ranks, and this command starts at most 8"),
        (["--layouts", "tp4"], "--num-attention-heads"),
        (["--layouts", "pp4"], "--num-layers"),
        (["--steps", "0"], "--steps: got 0"),
        (["--timeout", "0"], "--timeout: got 0"),
        (["--json", "no/such/folder/x.json"], "--json: got no/such/folder/x.json"),
        (["--timeout", "inf"], "--timeout: got inf"),
        (["--json", "/"], "--json: got /"),
        (["--shrink", "global_batch_size=4"], "global_batch_size is no size of a model"),
        (["--layouts", "tp2:tp_comm_overlap=true"], "--sequence-parallel"),
        (["--shrink", "layers=2"], "--shrink: got 'layers=2'"),
        (["--shrink", "num_attention_heads=3"], "The small model cannot run there"),
        (["--num-layer", "2"], "Did you mean --num-layers?"),
        (["--layouts"], "--layouts: got nothing"),
    ],
    ids=" ".join,
)
def test_bad_input(capsys, args, said):
    try:
        code = parity.main([*SMALL, *args])
    except SystemExit as left:
        code = left.code
    out, err = capsys.readouterr()
    assert code == 2
    assert said in err
    assert out == ""
