"""Plays a schedule through without computing anything: does it end, how long does it take?

The model of communication is that of NCCL. A channel is a communicator; on each rank the transfers
of one channel happen in the order in which the rank issues them, one after the other, and each
needs both ends. A send does not hold up the rank that issues it, but it holds up every later
transfer of that channel on that rank. Waiting for a received tensor holds up the rank.

Transports that are more lenient (gloo buffers what is sent) finish whatever finishes here.
No torch in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.core.errors import MegatronError, complaint
from megatron.core.pipeline_parallel.schedule import (
    Action,
    Op,
    Schedule,
    Transfer,
    transfer_of,
)

_TRANSFERS = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)
_SENDS = (Op.SEND_F, Op.SEND_B)
_ARRIVES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}
_AFTER = {Op.B: (Op.F, "forward"), Op.W: (Op.B, "backward")}
_NEEDS = {Op.SEND_F: Op.F, Op.SEND_B: Op.B}

TransferOf = Callable[[Action, int], Transfer]


class ScheduleError(MegatronError):
    """A schedule that hangs, mixes up tensors, or computes something twice or never."""


@dataclass(frozen=True)
class Span:
    """One computation on the time axis."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """What a schedule costs.

    Attributes:
        spans: Every rank's computations in order.
        makespan: Time from the first computation to the end of the last one.
        busy: Time that each rank computes.
        bubble: Idle time of a rank relative to the time it computes, the mean over the ranks.
        peak_live: By rank, the most (stage, microbatch) pairs whose forward pass is done and whose
            backward pass is not: the activations that are kept at the same time. With weight passes
            a pair counts until its own is done, although not all of it is kept so long.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubble: float
    peak_live: tuple[int, ...]


@dataclass
class _Issued:
    """A transfer that a rank has issued; `end` is set when it has happened."""

    action: Action
    transfer: Transfer
    start: float
    end: float | None = None


@dataclass
class _Rank:
    """One rank while the schedule is played."""

    number: int
    actions: list[Action]
    next: int = 0
    clock: float = 0.0
    spans: list[Span] = field(default_factory=list)
    done: dict[tuple[int, Op, int | None], _Issued | None] = field(default_factory=dict)
    queues: dict[str, list[_Issued]] = field(default_factory=dict)
    live: int = 0
    peak: int = 0
    receives: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        self.receives = frozenset(a for a in self.actions if a.op in _ARRIVES.values())

    @property
    def waiting_in(self) -> Action | None:
        return self.actions[self.next] if self.next < len(self.actions) else None


def simulate(
    schedule: Schedule,
    *,
    forward_cost: float = 1.0,
    backward_cost: float = 2.0,
    weight_cost: float = 1.0,
    transfer_cost: float = 0.0,
    transfer: TransferOf = transfer_of,
) -> Report:
    """Play a lowered schedule.

    Args:
        schedule: What `lower` returned.
        forward_cost: Time of a stage's forward pass.
        backward_cost: Time of its backward pass, with the gradients of the weights.
        weight_cost: The part of it that a weight pass takes, where the schedule has them.
        transfer_cost: Time of a transfer.
        transfer: Which channel an action uses; another function models another transport.

    Raises:
        ScheduleError: It cannot end, or a tensor would go to the wrong place, or a computation is
            missing, doubled or out of order. Names every rank that waits and what for.
    """
    size = len(schedule)
    _check_complete(schedule)
    ranks = [_Rank(i, list(actions)) for i, actions in enumerate(schedule)]
    split = any(a.op is Op.W for actions in schedule for a in actions)
    costs = {
        Op.F: forward_cost,
        Op.B: backward_cost - weight_cost if split else backward_cost,
        Op.W: weight_cost,
    }
    last_op = Op.W if split else Op.B
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while _advance(rank, size, costs, transfer, last_op):
                moved = True
        for rank in ranks:
            while _exchange(rank, ranks, transfer_cost):
                moved = True
    _check_ended(ranks)
    busy = tuple(sum(s.end - s.start for s in r.spans) for r in ranks)
    makespan = max((s.end for r in ranks for s in r.spans), default=0.0)
    idle = [(makespan - b) / b for b in busy if b]
    return Report(
        spans=tuple(tuple(r.spans) for r in ranks),
        makespan=makespan,
        busy=busy,
        bubble=sum(idle) / len(idle) if idle else 0.0,
        peak_live=tuple(r.peak for r in ranks),
    )


def _advance(
    rank: _Rank, size: int, costs: dict[Op, float], transfer: TransferOf, last_op: Op
) -> bool:
    """Execute the rank's next action; return whether that was possible.

    `last_op` is the operation after which nothing of a microbatch is kept.
    """
    action = rank.waiting_in
    if action is None:
        return False
    if action.op in _TRANSFERS:
        end = transfer(action, size)
        if action.op in _SENDS and (action.stage, _NEEDS[action.op], action.microbatch) not in (
            rank.done
        ):
            raise _wrong(rank, action, "It sends what is not computed yet")
        issued = _Issued(action, end, rank.clock)
        rank.queues.setdefault(end.channel, []).append(issued)
        rank.done[action.stage, action.op, action.microbatch] = issued
    elif action.op in costs:
        start = _ready(rank, action)
        if start is None:
            return False
        rank.clock = start + costs[action.op]
        rank.spans.append(Span(action, start, rank.clock))
        rank.done[action.stage, action.op, action.microbatch] = None
        rank.live += (action.op is Op.F) - (action.op is last_op)
        rank.peak = max(rank.peak, rank.live)
    rank.next += 1
    return True


def _ready(rank: _Rank, action: Action) -> float | None:
    """Time at which a computation has its inputs; None while it has to wait."""
    if action.op in _AFTER:
        op, name = _AFTER[action.op]
        if (action.stage, op, action.microbatch) not in rank.done:
            raise _wrong(rank, action, f"Its {name} pass is not done yet")
    if action.op not in _ARRIVES:
        return rank.clock
    arrives = Action(action.stage, _ARRIVES[action.op], action.microbatch)
    received = rank.done.get((arrives.stage, arrives.op, arrives.microbatch))
    if received is None:
        if arrives in rank.receives:
            raise _wrong(rank, action, "It needs what is received only after it")
        return rank.clock
    return None if received.end is None else max(rank.clock, received.end)


def _exchange(rank: _Rank, ranks: list[_Rank], cost: float) -> bool:
    """Let one transfer happen of those that the rank is to receive next; return whether one did."""
    for channel, queue in rank.queues.items():
        mine = _head(queue)
        if mine is None or mine.transfer.receiver != rank.number or mine.action.op in _SENDS:
            continue
        other = _head(ranks[mine.transfer.sender].queues.get(channel, []))
        if other is None or other.action.op not in _SENDS:
            continue
        if other.transfer.receiver != rank.number:
            continue
        if other.transfer.parcel != mine.transfer.parcel:
            raise _wrong(
                rank,
                mine.action,
                f"Rank {mine.transfer.sender} sends {other.transfer.parcel} at this point of "
                f"channel {channel} and the receiver would take it for {mine.transfer.parcel}",
            )
        mine.end = other.end = max(mine.start, other.start) + cost
        for done in (mine, other):
            _free(ranks, done, done.end or 0.0)
        return True
    return False


def _free(ranks: list[_Rank], done: _Issued, end: float) -> None:
    """The next transfer of a channel cannot start before the one ahead of it has ended."""
    number = done.transfer.sender if done.action.op in _SENDS else done.transfer.receiver
    queue = ranks[number].queues[done.transfer.channel]
    queue.pop(0)
    if queue:
        queue[0].start = max(queue[0].start, end)


def _head(queue: list[_Issued]) -> _Issued | None:
    return queue[0] if queue else None


def _check_complete(schedule: Schedule) -> None:
    """Every stage runs the same microbatches, each action once, and synchronises at the end."""
    size = len(schedule)
    forward: dict[int, set[int | None]] = {}
    present = {a.op for actions in schedule for a in actions}
    for number, actions in enumerate(schedule):
        if len(set(actions)) != len(actions):
            twice = next(a for i, a in enumerate(actions) if a in actions[:i])
            raise _schedule_error(str(twice), f"Rank {number} lists it twice")
        for action in actions:
            if action.stage % size != number:
                raise _schedule_error(str(action), f"Rank {number} does not hold that stage")
            if action.op is Op.F:
                forward.setdefault(action.stage, set()).add(action.microbatch)
        _check_rank(number, actions, present)
    _check_stages(forward)
    _check_transfers(schedule, max(forward, default=0))


def _check_stages(forward: dict[int, set[int | None]]) -> None:
    """No stage is left out, and all of them run the same microbatches."""
    if sorted(forward) != list(range(len(forward))):
        raise _schedule_error(f"stages {sorted(forward)}", "A stage in between is missing")
    first = forward.get(0, set())
    for stage, microbatches in forward.items():
        odd = [m for m in microbatches ^ first if m is not None]
        if odd:
            why = f"Stages 0 and {stage} do not both run microbatch {min(odd)}"
            raise _schedule_error(f"stage {stage}", why)


def _check_rank(number: int, actions: list[Action], present: set[Op]) -> None:
    """Backward passes belong to forward passes, and synchronisation comes after all of them.

    `present` is what occurs anywhere in the schedule: one weight pass means that all backward
    passes leave theirs out.
    """
    if Op.B not in present:
        return
    forward = {(a.stage, a.microbatch) for a in actions if a.op is Op.F}
    for op in (Op.B, Op.W) if Op.W in present else (Op.B,):
        odd = forward ^ {(a.stage, a.microbatch) for a in actions if a.op is op}
        if odd:
            stage, microbatch = min(odd, key=str)
            passes = "both" if op is Op.B else "all"
            why = (
                f"Rank {number} does not run {passes} passes of microbatch {microbatch} in "
                f"stage {stage}"
            )
            raise _schedule_error(f"rank {number}", why)
    tail = [a.op for a in actions if not a.op.per_microbatch]
    after = [a.op for a in actions[-2:]]
    if tail != [Op.GRAD_SYNC, Op.AMAX_SYNC] or after != tail:
        raise _schedule_error(
            f"rank {number}",
            "It must end with GRAD_SYNC and AMAX_SYNC, once each, after its last backward pass",
        )


def _check_transfers(schedule: Schedule, last: int) -> None:
    """Whatever crosses from stage to stage has exactly the sends and receives that it needs."""
    size = len(schedule)
    for actions in schedule:
        for wanted, ops in (
            (Op.F, ((Op.RECV_F, 0), (Op.SEND_F, last))),
            (Op.B, ((Op.RECV_B, last), (Op.SEND_B, 0))),
        ):
            for op, end in ops:
                need = {
                    (a.stage, a.microbatch)
                    for a in actions
                    if a.op is wanted and a.stage != end and size > 1
                }
                have = {(a.stage, a.microbatch) for a in actions if a.op is op}
                for stage, microbatch in sorted(need ^ have, key=str):
                    what = f"{stage}{op.value}{microbatch}"
                    missing = (stage, microbatch) in need
                    why = "It is missing" if missing else "Nothing computes or needs its tensor"
                    raise _schedule_error(what, why)


def _check_ended(ranks: list[_Rank]) -> None:
    """Raise if a rank waits or a transfer was never met."""
    stuck = []
    for rank in ranks:
        action = rank.waiting_in
        open_ends = [str(q[0].action) for q in rank.queues.values() if q]
        if action is None and not open_ends:
            continue
        where = f"rank {rank.number} " + (f"waits at {action}" if action else "is through")
        stuck.append(where + (f" with {', '.join(open_ends)} unmet" if open_ends else ""))
    if stuck:
        raise _schedule_error("a schedule that hangs", "; ".join(stuck))


def _wrong(rank: _Rank, action: Action, why: str) -> ScheduleError:
    return _schedule_error(f"{action} on rank {rank.number}", why)


def _schedule_error(got: str, why: str) -> ScheduleError:
    fix = "Use a schedule of megatron.core.pipeline_parallel.schedule, or report this one"
    return ScheduleError(complaint("schedule", got, why, fix))


def ideal_bubble(
    num_microbatches: int,
    pipeline_size: int,
    virtual_size: int = 1,
    kind: str = "1f1b",
    *,
    forward_cost: float = 1.0,
    backward_cost: float = 2.0,
    weight_cost: float = 1.0,
) -> float:
    """Return the bubble of the formula, relative to the computing time of a rank.

    `1f1b` and `gpipe`: `(p - 1) / (v m)`, whatever the costs. `zb-h1`, with the backward pass b
    apart from the weight pass w: `(p - 1) (f + b) - (min(m, p) - 1) min(f, b, w)` divided by
    `m (f + b + w)`; for m >= p and equal costs a third of 1F1B's.

    Args:
        num_microbatches: m.
        pipeline_size: Ranks, p.
        virtual_size: Stages of a rank, v.
        kind: The schedule.
        forward_cost: Time of a stage's forward pass, f.
        backward_cost: Time of its whole backward pass, b + w.
        weight_cost: The part of it that is the weight pass, w.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, section 2.2. ZB-H1 with m >= p and w <= f, b: Qi et al., "Zero Bubble
    Pipeline Parallelism", ICLR 2024, section 2; the general form holds for the order used here.
    """
    p, m = pipeline_size, num_microbatches
    if kind != "zb-h1":
        return (p - 1) / (virtual_size * m)
    input_cost = backward_cost - weight_cost
    hidden = (min(m, p) - 1) * min(forward_cost, input_cost, weight_cost)
    idle = (p - 1) * (forward_cost + input_cost) - hidden
    return idle / (m * (forward_cost + backward_cost))
