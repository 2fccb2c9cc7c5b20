"""Settings that a resumed run may change, and that change what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import RunConfig
from megatron.config.schema import flag_of
from megatron.training.inspection.compare import settings_differences

# Others are refused, have no effect on the result, or are named where they are looked at: the
# learning rate's schedule, the data, FP8.
_RESULTS = (
    "bf16",
    "fp16",
    "clip_grad",
    "hidden_dropout",
    "attention_dropout",
    "eod_mask_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
_OF_OPTIMIZER = {"adam": ("adam_beta1", "adam_beta2", "adam_eps"), "sgd": ("sgd_momentum",)}


def changes(saved: Mapping[str, Any], cfg: RunConfig) -> list[str]:
    """Return one line that names what differs, no line if nothing does.

    Args:
        saved: The settings of the run that saved; what it does not say is not compared.
        cfg: Those of this run.
    """
    names = (*_RESULTS, *_OF_OPTIMIZER.get(cfg.optimizer, ()))
    own = {name: value for name, value in cfg.to_dict().items() if name in names and name in saved}
    found = settings_differences({name: saved[name] for name in own}, own)
    if not found:
        return []
    listed = ", ".join(f"{flag_of(name)} {was} -> {now}" for name, (was, now) in found.items())
    return [f"  NOTE: settings that change the result are other than in the checkpoint: {listed}"]
