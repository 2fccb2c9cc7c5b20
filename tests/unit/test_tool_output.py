"""Programs whose output nobody reads to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.tool_flags import CLOSED_PIPE

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [p for p in ROOT.glob("tools/**/*.py") if "__main__" in p.read_text()]


def with_closed_output(*command):
    """Exit code and complaints of a program, with its output as after `| head -0`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, *command], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    os.close(write)
    return done.returncode, done.stderr


RUN = "from megatron.config.tool_flags import run_tool; "


@pytest.mark.parametrize(
    "body",
    [
        "lambda: print('a line')",  # fails when it is flushed
        "lambda: print('x' * 100_000)",  # fails when it is printed
        "lambda: print('a line', flush=True)",
        "lambda: print('a line') or exit(3)",
    ],
)
def test_it_ends_without_a_word(body):
    assert with_closed_output("-c", f"{RUN}run_tool({body})") == (CLOSED_PIPE, "")


def test_other_pipes_are_not_meant():
    body = "import os; r, w = os.pipe(); os.close(r); run_tool(lambda: os.write(w, b'x'))"
    done = subprocess.run(
        [sys.executable, "-c", RUN + body], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_the_training_program_does_so_too():
    assert with_closed_output("pretrain_gpt.py", "--help") == (CLOSED_PIPE, "")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_every_tool_does_so(path):
    assert path.read_text().endswith('if __name__ == "__main__":\n    run_tool(main)\n'), path
