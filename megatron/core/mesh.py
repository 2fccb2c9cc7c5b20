"""The process mesh: which ranks share which work.

Ranks are numbered along the axes `tp cp ep dp pp`, leftmost fastest. Dense layers see a mesh
without `ep`; expert layers see one in which `tp` is `etp`, `cp` is 1 and `dp` is `edp`. Both use
the same `pp`, also where `dp` comes behind it: experts divide the ranks of one pipeline stage. An
axis of size 1 has no process group, so one process needs no torch.distributed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.comm_log import CommLog, PackedLog, Packing
from megatron.core.errors import MeshError, complaint

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA_ORDER = "tp-cp-ep-pp-dp"
AMAX_REDUCTIONS = ("tp", "tp-cp", "tp-cp-dp")
# Ranks that share the FP8 scales of one expert. The expert mesh has no context axis; what narrows
# less than to one replica of an expert takes all of them.
_EXPERT_AMAX = {"tp": "etp", "tp-cp": "etp-edp", "tp-cp-dp": "etp-edp"}

_EXPERT_NAME = {"tp": "etp", "cp": None, "ep": "ep", "dp": "edp", "pp": "pp"}
_EXPERT_ONLY = frozenset({"ep", "etp", "edp"})


class PaperGroup:
    """Stands in for the process group of ranks that do not exist.

    Transfers along an axis with such a group are noted, and nothing moves.
    """


MakeGroup = Callable[[list[int]], "dist.ProcessGroup | PaperGroup | None"]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as this process sees it.

    Attributes:
        name: `tp`, `dp`, `tp-cp`, ...
        size: Number of ranks along the axis.
        rank: This process's index along the axis.
        ranks: Global ranks along the axis, in order.
        group: Their process group; None if and only if `size` is 1. A `PaperGroup` for ranks that
            do not exist.
        log: Notes every transfer along the axis; None to note nothing.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    log: CommLog | None = field(default=None, repr=False, compare=False)

    @classmethod
    def single(cls, name: str, global_rank: int = 0) -> Axis:
        """An axis that holds this process alone."""
        return cls(name, 1, 0, (global_rank,))

    @property
    def is_first(self) -> bool:
        """Whether this process has index 0 along the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process has the highest index along the axis."""
        return self.rank == self.size - 1

    def packed(self, packing: Packing) -> Axis:
        """The same axis for transfers whose bytes stand for something, see `Packing`."""
        return self if self.log is None else replace(self, log=PackedLog(self.log, packing))


@dataclass(frozen=True)
class MeshSizes:
    """Extents of every axis and the order in which ranks run through them.

    `etp` defaults to `tp`; `dp` and `edp` are what is left of `world`. `optimizer_instances` is
    into how many equal parts the replicas are cut, each of which holds the optimizer once. `vpp` is
    the number of stages of a pipeline rank. `cp_a2a` is how many neighbours along `cp` exchange
    heads where context parallelism has two levels.

    Raises:
        MeshError: If the axes do not divide the world.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    vpp: int = 1
    cp_a2a: int = 1

    def __post_init__(self) -> None:
        _check_order(self.order)
        if self.vpp > 1 and self.pp == 1:
            raise MeshError(
                complaint(
                    "virtual_pipeline_model_parallel_size",
                    self.vpp,
                    "Stages are interleaved over several pipeline ranks, and there is one",
                    "Leave it out, or raise --pipeline-model-parallel-size",
                )
            )
        if self.cp_a2a < 1 or self.cp % self.cp_a2a:
            raise MeshError(
                complaint(
                    "--hierarchical-context-parallel-sizes",
                    f"{self.cp_a2a} with {self.cp} context-parallel ranks",
                    "They are cut into equal parts",
                    "Choose two sizes whose product is --context-parallel-size",
                )
            )
        for flag, size in (
            ("--tensor-model-parallel-size", self.tp),
            ("--context-parallel-size", self.cp),
            ("--pipeline-model-parallel-size", self.pp),
            ("--expert-model-parallel-size", self.ep),
            ("--expert-tensor-parallel-size", self.expert_tp),
            ("--num-distributed-optimizer-instances", self.optimizer_instances),
            ("world size", self.world),
        ):
            if size < 1:
                raise MeshError(
                    complaint(flag, size, "An axis holds at least one rank", "Use 1 or more")
                )
        dense, expert = self.tp * self.cp * self.pp, self.expert_tp * self.ep * self.pp
        if self.world % dense:
            raise MeshError(
                complaint(
                    "world size",
                    self.world,
                    f"It is not a multiple of tp x cp x pp = {self.tp} x {self.cp} x {self.pp}"
                    f" = {dense}",
                    f"Start a multiple of {dense} ranks or change the parallel sizes",
                )
            )
        if self.world % expert:
            raise MeshError(
                complaint(
                    "world size",
                    self.world,
                    "It is not a multiple of etp x ep x pp ="
                    f" {self.expert_tp} x {self.ep} x {self.pp} = {expert}",
                    f"Start a multiple of {expert} ranks or change the expert-parallel sizes",
                )
            )
        for what, replicas in (("", self.dp * self.cp), (" of the experts", self.edp)):
            if replicas % self.optimizer_instances:
                raise MeshError(
                    complaint(
                        "--num-distributed-optimizer-instances",
                        self.optimizer_instances,
                        f"The {replicas} replicas{what} cannot be cut into that many equal parts",
                        f"Choose a divisor of {replicas}",
                    )
                )

    @classmethod
    def from_config(cls, config: Any, world_size: int) -> MeshSizes:
        """Read the sizes from anything with the parallel flags' names as attributes."""
        pp_first = bool(getattr(config, "use_tp_pp_dp_mapping", False))
        return cls(
            world=world_size,
            tp=getattr(config, "tensor_model_parallel_size", 1),
            cp=getattr(config, "context_parallel_size", 1),
            pp=getattr(config, "pipeline_model_parallel_size", 1),
            ep=getattr(config, "expert_model_parallel_size", 1),
            etp=getattr(config, "expert_tensor_parallel_size", None),
            optimizer_instances=getattr(config, "num_distributed_optimizer_instances", 1),
            order=PIPELINE_BEFORE_DATA_ORDER if pp_first else DEFAULT_ORDER,
            vpp=getattr(config, "virtual_pipeline_model_parallel_size", None) or 1,
            cp_a2a=(getattr(config, "hierarchical_context_parallel_sizes", None) or (1,))[0],
        )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of expert layers."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel size of dense layers."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of expert layers."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    def text(self, experts: bool) -> str:
        """The sizes for a reader; those of expert layers where there are any."""
        shown = f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}"
        if not experts:
            return shown
        size = f"etp {self.expert_tp} x ep {self.ep} x pp {self.pp} x edp {self.edp}"
        return f"{shown}; experts {size}"

    def as_dict(self) -> dict[str, int]:
        """Sizes by axis name, for `groups_of`."""
        return {
            "tp": self.tp,
            "cp": self.cp,
            "dp": self.dp,
            "pp": self.pp,
            "ep": self.ep,
            "etp": self.expert_tp,
            "edp": self.edp,
        }


def _check_order(order: str) -> list[str]:
    names = order.split("-")
    if sorted(names) != sorted(_EXPERT_NAME):
        raise MeshError(
            complaint(
                "rank order",
                order,
                "It must name tp, cp, ep, dp and pp once each",
                f"Use {DEFAULT_ORDER}",
            )
        )
    return names


def groups_of(token: str, sizes: Mapping[str, int], order: str = DEFAULT_ORDER) -> list[list[int]]:
    """All rank groups of one axis or of a union of axes.

    Args:
        token: Axis names joined by `-`. `ep`, `etp` and `edp` select the expert mesh (in which
            only `pp` is shared with the dense one, with the same groups in every order).
        sizes: Extent by axis name; a missing name is 1.
        order: The five dense names, fastest first.

    Returns:
        Disjoint groups that cover the world, each in rank order.

    Raises:
        MeshError: If the token mixes dense and expert axes or is unknown.
    """
    wanted = token.split("-")
    expert = bool(_EXPERT_ONLY & set(wanted))
    names: list[str] = []
    for name in _check_order(order):
        mapped = _EXPERT_NAME[name] if expert else (None if name == "ep" else name)
        if mapped is not None:
            names.append(mapped)
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise MeshError(
            complaint(
                "axis",
                token,
                f"{', '.join(unknown)} is not among {', '.join(names)}",
                "Name dense axes (tp cp dp pp) or expert axes (etp ep edp pp), not both",
            )
        )
    if not expert:
        return _runs(names, set(wanted), sizes)
    # A layer with experts is on one pipeline stage: its ranks, in their order, are dealt anew.
    stage = [name for name in names if name != "pp"]
    groups = _runs([*stage, "pp"], set(wanted), sizes)
    if names[-1] == "pp":
        return groups
    dense = [name for name in _check_order(order) if name != "ep"]
    rank_of = _numbers(dense, [*(name for name in dense if name != "pp"), "pp"], sizes)
    return [sorted(rank_of[place] for place in group) for group in groups]


def _runs(names: Sequence[str], wanted: set[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """Groups along some axes of a mesh whose ranks run through `names`, leftmost fastest."""
    starts = _numbers(names, [name for name in names if name not in wanted], sizes)
    steps = _numbers(names, [name for name in names if name in wanted], sizes)
    return [[start + step for step in steps] for start in starts]


def _numbers(names: Sequence[str], through: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Ranks, numbered along `names`, that one meets going along the axes `through`."""
    extents = [sizes.get(name, 1) for name in names]
    strides = [1, *itertools.accumulate(extents, lambda a, b: a * b)][: len(names)]
    stride = dict(zip(names, strides, strict=True))
    spans = [range(0, sizes.get(name, 1) * stride[name], stride[name]) for name in through]
    return [sum(parts) for parts in itertools.product(*reversed(spans))]


@dataclass(frozen=True)
class ParallelState:
    """Every axis of the mesh as this process sees it; passed explicitly, never looked up.

    `ep_etp` are the ranks that hold the experts of one layer between them, `tp_cp_dp` those that
    see different tokens of a batch (in a layer that spreads the sequence over `tp`). `amax` and
    `expert_amax` are the ranks that share the FP8 scales of a dense layer and of one expert.
    `dp_cp` is cut into parts, each of which holds the optimizer's state once: `dp_cp_inner` is this
    process's part, `dp_cp_outer` the processes that hold the same in every part; so is `edp`.
    Context parallelism in two levels cuts `cp`: neighbours (`cp_a2a`) exchange heads for tokens,
    and what they then hold together travels around the ring `cp_p2p`.

    The `pipe_*` axes carry tensors between pipeline stages. Each has a process group of its own,
    because transfers of one group wait for each other: in either direction one for the edges from
    even ranks, one for those from odd ranks, and one between the last rank and the first one, which
    is in use when stages are interleaved.
    """

    tp: Axis
    cp: Axis
    cp_a2a: Axis
    cp_p2p: Axis
    dp: Axis
    pp: Axis
    ep: Axis
    etp: Axis
    edp: Axis
    dp_cp: Axis
    dp_cp_inner: Axis
    dp_cp_outer: Axis
    edp_inner: Axis
    edp_outer: Axis
    tp_cp: Axis
    tp_cp_dp: Axis
    ep_etp: Axis
    amax: Axis
    expert_amax: Axis
    world: Axis
    embedding: Axis
    pipe_forward: Axis
    pipe_backward: Axis
    pipe_forward_odd: Axis
    pipe_backward_odd: Axis
    pipe_forward_wrap: Axis
    pipe_backward_wrap: Axis
    rank: int = 0

    @classmethod
    def single(cls) -> ParallelState:
        """The mesh of one process."""
        names = [f.name for f in fields(cls) if f.name != "rank"]
        axes: dict[str, Any] = {name: Axis.single(name.replace("_", "-")) for name in names}
        return cls(**axes)

    @classmethod
    def build(
        cls,
        config: Any,
        rank: int,
        world_size: int,
        make_group: MakeGroup | None = None,
        amax_reduction: str | None = None,
    ) -> ParallelState:
        """Build the mesh and its process groups. Collective: every rank calls it.

        Args:
            config: A `MeshSizes`, or anything with the parallel flags' names as attributes.
            rank: Global rank of this process.
            world_size: Number of processes.
            make_group: Makes one process group from global ranks; called on every rank for every
                group in the same order. Default: `torch.distributed.new_group`, with the time
                limit `config.distributed_timeout_minutes`.
            amax_reduction: `tp`, `tp-cp` or `tp-cp-dp`; default `config.fp8_amax_reduction`.

        Raises:
            MeshError: If sizes do not fit, or `torch.distributed` is missing for several ranks.
        """
        sizes = _sizes_of(config, rank, world_size)
        amax = amax_reduction or getattr(config, "fp8_amax_reduction", None) or "tp-cp-dp"
        if amax not in AMAX_REDUCTIONS:
            raise MeshError(
                complaint(
                    "--fp8-amax-reduction",
                    amax,
                    "No such set of ranks",
                    f"Use one of {', '.join(AMAX_REDUCTIONS)}",
                )
            )
        if world_size == 1:
            return cls.single()
        if make_group is None:
            make_group = _default_groups(
                world_size, getattr(config, "distributed_timeout_minutes", None)
            )
        make_axis = _AxisMaker(rank, make_group)
        extents, order = sizes.as_dict(), sizes.order
        axes: dict[str, Any] = {
            name: make_axis(token, groups_of(token, extents, order))
            for name, token in (
                ("tp", "tp"),
                ("cp", "cp"),
                ("dp", "dp"),
                ("pp", "pp"),
                ("ep", "ep"),
                ("etp", "etp"),
                ("edp", "edp"),
                ("dp_cp", "dp-cp"),
                ("tp_cp", "tp-cp"),
                ("tp_cp_dp", "tp-cp-dp"),
                ("ep_etp", "etp-ep"),
                ("amax", amax),
                ("expert_amax", _EXPERT_AMAX[amax]),
            )
        }
        for name, token in (("dp_cp", "dp-cp"), ("edp", "edp")):
            inner, outer = _cut(groups_of(token, extents, order), sizes.optimizer_instances)
            part = f"{token}-inner" if sizes.optimizer_instances > 1 else token
            axes[f"{name}_inner"] = make_axis(part, inner)
            axes[f"{name}_outer"] = make_axis(f"{token}-outer", outer)
        inner, outer = _cut(groups_of("cp", extents, order), sizes.cp // sizes.cp_a2a)
        axes["cp_a2a"], axes["cp_p2p"] = make_axis("cp-a2a", inner), make_axis("cp-p2p", outer)
        axes["world"] = make_axis("world", [list(range(world_size))])
        ends = [[g[0]] if len(g) == 1 else [g[0], g[-1]] for g in groups_of("pp", extents, order)]
        axes["embedding"] = make_axis("embedding", ends)
        lines = groups_of("pp", extents, order)
        axes["pipe_forward"] = make_axis("pipe-forward", lines, own=True)
        axes["pipe_backward"] = make_axis("pipe-backward", lines, own=True)
        odd = lines if sizes.pp > 2 else []  # two ranks have one edge
        axes["pipe_forward_odd"] = make_axis("pipe-forward-odd", odd, own=True)
        axes["pipe_backward_odd"] = make_axis("pipe-backward-odd", odd, own=True)
        wrapped = ends if sizes.vpp > 1 else []
        axes["pipe_forward_wrap"] = make_axis("pipe-forward-wrap", wrapped, own=True)
        axes["pipe_backward_wrap"] = make_axis("pipe-backward-wrap", wrapped, own=True)
        return cls(rank=rank, **axes)

    def recording(self, log: CommLog) -> ParallelState:
        """The same mesh, with every transfer along any of its axes noted in `log`."""
        axes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rank"}
        return replace(self, **{name: replace(axis, log=log) for name, axis in axes.items()})

    def label(self) -> str:
        """Short name of this process for messages: `rank 5 tp1 pp1 dp0`."""
        parts = [f"rank {self.rank}", f"tp{self.tp.rank}", f"pp{self.pp.rank}", f"dp{self.dp.rank}"]
        parts += [f"{axis.name}{axis.rank}" for axis in (self.cp, self.ep) if axis.size > 1]
        return " ".join(parts)


def _cut(groups: list[list[int]], parts: int) -> tuple[list[list[int]], list[list[int]]]:
    """Cut each group into contiguous parts; also return the ranks with one place in all parts."""
    inner, outer = [], []
    for group in groups:
        size = len(group) // parts
        inner += [group[start : start + size] for start in range(0, len(group), size)]
        outer += [group[place::size] for place in range(size)]
    return inner, outer


def _sizes_of(config: Any, rank: int, world_size: int) -> MeshSizes:
    """The sizes that a configuration asks for, checked against this process's place."""
    sizes = config if isinstance(config, MeshSizes) else MeshSizes.from_config(config, world_size)
    if sizes.world != world_size:
        raise MeshError(
            complaint(
                "world size",
                world_size,
                f"The mesh was laid out for {sizes.world}",
                "Build the sizes for this world",
            )
        )
    if not 0 <= rank < world_size:
        raise MeshError(
            complaint(
                "rank",
                rank,
                f"Ranks run from 0 to {world_size - 1}",
                "Check RANK and WORLD_SIZE",
            )
        )
    return sizes


def _default_groups(world_size: int, timeout_minutes: float | None) -> MakeGroup:
    """Groups of `torch.distributed`; the first one of the whole world exists already."""
    if not dist.is_available() or not dist.is_initialized():
        raise MeshError(
            complaint(
                "world size",
                world_size,
                "Several ranks need torch.distributed and it is not initialised",
                "Call torch.distributed.init_process_group first",
            )
        )
    # Without one, a group gets torch's default limit, not that of init_process_group.
    timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)

    existing = [dist.group.WORLD]

    def make(ranks: list[int]) -> dist.ProcessGroup | None:
        if len(ranks) == world_size and existing:
            return existing.pop()
        return dist.new_group(ranks, timeout=timeout)

    return make


class _AxisMaker:
    """Makes axes, one process group for each distinct set of ranks."""

    def __init__(self, rank: int, make_group: MakeGroup) -> None:
        self.rank, self.make_group = rank, make_group
        self.made: dict[tuple[int, ...], Any] = {}

    def __call__(self, name: str, groups: Sequence[Sequence[int]], own: bool = False) -> Axis:
        """Make the axis; `own` gives it process groups that no other axis shares."""
        mine = Axis.single(name, self.rank)
        made = {} if own else self.made
        for group in groups:
            ranks = tuple(group)
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = self.make_group(list(ranks))
            if len(ranks) > 1 and self.rank in ranks:
                mine = Axis(name, len(ranks), ranks.index(self.rank), ranks, made[ranks])
        return mine
