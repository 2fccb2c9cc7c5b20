"""Does a model learn in FP8 what it learns in BF16?

Trains the quickstart model in BF16 and FP8 (delayed and tensorwise in the hybrid format, delayed in
E4M3) with several seeds, each seed with one data order for all precisions, and compares the mean
validation loss. Two variants are broken on purpose, with every scale frozen at 1. In E4M3 the
gradients then vanish below the format's smallest value: the check must reject it. E5M2 reaches 128
times lower, so in the hybrid format the same fault may go unnoticed on a model of this size; the
figure is shown all the same.

    make quickstart                       # prepares the corpus
    python benchmarks/fp8_learns.py       # all variants, three seeds: runs of one to two minutes
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FINAL = re.compile(
    r"validation loss at iteration \d+ on validation set \| lm loss value: ([0-9.E+-]+)"
)
HYBRID, E4M3 = ["--fp8-format", "hybrid"], ["--fp8-format", "e4m3"]
VARIANTS = {
    "bf16": [],
    "delayed": [*HYBRID, "--fp8-recipe", "delayed"],
    "tensorwise": [*HYBRID, "--fp8-recipe", "tensorwise"],
    "e4m3": [*E4M3, "--fp8-recipe", "delayed"],
    "blockwise": [*E4M3, "--fp8-recipe", "blockwise"],
    "mxfp8": [*E4M3, "--fp8-recipe", "mxfp8"],
    "nvfp4": ["--fp4-format", "e2m1"],  # measured, not judged
    "frozen-hybrid": [*HYBRID, "--fp8-recipe", "delayed"],
    "frozen-e4m3": [*E4M3, "--fp8-recipe", "delayed"],
}
# Relative excess of the mean validation loss over BF16 that is still accepted.
BAND = 0.005
# Recipes that must stay inside; broken variants that must not.
HELD = ("delayed", "tensorwise", "e4m3", "blockwise", "mxfp8")
NEGATIVE_CONTROLS = ("frozen-e4m3",)


def child(variant: str, flags: list[str]) -> int:
    """Run the ordinary training program, for `frozen` variants with scales that never move."""
    sys.path.insert(0, str(ROOT))
    import pretrain_gpt

    if variant.startswith("frozen"):
        from megatron.core.fp8 import Fp8State

        Fp8State.sync = lambda self, *axes: self.discard()
    return pretrain_gpt.main(flags)


def final_loss(variant: str, seed: int, args: argparse.Namespace) -> float:
    """Train one model in a process of its own; return its validation loss in nats per token."""
    work = args.workdir
    flags = ["--config", str(ROOT / "configs/quickstart_llama_10m.yaml"), "--bf16"]
    flags += ["--data-path", str(work / "corpus_text_document")]
    flags += ["--data-cache-path", str(work / "cache")]
    flags += ["--tokenizer-type", "SentencePieceTokenizer"]
    flags += ["--tokenizer-model", str(work / "tokenizer.model")]
    flags += ["--train-iters", str(args.train_iters), "--seed", str(seed)]
    flags += ["--eval-interval", str(args.train_iters * 2), "--eval-iters", str(args.eval_iters)]
    # At the quickstart's own rate the smallest difference in rounding or order moves one seed's
    # loss by up to 2 % either way; a third of it tells precisions apart with three seeds.
    flags += ["--lr", "1e-3", "--min-lr", "1e-4"]
    flags += ["--log-interval", "50", *VARIANTS[variant]]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    command = [sys.executable, __file__, "--child", variant, "--", *flags]
    begun = time.monotonic()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    found = FINAL.findall(done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"{variant} seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    loss = float(found[-1])
    print(f"{variant:>14} seed {seed}: {loss:.4f}  ({time.monotonic() - begun:.0f} s)", flush=True)
    return loss


def main() -> int:
    """Train all variants and judge them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=ROOT / "quickstart")
    parser.add_argument("--train-iters", type=int, default=60)
    parser.add_argument("--eval-iters", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time")
    parser.add_argument(
        "--output", type=Path, help="keep the losses here as JSON; variants found there are judged"
    )
    args = parser.parse_args()
    jobs = [(variant, seed) for seed in args.seeds for variant in args.variants]
    with ThreadPoolExecutor(args.parallel) as pool:
        losses = list(pool.map(lambda job: final_loss(*job, args), jobs))
    found: dict[str, list[float]] = {name: [] for name in args.variants}
    for (variant, _), loss in zip(jobs, losses, strict=True):
        found[variant].append(loss)
    if args.output:
        known = json.loads(args.output.read_text()) if args.output.exists() else {}
        found = {**known, **found}
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return judge(found)


def judge(found: dict[str, list[float]]) -> int:
    """Print how far every variant is from BF16; return the exit code.

    Args:
        found: Validation losses by variant, in the same order of seeds.
    """
    if "bf16" not in found:
        print("No BF16 run to compare with: train it too, or give the --output that has it.")
        return 0
    base = statistics.mean(found["bf16"])
    spread = statistics.stdev(found["bf16"]) if len(found["bf16"]) > 1 else 0.0
    print(f"\nBF16 mean {base:.4f}, spread over seeds {spread:.4f}, accepted excess {BAND:.1%}")
    outside = set()
    for variant, losses in found.items():
        pairs = zip(losses, found["bf16"], strict=False)
        excess = statistics.mean(loss / reference for loss, reference in pairs) - 1.0
        if excess > BAND:
            outside.add(variant)
        verdict = "OUTSIDE" if variant in outside else "inside"
        print(f"{variant:>14}: {excess:+.3%}  {verdict}")
    caught = all(v in outside for v in NEGATIVE_CONTROLS if v in found)
    return 0 if caught and not outside & set(HELD) else 1


if __name__ == "__main__":
    if "--child" in sys.argv:
        at = sys.argv.index("--child")
        sys.exit(child(sys.argv[at + 1], sys.argv[at + 3 :]))
    sys.exit(main())
