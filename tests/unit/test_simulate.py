"""The simulator: generated schedules end and cost what the formula says; broken ones are found."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.errors import MegatronError
from megatron.core.pipeline_parallel.schedule import (
    KINDS,
    Action,
    Op,
    from_text,
    generate,
    group_problem,
    lower,
    to_text,
    transfer_of,
)
from megatron.core.pipeline_parallel.simulate import ScheduleError, ideal_bubble, simulate


def schedule(pp, microbatches, vpp=1, **fields):
    return lower(generate(microbatches, pipeline_size=pp, virtual_size=vpp, **fields))


# What the ranks keep at most: m microbatches, p ranks, rank number.
PEAKS = {
    "1f1b": lambda m, p, rank: min(m, p - rank),
    "gpipe": lambda m, p, rank: m,
    "zb-h1": lambda m, p, rank: min(m, p),  # of the first rank of 1F1B
}


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_ends_with_the_bubble_of_its_formula(pp, kind):
    for microbatches in range(1, 33):
        report = simulate(schedule(pp, microbatches, kind=kind))
        assert report.bubble == pytest.approx(ideal_bubble(microbatches, pp, kind=kind))
        assert report.busy == (3 * microbatches,) * pp
        peak = PEAKS[kind]
        assert report.peak_live == tuple(peak(microbatches, pp, rank) for rank in range(pp))


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("vpp", [2, 3, 4])
def test_interleaving_divides_the_bubble(pp, vpp):
    for microbatches in range(pp, 33, pp):
        report = simulate(schedule(pp, microbatches, vpp))
        assert report.bubble == pytest.approx(ideal_bubble(microbatches, pp, vpp))
        first = min(microbatches * vpp, 2 * (pp - 1) + (vpp - 1) * pp + 1)
        assert report.peak_live[0] == first


def test_zero_bubble_formula_at_any_cost():
    """Also where a weight pass is longer than what it hides behind."""
    for forward, whole, weight in itertools.product((1, 2, 5), (4, 7, 9), (1, 2, 3)):
        costs = {"forward_cost": forward, "backward_cost": whole, "weight_cost": weight}
        for pp, microbatches in ((2, 5), (4, 3), (4, 9), (7, 6)):
            report = simulate(schedule(pp, microbatches, kind="zb-h1"), **costs)
            expected = ideal_bubble(microbatches, pp, kind="zb-h1", **costs)
            assert report.bubble == pytest.approx(expected)
            one = simulate(schedule(pp, microbatches), **costs)
            assert report.makespan <= one.makespan
            assert report.busy == one.busy


def test_zero_bubble_has_a_third_of_the_bubble():
    assert ideal_bubble(8, 4, kind="zb-h1") == pytest.approx(ideal_bubble(8, 4) / 3)


@pytest.mark.parametrize(("kind", "vpp"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("1f1b", 2)])
def test_prefetched_receives_hide_transfers(kind, vpp):
    """Never later than without, and in the steady state a transfer costs nothing."""
    for pp, m in ((2, 4), (4, 8), (4, 32), (5, 10)):
        bare = generate(m, pipeline_size=pp, virtual_size=vpp, kind=kind)
        early, late = lower(bare), lower(bare, prefetch=False)
        assert to_text(early) != to_text(late)
        assert [sorted(map(str, a)) for a in early] == [sorted(map(str, a)) for a in late]
        ends = [simulate(x, transfer_cost=0.5).makespan for x in (early, late)]
        assert ends[0] <= ends[1]
        if (pp, m, vpp) == (4, 32, 1):
            assert ends[0] < ends[1]


def test_receives_come_one_computation_ahead():
    assert to_text(lower(generate(3, pipeline_size=2, kind="zb-h1"))) == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0W0 0RECV_B1 0F2 0SEND_F2 0B1 0RECV_B2 0W1 0B2 0W2"
        " 0GRAD_SYNC 0AMAX_SYNC\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1W0 1F2 1B2 1SEND_B2 1W1 1W2"
        " 1GRAD_SYNC 1AMAX_SYNC"
    )


@pytest.mark.parametrize(("pp", "group"), [(2, 3), (2, 4), (3, 5), (4, 6)])
def test_larger_groups_and_a_smaller_last_one(pp, group):
    tried = 0
    for microbatches in range(group, 25):
        if not group_problem(microbatches, pp, group):
            simulate(schedule(pp, microbatches, 2, group_size=group))
            tried += 1
    assert tried > 5


@pytest.mark.parametrize("costs", [(1.0, 2.0, 0.3), (2.0, 1.0, 5.0), (1.0, 1.0, 0.0)])
def test_the_end_does_not_depend_on_speed(costs):
    forward, backward, transfer = costs
    slow = {"forward_cost": forward, "backward_cost": backward, "transfer_cost": transfer}
    for pp, microbatches, vpp in ((2, 4, 1), (4, 8, 1), (3, 6, 2), (4, 8, 3)):
        free = simulate(schedule(pp, microbatches, vpp), **{**slow, "transfer_cost": 0.0})
        assert simulate(schedule(pp, microbatches, vpp), **slow).makespan >= free.makespan


@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize("pp", [2, 4])
def test_evaluation_runs_forward_only(pp, vpp):
    report = simulate(schedule(pp, 8, vpp, training=False))
    assert report.busy == (8 * vpp,) * pp
    assert "B" not in to_text(schedule(pp, 8, vpp, training=False))


def test_one_f_one_b_as_text():
    assert to_text(schedule(2, 2)) == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0GRAD_SYNC 0AMAX_SYNC\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1GRAD_SYNC 1AMAX_SYNC"
    )


def one_channel_each_way(action, pp):
    transfer = transfer_of(action, pp)
    return replace(transfer, channel=transfer.channel.partition("_")[0])


def one_channel(action, pp):
    return replace(transfer_of(action, pp), channel="all")


def test_why_each_direction_has_its_own_channel():
    simulate(schedule(2, 4))
    with pytest.raises(ScheduleError, match="a schedule that hangs"):
        simulate(schedule(2, 4), transfer=one_channel)


def test_why_the_wrap_has_its_own_channel():
    simulate(schedule(4, 8, 2))
    with pytest.raises(ScheduleError, match="a schedule that hangs"):
        simulate(schedule(4, 8, 2), transfer=one_channel_each_way)


def test_why_neighbouring_edges_have_channels_of_their_own():
    """A rank that receives early would hold up what it sends."""

    def edges_together(action, pp):
        transfer = transfer_of(action, pp)
        return replace(transfer, channel=transfer.channel.replace("_odd", ""))

    good = schedule(5, 15, 2)
    slow = simulate(good, transfer=edges_together, transfer_cost=0.2).makespan
    assert simulate(good, transfer_cost=0.2).makespan < slow
    good = schedule(3, 6)
    for rank, actions in enumerate(good):  # all receives at the start
        early = [a for a in actions if a.op in (Op.RECV_F, Op.RECV_B)]
        good[rank] = early + [a for a in actions if a not in early]
    simulate(good)
    with pytest.raises(ScheduleError, match="a schedule that hangs"):
        simulate(good, transfer=edges_together)


TAIL = "{0}GRAD_SYNC {0}AMAX_SYNC"
GOOD = [
    f"0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 {TAIL.format(0)}",
    f"1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 {TAIL.format(1)}",
]


def broken(rank, old, new):
    lines = list(GOOD)
    assert old in lines[rank]
    lines[rank] = lines[rank].replace(old, new)
    return from_text("\n".join(lines))


# what is done to the good schedule -> words of the message
BROKEN = {
    "a receive that is missing": ((1, "1RECV_F1 ", ""), "1RECV_F1.*missing"),
    "a send that is missing": ((0, "0SEND_F1 ", ""), "0SEND_F1.*missing"),
    "a gradient that is not sent": ((1, "1SEND_B0 ", ""), "1SEND_B0.*missing"),
    "a gradient that is not received": ((0, "0RECV_B1 ", ""), "0RECV_B1.*missing"),
    "receives in another order": (
        (1, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1", "1RECV_F1 1F1 1RECV_F0 1F0 1B0 1SEND_B0"),
        "would take it for F1",
    ),
    "sends in another order": (
        (0, "0F0 0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0F0 0SEND_F0"),
        "would take it for F0",
    ),
    "gradients in another order": (
        (0, "0RECV_B0 0B0 0RECV_B1 0B1", "0RECV_B1 0B1 0RECV_B0 0B0"),
        "would take it for B1",
    ),
    "sent before it is computed": ((0, "0F1 0SEND_F1", "0SEND_F1 0F1"), "not computed yet"),
    "received after it is needed": (
        (1, "1RECV_F1 1F1", "1F1 1RECV_F1"), "needs what is received only after it",
    ),
    "backward before forward": ((1, "1F0 1B0", "1B0 1F0"), "forward pass is not done"),
    "both wait for each other": (
        (0, "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
         "0F0 0F1 0RECV_B0 0B0 0SEND_F0 0SEND_F1 0RECV_B1 0B1"),
        "rank 0 waits at 0B0.*rank 1 waits at 1F0",
    ),
    "a forward pass twice": ((0, "0F1", "0F1 0F1"), "0F1.*twice"),
    "a backward pass that is missing": ((1, "1B1 1SEND_B1 ", ""), "both passes of microbatch 1"),
    "a microbatch that one stage does not run": (
        (1, "1RECV_F1 1F1 1B1 1SEND_B1 ", ""), "microbatch 1",
    ),
    "synchronised before the last backward pass": (
        (0, "0B1 0GRAD_SYNC", "0GRAD_SYNC 0B1"), "must end with GRAD_SYNC",
    ),
    "no amax synchronisation": ((1, " 1AMAX_SYNC", ""), "must end with GRAD_SYNC"),
    "a stage of another rank": ((0, "0F1 ", "1F1 "), "does not hold that stage"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedules_are_found(name):
    simulate(from_text("\n".join(GOOD)))
    change, words = BROKEN[name]
    with pytest.raises(ScheduleError, match=words):
        simulate(broken(*change))


def test_a_slow_order_that_only_looks_dangerous_is_no_mistake():
    order = "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1"
    report = simulate(broken(0, GOOD[0].split(" 0GRAD")[0], order))
    assert report.makespan == 12 > simulate(from_text("\n".join(GOOD))).makespan


WEIGHTS = [
    f"0F0 0SEND_F0 0RECV_B0 0B0 0W0 {TAIL.format(0)}",
    f"1RECV_F0 1F0 1B0 1SEND_B0 1W0 {TAIL.format(1)}",
]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1B0 1SEND_B0 1W0", "1W0 1B0 1SEND_B0", "backward pass is not done"),
        ("1W0 1GRAD_SYNC", "1GRAD_SYNC 1W0", "must end with GRAD_SYNC"),
        (" 1W0", "", "all passes of microbatch 0"),
        ("1W0", "1W0 1W0", "1W0.*twice"),
        ("1W0", "1W0 1W1", "all passes of microbatch 1"),
    ],
)
def test_broken_weight_passes_are_found(old, new, words):
    simulate(from_text("\n".join(WEIGHTS)))
    assert old in WEIGHTS[1]
    with pytest.raises(ScheduleError, match=words):
        simulate(from_text("\n".join([WEIGHTS[0], WEIGHTS[1].replace(old, new)])))


@pytest.mark.parametrize(
    ("pp", "vpp", "kind"), [(2, 1, "1f1b"), (3, 1, "zb-h1"), (2, 2, "1f1b"), (2, 1, "gpipe")]
)
def test_any_lost_or_doubled_action_is_found(pp, vpp, kind):
    """Whichever action is taken out of a good schedule, or moved to the front, it is noticed."""
    good = schedule(pp, 2 * pp, vpp, kind=kind)
    for rank, actions in enumerate(good):
        for i, action in enumerate(actions):
            lost = [list(a) for a in good]
            del lost[rank][i]
            with pytest.raises(ScheduleError):
                simulate(lost)
            doubled = [list(a) for a in good]
            doubled[rank].insert(0, action)
            with pytest.raises(ScheduleError):
                simulate(doubled)


@pytest.mark.parametrize("vpp", [1, 2])
def test_receiving_too_early_on_the_same_channel_is_found(vpp):
    """A middle rank that queues a receive before the send that its microbatch depends on."""
    good = schedule(3, 6, vpp)
    rank = good[1]
    wait = Action(1, Op.RECV_F, 5)
    rank.remove(wait)
    rank.insert(rank.index(Action(1, Op.SEND_F, 0)), wait)
    with pytest.raises(ScheduleError):
        simulate(good)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "dualpipe"}, "--pipeline-schedule: got dualpipe"),
        ({"pipeline_size": 0}, "--pipeline-model-parallel-size: got 0"),
        ({"virtual_size": 2}, "2 with 1 rank"),
        ({"pipeline_size": 2, "virtual_size": 2, "kind": "gpipe"}, "gpipe"),
        ({"pipeline_size": 3, "virtual_size": 2}, "3 with 4 microbatches. The last group has 1"),
        (
            {"pipeline_size": 2, "virtual_size": 2, "group_size": 1},
            "at least one microbatch a rank",
        ),
    ],
)
def test_impossible_schedules_are_refused(fields, words):
    with pytest.raises(MegatronError, match=words):
        generate(4, **fields)


def test_no_torch():
    code = "import sys, megatron.core.pipeline_parallel.simulate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def show(*args):
    path = Path(__file__).resolve().parents[2] / "tools" / "show.py"
    spec = importlib.util.spec_from_file_location("tool_show", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(["schedule", *args])


def test_show_draws_the_grid(capsys):
    assert show("--pp", "2", "--microbatches", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0: 0  1  .  .  0' 0' .  1' 1'"
    assert lines[1] == "rank 1: .  0  0' 0' 1  1' 1' .  ."
    assert lines[2] == "bubble: 50.0% of the computing time; (p - 1) / (v m) = 50.0%"
    assert lines[4].endswith("by rank: 2, 1")


def test_show_other_schedules_and_mistakes(capsys):
    assert show("--pp", "4", "--microbatches", "8", "--schedule", "interleaved") == 0
    out = capsys.readouterr().out
    assert "(p - 1) / (v m) = 18.8%" in out
    assert "b7'" in out
    assert show("--pp", "2", "--microbatches", "2", "--schedule", "gpipe", "--actions") == 0
    assert capsys.readouterr().out.startswith("0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0")
    assert show("--pp", "4", "--microbatches", "8", "--schedule", "zb-h1") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[3].split()[2:9] == [".", ".", ".", "0", "0'", "1", "1'"]
    assert out[3].endswith("7' 4w 5w 6w 7w")
    assert "bubble: 12.5%" in out[4]
    assert out[4].endswith("= 12.5%")
    assert out[5] == "time: 27 with forward 1 and backward 2, of which 1 for the weights"
    assert show("--pp", "2", "--microbatches", "3", "--schedule", "interleaved") == 1
    assert "got 2 with 3 microbatches" in capsys.readouterr().err
    assert show("--pp", "2", "--microbatches", "2", "--vpp", "2") == 2
    assert "--vpp: got 2." in capsys.readouterr().err
    zero_bubble = ("--pp", "2", "--microbatches", "2", "--schedule", "zb-h1")
    assert show(*zero_bubble, "--weight-cost", "2") == 2
    assert "--weight-cost: got 2." in capsys.readouterr().err
