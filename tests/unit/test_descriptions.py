"""Descriptions of tensors are kept as long as the tensors are the same."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from megatron.core.dist_checkpointing.schema import Stacking
from megatron.core.mesh import ParallelState
from megatron.training.descriptions import Descriptions

MESH, STACKING = ParallelState.single(), Stacking(1)


class State:
    owned_ranges: dict = {}

    def __init__(self, model, lends_copies=False):
        self.lends_copies = lends_copies
        self.moments = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def named_state(self):
        for name, tensor in self.moments.items():
            yield name, {"exp_avg": tensor.clone() if self.lends_copies else tensor}


def model_of(described, model):
    return described.model(model, MESH, STACKING, {})[0]


def test_kept_until_a_tensor_is_another():
    described, model = Descriptions(), nn.Linear(3, 2)
    state = State(model)
    first = model_of(described, model), described.optimizer(state, model, MESH, STACKING)
    with torch.no_grad():
        model.weight.fill_(7)
    again = model_of(described, model), described.optimizer(state, model, MESH, STACKING)
    for one, two in zip(first, again, strict=True):
        assert one.keys() == two.keys()
        assert all(one[key] is two[key] for key in one)
    assert torch.all(again[0]["weight"].pieces[0].local == 7)  # live
    again[0].clear()  # the caller's own
    model.weight = nn.Parameter(torch.ones(2, 3))
    state.moments["bias"] = torch.full((2,), 5.0)
    assert torch.equal(model_of(described, model)["weight"].pieces[0].local, torch.ones(2, 3))
    moments = described.optimizer(state, model, MESH, STACKING)
    assert torch.all(moments["optimizer.state.exp_avg.bias"].pieces[0].local == 5)


def test_copies_are_not_kept():
    described, model = Descriptions(), nn.Linear(3, 2)
    state = State(model, lends_copies=True)
    found = described.optimizer(state, model, MESH, STACKING)
    gone = [weakref.ref(piece.local) for shard in found.values() for piece in shard.pieces]
    del found
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    state.moments["bias"].fill_(3)
    found = described.optimizer(state, model, MESH, STACKING)
    assert torch.all(found["optimizer.state.exp_avg.bias"].pieces[0].local == 3)
