"""What Megatron-LM looks up beside the tensors of a checkpoint, to continue with its optimizer.

The tensors are those of its distributed optimizer in the form ``fully_reshardable`` already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.training.foreign_state import LR_NAMES, SCALER_NAMES, WD_NAMES

_FORM = "fully_reshardable"
# How Megatron-LM names the optimizer's tensors: those of experts like all others.
_CONTENT = {
    "distrib_optim_sharding_type": _FORM,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def entries(
    cfg: RunConfig, scalars: Mapping[str, Any] | None, schedule: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return Megatron-LM's entries for optimizer and schedule.

    Args:
        cfg: The configuration.
        scalars: Step count and loss scale; None without an optimizer.
        schedule: The schedule's state, None without; it stands beside Megatron-LM's names for it.
    """
    found: dict[str, Any] = {"content_metadata": dict(_CONTENT), "opt_param_scheduler": schedule}
    if schedule is not None:
        found["opt_param_scheduler"] = {**schedule, **_schedule(schedule)}
    if scalars is not None and cfg.optimizer == "adam":
        found["optimizer"] = _optimizer(cfg, scalars, (schedule or {}).get("lr") or {})
    return found


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    lr = {name: state["lr"][field] for name, field in LR_NAMES.items()}
    wd = {name: state["wd"][field] for name, field in WD_NAMES.items()}
    return {**lr, **wd, "num_steps": state["num_samples"]}


def _optimizer(cfg: RunConfig, scalars: Mapping[str, Any], lr: Mapping[str, Any]) -> dict[Any, Any]:
    """Hyperparameters by group, and the loss scale, of one optimizer or, by number, of two.

    Experts have the second where there is expert parallelism. Megatron-LM's schedule writes rate
    and decay of the next step into the groups.
    """
    common = {
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": lr.get("max_lr", cfg.lr),
        "min_lr": lr.get("min_lr", cfg.min_lr),
        "lr": cfg.lr,
        "betas": (cfg.adam_beta1, cfg.adam_beta2),
        "eps": cfg.adam_eps,
        "bias_correction": True,
        "step": scalars["step"],
    }

    def optimizer(experts: bool, factors: tuple[float, ...]) -> dict[str, Any]:
        groups = [
            {"wd_mult": f, "weight_decay": f * cfg.weight_decay, "is_expert_parallel": experts}
            for f in factors
        ]
        entry: dict[str, Any] = {
            "optimizer": {"param_groups": [{**common, **group} for group in groups]},
            "param_state_sharding_type": _FORM,
        }
        scaler = {name: scalars[own] for name, own in SCALER_NAMES.items() if own in scalars}
        if scaler:
            entry["grad_scaler"] = {**scaler, "scale": torch.tensor([scaler["scale"]])}
        return entry

    dense = optimizer(False, (1.0, 0.0))  # norms and biases do not decay
    if cfg.num_experts is None or cfg.expert_model_parallel_size == 1:
        return dense
    return {0: dense, 1: optimizer(True, (1.0,))}  # experts have matrices only
