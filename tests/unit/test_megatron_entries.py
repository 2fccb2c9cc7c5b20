"""What Megatron-LM continues our optimizer with: its own entries, which read back are ours."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron.core.optimizer.loss_scale import DynamicLossScale
from megatron.core.optimizer.lr import LrSchedule, ParamScheduler, WdSchedule
from megatron.training import foreign_state, megatron_entries
from tests.small_models import small_config

# How Megatron-LM tells its groups apart.
IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
DENSE = [(1.0, 1.0, False, False), (0.0, 1.0, False, False)]
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8,
           "add_bias_linear": False}  # fmt: skip


def entries(scaler=None, **settings):
    scale = scaler.state_dict() if scaler else {}
    schedule = ParamScheduler([{}], LrSchedule(4e-3, 1e-4), WdSchedule(0.1, 0.1, 9)).state_dict()
    return megatron_entries.entries(small_config(**settings), {"step": 7, **scale}, schedule)


def identities(optimizer):
    return [tuple(g[name] for name in IDENTITY) for g in optimizer["optimizer"]["param_groups"]]


def test_groups_are_those_of_megatron_lm():
    found = entries(adam_beta2=0.95, weight_decay=0.1)["optimizer"]
    assert identities(found) == DENSE
    assert found["param_state_sharding_type"] == "fully_reshardable"
    first, second = found["optimizer"]["param_groups"]
    assert (first["betas"], first["weight_decay"], second["weight_decay"]) == ((0.9, 0.95), 0.1, 0)
    assert (first["step"], first["max_lr"], first["min_lr"]) == (7, 4e-3, 1e-4)


def test_experts_have_an_optimizer_of_their_own():
    """If there is expert parallelism; else they are in the one for all."""
    assert identities(entries(**EXPERTS)["optimizer"]) == DENSE
    found = entries(**EXPERTS, world_size=2, expert_model_parallel_size=2)
    assert found["content_metadata"]["chained_optim_avoid_prefix"]
    assert identities(found["optimizer"][0]) == DENSE
    assert identities(found["optimizer"][1]) == [(1.0, 1.0, True, False)]


@pytest.mark.parametrize(
    "settings", [{}, {**EXPERTS, "world_size": 2, "expert_model_parallel_size": 2}]
)
def test_read_as_theirs_they_are_ours(settings):
    scaler = DynamicLossScale(initial=512.0)
    scaler.update(True)
    found = entries(scaler, fp16=True, **settings)
    assert foreign_state.optimizer_scalars(found) == {"step": 7, **scaler.state_dict()}
    theirs = {k: v for k, v in found["opt_param_scheduler"].items() if k not in ("lr", "wd")}
    own = ParamScheduler([{}], LrSchedule(1.0), WdSchedule(0, 1, 1)).state_dict()
    back = foreign_state.schedule_here(theirs, own, {"args": argparse.Namespace()}, Path("ckpt"))
    assert back == {k: found["opt_param_scheduler"][k] for k in ("lr", "wd", "num_samples")}


def test_no_entry_for_what_megatron_lm_would_not_continue():
    assert "optimizer" not in entries(optimizer="sgd")
    none = megatron_entries.entries(small_config(), None, None)
    assert "optimizer" not in none
    assert none["opt_param_scheduler"] is None
