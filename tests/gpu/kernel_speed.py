"""Single kernels and layers: products, casts against the copy limit, a layer in each recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core.backends.contract import Backend
from megatron.core.fp8 import E4M3, gemm_nt, hardware, kernels
from megatron.core.fp8.quantizers import BlockQuantizer
from megatron.core.fp8.recipe import BlockRecipe, Role
from megatron.core.fp8.scales import ScaleRule
from megatron.core.transformer.mlp import swiglu
from megatron.training.products import RECIPES as EVERY_RECIPE
from tests.gpu.cases import NATIVE_RECIPES, build_on, on, quantize
from tests.gpu.timing import median_seconds

PRODUCTS = ((8192, 4096, 4096), (8192, 11264, 4096), (8192, 4096, 11264), (8192, 2048, 8192))
CASTS = (8192, 8192)
LAYERS = (8192, 4096, 11264)  # tokens, in, out


def operands(name: str, shape: tuple[int, int, int], device: torch.device) -> tuple[Any, Any]:
    """Operands of the forward product of a recipe, `[M, K]` and `[N, K]`, from its quantizers."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(r, k, generator=generator).to(torch.bfloat16) for r in (m, n))
    recipe = EVERY_RECIPE[name]
    if not isinstance(recipe, BlockRecipe):
        return on(device, quantize(a, "e4m3")), on(device, quantize(b, "e4m3"))
    able = device.type == "cuda" and hardware.verdict(recipe, device, torch.bfloat16).hardware
    pair = zip((a, b), (Role.INPUT, Role.WEIGHT), strict=True)
    made = [
        BlockQuantizer(recipe, role, fold=True, hardware=able).rowwise(x.to(device))
        for x, role in pair
    ]
    return made[0], made[1]


def products(shape: tuple[int, int, int], device: torch.device, times: int) -> dict[str, Any]:
    """One product in bf16 and in each recipe, casts not included."""
    m, n, k = shape
    plain = [torch.randn(r, k, device=device, dtype=torch.bfloat16) for r in (m, n)]
    operations = 2.0 * m * n * k / 1e12
    row: dict[str, Any] = {"shape": list(shape)}

    def measure(name: str, pair: tuple[Any, Any]) -> None:
        def call() -> torch.Tensor:
            return gemm_nt(*pair, out_dtype=torch.bfloat16, fast_accum=True)

        row[name] = operations / median_seconds(call, device, times)

    measure("bf16", (plain[0], plain[1]))
    for name in EVERY_RECIPE:
        if name != "tensorwise":  # its product is that of delayed
            measure(name, operands(name, shape, device))
    return row


def casts(shape: tuple[int, int], device: torch.device) -> Iterator[tuple[str, float, Any]]:
    """Yield kernels: a name, the bytes an element that it cannot but move, and a call."""
    rows, cols = shape
    x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
    scale = torch.tensor(3.0, device=device)
    codes = kernels.cast(x, scale, E4M3)
    yield "magnitude", 2, lambda: kernels.amax(x)
    yield "cast", 3, lambda: kernels.cast_once(x, scale, E4M3)
    yield "cast, magnitude", 3, lambda: kernels.cast_once(x, scale, E4M3, want_amax=True)
    both = {"want_amax": True, "want_turned": True}
    yield "cast, magnitude, transpose", 4, lambda: kernels.cast_once(x, scale, E4M3, **both)
    yield "transpose of bytes", 2, lambda: kernels.turn(codes)
    power, e8m0 = ScaleRule.POWER_OF_TWO, ScaleRule.E8M0
    yield "1 x 128", 3 + 4 / 128, lambda: kernels.cast_blocks(x, E4M3, (1, 128), power)
    yield "1 x 128, both ways", 4 + 8 / 128, lambda: kernels.cast_blocks_both(x, E4M3, 128, power)
    yield "128 x 128", 3, lambda: kernels.cast_blocks(x, E4M3, (128, 128), power)
    yield "1 x 32, both ways", 4 + 8 / 32, lambda: kernels.cast_blocks_both(x, E4M3, 32, e8m0)
    yield "SwiGLU", 3, lambda: swiglu(x)
    if kernels.can_norm(x):
        weight = torch.ones(cols, device=device, dtype=torch.bfloat16)

        def norm() -> Any:
            kinds = {"centered": False, "zero_centered": False}
            return kernels.norm(x, weight, None, 1e-5, scale=scale, fmt=E4M3, **kinds)

        yield "RMS norm, cast, magnitude", 3, norm


def cast_speed(
    shape: tuple[int, int], device: torch.device, limit: float, times: int
) -> Iterator[dict[str, Any]]:
    """Yield for each kernel what share of the copy limit it reaches, and plain torch beside it.

    Args:
        shape: Of the matrix.
        device: Where.
        limit: Bytes a second of a copy.
        times: Timed repetitions.
    """
    elements = shape[0] * shape[1]
    fused = {name: (size, call) for name, size, call in casts(shape, device)}
    for name, (size, call) in fused.items():
        seconds = median_seconds(call, device, times)
        before = kernels.use_triton_on_cuda(False)
        plain = {n: c for n, _, c in casts(shape, device)}.get(name)
        plain_seconds = None if plain is None else median_seconds(plain, device, max(1, times // 4))
        kernels.use_triton_on_cuda(before)
        yield {
            "name": name,
            "ms": seconds * 1e3,
            "gb_per_s": elements * size / seconds / 1e9,
            "share_of_copy": elements * size / seconds / limit,
            "times_plain_torch": None if plain_seconds is None else plain_seconds / seconds,
        }


def layer_speed(
    shape: tuple[int, int, int], backend: Backend, device: torch.device, times: int
) -> Iterator[dict[str, Any]]:
    """Yield forward and backward of a norm and a linear layer in bf16 and in each recipe."""
    tokens, inner, out = shape
    base = 0.0
    for name, settings in {"bf16": {}, **NATIVE_RECIPES}.items():
        build = build_on(device, backend, "layer", fp8_emulation="fast", **settings)
        layer = backend.layernorm_column_parallel_linear(
            inner, out, build=build, init_method=torch.nn.init.zeros_, bias=False
        )
        torch.nn.init.normal_(layer.weight, std=0.02)
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        x = torch.randn(tokens, 1, inner, device=device, dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn(tokens, 1, out, device=device, dtype=torch.bfloat16)
        step = _one_step(layer, x, dy, build)
        seconds = median_seconds(step, device, times)
        base = base or seconds
        kernel = build.fp8.layers["layer"].row().kernel
        yield {"name": name, "ms": seconds * 1e3, "times_bf16": base / seconds, "kernel": kernel}


def _one_step(layer: Any, x: torch.Tensor, dy: torch.Tensor, build: Any) -> Callable[[], None]:
    def step() -> None:
        layer(x)[0].backward(dy)
        build.fp8.sync(build.mesh.amax)

    return step
