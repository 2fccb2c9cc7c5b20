"""Warm imports, which the forked ranks inherit; a checkpoint of a small run."""

from __future__ import annotations

import os

import pytest
import sympy  # noqa: F401
import torch._dynamo
import torch.distributed.tensor  # noqa: F401

import megatron.training.failures
import megatron.training.trainer  # noqa: F401
from tests.e2e.refusals import MOCK, accepted


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A save directory with iterations 1 and 2; tests must leave it as it is."""
    root = tmp_path_factory.mktemp("saved") / "ckpt"
    accepted([*MOCK, "--save", root, "--save-interval", "1"])
    assert {"iter_0000001", "iter_0000002"} < set(os.listdir(root))
    return root
