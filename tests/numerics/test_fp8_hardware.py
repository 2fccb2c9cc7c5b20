"""Which product multiplies FP8 operands, with which layout of scales, and whether it is checked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.capability import Target
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    Role,
    gemm_nt,
    hardware,
    linear,
)
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.hardware import Form, plan, plans, self_check
from megatron.core.fp8.quantizers import BlockQuantizer
from tests import fake_products

RECIPES = {
    "delayed": DelayedScaling(),
    "tensorwise": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "blockwise-hybrid": Float8BlockScaling(fp8_format="hybrid"),
    "blockwise-f32": Float8BlockScaling(use_f32_scales=True),
    "blockwise-1d": Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": MXFP8BlockScaling(),
}
CPU = torch.device("cpu")
HOPPER, BLACKWELL = (9, 0), (10, 0)
WHERE = {
    "blockwise": (HOPPER, BLACKWELL),
    "blockwise-hybrid": (HOPPER, BLACKWELL),
    "blockwise-f32": (HOPPER,),
    "blockwise-1d": (HOPPER, BLACKWELL),
    "mxfp8": (BLACKWELL,),
}
PLACES = [(name, where) for name, places in WHERE.items() for where in places]


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "call"),
    [
        ("delayed", (8, 0), ""),
        ("delayed", (8, 9), "tensor"),
        ("tensorwise", (12, 0), "tensor"),
        ("blockwise", (8, 9), ""),
        ("blockwise", (9, 0), "block"),
        ("blockwise", (10, 0), "mx"),
        ("blockwise-f32", (10, 0), ""),
        ("mxfp8", (9, 0), ""),
        ("mxfp8", (10, 3), "mx"),
        ("mxfp8", (12, 0), "mx"),
    ],
)
def test_the_table(name, capability, call):
    made = plans(RECIPES[name], Target("cuda", capability, (13, 0)))
    assert {one.call for one in made.values()} == {call}
    assert all(bool(one.reason) != bool(call) for one in made.values())


def test_reasons_name_what_is_missing():
    recipe = RECIPES["blockwise"]
    for target, why in (
        (Target("cuda", (8, 0)), "compute capability 8.0 has no FP8 products"),
        (Target("cuda", (9, 0), has_scaled_mm=False), "no torch.nn.functional.scaled_mm"),
        (Target("cuda", (9, 0), (12, 8)), "scales of blocks need 12.9"),
        (Target("cuda", (9, 0), is_rocm=True), "ROCm"),
        (Target("meta"), "on paper the device is not known"),
        (Target("cpu"), "on cpu"),
    ):
        assert why in plans(recipe, target)["fprop"].reason
    why = plans(RECIPES["mxfp8"], Target("cuda", (9, 0)))["wgrad"].reason
    assert "10.0" in why
    assert plan(Form.TENSOR, Form.TENSOR, (E5M2, E5M2), True, Target("cuda", (9, 0))).call == ""
    assert plan(Form.OTHER, Form.MX, (E4M3, E4M3), True, Target("cuda", (10, 0))).call == ""


def test_weight_gradients_have_no_squares():
    made = plans(RECIPES["blockwise"], Target("cuda", HOPPER))
    assert made["fprop"].kernel == "scaled_mm e4m3xe4m3, scales 1 x 128 and 128 x 128"
    assert made["wgrad"].kernel == "scaled_mm e4m3xe4m3, scales 1 x 128 and 1 x 128"


# -- layouts of scales ---------------------------------------------------------------------------


def operands(recipe, m, n, k, roles=(Role.INPUT, Role.WEIGHT)):
    generator = torch.Generator().manual_seed(m + n + k)
    pair = []
    for rows, role in zip((m, n), roles, strict=True):
        x = torch.randn(rows, k, generator=generator)
        x *= 2.0 ** torch.randint(-6, 6, (rows, 1), generator=generator)
        x *= 2.0 ** torch.randint(-6, 6, (1, k), generator=generator)
        pair.append(BlockQuantizer(recipe, role, fold=False, hardware=True).rowwise(x.bfloat16()))
    return pair


@pytest.mark.parametrize(("name", "capability"), PLACES)
@pytest.mark.parametrize("shape", [(16, 256, 512), (40, 144, 640), (7, 33, 130), (129, 5, 1)])
def test_products_read_every_scale_where_it_lies(name, capability, shape, monkeypatch):
    recipe = RECIPES[name]
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    with fake_products.device_like(capability, monkeypatch):
        for roles in hardware.OPERANDS.values():
            a, b = operands(recipe, *shape, roles)
            left, right = (x.hold().data.double() * x.expanded_scale_inv().double() for x in (a, b))
            want = left @ right.t()
            made = gemm_nt(a, b, out_dtype=torch.float32)
            # The stand-in sums in fp64, in another order where zeros were added, and rounds once.
            torch.testing.assert_close(made.double(), want, rtol=2.0**-22, atol=0)
            assert made.is_contiguous()  # it may be sent
            into = torch.empty(shape[:2], dtype=torch.bfloat16)
            got = gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias, out=into)
            assert got is into
            torch.testing.assert_close(got.float(), made + bias.float(), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize(("name", "capability"), PLACES)
@pytest.mark.parametrize("shape", [(16, 256, 512), (40, 144, 640), (7, 33, 130), (257, 129, 1)])
def test_torch_accepts_the_arguments(name, capability, shape):
    """By the checks that torch itself makes of arguments on CUDA, on tensors without memory."""
    a, b = operands(RECIPES[name], *shape)
    forms = (hardware.form_of(a), hardware.form_of(b))
    planned = plan(*forms, (E4M3, E4M3), a.power_of_two, Target("cuda", capability))
    block = planned.call == "block"
    arguments = hardware.block_arguments(a, b) if block else hardware.mx_arguments(a, b)
    with FakeTensorMode():
        arguments = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            if isinstance(x, torch.Tensor)
            else x
            for x in arguments
        ]
        if block:
            made = F.scaled_mm(*arguments, output_dtype=torch.bfloat16)
        else:
            made = torch._scaled_mm(*arguments, out_dtype=torch.bfloat16)
    assert made.shape[0] >= shape[0]
    assert made.shape[1] >= shape[1]
    assert made.shape[0] < shape[0] + 16
    assert made.shape[1] < shape[1] + 128


def test_scales_of_rows():
    """No recipe makes them; the product takes them, and torch has it on a CPU, too."""
    x, w = torch.randn(6, 32), torch.randn(24, 32)
    pair = []
    for t in (x, w):
        scale = 448.0 / t.abs().amax(1, keepdim=True)
        codes = (t * scale).to(torch.float8_e4m3fn)
        pair.append(hardware.QuantizedTensor(codes, scale.reciprocal(), E4M3, (1, 32)))
    assert hardware.form_of(pair[0]) is Form.ROW
    got = gemm_nt(*pair, out_dtype=torch.float32)
    want = pair[0].dequantize(torch.float64) @ pair[1].dequantize(torch.float64).t()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert gemm_nt(pair[0], narrow(pair[1]), out_dtype=torch.float32).is_contiguous()


def narrow(x):
    """17 rows, which is no multiple of 16."""
    return hardware.QuantizedTensor(x.data[:17], x.scale_inv[:17], x.fmt, x.block)


# -- the check on the device ---------------------------------------------------------------------


@pytest.mark.parametrize("form", [Form.TENSOR, Form.ROW])
def test_a_right_product_passes(form):
    for formats in ((E4M3, E4M3), (E5M2, E4M3)):
        outputs = (torch.float32, torch.bfloat16)
        assert self_check((form, form), formats, True, outputs, CPU) == ""


@pytest.mark.parametrize(("name", "capability"), PLACES)
def test_a_right_product_of_blocks_passes(name, capability, monkeypatch):
    recipe = RECIPES[name]
    with fake_products.device_like(capability, monkeypatch):
        for roles in hardware.OPERANDS.values():
            forms = tuple(hardware.form_for(recipe, role) for role in roles)
            formats = tuple(recipe.format_of(role) for role in roles)
            assert self_check(forms, formats, recipe.exact_in_bf16, (torch.bfloat16,), CPU) == ""


def move_one(scales):
    """The first two scales in memory change places."""
    moved = scales.clone(memory_format=torch.preserve_format)
    storage = moved.as_strided((moved.numel(),), (1,))
    storage[:2] = storage[:2].flip(0).clone()
    return moved


@pytest.mark.parametrize("name", ["blockwise", "blockwise-1d"])
def test_a_scale_in_a_wrong_place_is_noticed(name, monkeypatch):
    forms = tuple(hardware.form_for(RECIPES[name], role) for role in hardware.OPERANDS["fprop"])
    right = hardware.columns
    with fake_products.device_like(HOPPER, monkeypatch):
        monkeypatch.setattr(hardware, "columns", lambda *args: move_one(right(*args)))
        found = self_check(forms, (E4M3, E4M3), True, (torch.bfloat16,), CPU)
    assert found.startswith("a result is off by")


def test_an_unswizzled_layout_is_noticed(monkeypatch):
    with fake_products.device_like(BLACKWELL, monkeypatch):
        monkeypatch.setattr(
            hardware, "swizzled", lambda codes, r, c: F.pad(
                codes, (0, -c % 4, 0, -r % 128 + r - codes.shape[0])
            ).reshape(-1),
        )  # fmt: skip
        found = self_check((Form.MX, Form.MX), (E4M3, E4M3), True, (torch.bfloat16,), CPU)
    assert found.startswith("a result is off by")


def test_a_call_that_fails_is_told():
    found = self_check((Form.STRIP, Form.STRIP), (E4M3, E4M3), True, (torch.bfloat16,), CPU)
    assert found == "there is no such call"


def test_a_device_that_fails_its_check_emulates_and_says_so(monkeypatch):
    where = torch.device("cuda", 7)
    with monkeypatch.context() as patch:
        patch.setattr(
            Target, "of", classmethod(lambda cls, device: Target("cuda", HOPPER, (13, 0)))
        )
        patch.setattr(hardware, "self_check", lambda *args: "CUBLAS_STATUS_NOT_SUPPORTED")
        got = hardware.verdict.__wrapped__(RECIPES["blockwise"], where, torch.bfloat16)
        assert not got.hardware
        assert "failed its check here: CUBLAS_STATUS_NOT_SUPPORTED" in got.reason
        patch.setattr(hardware, "self_check", lambda *args: "")
        got = hardware.verdict.__wrapped__(RECIPES["blockwise"], where, torch.bfloat16)
        assert got.hardware
        assert got.kernel("dgrad").endswith("128 x 128")


# -- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "capability"), PLACES)
@pytest.mark.parametrize("rows", [128, 21])
def test_a_layer_in_hardware_is_the_emulated_one(name, capability, rows, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x0, dy = (torch.randn(rows, 1, w, generator=generator).bfloat16() for w in (160, 144))
    w0 = torch.randn(144, 160, generator=generator).bfloat16()
    results = []
    for on_hardware in (False, True):
        with fake_products.device_like(capability, monkeypatch):
            state = Fp8State(Fp8Policy(recipe=RECIPES[name]), emulation="exact")
            state.hardware = on_hardware
            precision = state.for_linear("decoder.layers.0.fc")
            weight = torch.nn.Parameter(w0.clone())
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            x = x0.clone().requires_grad_()
            y = linear(x, weight, None, precision)
            y.backward(dy)
            row = precision.row()
        assert ("scaled_mm" in row.kernel) == on_hardware
        assert row.reason == ""
        results.append((y.detach(), x.grad, weight.main_grad))
    for emulated, real in zip(*results, strict=True):
        # Sums in fp32 on one side and in fp64 on the other, each rounded once more.
        torch.testing.assert_close(real, emulated, rtol=2.0**-7, atol=1e-3)
