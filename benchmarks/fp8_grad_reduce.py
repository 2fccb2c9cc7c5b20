"""Does a model learn from gradients that travel in FP8 what it learns from exact sums?

Trains a model of two million parameters on real text on four replicas, several times with the same
data, weights and settings; only the type in which the replicas send their gradients differs.
`order` is the yardstick: exact sums again, in smaller buckets, so that only the order of additions
differs. What that moves the loss by means nothing. Bytes are those of the table of communication.

    make quickstart                          # prepares the corpus
    python benchmarks/fp8_grad_reduce.py     # four runs of about two minutes on two cores
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FINAL = re.compile(
    r"validation loss at iteration \d+ on validation set \| lm loss value: ([0-9.E+-]+)"
)
TRAINED = re.compile(r" iteration +(\d+)/.* lm loss: ([0-9.E+-]+)")
RANKS = 4
FP8 = ["--grad-reduce-dtype", "fp8"]
VARIANTS = {
    "fp32": [],
    "order": ["--ddp-bucket-size", "300000"],
    "fp8": FP8,
    "fp8-no-feedback": [*FP8, "--no-grad-reduce-error-feedback"],
}
# Relative excess of the validation loss over that with exact sums that is still accepted.
BAND = 0.005
HELD = ("fp8",)


def flags_of(variant: str, args: argparse.Namespace) -> list[str]:
    """Return the settings of a run, without those of data."""
    flags = ["--config", str(ROOT / "configs/quickstart_llama_10m.yaml"), "--bf16"]
    flags += ["--num-layers", "4", "--hidden-size", "128", "--ffn-hidden-size", "384"]
    flags += ["--num-attention-heads", "4", "--num-query-groups", "2", "--seq-length", "128"]
    flags += ["--micro-batch-size", "4", "--global-batch-size", "16"]
    # A third of the quickstart's rate, at which roundings do not grow into another run.
    flags += ["--lr", "1e-3", "--min-lr", "1e-4", "--train-iters", str(args.train_iters)]
    if args.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    return [*flags, *VARIANTS[variant]]


def train(variant: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Train on four ranks; return validation loss and mean training loss of the last sixth."""
    work = args.workdir.resolve()
    flags = flags_of(variant, args)
    flags += ["--data-path", str(work / "corpus_text_document")]
    flags += ["--data-cache-path", str(work / "cache")]
    flags += ["--tokenizer-type", "SentencePieceTokenizer"]
    flags += ["--tokenizer-model", str(work / "tokenizer.model")]
    flags += ["--eval-interval", str(2 * args.train_iters), "--eval-iters", str(args.eval_iters)]
    flags += ["--seed", str(seed), "--log-interval", "5"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(RANKS), str(ROOT / "pretrain_gpt.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    found = FINAL.findall(done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"{variant} seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    losses = {int(n): float(loss) for n, loss in TRAINED.findall(done.stdout)}
    last = [loss for n, loss in losses.items() if n > args.train_iters * 5 / 6]
    seconds = time.monotonic() - begun
    loss = float(found[-1])
    print(f"{variant:>16} seed {seed}: {loss:.4f}  ({seconds:.0f} s)", flush=True)
    return {"validation": loss, "training": statistics.mean(last), "seconds": round(seconds)}


def bytes_sent(variant: str, args: argparse.Namespace) -> int:
    """Return what a rank sends for gradients in a step, from the table of communication."""
    command = [sys.executable, str(ROOT / "tools/show.py"), "comm", "--json", "--rank", "0"]
    command += [*flags_of(variant, args), "--fake-world-size", str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    (one,) = json.loads(done.stdout)["communication"]
    return sum(row["sent_bytes"] for row in one["rows"] if row["part"] == "gradient sync")


def main() -> int:
    """Train all variants and judge them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=ROOT / "quickstart")
    parser.add_argument("--train-iters", type=int, default=300)
    parser.add_argument("--eval-iters", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME"
    )
    parser.add_argument(
        "--no-distributed-optimizer", dest="distributed_optimizer", action="store_false"
    )
    parser.add_argument("--output", type=Path, help="write all figures here as JSON")
    args = parser.parse_args()
    if "fp32" not in args.variants:
        args.variants.insert(0, "fp32")
    runs = {name: [train(name, seed, args) for seed in args.seeds] for name in args.variants}
    sent = {name: bytes_sent(name, args) for name in args.variants}
    found = {
        name: {
            "validation": statistics.mean(run["validation"] for run in runs[name]),
            "excess": excess(runs, name, "validation"),
            "training_excess": excess(runs, name, "training"),
            "sent_bytes": sent[name],
            "share_of_bytes": sent[name] / sent["fp32"],
            "runs": runs[name],
        }
        for name in args.variants
    }
    report = {
        "ranks": RANKS,
        "train_iters": args.train_iters,
        "seeds": args.seeds,
        "distributed_optimizer": args.distributed_optimizer,
        "band": BAND,
        "variants": found,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return judge(found)


def excess(runs: dict[str, list[dict[str, float]]], name: str, what: str) -> float:
    """Return by how much a variant's loss exceeds that with exact sums, the mean over seeds."""
    pairs = zip(runs[name], runs["fp32"], strict=True)
    return statistics.mean(ours[what] / exact[what] for ours, exact in pairs) - 1.0


def judge(found: dict[str, dict[str, float]]) -> int:
    """Print all figures; return the exit code."""
    print(f"\n{'gradients':>16}  validation   excess  (training)   bytes a step")
    for name, one in found.items():
        print(
            f"{name:>16}  {one['validation']:10.4f}  {one['excess']:+7.3%}"
            f"  ({one['training_excess']:+7.3%})"
            f"   {one['sent_bytes'] / 2**20:6.2f} MiB  {one['share_of_bytes']:6.1%}"
        )
    outside = [name for name in HELD if name in found and abs(found[name]["excess"]) > BAND]
    if outside:
        print(f"outside of {BAND:.1%}: {', '.join(outside)}")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
