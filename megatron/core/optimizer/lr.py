"""Learning rate and weight decay as functions of the number of training samples.

Both schedules count samples, not iterations, so that a change of the global batch size does not
bend them. A skipped optimizer step does not advance them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.errors import CheckpointError, complaint

Group = dict[str, Any]


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate over samples: warm-up, decay, floor.

    Attributes:
        max_lr: Value at the end of the warm-up.
        min_lr: Value from the end of the decay on.
        warmup_init: Value at sample 0.
        warmup_samples: Length of the linear warm-up.
        decay_samples: Sample at which `min_lr` is reached.
        style: constant, linear, cosine, inverse-square-root or WSD.
        wsd_style: Shape of the last phase of WSD: exponential, linear, cosine or minus_sqrt.
        wsd_decay_samples: Length of the last phase of WSD.
    """

    max_lr: float
    min_lr: float = 0.0
    warmup_init: float = 0.0
    warmup_samples: float = 0
    decay_samples: float = 1
    style: str = "linear"
    wsd_style: str = "exponential"
    wsd_decay_samples: float = 0

    def value(self, samples: int) -> float:
        """Return the learning rate after the steps taken so far have used `samples` samples."""
        top, floor = self.max_lr, self.min_lr
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.warmup_init + (top - self.warmup_init) * samples / self.warmup_samples
        if self.style == "constant":
            return top
        if samples > self.decay_samples:
            return floor
        if self.style == "inverse-square-root":
            return max(
                floor, top * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(samples, 1))
            )
        return floor + self._coefficient(samples) * (top - floor)

    def effective(self) -> dict[str, Any]:
        """Return the fields that have an influence on the learning rate."""
        fields = asdict(self)
        if self.style != "WSD":
            del fields["wsd_style"], fields["wsd_decay_samples"]
        if self.style == "constant":
            del fields["min_lr"], fields["decay_samples"]
        return fields

    def _coefficient(self, samples: int) -> float:
        """Return what is left of the span between floor and top, 1 at its start, 0 at its end."""
        if self.style == "WSD":
            start = self.decay_samples - self.wsd_decay_samples
            if samples <= start:
                return 1.0
            return _wsd_coefficient(self.wsd_style, (samples - start) / self.wsd_decay_samples)
        span = self.decay_samples - self.warmup_samples
        ratio = (samples - self.warmup_samples) / span if span > 0 else 1.0
        return 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)


def _wsd_coefficient(style: str, t: float) -> float:
    """Return the coefficient of the last WSD phase at `t` in (0, 1]."""
    if style == "linear":
        return 1.0 - t
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * t) + 1.0)
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(t)
    return 2.0 * math.pow(0.5, t) - 1.0


@dataclass(frozen=True)
class WdSchedule:
    """Weight decay over samples: constant, or a ramp from `start` to `end`."""

    start: float
    end: float
    incr_samples: float
    style: str = "constant"

    def effective(self) -> dict[str, Any]:
        """Return the fields that have an influence on the weight decay."""
        if self.style == "constant":
            return {"end": self.end, "style": self.style}
        return asdict(self)

    def value(self, samples: int) -> float:
        """Return the weight decay after `samples` samples."""
        if self.style == "constant" or samples > self.incr_samples:
            return self.end
        ratio = samples / self.incr_samples if self.incr_samples else 1.0
        if self.style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start + ratio * (self.end - self.start)


# What a checkpoint compares, and the flag that a message names for it.
_LR_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_init": "--lr-warmup-init",
    "warmup_samples": "--lr-warmup-iters/-samples/-fraction",
    "decay_samples": "--lr-decay-iters/-samples",
    "style": "--lr-decay-style",
    "wsd_style": "--lr-wsd-decay-style",
    "wsd_decay_samples": "--lr-wsd-decay-iters/-samples",
}
_WD_FLAGS = {
    "start": "--start-weight-decay/--weight-decay",
    "end": "--end-weight-decay/--weight-decay",
    "incr_samples": "--train-iters/-samples",
    "style": "--weight-decay-incr-style",
}


class ParamScheduler:
    """Writes `lr` and `weight_decay` of an optimizer's parameter groups.

    A group may carry the factors `lr_mult` and `wd_mult`.

    Args:
        groups: The optimizer's parameter groups; they are changed in place.
        lr: Learning rate schedule.
        wd: Weight decay schedule.
        override: Keep these schedules when a checkpoint holds others.
        use_checkpoint: Take over the schedules of a checkpoint.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        lr: LrSchedule,
        wd: WdSchedule,
        *,
        override: bool = False,
        use_checkpoint: bool = False,
    ) -> None:
        self.groups = list(groups)
        self.lr, self.wd = lr, wd
        self.override, self.use_checkpoint = override, use_checkpoint
        self.num_samples = 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and write the values into the groups."""
        self.num_samples += increment
        rate, decay = self.lr.value(self.num_samples), self.wd.value(self.num_samples)
        for group in self.groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = decay * group.get("wd_mult", 1.0)

    def learning_rate(self) -> float:
        """Return the learning rate of groups without a factor."""
        return self.lr.value(self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and both schedules as plain values."""
        return {"num_samples": self.num_samples, "lr": asdict(self.lr), "wd": asdict(self.wd)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: The checkpoint's schedule differs from this run's and neither
                ``--override-opt_param-scheduler`` nor ``--use-checkpoint-opt_param-scheduler``
                says which one counts.
        """
        if self.use_checkpoint:
            self.lr, self.wd = LrSchedule(**state["lr"]), WdSchedule(**state["wd"])
        elif not self.override:
            saved_lr, saved_wd = LrSchedule(**state["lr"]), WdSchedule(**state["wd"])
            _refuse_difference(saved_lr.effective(), self.lr.effective(), _LR_FLAGS)
            _refuse_difference(saved_wd.effective(), self.wd.effective(), _WD_FLAGS)
        self.num_samples = 0
        self.step(int(state["num_samples"]))


def _refuse_difference(
    saved: Mapping[str, Any], own: Mapping[str, Any], flags: Mapping[str, str]
) -> None:
    """Raise at the first field that both schedules have and that differs.

    The style is compared first: with different styles the other fields say little.
    """
    for name in sorted(own, key=lambda n: n != "style"):
        if name in saved and saved[name] != own[name]:
            # Lengths given in steps were converted with the global batch size.
            unit = " samples" if name.endswith("_samples") else ""
            raise CheckpointError(
                complaint(
                    flags[name],
                    f"{own[name]}{unit}",
                    f"The checkpoint was trained with {saved[name]}{unit}",
                    "Pass --override-opt_param-scheduler to use the new value or "
                    "--use-checkpoint-opt_param-scheduler to keep the old one",
                )
            )
