"""FP8 attention on a device against the native one on the CPU; returns what was measured."""

from __future__ import annotations

import torch

from megatron.core.backends.contract import Backend
from megatron.core.backends.native import NativeBackend
from tests.gpu.cases import CPU, RECIPES, build_on, relative_error

PATH = "decoder.layers.0.self_attention.core_attention"
SHAPE = (128, 2, 2, 64)  # s, b, n, d


def run(device: torch.device, backend: Backend, recipe: str) -> dict[str, torch.Tensor]:
    """Two steps of one attention: result and gradients of the second, and the scales."""
    settings = {"fp8_format": "hybrid", "fp8_dot_product_attention": True, **RECIPES[recipe]}
    heads = {"hidden_size": 128, "num_attention_heads": 2}
    build = build_on(device, backend, PATH, **settings, **heads)
    attention = backend.core_attention(build=build, layer_number=1)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(SHAPE, generator=generator).bfloat16().to(device) for _ in range(4)]
        leaves = [x.requires_grad_() for x in made[:3]]
        out = attention(*leaves)
        gradients = torch.autograd.grad(out, leaves, made[3].flatten(2))
        build.fp8.sync(build.mesh.amax)
    scales = torch.cat([book.scale for book in build.fp8.books if book.paths()])
    names = ("out", "dq", "dk", "dv")
    return dict(zip(names, (out, *gradients), strict=True)) | {"scale": scales}


def agree(device: torch.device, backend: Backend, recipe: str) -> dict[str, float]:
    """Relative errors of everything that `run` returns."""
    ours, expected = run(device, backend, recipe), run(CPU, NativeBackend(), recipe)
    return {name: relative_error(ours[name], expected[name]) for name in expected}
