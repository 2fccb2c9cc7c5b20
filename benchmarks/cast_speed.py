"""How fast are the FP8 casts on this CPU?

Each kernel in turn on one tensor, compiled (numba) and plain torch, beside a copy of the tensor and
torch's own FP8 casts: medians of process CPU time, elements a second, one JSON line at the end.

    python benchmarks/cast_speed.py
    python benchmarks/cast_speed.py --elements 1048576 --repeats 51 --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2


def contenders(count: int) -> dict[str, Callable[[], object]]:
    """Everything that is timed, by name."""
    x32 = torch.randn(count)
    x16 = x32.bfloat16()
    scale = torch.tensor(57.3)
    out: dict[str, Callable[[], object]] = {
        "copy bf16": x16.clone,
        "copy fp32": x32.clone,
    }
    native = {fmt.name: x16.to(fmt.torch_dtype) for fmt in (E4M3, E5M2)}
    for fmt in (E4M3, E5M2):
        codes = kernels.encode(kernels.round_to_grid(x16, scale, fmt)[0], fmt)
        out |= {
            f"torch bf16 -> {fmt.name}": lambda fmt=fmt: x16.to(fmt.torch_dtype),
            f"torch {fmt.name} -> bf16": lambda fmt=fmt: native[fmt.name].to(torch.bfloat16),
        }
        for which in ("compiled", "plain"):
            if which == "compiled" and kernels.compiled is None:
                continue

            def using(fn: Callable[[], object], which: str = which) -> Callable[[], object]:
                def call() -> object:
                    before = kernels.use(which)
                    try:
                        return fn()
                    finally:
                        kernels.use(before)

                return call

            held = kernels.decode(codes, fmt)
            for kind, x in (("bf16", x16), ("fp32", x32)):
                out[f"{which} round {kind} to {fmt.name}, with amax"] = using(
                    lambda x=x, fmt=fmt: kernels.round_to_grid(x, scale, fmt, want_amax=True)
                )
                out[f"{which} amax {kind}"] = using(lambda x=x: kernels.amax(x))
            out[f"{which} encode {fmt.name}"] = using(
                lambda held=held, fmt=fmt: kernels.encode(held, fmt)
            )
            out[f"{which} decode {fmt.name}"] = using(
                lambda codes=codes, fmt=fmt: kernels.decode(codes, fmt)
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    timed = contenders(args.elements)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(args.repeats + 2):  # two rounds of warm-up
        for name, call in timed.items():
            start = time.process_time()
            call()
            if repeat >= 2:
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    copy = medians["copy bf16"]
    print(f"{args.elements} elements, {args.threads} threads, process CPU time")
    for name, value in medians.items():
        print(
            f"{name:42s} {value * 1e3:8.3f} ms {args.elements / value / 1e9:7.2f} G/s"
            f" {value / copy:6.2f} x copy"
        )
    print(json.dumps({"benchmark": "cast_speed", "seconds": medians}))


if __name__ == "__main__":
    main()
