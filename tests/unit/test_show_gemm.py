"""tools/show.py gemm: which kernel multiplies FP8 operands on which device, and why."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron.core.capability import Target, release
from megatron.core.fp8 import DelayedScaling, Fp8Policy, Fp8State
from megatron.training import precision
from megatron.training.products import RECIPES, Place, rows_of_layers, rows_of_recipes

PATH = Path(__file__).resolve().parents[2] / "tools" / "show.py"
MODEL = [
    "--num-layers", "2", "--hidden-size", "40", "--num-attention-heads", "4", "--seq-length", "32",
    "--vocab-size", "128", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3",
    "--train-iters", "2", "--mock-data", "--bf16",
]  # fmt: skip


def show(capsys, *args):
    spec = importlib.util.spec_from_file_location("tool_show", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = module.main(["gemm", *args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_here_everything_is_emulated(capsys):
    code, out, _ = show(capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["device"] == "cpu"
    assert len(found["recipes"]) == 3 * len(RECIPES)
    assert all(row["kernel"].startswith("emulated") for row in found["recipes"])
    assert all(row["reason"] == "a CPU has no FP8 products" for row in found["recipes"])
    assert set(found["casts"]) == {"casts", "blocks", "fused"}


@pytest.mark.parametrize(
    ("capability", "emulated"),
    [
        ("8.0", {"delayed", "tensorwise", "blockwise", "mxfp8"}),
        ("8.9", {"blockwise", "mxfp8"}),
        ("9.0", {"mxfp8"}),
        ("10.0", set()),
    ],
)
def test_an_imagined_device(capsys, capability, emulated):
    code, out, _ = show(capsys, "--device-capability", capability, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["device"].startswith(f"compute capability {capability} (not here")
    rows = found["recipes"]
    emulated = emulated | {"nvfp4"}  # torch has no product for it anywhere yet
    assert {row["recipe"] for row in rows if row["kernel"].startswith("emulated")} == emulated
    assert all(bool(row["reason"]) == (row["recipe"] in emulated) for row in rows)


def test_a_run_on_an_imagined_device(capsys):
    fp8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--first-last-layers-bf16"]
    flags = [*fp8, *MODEL, "--num-layers", "3", "--device-capability", "9.0"]
    code, out, _ = show(capsys, *flags)
    assert code == 0
    assert "precision: 4 of 13 linear layers in FP8" in out
    assert "scaled_mm e4m3xe4m3, scales 1 x 128 and 1 x 128" in out
    assert "among the first 1 layers" in out
    assert "padded with zeros to multiples of 128: the hidden size 40 as 128 (+220.0%)" in out
    code, out, _ = show(capsys, *flags[:-1], "cpu", "--json")
    layers = json.loads(out)["layers"]
    assert {"emulated", "bf16"} == {line["kernel"].split()[0] for line in layers}


def test_bad_arguments(capsys):
    code, _, err = show(capsys, "--device-capability", "nine")
    assert code == 2
    assert err.startswith("error: --device-capability: got nine. ")
    code, _, err = show(capsys, "--device-capability", "9.0", "--fp8-recipe", "fastest", *MODEL)
    assert code == 2
    assert "--fp8-recipe: got 'fastest'" in err


def test_what_is_known_of_a_device():
    assert release("12.9.1") == (12, 9)
    assert release(None) is None
    assert Target.of(torch.device("cpu")) == Target("cpu")
    assert Target.imagined((9, 0)).capability == (9, 0)
    rows = rows_of_recipes(Place(Target("cuda", (9, 0), has_scaled_mm=False)))
    reasons = {row["reason"] for row in rows if row["recipe"] == "blockwise"}
    assert any("no torch.nn.functional.scaled_mm" in reason for reason in reasons)


def test_layers_that_are_not_in_fp8_keep_their_line():
    state = Fp8State(Fp8Policy(recipe=DelayedScaling(), wgrad=False))
    layer = state.for_linear("decoder.layers.0.fc")
    rows = rows_of_layers([layer], Place.imagined("9.0"))
    assert [row.kernel for row in rows] == ["_scaled_mm e4m3xe4m3", "_scaled_mm e5m2xe4m3"] + [
        "bf16 GEMM"
    ]
    assert rows[2].reason == "--no-fp8-wgrad"


def test_a_run_on_cuda_says_what_casts_and_multiplies(monkeypatch):
    state = Fp8State(Fp8Policy(recipe=DelayedScaling()))
    assert precision.device_notes(None, state, "transformer_engine") == []
    state.device = torch.device("cuda", 0)
    monkeypatch.setattr(precision, "padding_note", lambda *args: "")
    monkeypatch.setattr(
        precision.kernels, "describe", lambda device, groups: dict.fromkeys(groups, "Triton 3.6.0")
    )
    notes = precision.device_notes(None, state, "native")
    assert notes[0].startswith("FP8 products (delayed): emulated, ")
    assert notes[1] == "FP8 casts (cast, magnitude and transpose in one pass): Triton 3.6.0"
    assert len(notes) == 3
