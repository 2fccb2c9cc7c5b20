"""A pipeline schedule as data: a list that can be printed, parsed, compared and executed.

No torch in here. `runner.py` is the one loop that executes what `generate` returns.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from dataclasses import dataclass

from megatron.core.errors import MegatronError, complaint


class Op(enum.Enum):
    """What one action does.

    A backward pass is one action, `B`, or two: then `B` computes the gradients of the activations,
    which the stage before waits for, and `W` those of the linear layers' weights, for which nobody
    waits.
    """

    F = "F"
    B = "B"
    W = "W"
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
                    "F, B, W, SEND_* and RECV_* name a microbatch and *_SYNC do not",
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

KINDS = ("1f1b", "gpipe", "zb-h1")


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
        kind: `1f1b` runs a backward pass as soon as it can, `gpipe` after every forward pass;
            `zb-h1` is 1f1b with weight gradients computed later, when a rank would wait.
        group_size: Microbatches that a rank runs through one of its stages before it turns to the
            next one; default `pipeline_size`.
        training: Whether backward passes and the synchronisations at the end are wanted.

    Raises:
        MegatronError: There is no such schedule.

    Source: GPipe: Huang et al., 2019. 1F1B: Narayanan et al., "PipeDream", 2019. Interleaving:
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021.
        ZB-H1: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
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
        if kind != "gpipe":
            warmup = min(warmup, _warmup(rank, pipeline_size, virtual_size, group))
        actions = forward[:warmup]
        for one_forward, one_backward in zip(forward[warmup:], backward, strict=False):
            actions += [one_forward, one_backward]
        actions += backward[len(forward) - warmup :]
        if kind == "zb-h1":
            actions = _with_weight_passes(actions, rank)
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


def _with_weight_passes(actions: list[Action], rank: int) -> list[Action]:
    """Add the weight passes of ZB-H1, as many backward passes late as the rank's number.

    The later a rank is in the pipeline, the longer it has nothing to do at the end, and the fewer
    microbatches 1F1B keeps on it: it puts off as many weight passes as make both equal to those of
    the first rank.
    """
    out: list[Action] = []
    waiting: deque[Action] = deque()
    for action in actions:
        out.append(action)
        if action.op is Op.B:
            waiting.append(Action(action.stage, Op.W, action.microbatch))
            if len(waiting) > rank:
                out.append(waiting.popleft())
    return [*out, *waiting]


def lower(schedule: Schedule, *, prefetch: bool = True) -> Schedule:
    """Add the transfers between stages to what `generate` returned.

    A result is sent right after it is computed. Sends do not block.

    Args:
        schedule: What `generate` returned.
        prefetch: Start to receive before the computation that precedes the one that needs the
            tensor, so that it travels meanwhile; otherwise right before it is needed.
    """
    size = len(schedule)
    last = max((a.stage for actions in schedule for a in actions), default=0)
    lowered: Schedule = []
    for actions in schedule:
        receives = [_receives(a, size, last) for a in actions]
        out: list[Action] = []
        for i, action in enumerate(actions):
            if not prefetch or i == 0:
                out += receives[i]
            if prefetch and i + 1 < len(actions):
                out += receives[i + 1]
            out += [action, *_sends(action, size, last)]
        lowered.append(out)
    return lowered


def _receives(action: Action, size: int, last: int) -> list[Action]:
    """What a computation needs from another stage."""
    op = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}.get(action.op)
    end = 0 if action.op is Op.F else last
    if op is None or size == 1 or action.stage == end:
        return []
    return [Action(action.stage, op, action.microbatch)]


def _sends(action: Action, size: int, last: int) -> list[Action]:
    """What another stage needs of a computation."""
    op = {Op.F: Op.SEND_F, Op.B: Op.SEND_B}.get(action.op)
    end = last if action.op is Op.F else 0
    if op is None or size == 1 or action.stage == end:
        return []
    return [Action(action.stage, op, action.microbatch)]


@dataclass(frozen=True)
class Transfer:
    """The two ends of what a SEND or RECV action takes part in.

    Attributes:
        channel: `forward` or `backward` for the edges from even ranks to the next one, the same
            with `_odd` for those from odd ranks, and with `_wrap` for the edge from the last rank
            back to the first one, which only interleaved stages use. So a rank never sends and
            receives on one channel, and a transfer waits for none but those of its own edge.
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
    edge = min(source, target) % pipeline_size
    side = "_wrap" if edge == pipeline_size - 1 else "_odd" if edge % 2 else ""
    channel = ("forward" if forward else "backward") + side
    kind = "F" if forward else "B"
    return Transfer(channel, sender, receiver, f"{kind}{action.microbatch} to stage {target}")


def to_text(schedule: Schedule) -> str:
    """Return the schedule with one line a pipeline rank."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def from_text(text: str) -> Schedule:
    """Read what `to_text` wrote."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]
