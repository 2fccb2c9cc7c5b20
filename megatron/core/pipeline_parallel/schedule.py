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


def generate(num_microbatches: int, *, num_stages: int = 1, training: bool = True) -> Schedule:
    """Return every pipeline rank's actions for one step.

    Args:
        num_microbatches: Microbatches of the step.
        num_stages: Pipeline stages.
        training: Whether backward passes and the synchronisations at the end are wanted.

    Raises:
        MegatronError: More than one stage is asked for.
    """
    if num_stages != 1:
        raise MegatronError(
            complaint(
                "--pipeline-model-parallel-size",
                num_stages,
                "This release generates schedules of one stage",
                "Use 1 and raise --tensor-model-parallel-size instead",
            )
        )
    actions: list[Action] = []
    for microbatch in range(num_microbatches):
        actions.append(Action(0, Op.F, microbatch))
        if training:
            actions.append(Action(0, Op.B, microbatch))
    if training:
        actions += [Action(0, Op.GRAD_SYNC), Action(0, Op.AMAX_SYNC)]
    return [actions]


def to_text(schedule: Schedule) -> str:
    """Return the schedule with one line a pipeline rank."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def from_text(text: str) -> Schedule:
    """Read what `to_text` wrote."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]


def microbatches_of(actions: Iterable[Action], op: Op) -> list[int]:
    """Return the microbatches on which `op` is run, in order."""
    return [a.microbatch for a in actions if a.op is op and a.microbatch is not None]
