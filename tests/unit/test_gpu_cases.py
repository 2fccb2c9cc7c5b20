"""The GPU suite's cases run on a CPU, so that they are not broken when a GPU comes along."""

from __future__ import annotations

import json

import pytest
import torch

from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from tests.contract.fake_te import FakeTransformerEngine
from tests.gpu import cases, snapshot_cases, throughput, timing


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_casts(fmt):
    assert set(cases.casts(cases.CPU, fmt, 3.0).values()) == {0}


def test_moments():
    measured = cases.moments(cases.CPU)
    assert measured["bytes_that_differ"] == 0
    assert 0 < measured["drift"] < 5


def test_all_bf16_values_are_there():
    values = cases.all_bf16_values()
    assert values.unique().numel() == 2**16 - 2 * 127 - 1  # NaNs became zero, and -0 equals 0


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_products(formats):
    error = cases.products(cases.CPU, (17, 24, 40), formats, fast_accum=False)
    assert error["fp32_error"] < 1e-6
    assert 0 < error["bf16_error"] < 2.0**-8


@pytest.mark.parametrize("group", ["casts", "blocks"])
def test_kernels(group):
    assert cases.kernel_bits(cases.CPU, group) == {"bytes_that_differ": 0}


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_block_products(recipe):
    measured = cases.block_products(cases.CPU, recipe, (17, 24, 140))
    assert measured["error"] < 1e-6
    assert measured["hardware"] == 0.0


@pytest.mark.parametrize("on_device", [False, True])
def test_snapshots(on_device):
    measured = snapshot_cases.elements_that_differ(cases.CPU, on_device=on_device)
    assert measured["changed_by_training"] > 1000
    assert measured["left_after_return"] == 0


@pytest.mark.parametrize("kind", cases.LAYERS)
@pytest.mark.parametrize("recipe", list(cases.NATIVE_RECIPES))
def test_layers(kind, recipe):
    assert max(cases.layers_agree(cases.CPU, NativeBackend(), kind, recipe).values()) == 0.0


@pytest.mark.parametrize("recipe", list(cases.NATIVE_RECIPES))
def test_experts(recipe):
    assert max(cases.experts_agree(cases.CPU, NativeBackend(), recipe).values()) == 0.0


def test_a_wrong_layer_is_noticed():
    # The stand-in multiplies in bf16, so its results are near those of FP8 and no nearer.
    backend = TransformerEngineBackend(FakeTransformerEngine("2.20.2").library)
    error = cases.layers_agree(cases.CPU, backend, "column_parallel_linear", "delayed")
    assert 6e-3 < error["y"] < 0.1


@pytest.mark.parametrize("recipe", [None, *cases.NATIVE_RECIPES])
def test_models(recipe):
    measured = cases.models_agree(cases.CPU, NativeBackend(), recipe)
    assert measured["difference"] == 0.0
    assert measured["last"] < measured["first"]


def test_throughput_dry_run(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine runs it for real")
    target = tmp_path / "throughput.json"
    throughput.main(["--dry-run", "--json", str(target)])
    result = json.loads(target.read_text())
    recipes = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8")
    trained = [row["name"] for row in result["training"]]
    assert trained == [f"native {name}" for name in recipes[:-1]]
    assert all(row["tokens_per_s"] > 0 and row["loss"] > 0 for row in result["training"])
    assert set(result["products"][0]) == {"shape", "bf16", "delayed", "blockwise", "mxfp8"}
    assert [row["name"] for row in result["layers"]] == list(recipes)
    assert {"cast, magnitude, transpose", "1 x 32, both ways"} <= {
        row["name"] for row in result["casts"]
    }
    assert len(result["dispatch"]) == 12
    assert "not installed" in result["skipped"]["transformer_engine"]
    shown = capsys.readouterr().out
    assert "MFU" in shown
    assert "skipped transformer_engine" in shown


def test_limits_of_devices():
    assert timing.peak_tflops("NVIDIA H200") == timing.peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert timing.peak_tflops("NVIDIA H100 PCIe") == 756
    assert timing.peak_tflops("CPU") is None
