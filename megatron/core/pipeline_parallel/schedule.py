"""A pipeline schedule as data: a list that can be printed, parsed, compared and executed.

No torch in here. `runner.py` is the one loop that executes what `generate` returns.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.errors import MegatronError, complaint


class Op(enum.Enum):
    """What one action does."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GRAD_SYNC = "GRAD_SYNC"
    AMAX_SYNC = "AMAX_SYNC"

    @property
    def per_microbatch(self) -> bool:
        """Whether the operation belongs to one microbatch rather than to the whole step."""
        return self not in (Op.GRAD_SYNC, Op.AMAX_SYNC)


_TEXT = re.compile(r"(\d+)([A-Z][A-Z_]*)(\d*)")


@dataclass(frozen=True)
class Action:
    """One operation of one stage.

    The text form is stage, operation, microbatch: ``2SEND_F1``; ``0GRAD_SYNC`` has no microbatch.

    Attributes:
        stage: Index of the model chunk, 0 for the first one.
        op: What to do.
        microbatch: Index of the microbatch, None for operations of the whole step.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.op.per_microbatch != (self.microbatch is not None):
            raise MegatronError(
                complaint(
                    f"action {self.op.value}",
                    f"microbatch {self.microbatch}",
                    "F, B, SEND_* and RECV_* name a microbatch and *_SYNC do not",
                    "Add or remove the microbatch",
                )
            )

    def __str__(self) -> str:
        """Return the text form."""
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            MegatronError: The text is not an action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in Op.__members__:
            raise MegatronError(
                complaint(
                    "action",
                    text,
                    "It is not <stage><operation><microbatch>",
                    f"Use one of the operations {' '.join(Op.__members__)}, as in 2SEND_F1",
                )
            )
        return cls(int(match[1]), Op[match[2]], int(match[3]) if match[3] else None)


Schedule = list[list[Action]]

KINDS = ("1f1b", "gpipe")


def generate(
    num_microbatches: int,
    *,
    pipeline_size: int = 1,
    virtual_size: int = 1,
    kind: str = "1f1b",
    group_size: int | None = None,
    training: bool = True,
) -> Schedule:
    """Return what every pipeline rank computes in one step, in order; `lower` adds the transfers.

    Stage `s` of `pipeline_size * virtual_size` stages lives on rank `s % pipeline_size`.

    Args:
        num_microbatches: Microbatches of the step.
        pipeline_size: Ranks of the pipeline.
        virtual_size: Stages of each rank; more than one interleaves them.
        kind: `1f1b` runs a backward pass as soon as it can, `gpipe` after every forward pass.
        group_size: Microbatches that a rank runs through one of its stages before it turns to the
            next one; default `pipeline_size`.
        training: Whether backward passes and the synchronisations at the end are wanted.

    Raises:
        MegatronError: There is no such schedule.

    Source: GPipe: Huang et al., 2019. 1F1B: Narayanan et al., "PipeDream", 2019. Interleaving:
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021.
    """
    group = group_size or pipeline_size
    _check(num_microbatches, pipeline_size, virtual_size, kind, group)
    order = _table(num_microbatches, virtual_size, group)
    schedule: Schedule = []
    for rank in range(pipeline_size):
        forward = [Action(c * pipeline_size + rank, Op.F, m) for c, m in order]
        if not training:
            schedule.append(forward)
            continue
        backward = [
            Action((virtual_size - 1 - c) * pipeline_size + rank, Op.B, m) for c, m in order
        ]
        warmup = len(forward)
        if kind == "1f1b":
            warmup = min(warmup, _warmup(rank, pipeline_size, virtual_size, group))
        actions = forward[:warmup]
        for one_forward, one_backward in zip(forward[warmup:], backward, strict=False):
            actions += [one_forward, one_backward]
        actions += backward[len(forward) - warmup :]
        schedule.append([*actions, Action(rank, Op.GRAD_SYNC), Action(rank, Op.AMAX_SYNC)])
    return schedule


def _check(microbatches: int, pipeline: int, virtual: int, kind: str, group: int) -> None:
    """Refuse what no schedule can be made of."""
    if kind not in KINDS:
        raise MegatronError(
            complaint("--pipeline-schedule", kind, "Unknown", f"Use {' or '.join(KINDS)}")
        )
    for name, value in (
        ("microbatches", microbatches),
        ("--pipeline-model-parallel-size", pipeline),
        ("--num-virtual-stages-per-pipeline-rank", virtual),
    ):
        if value < 1:
            raise MegatronError(complaint(name, value, "There is at least one", "Use 1 or more"))
    if virtual == 1:
        return
    if pipeline == 1 or kind != "1f1b":
        raise MegatronError(
            complaint(
                "--num-virtual-stages-per-pipeline-rank",
                f"{virtual} with {pipeline} rank(s) and schedule {kind}",
                "Stages are interleaved over several ranks, by the schedule 1f1b",
                "Use more ranks and 1f1b, or one stage a rank",
            )
        )
    why = group_problem(microbatches, pipeline, group)
    if why:
        raise MegatronError(
            complaint(
                "--microbatch-group-size-per-virtual-pipeline-stage",
                f"{group} with {microbatches} microbatches",
                why,
                f"Use {pipeline} and a multiple of it as the number of microbatches",
            )
        )


def group_problem(microbatches: int, pipeline: int, group: int) -> str:
    """Say why microbatches cannot be interleaved in such groups; empty if they can."""
    if not pipeline <= group <= max(microbatches, pipeline):
        return f"A group holds at least one microbatch a rank, {pipeline}, and no more than all"
    rest = microbatches % group
    if rest and rest < pipeline:
        return (
            f"The last group has {rest} microbatches, and a rank that turns to its next stage "
            f"would wait for {pipeline - rest} that do not exist"
        )
    return ""


def _table(microbatches: int, virtual: int, group: int) -> list[tuple[int, int]]:
    """Order in which a rank runs (its stage, microbatch) forward."""
    return [
        (chunk, microbatch)
        for first in range(0, microbatches, group)
        for chunk in range(virtual)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def _warmup(rank: int, pipeline: int, virtual: int, group: int) -> int:
    """Forward passes of a rank before its first backward pass can start."""
    if virtual == 1:
        return pipeline - rank - 1
    return 2 * (pipeline - rank - 1) + (virtual - 1) * group


def lower(schedule: Schedule) -> Schedule:
    """Add the transfers between stages to what `generate` returned.

    A result is sent right after it is computed and received right before it is needed. Sends do not
    block, so that is as early as it can be without a second buffer.
    """
    size = len(schedule)
    last = max((a.stage for actions in schedule for a in actions), default=0)
    lowered: Schedule = []
    for actions in schedule:
        out: list[Action] = []
        for action in actions:
            stage, microbatch = action.stage, action.microbatch
            if action.op is Op.F and size > 1:
                before = [Action(stage, Op.RECV_F, microbatch)] if stage > 0 else []
                after = [Action(stage, Op.SEND_F, microbatch)] if stage < last else []
            elif action.op is Op.B and size > 1:
                before = [Action(stage, Op.RECV_B, microbatch)] if stage < last else []
                after = [Action(stage, Op.SEND_B, microbatch)] if stage > 0 else []
            else:
                before, after = [], []
            out += [*before, action, *after]
        lowered.append(out)
    return lowered


@dataclass(frozen=True)
class Transfer:
    """The two ends of what a SEND or RECV action takes part in.

    Attributes:
        channel: `forward`, `backward`, or the same with `_wrap` for the edge from the last rank
            back to the first one, which only interleaved stages use.
        sender: Pipeline rank that sends.
        receiver: Pipeline rank that receives.
        parcel: What travels, e.g. `F3 to stage 2`; equal on both ends.
    """

    channel: str
    sender: int
    receiver: int
    parcel: str


def transfer_of(action: Action, pipeline_size: int) -> Transfer:
    """Describe the transfer behind a SEND or RECV action."""
    forward = action.op in (Op.SEND_F, Op.RECV_F)
    sends = action.op in (Op.SEND_F, Op.SEND_B)
    step = 1 if forward else -1
    source = action.stage if sends else action.stage - step
    target = source + step
    sender, receiver = source % pipeline_size, target % pipeline_size
    wraps = min(source, target) % pipeline_size == pipeline_size - 1
    channel = ("forward" if forward else "backward") + ("_wrap" if wraps else "")
    kind = "F" if forward else "B"
    return Transfer(channel, sender, receiver, f"{kind}{action.microbatch} to stage {target}")


def to_text(schedule: Schedule) -> str:
    """Return the schedule with one line a pipeline rank."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def from_text(text: str) -> Schedule:
    """Read what `to_text` wrote."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]


def microbatches_of(actions: Iterable[Action], op: Op) -> list[int]:
    """Return the microbatches on which `op` is run, in order."""
    return [a.microbatch for a in actions if a.op is op and a.microbatch is not None]
