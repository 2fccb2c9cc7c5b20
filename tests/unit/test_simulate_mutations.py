"""Broken schedules, made at random: the simulator and an independent judge agree about each.

The judge knows nothing of clocks and queues. It writes down what has to happen before what, as a
graph; a cycle is a schedule that hangs, and the longest path is the time that it takes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.core.pipeline_parallel.schedule import Op, generate, lower, to_text, transfer_of
from megatron.core.pipeline_parallel.simulate import ScheduleError, simulate

SENDS, RECEIVES = (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B)
COST = {Op.F: 1.0, Op.B: 2.0, Op.W: 1.5}
TRANSFER = 0.25
BEFORE = {Op.SEND_F: Op.F, Op.SEND_B: Op.B, Op.F: Op.RECV_F, Op.B: Op.F, Op.W: Op.B}


def disorder(actions):
    """Whether a rank uses something that it makes or receives only later."""
    place = {(a.stage, a.op, a.microbatch): i for i, a in enumerate(actions)}
    for i, a in enumerate(actions):
        needs = [BEFORE[a.op]] if a.op in BEFORE else []
        needs += [Op.RECV_B] if a.op is Op.B else []
        if any(place.get((a.stage, op, a.microbatch), -1) > i for op in needs):
            return True
    return False


def edges(schedule, transfer):
    """node -> [(earlier node, time that the earlier one takes)]; a parcel's transfer is a node."""
    size, before, cost = len(schedule), {}, {}
    for rank, actions in enumerate(schedule):
        last_of_channel = {}
        for i, action in enumerate(actions):
            node = (rank, i)
            before.setdefault(node, []).extend([(rank, i - 1)] if i else [])
            cost[node] = COST.get(action.op, 0.0)
            if action.op in SENDS + RECEIVES:
                end = transfer(action, size)
                parcel = (end.parcel, end.sender)
                cost[parcel] = TRANSFER
                before.setdefault(parcel, []).append(node)
                if end.channel in last_of_channel:
                    before[parcel].append(last_of_channel[end.channel])
                last_of_channel[end.channel] = parcel
            for op in {Op.F: [Op.RECV_F], Op.B: [Op.RECV_B]}.get(action.op, []):
                arrival = replace(action, op=op)
                if arrival in actions:
                    end = transfer(arrival, size)
                    before[node].append((end.parcel, end.sender))
    return before, cost


def judge(schedule, transfer):
    """The time that the schedule takes; None if it hangs or uses what is not there."""
    if any(disorder(actions) for actions in schedule):
        return None
    before, cost = edges(schedule, transfer)
    ends, open_ = {}, set()

    def end(node):
        if node in open_:
            raise RecursionError
        if node not in ends:
            open_.add(node)
            ends[node] = max((end(n) for n in before[node]), default=0.0) + cost[node]
            open_.remove(node)
        return ends[node]

    try:
        return max(end(node) for node in before)
    except RecursionError:
        return None


def shared(action, size):
    """Fewer channels than the project has: more schedules hang."""
    found = transfer_of(action, size)
    return replace(found, channel=found.channel.partition("_")[0])


def moved(actions, rng):
    """The same actions, a few of them elsewhere; the end stays the end."""
    actions, tail = list(actions[:-2]), actions[-2:]
    for _ in range(rng.randint(1, 2)):
        kinds = rng.choice([SENDS, RECEIVES, tuple(COST), (*SENDS, *RECEIVES, *COST)])
        places = [i for i, a in enumerate(actions) if a.op in kinds]
        if len(places) < 2:
            continue
        i = rng.choice(places)
        if rng.random() < 0.5:
            j = rng.choice(places)
            actions[i], actions[j] = actions[j], actions[i]
        else:
            step = rng.choice((-3, -2, -1, 1, 2, 3))
            actions.insert(max(0, i + step), actions.pop(i))
    return [*actions, *tail]


@pytest.mark.parametrize("transfer", [transfer_of, shared], ids=["own channels", "shared"])
@pytest.mark.parametrize(
    ("pp", "vpp", "kind"), [(2, 1, "1f1b"), (3, 1, "zb-h1"), (3, 1, "gpipe"), (2, 2, "1f1b")]
)
def test_every_hang_is_found_and_nothing_else(pp, vpp, kind, transfer):
    rng = random.Random(f"{pp} {vpp} {kind}")
    good = lower(generate(2 * pp, pipeline_size=pp, virtual_size=vpp, kind=kind))
    costs = {"forward_cost": 1.0, "backward_cost": 2.0, "weight_cost": 1.5}
    if kind == "zb-h1":
        costs["backward_cost"] = 3.5
    hangs = ends = 0
    for _ in range(120):
        changed = list(good)
        for rank in rng.sample(range(pp), rng.randint(1, 2)):
            changed[rank] = moved(changed[rank], rng)
        expected = judge(changed, transfer)
        try:
            found = simulate(changed, transfer=transfer, transfer_cost=TRANSFER, **costs).makespan
        except ScheduleError:
            found = None
        assert (found is None) == (expected is None), to_text(changed)
        if found is not None:
            assert found == pytest.approx(expected), to_text(changed)
        hangs, ends = hangs + (found is None), ends + (found is not None)
    assert hangs > 10
    assert ends > 10 or judge(good, transfer) is None, (hangs, ends)
