"""Layers named for profilers: real records on the CPU, and NVTX through a stand-in."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.config import make_config
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.parity import BASE, SyntheticSource

FP8 = {"bf16": True, "fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers": 3}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 1}  # fmt: skip
FC1 = "decoder.layers.1.mlp.linear_fc1"


class RecordingNvtx:
    """Stands in for `torch.cuda.nvtx`, which needs a CUDA build: notes calls, draws nothing."""

    def __init__(self):
        self.open, self.seen = [], []

    def range_push(self, name):
        self.open.append(name)
        self.seen.append(tuple(self.open))

    def range_pop(self):
        self.open.pop()


def step_of(**fields):
    cfg = make_config(**{**BASE, "train_iters": 2, "nvtx_ranges": True, **fields})
    runtime = start(cfg, Launch())
    parts = setup_model(cfg, runtime)
    return parts.fp8, TrainStep(cfg, runtime, parts, SyntheticSource(cfg, 1))


def test_torch_profiler_shows_every_layer_with_its_precision():
    _, step = step_of(**FP8)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step.run(1, 0)
    names = {event.key: event.count for event in found.key_averages()}
    microbatches = 4
    assert names[f"{FC1} forward [fp8 e4m3xe4m3 delayed]"] == microbatches
    assert names[f"{FC1} backward [fp8 e5m2xe4m3 delayed]"] == microbatches
    assert names["decoder.layers.0.mlp.linear_fc1 forward [bf16]"] == microbatches
    assert names["decoder.layers.0.mlp.linear_fc1 backward [bf16]"] == microbatches
    assert names["decoder.layers.1.self_attention.core_attention forward [bf16]"] == microbatches
    assert names["decoder.layers.1 forward"] == microbatches


@pytest.mark.parametrize(
    "fields",
    [
        FP8,
        {**FP8, **RECOMPUTE},
        {**FP8, "num_experts": 4, "moe_ffn_hidden_size": 32, "add_bias_linear": False},
    ],
    ids=["plain", "recompute", "experts"],
)
def test_ranges_are_nested_and_closed_and_change_nothing(fields):
    fp8, step = step_of(**fields)
    nvtx = fp8.ranges._nvtx = RecordingNvtx()
    loss = step.run(1, 0).loss
    assert nvtx.open == []
    inside = "decoder.layers.1.mlp forward"
    assert any(inside in stack and stack[-1].startswith(FC1[:20]) for stack in nvtx.seen)
    backward = [stack for stack in nvtx.seen if "backward" in stack[-1]]
    assert backward
    assert all(len(stack) == 1 for stack in backward)
    assert step_of(**{**fields, "nvtx_ranges": False})[1].run(1, 0).loss == loss


def test_off_by_default_leaves_no_hooks():
    fp8, step = step_of(**FP8, nvtx_ranges=False)
    assert fp8.ranges is None
    assert not any(m._forward_pre_hooks for m in step.parts.model.modules())


def test_a_layer_without_gradients_has_no_backward_to_name():
    fp8, step = step_of(**FP8)
    nvtx = fp8.ranges._nvtx = RecordingNvtx()
    cfg = step.parts.model.config
    tokens = torch.zeros(1, cfg.seq_length, dtype=torch.long)
    with torch.no_grad():
        step.parts.model(tokens, torch.arange(cfg.seq_length)[None])
    assert nvtx.open == []
    assert not any("backward" in stack[-1] for stack in nvtx.seen)
