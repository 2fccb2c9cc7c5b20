"""What has to hold on a GPU, as functions of the device. Each returns what it measured.

The reference is the exact emulation on the CPU. On a CPU device the cases compare the emulation
with itself: that proves nothing about hardware, but it keeps the suite in order where there is
none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.backends.contract import Backend
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.fp8 import E4M3, E5M2, QuantizedTensor, gemm_nt, hardware, kernels
from megatron.core.fp8.kernels import plain, plain_blocks
from megatron.core.fp8.quantizers import BlockQuantizer
from megatron.core.fp8.scales import ScaleRule
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.moments import fp8_storage, from_fp8, to_fp8
from megatron.training.products import RECIPES as EVERY_RECIPE
from tests.small_models import LLAMA, batch, small_config

CPU = torch.device("cpu")
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
RECIPES: dict[str, dict[str, object]] = {
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}
NATIVE_RECIPES = {
    **RECIPES,
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
}
LAYERS = ("column_parallel_linear", "layernorm_column_parallel_linear", "row_parallel_linear")


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    x, reference = x.detach().to(CPU, torch.float64), reference.detach().to(CPU, torch.float64)
    return float((x - reference).norm() / reference.norm())


def all_bf16_values() -> torch.Tensor:
    """Every bf16 value but NaN, as a matrix."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    return torch.where(values.isnan(), torch.zeros_like(values), values).view(256, 256)


def casts(device: torch.device, fmt: str, scale: float) -> dict[str, float]:
    """Every bf16 value, cast on the device and on the CPU: how many bytes differ."""
    values, scales = all_bf16_values(), torch.tensor(scale)
    here = kernels.cast(values, scales, FORMATS[fmt]).view(torch.uint8)
    there = kernels.cast(values.to(device), scales.to(device), FORMATS[fmt]).view(torch.uint8)
    amax = kernels.amax(values[:, :64].contiguous().to(device))
    expected = kernels.amax(values[:, :64].contiguous())
    return {
        "bytes_that_differ": int((here != there.to(CPU)).sum()),
        "amax_differs": int(not torch.equal(amax.to(CPU).view(()), expected.view(()))),
    }


def moments(device: torch.device) -> dict[str, float]:
    """Adam's moments in FP8: bytes that differ from the CPU's, and how far random rounding drifts.

    The drift is the mean error over many draws, in the spread that it has by chance.
    """
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(999, generator=generator)
    values *= 2.0 ** torch.randint(-30, 30, (999,), generator=generator)
    differ = 0
    for squares in (False, True):
        pairs = []
        for where in (CPU, device):
            source = (values.square() if squares else values).to(where)
            codes, exponents = fp8_storage(source)
            to_fp8(source, codes, exponents, squares)
            pairs.append((codes.view(torch.uint8).to(CPU), exponents.to(CPU)))
        differ += sum(int((a != b).sum()) for a, b in zip(*pairs, strict=True))
    # 1.03 lies between 1 and 1.125.
    source = torch.full((1 << 16,), 1.03, device=device)
    codes, exponents = fp8_storage(source)
    to_fp8(source, codes, exponents, False, torch.Generator(device).manual_seed(1))
    mean = float(from_fp8(codes, exponents, source.shape, False).double().mean())
    spread = 0.125 * (0.24 * 0.76 / source.numel()) ** 0.5
    return {"bytes_that_differ": differ, "drift": abs(mean - 1.03) / spread}


def quantize(x: torch.Tensor, fmt: str) -> QuantizedTensor:
    scale = torch.tensor(FORMATS[fmt].max) / x.abs().max().float()
    return QuantizedTensor(kernels.cast(x, scale, FORMATS[fmt]), scale.reciprocal(), FORMATS[fmt])


def on(device: torch.device, x: QuantizedTensor) -> QuantizedTensor:
    if device.type == "cpu":
        return x.hold()
    return QuantizedTensor(x.data.to(device), x.scale_inv.to(device), x.fmt, x.block)


def products(
    device: torch.device, shape: tuple[int, int, int], formats: tuple[str, str], fast_accum: bool
) -> dict[str, float]:
    """`gemm_nt` of random operands on the device, against the exact emulation."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    a = quantize(torch.randn(m, k, generator=generator), formats[0])
    b = quantize(torch.randn(n, k, generator=generator), formats[1])
    bias = torch.randn(n, generator=generator).to(torch.bfloat16)
    exact = gemm_nt(a.hold(), b.hold(), out_dtype=torch.float32, emulation="exact")
    wide = gemm_nt(on(device, a), on(device, b), out_dtype=torch.float32, fast_accum=fast_accum)
    narrow = gemm_nt(
        on(device, a),
        on(device, b),
        out_dtype=torch.bfloat16,
        bias=bias.to(device),
        fast_accum=fast_accum,
    )
    return {
        "fp32_error": relative_error(wide, exact),
        "bf16_error": relative_error(narrow, exact + bias.float()),
    }


def kernel_bits(device: torch.device, group: str) -> dict[str, float]:
    """Elements that a device's kernels for casts compute otherwise than plain torch on the CPU.

    On a matrix of many tiles, in every 16- and 32-bit type.
    """
    differ = 0
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(700, 1040, generator=generator)
    whole *= 2.0 ** torch.randint(-20, 20, (700, 1), generator=generator)
    whole[::97, ::31], whole[5, 7], whole[9, :3] = 0.0, float("nan"), float("inf")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = whole.to(dtype)
        pairs = _casts_of(x, device) if group == "casts" else _blocks_of(x, device)
        for here, there in pairs:
            here, there = (t.cpu().contiguous().view(torch.uint8) for t in (here, there))
            differ += int((here != there).sum())
    return {"bytes_that_differ": differ}


def _casts_of(x: torch.Tensor, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for fmt in (E4M3, E5M2):
        scale = torch.tensor(0.7)
        wants = {"want_amax": True, "want_turned": True}
        made = kernels.cast_once(x.to(device), scale.to(device), fmt, **wants)
        want = plain.cast(x, scale, fmt)
        yield made.data, want
        yield made.turned, want.t()
        yield made.amax.view(1), plain.amax(x).view(1)


def _blocks_of(
    x: torch.Tensor, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rules = ((128, ScaleRule.POWER_OF_TWO), (128, ScaleRule.FP32), (32, ScaleRule.E8M0))
    for length, rule in rules:
        both = kernels.cast_blocks_both(x.to(device), E4M3, length, rule)
        square = kernels.cast_blocks(x.to(device), E4M3, (length, length), rule)
        blocks = ((1, length), (length, 1), (length, length))
        for (codes, inverse), block in zip((*both, square), blocks, strict=True):
            held, want = plain_blocks.round_blocks(x, E4M3, block, rule, False)
            yield codes, plain.encode(held, E4M3)
            yield inverse, want


def block_products(
    device: torch.device, recipe: str, shape: tuple[int, int, int]
) -> dict[str, float]:
    """The three products of a recipe with scales of blocks, against fp64, and how they ran."""
    recipe_of = EVERY_RECIPE[recipe]
    able = hardware.verdict(recipe_of, device, torch.bfloat16).hardware
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    worst = 0.0
    for roles in hardware.OPERANDS.values():
        pair = []
        for rows, role in zip((m, n), roles, strict=True):
            x = torch.randn(rows, k, generator=generator).to(torch.bfloat16).to(device)
            quantizer = BlockQuantizer(recipe_of, role, fold=False, hardware=able)
            pair.append(quantizer.rowwise(x))
        a, b = (x.hold().data.double() * x.expanded_scale_inv().double() for x in pair)
        got = gemm_nt(*pair, out_dtype=torch.float32, emulation="exact")
        worst = max(worst, relative_error(got, a @ b.t()))
    return {"error": worst, "hardware": float(able)}


def build_on(device: torch.device, backend: Backend, path: str = "", **settings: object) -> Build:
    config = small_config(**{"bf16": True, "fp8_emulation": "exact", **settings})
    return Build.root(config, ParallelState.single(), backend, device, path)


def run_layer(
    device: torch.device, backend: Backend, kind: str, recipe: str, rows: int = 64
) -> dict[str, torch.Tensor]:
    """Two training steps of one layer; outputs and gradients of the second, and the scales."""
    build = build_on(device, backend, "layer", **NATIVE_RECIPES[recipe])
    layer = getattr(backend, kind)(
        128, 96, build=build, init_method=torch.nn.init.xavier_normal_, bias=True
    )
    results = {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, g = (
            torch.randn(rows, 1, width, generator=generator).to(torch.bfloat16).to(device)
            for width in (128, 96)
        )
        x.requires_grad_()
        layer.zero_grad()
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        y, _ = layer(x)
        y.backward(g)
        build.fp8.sync(build.mesh.amax)
        results = {
            "y": y,
            "dx": x.grad,
            "dw": layer.weight.main_grad,
            "db": layer.bias.grad,
        }
    if build.fp8.book is not None:
        results["scale"] = build.fp8.book.scale
    return {name: value.detach().to(CPU) for name, value in results.items()}


def layers_agree(
    device: torch.device, backend: Backend, kind: str, recipe: str
) -> dict[str, float]:
    """A layer of `backend` on the device, against the native one emulated on the CPU."""
    reference = run_layer(CPU, NativeBackend(), kind, recipe)
    measured = run_layer(device, backend, kind, recipe)
    return {name: relative_error(measured[name], reference[name]) for name in reference}


def run_experts(device: torch.device, backend: Backend, recipe: str) -> dict[str, torch.Tensor]:
    """Two steps of three experts, one of them without tokens in the second."""
    path = "decoder.layers.0.mlp.experts.linear_fc1"
    build = build_on(device, backend, path, **NATIVE_RECIPES[recipe])
    layer = backend.column_parallel_grouped_linear(
        3, 128, 96, build=build, init_method=torch.nn.init.xavier_normal_
    )
    results = {}
    for step, counts in enumerate(([16, 9, 32], [5, 0, 33])):
        generator = torch.Generator().manual_seed(step)
        x, g = (
            torch.randn(sum(counts), width, generator=generator).to(torch.bfloat16).to(device)
            for width in (128, 96)
        )
        x.requires_grad_()
        for weight in layer.weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        y = layer(x, counts)
        y.backward(g)
        build.fp8.sync(build.mesh.amax, build.mesh.expert_amax)
        dw = torch.stack([weight.main_grad for weight in layer.weights])
        results = {"y": y, "dx": x.grad, "dw": dw}
    if build.fp8.expert_book is not None:
        results["scale"] = build.fp8.expert_book.scale
    return {name: value.detach().to(CPU) for name, value in results.items()}


def experts_agree(device: torch.device, backend: Backend, recipe: str) -> dict[str, float]:
    """Experts of `backend` on the device, against the native ones emulated on the CPU."""
    reference = run_experts(CPU, NativeBackend(), recipe)
    measured = run_experts(device, backend, recipe)
    return {name: relative_error(measured[name], reference[name]) for name in reference}


def run_model(
    device: torch.device, backend: Backend, steps: int = 3, **settings: object
) -> list[float]:
    """Losses of a few SGD steps on one batch."""
    build = build_on(device, backend, **{**LLAMA, **settings})
    model = GPTModel(build)
    given = [x.to(device) for x in batch(build.config)]
    losses = []
    for _ in range(steps):
        loss = model(*given).mean()
        model.zero_grad()
        loss.backward()
        build.fp8.sync(build.mesh.amax)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.5)
        losses.append(float(loss.detach()))
    return losses


def models_agree(device: torch.device, backend: Backend, recipe: str | None) -> dict[str, float]:
    """Losses of a small Llama on the device, against the native one on the CPU."""
    settings = NATIVE_RECIPES[recipe] if recipe else {}
    reference = run_model(CPU, NativeBackend(), **settings)
    measured = run_model(device, backend, **settings)
    difference = max(abs(a - b) for a, b in zip(measured, reference, strict=True))
    return {"difference": difference, "first": measured[0], "last": measured[-1]}
