"""Errors that users see are built by `complaint`, so that all of them have one form."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron.core import errors

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.MegatronError)
}
# Which file a checkpoint's problem is in is all that its class needs; it builds the rest.
BUILDS_THE_FORM = "UnusableCheckpointError"
# Checks of the callers' code, and texts that another message takes up.
INTERNAL = {
    "megatron/core/dist_checkpointing/shard.py": 5,
    "megatron/core/dist_checkpointing/writing.py": 2,
    "megatron/core/datasets/source.py": 1,
}


def bare_texts(path):
    """Lines where a project error is made of a text that `complaint` did not build."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in KINDS - {BUILDS_THE_FORM}
        and node.args
        and isinstance(node.args[0], ast.Constant | ast.JoinedStr | ast.BinOp)
    ]


def test_every_error_has_the_form():
    files = [*ROOT.glob("megatron/**/*.py"), *ROOT.glob("tools/**/*.py")]
    assert len(files) > 100
    found = {str(p.relative_to(ROOT)): bare_texts(p) for p in sorted(files)}
    for name, lines in found.items():
        assert len(lines) == INTERNAL.get(name, 0), f"{name}, lines {lines}"


@pytest.mark.parametrize("ending", ["", "."])
def test_the_form(ending):
    text = errors.complaint("--load", "x", f"It is not there{ending}", f"Name one{ending}")
    assert text == "--load: got x. It is not there. Name one."
    assert str(errors.UnusableCheckpointError(f"a is cut{ending}", "--load-dir", "Get it")) == (
        "--load-dir: got unusable content. a is cut. Get it."
    )
