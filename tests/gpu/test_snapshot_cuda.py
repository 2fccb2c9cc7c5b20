"""Snapshots of a model on CUDA, in pinned host memory and on the device."""

from __future__ import annotations

import pytest

from tests.gpu.snapshot_cases import elements_that_differ

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_snapshot_brings_every_element_back(device, report, on_device):
    measured = report(elements_that_differ(device, on_device=on_device))
    assert measured["changed_by_training"] > 1000
    assert measured["left_after_return"] == 0
