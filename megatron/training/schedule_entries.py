"""Step counts, loss scale and schedules out of a checkpoint, ours or Megatron-LM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.config import RunConfig
from megatron.core.errors import CheckpointError, complaint
from megatron.training import foreign_state


class _Optimizer(Protocol):
    def load_scalars(self, values: Mapping[str, Any]) -> None: ...


class _Scheduler(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def load_schedule(
    cfg: RunConfig,
    common: Mapping[str, Any],
    directory: Path,
    optimizer: _Optimizer | None,
    scheduler: _Scheduler | None,
    note: Callable[[str], None],
) -> None:
    """Continue with the checkpoint's step counts, loss scale and place in the schedule.

    With ``--no-load-optim`` nothing is taken over, as in Megatron-LM, but for the schedule that
    ``--use-checkpoint-opt_param-scheduler`` asks for.

    Args:
        cfg: The configuration.
        common: The entry that all ranks share.
        directory: The checkpoint.
        optimizer: None to leave it alone.
        scheduler: None to leave it alone.
        note: Receives the lines to show.

    Raises:
        CheckpointError: Something is missing, or two schedules differ and no flag says which one
            counts.
    """
    if optimizer is not None and not cfg.no_load_optim:
        optimizer.load_scalars(_scalars(cfg, common, directory))
    wanted = cfg.use_checkpoint_opt_param_scheduler
    if scheduler is None or (cfg.no_load_optim and not wanted):
        return
    state = common.get("opt_param_scheduler")
    if state is not None and "lr" not in state:
        state = foreign_state.schedule_here(state, scheduler.state_dict(), common, directory)
    if state is not None:
        scheduler.load_state_dict(state)
    elif wanted:
        raise CheckpointError(
            complaint(
                "--use-checkpoint-opt_param-scheduler",
                f"{directory}, which has no opt_param_scheduler",
                "The schedule that it was trained with is not known",
                "Say the schedule with --lr and --lr-decay-style, without this flag",
            )
        )
    else:
        note("  NOTE: the schedule starts anew: the checkpoint has no opt_param_scheduler")


def _scalars(cfg: RunConfig, common: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    scalars = common.get("optimizer_scalars") or foreign_state.optimizer_scalars(common)
    if scalars is None and cfg.optimizer == "adam":
        raise CheckpointError(
            complaint(
                "--load",
                f"{directory}, whose optimizer entry has no step count",
                "Adam corrects its moments by it",
                "Pass --no-load-optim or --finetune to load the weights alone",
            )
        )
    return scalars or {"step": 0}
