"""Where numbers go wrong is found on whichever rank it is."""

from __future__ import annotations

import pytest
import torch
from distpool import run_ranks
from parity import BASE, SyntheticSource

from megatron.config import make_config
from megatron.training.initialize import Launch, start
from megatron.training.non_finite import trace
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

LAYOUTS = {
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "dp2": {"use_distributed_optimizer": True},
}
DELAYED = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
FC1 = "decoder.layers.1.mlp.linear_fc1"


def poisoned(rank, world_size, fields, where):
    """What is found after a step in which something in the second layer is wrong on one rank."""
    cfg = make_config(world_size=world_size, **{**BASE, "train_iters": 1, **fields})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    parts = setup_model(cfg, runtime)
    layer = dict(parts.model.named_modules()).get(FC1)
    if layer is not None and runtime.mesh.tp.rank == 0:
        if where == "output" and runtime.mesh.dp.rank == 0:
            layer.register_forward_hook(lambda m, x, y: (y[0] * float("inf"), y[1]))
        if where == "weight":
            with torch.no_grad():
                layer.weight[0, 0] = float("nan")
        if where == "gradient":
            layer.register_full_backward_hook(lambda m, gx, gy: (gx[0] * float("nan"),))
    source = SyntheticSource(cfg, runtime.mesh.dp.size)
    outcome = TrainStep(cfg, runtime, parts, source).run(1, 0)
    before = parts.fp8.book.state_dict()
    found = trace(cfg, runtime, parts, source, 0)
    after = parts.fp8.book.state_dict()
    same = all(torch.equal(after[p][k], v) for p, e in before.items() for k, v in e.items())
    return outcome.update.success, same, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["output", "weight", "gradient"])
def test_the_first_module_is_named_on_every_rank(layout, where):
    fields = LAYOUTS[layout] | DELAYED
    results = run_ranks(poisoned, 2, fields, where, detail=False)
    assert [r[:2] for r in results] == [(False, True)] * 2
    assert results[0][2] == results[1][2]
    found = results[0][2]
    if where == "weight":
        assert found == f"weights that are not finite: {FC1}.weight"
    elif where == "output":
        assert found.startswith(f"first output that is not finite: {FC1}, microbatch 0, rank ")
    else:
        # A layer's own gradients come before what it hands on.
        assert "every output of the forward pass is finite" in found
        assert "decoder.layers.1" in found.partition("first: ")[2].partition(",")[0]
