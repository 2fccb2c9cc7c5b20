"""The quickstart's steps: skipped when nothing changed, continued or begun anew otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "quickstart", Path(__file__).resolve().parents[2] / "tools" / "quickstart.py"
)
quickstart = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(quickstart)

# Adds a line to a file in the folder; fails as long as there are fewer lines than asked for.
APPEND = """
import pathlib, sys
folder, wanted = pathlib.Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(exist_ok=True)
with (folder / "lines").open("a") as file:
    file.write("x\\n")
sys.exit(len((folder / "lines").read_text().split()) < wanted)
"""


@pytest.fixture
def step(tmp_path):
    steps, folder = quickstart.Steps(tmp_path), tmp_path / "out"

    def run(wanted):
        """Run the step and return how many lines it has written into its folder."""
        command = [sys.executable, "-S", "-c", APPEND, str(folder), str(wanted)]
        with contextlib.suppress(SystemExit):
            steps.run("some step", command, outputs=[folder / "lines"], folder=folder)
        return len((folder / "lines").read_text().split())

    return run


def test_a_finished_step_is_skipped(step):
    assert [step(1), step(1)] == [1, 1]


def test_an_interrupted_step_continues(step):
    assert [step(2), step(2), step(2)] == [1, 2, 2]


def test_another_command_begins_with_an_empty_folder(step):
    assert [step(3), step(3), step(1)] == [1, 2, 1]


def test_a_missing_output_is_made_again(step, tmp_path):
    step(1)
    (tmp_path / "out" / "lines").unlink()
    assert step(1) == 1


def test_a_command_is_shown_as_a_shell_takes_it():
    words = [sys.executable, f"{quickstart.ROOT}/x", "--prompt", "def f(a):\n"]
    assert shlex.split(quickstart._shown(words))[1:] == ["x", "--prompt", "def f(a):\n"]


@pytest.mark.parametrize("there", [False, True])
def test_tensorboard_is_used_where_it_is_installed(there, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None)
    assert ("--tensorboard-dir" in quickstart.training(tmp_path, tmp_path)) == there


def test_the_last_validation_loss_counts(tmp_path):
    log = tmp_path / "log"
    line = "validation loss at iteration {} | lm loss value: {} | lm loss PPL: 1.0E+00 |\n"
    log.write_text(line.format(10, "3.500000E+00") + "noise\n" + line.format(20, "2.500000E+00"))
    assert quickstart.last_validation_loss(log) == 2.5
    log.write_text("nothing")
    with pytest.raises(SystemExit, match="no validation loss"):
        quickstart.last_validation_loss(log)
