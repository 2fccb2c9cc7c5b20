"""Rank groups against the groups that Megatron-LM makes, and what the axes promise."""

from __future__ import annotations

import itertools

import pytest

from megatron.core.errors import MeshError
from megatron.core.mesh import (
    DEFAULT_ORDER,
    PIPELINE_BEFORE_DATA_ORDER,
    Axis,
    MeshSizes,
    ParallelState,
    groups_of,
)

W16 = MeshSizes(world=16, tp=2, cp=2, pp=2)


@pytest.mark.parametrize(
    ("token", "first_groups"),
    [
        ("tp", [[0, 1], [2, 3], [4, 5]]),
        ("cp", [[0, 2], [1, 3], [4, 6]]),
        ("dp", [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]),
        ("pp", [[0, 8], [1, 9], [2, 10]]),
        ("dp-cp", [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]),
        ("tp-pp", [[0, 1, 8, 9], [2, 3, 10, 11]]),
        ("tp-cp", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("tp-cp-dp", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]),
    ],
)
def test_dense_groups_of_sixteen_ranks(token, first_groups):
    assert groups_of(token, W16.as_dict())[: len(first_groups)] == first_groups


def test_expert_groups_of_sixteen_ranks():
    sizes = MeshSizes(world=16, tp=2, cp=2, pp=2, ep=4, etp=1)
    assert sizes.edp == 2
    assert groups_of("ep", sizes.as_dict())[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of("edp", sizes.as_dict())[:2] == [[0, 4], [1, 5]]
    assert groups_of("etp", sizes.as_dict()) == [[rank] for rank in range(16)]
    assert groups_of("etp-ep", sizes.as_dict())[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of("etp-edp", sizes.as_dict())[:3] == [[0, 4], [1, 5], [2, 6]]


def test_expert_groups_with_whole_experts_split_over_two_ranks():
    sizes = MeshSizes(world=16, tp=4, pp=2, ep=2, etp=2).as_dict()
    assert groups_of("etp", sizes)[:2] == [[0, 1], [2, 3]]
    assert groups_of("ep", sizes)[:3] == [[0, 2], [1, 3], [4, 6]]
    assert groups_of("edp", sizes)[:3] == [[0, 4], [1, 5], [2, 6]]
    assert groups_of("etp-ep", sizes)[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of("etp-edp", sizes)[:2] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_expert_tensor_parallelism_defaults_to_that_of_dense_layers():
    sizes = MeshSizes(world=16, tp=2, ep=4).as_dict()
    assert groups_of("etp", sizes)[:2] == [[0, 1], [2, 3]]
    assert groups_of("ep", sizes)[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups_of("edp", sizes)[:2] == [[0, 8], [1, 9]]


def test_pipeline_before_data_order():
    order = PIPELINE_BEFORE_DATA_ORDER
    assert groups_of("dp", W16.as_dict(), order)[0] == [0, 8]
    assert groups_of("pp", W16.as_dict(), order)[0] == [0, 4]


@pytest.mark.parametrize(
    "sizes",
    [
        MeshSizes(world=t * c * d * p, tp=t, cp=c, pp=p, ep=e, etp=1)
        for t, c, d, p, e in itertools.product((1, 2, 4), (1, 2), (1, 3), (1, 2), (1, 2))
        if (t * c * d) % e == 0
    ],
    ids=str,
)
def test_every_axis_partitions_the_world(sizes):
    tokens = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp-dp", "ep", "etp", "edp", "etp-ep", "etp-edp")
    for token in tokens:
        groups = groups_of(token, sizes.as_dict(), sizes.order)
        assert sorted(itertools.chain(*groups)) == list(range(sizes.world))
        assert len({len(g) for g in groups}) == 1
        assert all(g == sorted(g) for g in groups)


@pytest.mark.parametrize("order", [DEFAULT_ORDER, PIPELINE_BEFORE_DATA_ORDER, "pp-dp-tp-ep-cp"])
@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2), (2, 4), (8, 1), (1, 1), (1, 2)])
def test_dense_and_expert_meshes_share_pipeline_groups(order, ep, etp):
    """The ranks that share the experts of a layer are on one pipeline stage, in every order."""
    sizes = MeshSizes(world=16, tp=2, cp=2, pp=2, ep=ep, etp=etp).as_dict()
    stages = {
        rank: stage
        for group in groups_of("pp", sizes, order)
        for stage, rank in enumerate(group)
    }  # fmt: skip
    for token in ("ep", "etp", "edp", "etp-ep", "etp-edp"):
        groups = groups_of(token, sizes, order)
        assert sorted(itertools.chain(*groups)) == list(range(16))
        assert all(group == sorted(group) for group in groups)
        assert all(len({stages[rank] for rank in group}) == 1 for group in groups), (token, groups)
    expert = groups_of("ep-pp", sizes, order)
    for group in groups_of("pp", sizes, order):
        assert any(set(group) <= set(wide) for wide in expert)


def test_experts_divide_a_stage_as_without_a_pipeline():
    sizes = MeshSizes(world=8, tp=2, pp=2, ep=2, etp=2).as_dict()
    order = PIPELINE_BEFORE_DATA_ORDER  # a stage's ranks are 0, 1, 4, 5 and 2, 3, 6, 7
    assert groups_of("etp", sizes, order) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert groups_of("ep", sizes, order) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups_of("edp", sizes, order) == [[0], [1], [4], [5], [2], [3], [6], [7]]


def test_build_without_processes_makes_each_group_once_and_in_one_order():
    calls = {}
    for rank in range(16):
        made = []
        mesh = ParallelState.build(W16, rank, 16, make_group=lambda r, made=made: made.append(r))
        calls[rank] = made
        assert mesh.world.ranks == tuple(range(16))
        assert mesh.tp.ranks[mesh.tp.rank] == rank
        assert mesh.ep.size == 1
        assert mesh.embedding.size == 2
    assert all(made == calls[0] for made in calls.values())
    pipes = 2 * len(groups_of("pp", W16.as_dict()))  # a group for either direction of a pipeline
    assert len({tuple(r) for r in calls[0]}) == len(calls[0]) - pipes
    assert all(len(r) > 1 for r in calls[0])


def test_labels_and_ranks():
    mesh = ParallelState.build(W16, 13, 16, make_group=lambda ranks: None)
    assert (mesh.tp.rank, mesh.cp.rank, mesh.dp.rank, mesh.pp.rank) == (1, 0, 1, 1)
    assert mesh.label() == "rank 13 tp1 pp1 dp1 cp0"
    assert mesh.pp.is_last
    assert not mesh.pp.is_first


@pytest.mark.parametrize(
    ("reduction", "ranks"),
    [("tp", (4, 5)), ("tp-cp", (4, 5, 6, 7)), ("tp-cp-dp", (0, 1, 2, 3, 4, 5, 6, 7))],
)
def test_amax_ranks(reduction, ranks):
    mesh = ParallelState.build(W16, 5, 16, make_group=lambda _: None, amax_reduction=reduction)
    assert mesh.amax.ranks == ranks


@pytest.mark.parametrize(
    ("reduction", "ranks"),
    [("tp", (4, 5)), ("tp-cp", (0, 1, 4, 5)), ("tp-cp-dp", (0, 1, 4, 5))],
)
def test_ranks_that_share_the_scales_of_an_expert(reduction, ranks):
    """Ranks that hold other experts never do."""
    sizes = MeshSizes(world=8, tp=2, cp=2, ep=2, etp=2)
    mesh = ParallelState.build(sizes, 5, 8, make_group=lambda _: None, amax_reduction=reduction)
    assert mesh.expert_amax.ranks == ranks
    assert mesh.ep_etp.ranks == (4, 5, 6, 7)
    assert mesh.tp_cp_dp.ranks == tuple(range(8))


def test_replicas_are_cut_into_instances_of_the_optimizer():
    """Contiguous parts of the replicas, as in Megatron-LM."""
    sizes = MeshSizes(world=16, tp=2, cp=2, pp=2, ep=2, etp=1, optimizer_instances=2)
    mesh = ParallelState.build(sizes, 5, 16, make_group=lambda _: None)
    assert mesh.dp_cp.ranks == (1, 3, 5, 7)
    assert mesh.dp_cp_inner.ranks == (5, 7)
    assert mesh.dp_cp_outer.ranks == (1, 5)
    assert mesh.edp.ranks == (1, 3, 5, 7)
    assert mesh.edp_inner.ranks == (5, 7)
    assert mesh.edp_outer.ranks == (1, 5)


def test_sizes_are_read_from_a_configuration():
    class Config:
        tensor_model_parallel_size = 2
        context_parallel_size = 1
        pipeline_model_parallel_size = 2
        fp8_amax_reduction = "tp"

    mesh = ParallelState.build(Config(), 0, 8, make_group=lambda _: None)
    assert (mesh.tp.size, mesh.pp.size, mesh.dp.size) == (2, 2, 2)
    assert mesh.amax.ranks == mesh.tp.ranks


def test_one_process_has_no_groups():
    mesh = ParallelState.build(MeshSizes(1), 0, 1)
    axes = [axis for axis in vars(mesh).values() if isinstance(axis, Axis)]
    assert len(axes) == 27
    assert all(axis.group is None and axis.size == 1 for axis in axes)
    assert mesh.label() == "rank 0 tp0 pp0 dp0"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MeshSizes(world=6, tp=4), "world size: got 6"),
        (lambda: MeshSizes(world=8, tp=2, ep=3), "etp x ep x pp"),
        (
            lambda: MeshSizes(world=8, ep=4, etp=2, optimizer_instances=2),
            "instances: got 2.*of the experts",
        ),
        (lambda: MeshSizes(world=12, optimizer_instances=5), "instances: got 5.*12 replicas"),
        (lambda: MeshSizes(world=8, tp=0), "--tensor-model-parallel-size: got 0"),
        (lambda: MeshSizes(world=8, order="tp-dp"), "rank order: got tp-dp"),
        (lambda: groups_of("tp-edp", W16.as_dict()), "axis: got tp-edp"),
        (lambda: groups_of("xp", W16.as_dict()), "axis: got xp"),
        (lambda: ParallelState.build(MeshSizes(2, tp=2), 0, 2), "init_process_group"),
        (lambda: ParallelState.build(MeshSizes(2, tp=2), 2, 2), "rank: got 2"),
        (lambda: ParallelState.build(MeshSizes(2, tp=2), 0, 4), "world size: got 4"),
        (
            lambda: ParallelState.build(MeshSizes(2), 0, 2, amax_reduction="dp"),
            "--fp8-amax-reduction: got dp",
        ),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(MeshError, match=words):
        make()
