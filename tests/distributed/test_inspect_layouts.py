"""tools/checkpoint/inspect.py on checkpoints that different layouts saved."""

from __future__ import annotations

import json

from tests.distpool import run_ranks
from tests.trained_parts import make_checkpoint, pass_on
from tools.checkpoint import inspect

WORDS = "embedding.word_embeddings.weight"


def test_layouts_make_no_difference(tmp_path, capsys):
    settings = {"bf16": True, "fp8_format": "hybrid"}
    one, two = tmp_path / "1", tmp_path / "2"
    make_checkpoint(0, 1, one, **settings)
    run_ranks(pass_on, 2, one, two, detail=False, tensor_model_parallel_size=2, **settings)
    inspect.main(["tensors", str(one), "--json"])
    shape = json.loads(capsys.readouterr().out)["tensors"][WORDS]["shape"]
    inspect.main(["tensors", str(two), "--json"])
    other = json.loads(capsys.readouterr().out)["tensors"][WORDS]["shape"]
    assert shape != other  # padded differently
    assert inspect.main(["diff", str(one), str(two)]) == 0
    assert " 0 differ" in capsys.readouterr().out
    assert inspect.main(["config", str(one), str(two)]) == 1
    assert "tensor_model_parallel_size: 1 and 2" in capsys.readouterr().out
