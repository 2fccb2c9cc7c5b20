"""A snapshot brings a device's state back, as a function of the device."""

from __future__ import annotations

import torch

from megatron.config import make_config
from megatron.core.datasets.source import Source
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.snapshot import Snapshot, changing_tensors
from megatron.training.step import TrainStep
from tests.spikes import BATCH, RUN, Samples


def elements_that_differ(device: torch.device, *, on_device: bool) -> dict[str, float]:
    """Train, take a snapshot, train on and return: how many elements of the state differ."""
    settings = {**RUN, "bf16": True, "fp8_format": "hybrid", "device": device.type}
    runtime = start(make_config(**settings), Launch())
    parts = setup_model(runtime.config, runtime)
    source = Source(Samples(), micro_batch_size=BATCH, data_parallel_size=1)
    step = TrainStep(runtime.config, runtime, parts, source)
    step.run(1, 0)
    snapshot = Snapshot(parts, on_device=on_device)
    snapshot.take({})
    tensors = [*parts.model.parameters(), *changing_tensors(parts)]
    before = [one.detach().clone() for one in tensors]
    step.run(2, BATCH)
    changed = sum(int((a != b).sum()) for a, b in zip(before, tensors, strict=True))
    snapshot.restore()
    left = sum(int((a != b).sum()) for a, b in zip(before, tensors, strict=True))
    return {"changed_by_training": changed, "left_after_return": left}
