"""From raw text to a trained FP8 GPT to a HuggingFace model, on this machine.

Every step is a command of the project that can be run by hand; it is printed before it runs. A
step whose inputs have not changed since it last succeeded is skipped, and one that was interrupted
continues. ``make quickstart`` calls this after it has built the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.config.tool_flags import run_tool  # noqa: E402

CONFIG = "configs/quickstart_llama_10m.yaml"
VALIDATION = re.compile(r"validation loss at iteration \d+.*?lm loss value: ([0-9.E+-]+)")
# The trained model must beat the best model that ignores context by this many nats per token.
REQUIRED_MARGIN = 0.5


class Steps:
    """Runs commands once, remembering what they ran on.

    Args:
        workdir: Where stamps and logs go.
    """

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.stamps = workdir / "stamps"
        try:
            self.stamps.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(
                f"quickstart: --workdir: got {workdir}. It cannot be written to "
                f"({error.strerror}). Name another folder."
            )

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        inputs: Sequence[Path] = (),
        outputs: Sequence[Path] = (),
        folder: Path | None = None,
        log: Path | None = None,
        always: bool = False,
    ) -> None:
        """Run one step unless its stamp says that the same command on the same inputs succeeded.

        Args:
            name: Title and stamp name.
            command: Argument list, run from the repository root.
            inputs: Files whose content decides whether the step is stale.
            outputs: Files that must exist for the step to be skipped.
            folder: What the step fills. It is emptied when the command or its inputs are others
                than those that filled it, and continued when the same step was interrupted.
            log: Copy the output there as well.
            always: Run even if nothing changed.

        Raises:
            SystemExit: The command failed; its exit code is passed on.
        """
        stamp = self.stamps / name.replace(" ", "_")
        begun_stamp = stamp.with_name(f"{stamp.name}.begun")
        key = _digest(command, inputs)
        done = stamp.is_file() and stamp.read_text() == key and all(p.exists() for p in outputs)
        if done and not always:
            print(f"== {name}: already done", flush=True)
            return
        stamp.unlink(missing_ok=True)
        same = begun_stamp.is_file() and begun_stamp.read_text() == key
        if folder is not None and not same:
            shutil.rmtree(folder, ignore_errors=True)
        begun_stamp.write_text(key)
        print(f"\n== {name}\n$ {_shown(command)}", flush=True)
        begun = time.monotonic()
        code = _run(command, log)
        if code != 0:
            sys.exit(f"quickstart: step '{name}' failed with exit code {code}. See above.")
        stamp.write_text(key)
        print(f"== {name}: {time.monotonic() - begun:.0f} s", flush=True)


def _digest(command: Sequence[str], inputs: Sequence[Path]) -> str:
    parts = hashlib.sha256("\0".join(command).encode())
    for path in inputs:
        parts.update(path.read_bytes())
    return parts.hexdigest()


def _shown(command: Sequence[str]) -> str:
    words = [Path(word).name if word == sys.executable else word for word in command]
    return shlex.join(word.replace(f"{ROOT}/", "") for word in words)


def _run(command: Sequence[str], log: Path | None) -> int:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    if log is None:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    with (
        log.open("w", encoding="utf-8") as copy,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        stdout = process.stdout
        if stdout is not None:
            for line in stdout:
                print(line, end="", flush=True)
                copy.write(line)
    return process.returncode


def last_validation_loss(log: Path) -> float:
    """Return the last validation loss that a console log holds, in nats per token.

    Raises:
        SystemExit: The log has no validation line.
    """
    found = VALIDATION.findall(log.read_text(encoding="utf-8", errors="replace"))
    if not found:
        sys.exit(f"quickstart: {log}: no validation loss in it. Did the training step finish?")
    return float(found[-1])


def compare_with_unigrams(log: Path, entropy: float, required: bool) -> None:
    """Show whether the model learned more than how frequent each token is.

    Args:
        log: Console log of the training.
        entropy: Of single tokens in the corpus, in nats.
        required: Whether a model that did not learn is a failure.

    Raises:
        SystemExit: It is, and the model did not.
    """
    loss = last_validation_loss(log)
    print(f"\nvalidation loss {loss:.3f} nats per token, unigram entropy {entropy:.3f}")
    if required and loss > entropy - REQUIRED_MARGIN:
        sys.exit(
            f"quickstart: validation loss: got {loss:.3f}. It must be below {entropy:.3f} - "
            f"{REQUIRED_MARGIN}. The model did not learn; see {log}."
        )


def training(work: Path, run: Path) -> list[str]:
    """Return the command that trains.

    Args:
        work: Where the corpus and its tokenizer are.
        run: Where checkpoints and logs go.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "pretrain_gpt.py", "--config", CONFIG]
    command += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    command += ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
    command += ["--data-path", str(work / "corpus_text_document")]
    command += ["--data-cache-path", str(work / "cache")]
    command += ["--tokenizer-model", str(work / "tokenizer.model")]
    command += ["--save", str(run), "--load", str(run)]
    command += ["--fp8-stats-interval", "10"]
    if importlib.util.find_spec("tensorboard"):
        command += ["--tensorboard-dir", str(run / "tensorboard")]
    return [*command, "--dllogger-json", str(run / "log.json")]


def main() -> None:
    """Run the whole chain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=ROOT / "quickstart")
    parser.add_argument("--train-iters", type=int, help="override the config, e.g. for a trial")
    parser.add_argument("--prompt", default="def read_lines(path):\n")
    args = parser.parse_args()
    work = args.workdir.resolve()
    steps = Steps(work)
    python = sys.executable
    corpus, tokenizer = work / "corpus.jsonl", work / "tokenizer.model"
    statistics, prefix = work / "statistics.json", work / "corpus"
    run, log, exported = work / "run", work / "train.log", work / "huggingface"

    steps.run(
        "corpus and tokenizer",
        [python, "tools/build_corpus.py", "--output-dir", str(work), "--vocab-size", "4096"],
        inputs=[ROOT / "tools/build_corpus.py"],
        outputs=[corpus, tokenizer],
    )
    steps.run(
        "preprocess",
        [python, "tools/preprocess_data.py", "--input", str(corpus)]
        + ["--output-prefix", str(prefix), "--tokenizer-type", "SentencePieceTokenizer"]
        + ["--tokenizer-model", str(tokenizer), "--append-eod", "--workers", "2"],
        inputs=[corpus, tokenizer],
        outputs=[work / "corpus_text_document.bin", work / "corpus_text_document.idx"],
    )
    steps.run(
        "unigram entropy",
        [python, "tools/build_corpus.py", "--output-dir", str(work), "--statistics"],
        inputs=[work / "corpus_text_document.idx"],
        outputs=[statistics],
    )
    train = training(work, run)
    if args.train_iters:
        train += ["--train-iters", str(args.train_iters)]
    steps.run(
        "train",
        train,
        inputs=[ROOT / CONFIG, work / "corpus_text_document.idx"],
        outputs=[log, run / "latest_checkpointed_iteration.txt"],
        folder=run,
        log=log,
    )
    entropy = json.loads(statistics.read_text())["unigram_entropy_nats"]
    compare_with_unigrams(log, entropy, required=not args.train_iters)
    steps.run(
        "draw the loss",
        [python, "tools/plot_loss.py", str(log), "--output", str(work / "loss.png")]
        + ["--reference", f"{entropy:.4f}"],
        inputs=[log],
        outputs=[work / "loss.png"],
    )
    steps.run(
        "show what FP8 did",
        [python, "tools/fp8_report.py", str(run), "--output", str(work / "fp8_report.html")],
        inputs=[ROOT / "tools/fp8_report_page.html", log],
        outputs=[work / "fp8_report.html"],
    )
    steps.run(
        "export to HuggingFace",
        [python, "tools/checkpoint/convert.py", "--model-type", "GPT", "--loader", "megatron"]
        + ["--saver", "huggingface", "--load-dir", str(run), "--save-dir", str(exported)]
        + ["--target-dtype", "bf16", "--verify"],
        inputs=[run / "latest_checkpointed_iteration.txt", log],
        outputs=[exported / "config.json"],
        folder=exported,
    )
    steps.run(
        "generate",
        [python, "tools/generate.py", "--load", str(run), "--prompt", args.prompt]
        + ["--max-new-tokens", "120", "--temperature", "0.8", "--top-k", "40"],
        always=True,
    )
    print(f"\nDone. Loss curve: {work / 'loss.png'}, FP8: {work / 'fp8_report.html'}.")
    print(f"HuggingFace model: {exported}.")


if __name__ == "__main__":
    run_tool(main)
