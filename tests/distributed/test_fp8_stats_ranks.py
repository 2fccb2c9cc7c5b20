"""Figures of FP8 casts over ranks: the same on all of them, and those of one process."""

from __future__ import annotations

import pytest
from distpool import run_ranks

from megatron.config import make_config
from megatron.core.fp8 import Role
from megatron.training.fp8_watch import collector
from megatron.training.initialize import Launch, start
from megatron.training.parity.ranks import compile_kernels
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.parity import BASE, SyntheticSource

FP8 = {"fp8_format": "hybrid", "fp8_stats_interval": 2, "fp8_stats_samples": 0,
       "train_iters": 2}  # fmt: skip

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "add_bias_linear": False}


def figures(rank, world, fields):
    """Everybody's figures after two steps."""
    cfg = make_config(world_size=world, **{**BASE, **FP8, **fields})
    runtime = start(cfg, Launch(rank, world, rank, world))
    parts = setup_model(cfg, runtime)
    stats = parts.fp8.stats = collector(runtime)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, runtime.mesh.dp.size))
    for i in range(2):
        step.run(i + 1, i * cfg.global_batch_size)
    assert stats.latest_iteration == 2
    return {path: dict(roles) for path, roles in stats.figures.items()}


def one_process(**fields):
    return run_ranks(figures, 1, fields)[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 2}),
        (2, {"context_parallel_size": 2}),
    ],
    ids=["tp", "tp-sp", "pp-dp", "cp"],
)
def test_every_layout_measures_what_one_process_does(world, layout):
    compile_kernels()
    expected = one_process()
    found = run_ranks(figures, world, layout)
    assert all(rank == found[0] for rank in found)
    assert found[0].keys() == expected.keys()
    for path, roles in expected.items():
        assert found[0][path].keys() == roles.keys() == set(Role)
        for role, own in roles.items():
            same_cast(found[0][path][role], own)


def same_cast(ours, expected):
    """fp32: other sums differ by parts in 10**7, which may move an element to the next code."""
    assert ours.amax == pytest.approx(expected.amax, rel=1e-5)
    assert ours.scale == pytest.approx(expected.scale, rel=1e-5)
    assert ours.snr_db == pytest.approx(expected.snr_db, abs=1e-2)
    assert ours.underflow == pytest.approx(expected.underflow, abs=1e-3)
    assert ours.saturated == pytest.approx(expected.saturated, abs=1e-3)
    assert ours.nonfinite == expected.nonfinite == 0
    # What tensor-parallel ranks hold alike counts once for each.
    assert ours.elements in (expected.elements, 2 * expected.elements)


def test_experts_of_other_ranks_are_known_everywhere():
    compile_kernels()
    expected = one_process(**EXPERTS)
    found = run_ranks(figures, 2, {**EXPERTS, "expert_model_parallel_size": 2})
    assert found[0] == found[1]
    assert found[0].keys() == expected.keys()
    experts = [path for path in expected if ".experts." in path]
    assert len(experts) == 2 * 2 * 4
    for path in experts:
        assert found[0][path].keys() == expected[path].keys()
        for role, own in expected[path].items():
            same_cast(found[0][path][role], own)
