"""The native backend on CUDA: casts, products, layers and a model against the CPU's emulation."""

from __future__ import annotations

import pytest
import torch

from megatron.core.backends.native import NativeBackend
from megatron.core.capability import has_fp8_hardware
from megatron.core.fp8 import hardware, kernels
from megatron.core.fp8.kernels.device import GROUPS
from megatron.training.products import RECIPES as EVERY_RECIPE
from tests.gpu import cases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fp8_hardware(device):
    if not has_fp8_hardware(device):
        pytest.skip("this device has no FP8 products")


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 448.0 / 3.0, 2.0**-20, 2.0**20])
def test_casts_are_bitwise_those_of_the_cpu(device, report, fmt, scale):
    assert report(cases.casts(device, fmt, scale)) == {"bytes_that_differ": 0, "amax_differs": 0}


def test_moments_rest_as_on_the_cpu(device, report):
    measured = report(cases.moments(device))
    assert measured["bytes_that_differ"] == 0
    assert measured["drift"] < 5


# Hopper adds FP8 products in about 14 bits before it promotes them to fp32, and with fast
# accumulation it never promotes: errors of 2**-13 of a partial sum, growing with the square root
# of K / 32. A wrong scale, layout or format gives an error near one.
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("shape", [(64, 48, 128), (17, 24, 40), (256, 512, 4096)])
def test_products_match_the_exact_emulation(device, report, shape, formats, fast_accum):
    error = report(cases.products(device, shape, formats, fast_accum))
    bound = 2e-3 if fast_accum else 1e-3
    assert error["fp32_error"] < bound
    assert error["bf16_error"] < bound + 2.0**-9  # and one rounding to bf16


@pytest.mark.parametrize("group", ["casts", "blocks"])
def test_fused_kernels_are_bitwise_those_of_the_cpu(device, report, group):
    assert report(cases.kernel_bits(device, group)) == {"bytes_that_differ": 0}


@pytest.mark.parametrize("group", GROUPS)
def test_fused_kernels_are_used(device, report, group):
    pytest.importorskip("triton")
    why = kernels.describe(device, (group,))[group]
    report({"why": why})
    assert why.startswith("Triton"), why


# Products of blocks are promoted to fp32 after each 128 elements on Hopper, and multiplied with
# E8M0 scales in fp32 on Blackwell.
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", [(64, 128, 256), (40, 144, 640), (17, 33, 130), (512, 512, 4096)])
def test_block_products_match_fp64(device, report, recipe, shape):
    assert report(cases.block_products(device, recipe, shape))["error"] < 1e-3


def test_hopper_and_blackwell_multiply_blocks_in_hardware(device, report):
    measured = {
        name: hardware.verdict(EVERY_RECIPE[name], device, torch.bfloat16)
        for name in ("blockwise", "mxfp8")
    }
    report({name: found.reason for name, found in measured.items()})
    major = torch.cuda.get_device_capability(device)[0]
    if hasattr(torch.nn.functional, "scaled_mm") and major in (9, 10):
        assert measured["blockwise"].hardware, measured["blockwise"].reason
    if major == 10:
        assert measured["mxfp8"].hardware, measured["mxfp8"].reason


@pytest.mark.parametrize("kind", cases.LAYERS)
@pytest.mark.parametrize("recipe", list(cases.NATIVE_RECIPES))
def test_layers_match_the_emulation(device, report, kind, recipe):
    error = report(cases.layers_agree(device, NativeBackend(), kind, recipe))
    # A norm computed in another order moves some of its outputs to the neighbouring code (2**-4).
    bound = 2e-2 if "norm" in kind else 6e-3
    assert max(error["y"], error["dx"], error["dw"]) < bound
    assert error["db"] < 6e-3
    assert error.get("scale", 0.0) < (1e-3 if "norm" in kind else 1e-7)


@pytest.mark.parametrize("recipe", list(cases.NATIVE_RECIPES))
def test_experts_match_the_emulation(device, report, recipe):
    error = report(cases.experts_agree(device, NativeBackend(), recipe))
    assert max(error["y"], error["dx"], error["dw"]) < 6e-3
    assert error.get("scale", 0.0) < 1e-7


@pytest.mark.parametrize("recipe", [None, *cases.NATIVE_RECIPES])
def test_models_match_the_emulation(device, report, recipe):
    measured = report(cases.models_agree(device, NativeBackend(), recipe))
    assert measured["difference"] < 0.03
    assert measured["last"] < measured["first"]


def test_the_table_names_the_hardware_kernel(device):
    build = cases.build_on(device, NativeBackend(), "layer", fp8_format="hybrid")
    assert build.fp8.for_linear("layer").row().kernel.startswith("_scaled_mm")


def test_training_leaves_no_memory_behind(device, report):
    cases.run_model(device, NativeBackend(), **cases.RECIPES["delayed"])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    cases.run_model(device, NativeBackend(), **cases.RECIPES["delayed"])
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(device)
    report({"bytes_left": after - before})
    assert after - before < 2**20
