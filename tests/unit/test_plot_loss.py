"""The loss plot reads the console log and keeps the last word on an iteration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINE = (
    " [2026-01-01 00:00:00.000000] iteration {:8d}/     100 | consumed samples:   32 |"
    " elapsed time per iteration (ms): 1.0 | learning rate: 1.0E-03 | global batch size:    32 |"
    " lm loss: {:.6E} | loss scale: 1.0 | grad norm: 1.000 |\n"
)


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/plot_loss.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_reads_training_and_validation_points(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plot_loss

    log = tmp_path / "run.log"
    log.write_text(
        LINE.format(1, 9.5)
        + " validation loss at iteration 2 | lm loss value: 8.250000E+00 | lm loss PPL: 1 | \n"
        + LINE.format(2, 8.0)
        + LINE.format(2, 7.5)
    )
    curve = plot_loss.read_log(log)
    assert curve.train == [(1, 9.5), (2, 7.5)]
    assert curve.valid == [(2, 8.25)]


def test_writes_a_png(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(LINE.format(1, 9.5) + LINE.format(2, 8.0))
    out = tmp_path / "loss.png"
    done = run(log, "--output", out, "--reference", 6.5)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")


def test_refuses_a_log_without_losses(tmp_path: Path) -> None:
    log = tmp_path / "empty.log"
    log.write_text("nothing here\n")
    done = run(log)
    assert done.returncode != 0
    assert "no training lines" in done.stderr
