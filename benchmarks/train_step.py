"""How fast is one training step on this machine?

Everything runs in one process, one step of each contender in turn, so that they share the machine's
moods; medians and their ratios are printed, with the loss beside every speed, then one JSON line.
On a machine that others use, measure with --threads 1 and read the ratios of CPU time.

    python benchmarks/train_step.py                       the reference size, about two minutes
    python benchmarks/train_step.py --layers 2 --seq 128  smaller
    python benchmarks/train_step.py --only native_bf16,native_fp8_delayed

Contenders: `hf_bf16` (HuggingFace LlamaForCausalLM, sdpa), `native_bf16`, `native_fp8_delayed`,
`_tensorwise`, `_blockwise` and `_mxfp8`, and `native_fp4_nvfp4`, with compiled kernels (numba) if
there are any, and the same with plain torch kernels. All are bf16 Llamas of one shape with torch's
fused AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from megatron.config import RunConfig, make_config
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.capability import cpu_bf16_gemm, gemm_dtype
from megatron.core.fp8 import kernels
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.flops import flops_per_iteration

CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, object]] = {
    "fp8_delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "fp8_tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "fp8_mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "fp4_nvfp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}


@dataclass
class Contender:
    """One way to run a step, and what it took so far."""

    name: str
    step: Callable[[], float]
    kernels: str = "plain"
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    loss: float = 0.0

    def run(self, *, timed: bool) -> None:
        before = kernels.use(self.kernels)
        wall, cpu = time.perf_counter(), time.process_time()
        self.loss = self.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        kernels.use(before)
        if timed:
            self.wall_s.append(wall)
            self.cpu_s.append(cpu)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--only", default="", help="comma-separated contenders; default all")
    return parser.parse_args()


def llama_config(args: argparse.Namespace, **settings: object) -> RunConfig:
    return make_config(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        ffn_hidden_size=args.ffn,
        vocab_size=args.vocab,
        seq_length=args.seq,
        micro_batch_size=args.batch,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        mock_data=True,
        train_iters=1,
        **settings,
    )


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def native(
    args: argparse.Namespace, tokens: torch.Tensor, **settings: object
) -> Callable[[], float]:
    config = llama_config(args, **settings)
    build = Build.root(config, ParallelState.single(), NativeBackend(), CPU)
    model = GPTModel(build)
    optimizer = optimizer_for(model)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(args.seq).expand_as(inputs)

    def step() -> float:
        loss = model(inputs, positions, labels).mean()
        loss.backward()
        build.fp8.sync()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def huggingface(args: argparse.Namespace, tokens: torch.Tensor) -> Callable[[], float]:
    from transformers import LlamaConfig, LlamaForCausalLM  # optional, slow

    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = optimizer_for(model)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    def step() -> float:
        logits = model(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.view(-1, args.vocab).float(), labels.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def contenders(args: argparse.Namespace) -> list[Contender]:
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq + 1))
    fast = kernels.implementation()
    makers: dict[str, tuple[str, Callable[[], Callable[[], float]]]] = {
        "hf_bf16": ("plain", lambda: huggingface(args, tokens)),
        "native_bf16": ("plain", lambda: native(args, tokens)),
    }
    for name in SETTINGS:
        make = _maker(args, tokens, name)
        if fast == "compiled":
            makers[f"native_{name}"] = ("compiled", make)
        makers[f"native_{name}_plain"] = ("plain", make)
    wanted = [name for name in args.only.split(",") if name] or list(makers)
    unknown = [name for name in wanted if name not in makers]
    if unknown:
        raise SystemExit(f"--only: got {', '.join(unknown)}. Choose from {', '.join(makers)}.")
    return [Contender(name, makers[name][1](), makers[name][0]) for name in wanted]


def _maker(
    args: argparse.Namespace, tokens: torch.Tensor, name: str
) -> Callable[[], Callable[[], float]]:
    return lambda: native(args, tokens, **SETTINGS[name])


def gemm_rate(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a square product."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    torch.mm(a, b)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)


def report(args: argparse.Namespace, found: list[Contender]) -> dict[str, object]:
    tokens, flops = args.batch * args.seq, flops_per_iteration(llama_config(args))
    rates = {str(d).split(".")[1]: gemm_rate(d) for d in (torch.bfloat16, torch.float32)}
    best = max(rates.values())
    medians = {c.name: statistics.median(c.wall_s) for c in found}
    cpu = {c.name: statistics.median(c.cpu_s) for c in found}
    print(f"threads {torch.get_num_threads()}, torch {torch.__version__}, {cpu_bf16_gemm().reason}")
    print(
        "GEMM 1024^3: "
        + ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
        + f"; bf16 layers multiply in {gemm_dtype(torch.bfloat16, CPU)}"
    )
    print(
        f"{'contender':30} {'ms/step':>9} {'cpu ms':>9} {'tokens/s':>9} {'of GEMM':>8} {'loss':>8}"
    )
    for c in found:
        wall = medians[c.name]
        print(
            f"{c.name:30} {wall * 1e3:9.1f} {cpu[c.name] * 1e3:9.1f} "
            f"{tokens / wall:9.0f} {flops / wall / best:8.1%} {c.loss:8.4f}"
        )
    ratios = {}
    pairs = [("native_bf16", "hf_bf16", "tokens/s of native bf16 over HuggingFace")]
    pairs += [
        ("native_bf16", c.name, f"time of {c.name} over native bf16")
        for c in found
        if "fp8" in c.name or "fp4" in c.name
    ]
    for fast, slow, text in pairs:
        if fast in medians and slow in medians:
            both = (medians[slow] / medians[fast], cpu[slow] / cpu[fast])
            ratios[text] = dict(zip(("wall", "cpu"), both, strict=True))
            print(f"{text}: {both[0]:.3f} (by CPU time {both[1]:.3f})")
    return {
        "settings": vars(args),
        "gemm_flops_per_s": rates,
        "model_flops_per_step": flops,
        "median_wall_s": medians,
        "median_cpu_s": cpu,
        "loss": {c.name: c.loss for c in found},
        "ratios": ratios,
    }


def main() -> None:
    args = read_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = contenders(args)
    for contender in found:
        contender.run(timed=False)
    for _ in range(args.steps):
        for contender in found:
            contender.run(timed=True)
    print(json.dumps(report(args, found)))


if __name__ == "__main__":
    main()
