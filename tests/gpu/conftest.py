"""Collects what the cases measured; written as JSON to the file in MEGATRON_GPU_REPORT."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

_MEASURED: list[dict[str, object]] = []


@pytest.fixture
def report(request):
    """Call it with what a case returned; it is recorded, and returned."""

    def note(measured):
        _MEASURED.append({"case": request.node.name, **measured})
        return measured

    return note


@pytest.fixture
def device():
    return torch.device("cuda", 0)


def pytest_sessionfinish(session):
    target = os.environ.get("MEGATRON_GPU_REPORT")
    if target and _MEASURED:
        Path(target).write_text(json.dumps(_MEASURED, indent=1) + "\n", encoding="utf-8")
