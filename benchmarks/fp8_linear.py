"""What does FP8 cost a linear layer on this CPU?

Forward and backward of one layer, all six operands quantized, beside `torch.nn.functional.linear`
in bf16, this project's linear in bf16 and torchao's emulated Float8Linear (if installed). One round
of each in turn; medians of process CPU time; ratios to the plain bf16 layer.

    python benchmarks/fp8_linear.py
    python benchmarks/fp8_linear.py --shapes 512x256x512 --repeats 21
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron.core.capability import cpu_bf16_gemm
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    kernels,
    linear,
)

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=16),
    "tensorwise": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
Step = Callable[[], None]


def native(recipe, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, which: str) -> Step:
    state = Fp8State(Fp8Policy(recipe=recipe))
    precision = state.for_linear("layer")
    weight = torch.nn.Parameter(weight.clone())

    def step() -> None:
        before = kernels.use(which)
        x.grad = weight.grad = None
        linear(x, weight, None, precision).backward(dy)
        state.sync()  # the weight is quantized anew in every step
        kernels.use(before)

    return step


def reference(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Step:
    weight = torch.nn.Parameter(weight.clone())

    def step() -> None:
        x.grad = weight.grad = None
        F.linear(x, weight).backward(dy)

    return step


def torchao(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Step | None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    model = convert_to_float8_training(
        torch.nn.Sequential(layer), config=Float8LinearConfig(emulate=True)
    )

    def step() -> None:
        x.grad = None
        model.zero_grad()
        model(x).backward(dy)

    return step


def contenders(tokens: int, inner: int, out: int) -> dict[str, Step]:
    x = torch.randn(tokens, inner).bfloat16().requires_grad_()
    weight, dy = torch.randn(out, inner).bfloat16(), torch.randn(tokens, out).bfloat16()
    found: dict[str, Step | None] = {
        "F.linear bf16": reference(x, weight, dy),
        "native bf16": native(None, x, weight, dy, "plain"),
    }
    for which in ("compiled", "plain"):
        if which == "plain" or kernels.compiled is not None:
            for name, recipe in RECIPES.items():
                found[f"native {name}, {which}"] = native(recipe, x, weight, dy, which)
    found["torchao tensorwise, emulated"] = torchao(x, weight, dy)
    return {name: step for name, step in found.items() if step is not None}


def measure(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if repeat >= 2:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["2048x512x2048", "2048x1024x4096", "1024x2048x2048"],
        help="tokens x in x out",
    )
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"one thread, process CPU time; {cpu_bf16_gemm().reason}")
    results = {}
    for shape in args.shapes:
        tokens, inner, out = (int(size) for size in shape.split("x"))
        medians = results[shape] = measure(contenders(tokens, inner, out), args.repeats)
        base = medians["F.linear bf16"]
        print(f"\n{shape}")
        for name, value in medians.items():
            print(f"  {name:32s} {value * 1e3:9.1f} ms  {value / base:5.2f} x F.linear bf16")
    print(json.dumps({"benchmark": "fp8_linear", "seconds": results}))


if __name__ == "__main__":
    main()
