"""A model that holds NaN is no wrong conversion."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.core.errors import CheckpointError
from megatron.training import hf_verify
from megatron.training.hf_rows import OUTSIDE

NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        ([1.0, NAN], [1.0, NAN], "NaN in norm.weight .model.norm.weight.*there before"),
        ([1.0, NAN], [2.0, NAN], "The conversion is wrong"),
        ([1.0, NAN], [1.0, 2.0], "The conversion is wrong"),
        ([NAN, 1.0], [1.0, NAN], "The conversion is wrong"),
        ([1.0, 2.0], [1.0, NAN], "The conversion is wrong"),
    ],
)
def test_nan_on_both_sides_is_named(ours, theirs, says, monkeypatch):
    row = SimpleNamespace(key="norm.weight", names=["model.norm.weight"], dtype=None)
    monkeypatch.setattr(hf_verify, "every_tensor", lambda rows, layers: [(row, OUTSIDE)])
    one = SimpleNamespace(read=lambda *_: torch.tensor(ours))
    other = SimpleNamespace(
        read=lambda *_: torch.tensor(theirs), rows=lambda: [], fields={"num_layers": 1}
    )
    with pytest.raises(CheckpointError, match=says):
        hf_verify._compare_tensors(one, other, torch.float32)
