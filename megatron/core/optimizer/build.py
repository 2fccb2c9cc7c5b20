"""Build the optimizer and its scheduler from the configuration."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core.mesh import ParallelState
from megatron.core.optimizer.compact import CompactAdamW
from megatron.core.optimizer.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from megatron.core.optimizer.lr import LrSchedule, ParamScheduler, WdSchedule
from megatron.core.optimizer.mixed import MixedPrecisionOptimizer, ParamShards, Slot
from megatron.core.optimizer.moments import FP8
from megatron.core.shards import global_name

_MOMENT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": FP8,
}


def _slots(model: torch.nn.Module, shards: ParamShards | None) -> list[Slot]:
    """Make a slot of every trainable parameter, or of what this rank owns of it."""
    slots = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if shards is None:
            master = param if param.dtype == torch.float32 else param.detach().float()
            slots.append(Slot(name, param, master))
            continue
        owned = shards.owned_range(param)
        if owned.size:
            part = param.detach().view(-1)[owned.start : owned.stop]
            slots.append(Slot(name, param, part.float(), owned))
    return slots


def _groups(slots: list[Slot]) -> list[dict[str, Any]]:
    """Put the masters into two groups: with and without weight decay (biases, 1-D parameters)."""
    by_decay: dict[bool, list[torch.Tensor]] = {}
    for slot in slots:
        decayed = slot.param.dim() > 1 and not slot.name.endswith(".bias")
        by_decay.setdefault(decayed, []).append(slot.master)
    if not by_decay:  # this rank updates nothing; schedules still have a group to write into
        by_decay[True] = []
    return [{"params": own, "wd_mult": float(decayed)} for decayed, own in by_decay.items()]


def _apex_adam() -> Any | None:
    """Return NVIDIA apex's FusedAdam, None where it cannot be imported.

    PyPI's package of the name `apex` is an unrelated project; importing it raises ImportError too.
    """
    try:
        from apex.optimizers import FusedAdam  # noqa: PLC0415  (optional package)
    except ImportError:
        return None
    return FusedAdam


def _adam(cfg: RunConfig, slots: list[Slot], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build AdamW with its state in place, so that it can be saved and loaded before a step."""
    common: dict[str, Any] = {
        "lr": cfg.lr,
        "betas": (cfg.adam_beta1, cfg.adam_beta2),
        "eps": cfg.adam_eps,
        "weight_decay": cfg.weight_decay,
    }
    if cfg.use_precision_aware_optimizer:
        dtypes = {
            "exp_avg": _MOMENT_DTYPES[cfg.exp_avg_dtype],
            "exp_avg_sq": _MOMENT_DTYPES[cfg.exp_avg_sq_dtype],
        }
        names = {slot.master: global_name(slot.name, slot.param) for slot in slots}
        return CompactAdamW(groups, dtypes=dtypes, names=names, seed=cfg.seed, **common)
    apex = _apex_adam() if any(slot.param.is_cuda for slot in slots) else None
    inner: torch.optim.Optimizer
    if apex is not None:
        inner = apex(groups, adam_w_mode=True, **common)
        for group in inner.param_groups:
            group["step"] = 0
    else:
        inner = torch.optim.AdamW(groups, fused=True, **common)
    for group in inner.param_groups:
        for master in group["params"]:
            state = inner.state[master]
            if apex is None:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
    return inner


def _sgd(cfg: RunConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build SGD; its momentum buffers start at zero, which equals the usual first step."""
    on_paper = any(master.is_meta for group in groups for master in group["params"])
    inner = torch.optim.SGD(
        groups,
        lr=cfg.lr,
        momentum=cfg.sgd_momentum,
        weight_decay=cfg.weight_decay,
        fused=not on_paper,  # its fused kernel has no shapes
    )
    if cfg.sgd_momentum:
        for group in inner.param_groups:
            for master in group["params"]:
                inner.state[master]["momentum_buffer"] = torch.zeros_like(master)
    return inner


def build_loss_scale(cfg: RunConfig) -> LossScale:
    """Return a dynamic loss scale for FP16 without ``--loss-scale``, else a constant one."""
    if cfg.loss_scale is not None:
        return ConstantLossScale(cfg.loss_scale)
    if not cfg.fp16:
        return ConstantLossScale()
    return DynamicLossScale(
        initial=cfg.initial_loss_scale,
        minimum=cfg.min_loss_scale,
        window=cfg.loss_scale_window,
        hysteresis=cfg.hysteresis,
    )


def build_optimizer(
    cfg: RunConfig,
    model: torch.nn.Module,
    mesh: ParallelState,
    shards: ParamShards | None = None,
) -> MixedPrecisionOptimizer:
    """Build the optimizer over the trainable parameters of `model`.

    Args:
        cfg: The run's configuration.
        model: The bare model, so that names are checkpoint names. Each trainable parameter has a
            fp32 `main_grad` by the time of the first step.
        mesh: The process mesh.
        shards: Which elements this rank updates (the distributed optimizer); None for all.
    """
    slots = _slots(model, shards)
    groups = _groups(slots)
    tokens = float(cfg.seq_length * cfg.micro_batch_size * cfg.num_microbatches)
    inner = _sgd(cfg, groups) if cfg.optimizer == "sgd" else _adam(cfg, slots, groups)
    return MixedPrecisionOptimizer(
        slots,
        inner,
        mesh=mesh,
        loss_scale=build_loss_scale(cfg),
        loss_divisor=tokens if cfg.fp16 else 1.0,
        clip_grad=cfg.clip_grad,
        count_zeros=cfg.log_num_zeros_in_grad,
        skip_non_finite=cfg.check_for_nan_in_loss_and_grad or cfg.fp16,
        shards=shards,
        device=next((p.device for p in model.parameters()), None),
    )


def build_scheduler(cfg: RunConfig, optimizer: MixedPrecisionOptimizer) -> ParamScheduler:
    """Build the scheduler of `optimizer` from iterations or samples, whichever the run counts."""
    batch = cfg.global_batch_size
    if cfg.train_samples is not None:
        decay = cfg.lr_decay_samples or cfg.train_samples
        total = cfg.train_samples
        warmup: float = cfg.lr_warmup_samples
        wsd = cfg.lr_wsd_decay_samples or 0
    else:
        decay = (cfg.lr_decay_iters or cfg.train_iters) * batch
        total = cfg.train_iters * batch
        warmup = cfg.lr_warmup_iters * batch
        wsd = (cfg.lr_wsd_decay_iters or 0) * batch
    if cfg.lr_warmup_fraction is not None:
        warmup = cfg.lr_warmup_fraction * decay
    constant = cfg.weight_decay_incr_style == "constant"
    return ParamScheduler(
        optimizer.param_groups,
        LrSchedule(
            max_lr=cfg.lr,
            min_lr=cfg.min_lr,
            warmup_init=cfg.lr_warmup_init,
            warmup_samples=warmup,
            decay_samples=decay,
            style=cfg.lr_decay_style,
            wsd_style=cfg.lr_wsd_decay_style,
            wsd_decay_samples=wsd,
        ),
        WdSchedule(
            start=cfg.weight_decay if constant else cfg.start_weight_decay,
            end=cfg.weight_decay if constant else cfg.end_weight_decay,
            incr_samples=total,
            style=cfg.weight_decay_incr_style,
        ),
        override=cfg.override_opt_param_scheduler,
        use_checkpoint=cfg.use_checkpoint_opt_param_scheduler,
    )
