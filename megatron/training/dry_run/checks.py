"""What must hold for a run as a whole: groups, samples, and the blocks of a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core.datasets.source import Source
from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.shard import Sharded, volume
from megatron.core.errors import CheckpointError, DataError, MeshError, complaint
from megatron.core.mesh import AMAX_REDUCTIONS, MeshSizes, ParallelState, groups_of
from megatron.core.shards import FlatRange, is_expert
from megatron.training.checkpoint_config import stacking_of
from megatron.training.dry_run.trace import PaperRank

_REPORT = "Please report this configuration"
_PRIME = 2**61 - 1

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset and extents

_AXES = ("tp", "cp", "dp", "pp", "dp-cp", *AMAX_REDUCTIONS)
_PIPELINE = 3  # of the axes, the pipeline
_EXPERT_AXES = ("ep", "etp", "edp", "etp-ep", "etp-edp")


def check_groups(cfg: RunConfig) -> dict[str, tuple[int, int]]:
    """Check that every axis' groups hold every rank once, and that axes tell ranks apart.

    Ranks that share out experts have to be on one pipeline stage.

    Returns:
        Number of groups and ranks of each, for every axis that has groups of its own; expert axes
        only if there are experts.

    Raises:
        MeshError: They do not.
    """
    sizes = MeshSizes.from_config(cfg, cfg.world_size)
    found: dict[tuple[tuple[int, ...], ...], str] = {}
    place: dict[int, tuple[int, ...]] = dict.fromkeys(range(sizes.world), ())
    shared: dict[str, list[list[int]]] = {}
    has_experts = getattr(cfg, "num_experts", None) is not None
    for token in (*_AXES, *_EXPERT_AXES):
        groups = groups_of(token, sizes.as_dict(), sizes.order)
        members = sorted(rank for group in groups for rank in group)
        extents = {len(group) for group in groups}
        if members != list(range(sizes.world)) or len(extents) != 1:
            raise MeshError(
                complaint(
                    f"axis {token}",
                    f"{len(groups)} groups of {sorted(extents)} ranks",
                    f"They do not hold each of {sizes.world} ranks once",
                    _REPORT,
                )
            )
        if token in ("tp", "cp", "dp", "pp"):
            for group in groups:
                for index, rank in enumerate(group):
                    place[rank] += (index,)
        if token in _EXPERT_AXES:
            shared[token] = groups
        if extents != {1} and (has_experts or token not in _EXPERT_AXES):
            found.setdefault(tuple(map(tuple, groups)), token)
    if len(set(place.values())) != sizes.world:
        why = "Two of them have the same place on every axis"
        raise MeshError(complaint("ranks", sizes.world, why, _REPORT))
    for token, groups in shared.items():
        _check_stages(token, groups, {rank: at[_PIPELINE] for rank, at in place.items()})
    return {token: (len(groups), len(groups[0])) for groups, token in found.items()}


def _check_stages(token: str, groups: Sequence[Sequence[int]], stage_of: Mapping[int, int]) -> None:
    """Refuse ranks that share experts although they hold different layers."""
    for group in groups:
        stages = sorted({stage_of[rank] for rank in group})
        if len(stages) > 1:
            got = f"ranks {', '.join(map(str, group))} of the stages {', '.join(map(str, stages))}"
            why = "A layer with experts is on one pipeline stage"
            raise MeshError(complaint(f"axis {token}", got, why, _REPORT))


class _Numbers:
    """As many samples as a step takes."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index)}


def check_samples(cfg: RunConfig) -> None:
    """Check that replicas and microbatches read every sample of a step once.

    Raises:
        DataError: They do not.
    """
    step = int(cfg.global_batch_size)
    source = Source(
        _Numbers(step),
        micro_batch_size=cfg.micro_batch_size,
        data_parallel_size=cfg.data_parallel_size,
    )
    read = [
        source.first_sample(0, microbatch, replica) + i
        for microbatch in range(cfg.num_microbatches)
        for replica in range(cfg.data_parallel_size)
        for i in range(cfg.micro_batch_size)
    ]
    if sorted(read) != list(range(step)):
        raise DataError(
            complaint(
                "data",
                f"{len(set(read))} samples read {len(read)} times",
                f"A step has {step} samples, each of which is read once",
                _REPORT,
            )
        )


@dataclass(frozen=True)
class Stored:
    """What a checkpoint of the run consists of.

    Attributes:
        model: Key -> blocks of one rank of every pipeline rank, of the model's tensors.
        kinds: Kinds of optimizer state that every parameter has.
        blocks: Different blocks of the model's tensors, over all ranks.
    """

    model: dict[str, Sharded]
    kinds: tuple[str, ...]
    blocks: int

    @property
    def parameters(self) -> int:
        """Elements of the model's tensors, with the rows that pad the vocabulary."""
        return sum(volume(shard.size()) for shard in self.model.values())


def stored_model(stages: Sequence[PaperRank], stacking: schema.Stacking) -> dict[str, Sharded]:
    """Return the model's tensors as one rank of every pipeline rank stores them."""
    found: dict[str, Sharded] = {}
    for rank in stages:
        found.update(schema.model_state(rank.parts.model, rank.mesh, stacking))
    return found


def stored_optimizer(stages: Sequence[PaperRank], stacking: schema.Stacking) -> dict[str, Sharded]:
    """Return the optimizer's tensors as if nothing was shared between replicas."""
    found: dict[str, Sharded] = {}
    for rank in stages:
        kinds = _kinds(rank)
        state = [
            (name, dict.fromkeys(kinds, param))
            for name, param in rank.parts.model.named_parameters()
            if param.requires_grad
        ]
        found.update(schema.optimizer_state(state, rank.parts.model, rank.mesh, stacking))
    return found


def check_checkpoint(stages: Sequence[PaperRank], different: Iterable[PaperRank]) -> Stored:
    """Check that the blocks that ranks store cover every tensor once.

    The model's tensors are looked at on all ranks. What replicas store of the optimizer is compared
    with the parameters it belongs to, on ranks that differ in more than in a layer's number, at the
    first and the last place along the axes that split layers: the others' blocks are the same ones,
    moved. Of the optimizer the masters count; moments are cut like them.

    Args:
        stages: One rank of every pipeline rank.
        different: Those of them that hold different things.

    Raises:
        CheckpointError: Names a tensor that is not covered, or covered twice.
    """
    stacking = stacking_of(stages[0].config)
    blocks, sums = _Blocks(), _Sums()
    for rank in stages:
        for mesh in _places(rank.mesh):
            with _as_expert_rank(rank, mesh.ep.rank):
                blocks.add(schema.model_state(rank.parts.model, mesh, stacking))
    for key, shape in blocks.shapes.items():
        sums.compare(key, shape, [((0,) * len(shape), shape)], blocks.of[key])
    tied: dict[str, set[Block]] = {}
    for rank in different:
        places = _places(rank.mesh)
        for mesh in dict.fromkeys((places[0], places[-1])):
            masters = _check_masters(rank, mesh, stacking, sums)
            if mesh is places[0]:
                _check_copies(rank, masters, tied)
    model = stored_model(stages, stacking)
    return Stored(model, _kinds(stages[0]), sum(map(len, blocks.of.values())))


def _kinds(rank: PaperRank) -> tuple[str, ...]:
    return tuple(next(iter(rank.parts.optimizer.named_state()))[1])


def _places(mesh: ParallelState) -> list[ParallelState]:
    """Return the meshes of ranks that hold other parts of the same layers.

    First those that differ in `tp`, then those that differ in their experts, the last of both last.
    """

    def at(tp: int, etp: int, ep: int) -> ParallelState:
        ranks = {"tp": tp, "etp": etp, "ep": ep}
        axes = {name: replace(getattr(mesh, name), rank=rank) for name, rank in ranks.items()}
        return replace(mesh, **axes)

    last = mesh.tp.size - 1
    dense = [at(rank, mesh.etp.rank, mesh.ep.rank) for rank in range(mesh.tp.size)]
    experts = [at(last, etp, ep) for etp in range(mesh.etp.size) for ep in range(mesh.ep.size)]
    return [*dense, *experts]


@contextmanager
def _as_expert_rank(rank: PaperRank, place: int) -> Iterator[None]:
    """Number the experts of a rank as another expert-parallel rank does."""
    experts: list[Any] = [p for p in rank.parts.model.parameters() if is_expert(p)]
    local = getattr(rank.config, "num_experts", None) or 0
    shift = (place - rank.mesh.ep.rank) * (local // rank.mesh.ep.size)
    for param in experts:
        param.expert_index += shift
    try:
        yield
    finally:
        for param in experts:
            param.expert_index -= shift


def _check_copies(rank: PaperRank, masters: _Blocks, tied: dict[str, set[Block]]) -> None:
    """Check that a tied embedding is cut at the same places on both of its stages."""
    for name, param in rank.parts.model.named_parameters():
        key = schema.optimizer_key("param", name)
        if getattr(param, "shared_embedding", False) and key in masters.of:
            own = set(masters.of[key])
            if tied.setdefault(key, own) != own:
                raise _uncovered(key, "two copies", "They are cut at different places")


def _check_masters(
    rank: PaperRank, mesh: ParallelState, stacking: schema.Stacking, sums: _Sums
) -> _Blocks:
    """Check that replicas of a rank store each of its parameters' masters once."""
    masters, model = _Blocks(), rank.parts.model
    whole = [
        (name, {"param": param}) for name, param in model.named_parameters() if param.requires_grad
    ]
    with _as_expert_rank(rank, mesh.ep.rank):
        for named, owned in _masters(rank):
            masters.add(schema.optimizer_state(named, model, mesh, stacking, owned), copies=False)
        wanted_state = schema.optimizer_state(whole, model, mesh, stacking)
    for key, shard in wanted_state.items():
        wanted = [(piece.offset, tuple(piece.local.shape)) for piece in shard.pieces]
        sums.compare(key, tuple(shard.size()), wanted, masters.of.get(key, []))
    return masters


def _masters(
    rank: PaperRank,
) -> Iterable[tuple[list[tuple[str, dict[str, torch.Tensor]]], dict[str, FlatRange]]]:
    """Yield the masters of every replica that differs in what it owns, and what that is."""
    if not rank.config.use_distributed_optimizer:
        yield [(s.name, {"param": s.master}) for s in rank.parts.optimizer.slots], {}
        return
    names = {param: name for name, param in rank.parts.model.named_parameters()}
    for buffer in rank.parts.ddp.buffers_by_axis:
        for index in range(buffer.axis.size):
            owned = {names[p]: span for p, span in buffer.ranges_of(index).items() if span.size}
            yield (
                [
                    (name, {"param": torch.empty(span.size, device="meta")})
                    for name, span in owned.items()
                ],
                owned,
            )


class _Blocks:
    """Which blocks there are of each tensor."""

    def __init__(self) -> None:
        self.of: dict[str, list[Block]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(self, state: Mapping[str, Sharded], copies: bool = True) -> None:
        """Note a rank's blocks; where there are copies, equal blocks count once."""
        for key, shard in state.items():
            shape = tuple(shard.size())
            if self.shapes.setdefault(key, shape) != shape:
                raise _uncovered(key, f"shapes {self.shapes[key]} and {shape}", "Ranks disagree")
            own = self.of.setdefault(key, [])
            own += [(piece.offset, tuple(piece.local.shape)) for piece in shard.pieces]
            if copies:
                own[:] = dict.fromkeys(own)


class _Sums:
    """Compares sets of blocks: do they hold the same elements, each equally often?

    That is a statement about every element. Give every index of every dimension a random number
    modulo a large prime, and an element the product of its indices' numbers: the sum over a block
    is a product of partial sums, and equal sets have equal totals. Sets that differ have them with
    a probability of about 2^-60 (Schwartz, 1980).
    """

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._partial: dict[tuple[int, ...], list[list[int]]] = {}

    def compare(
        self, key: str, shape: tuple[int, ...], wanted: Sequence[Block], found: Sequence[Block]
    ) -> None:
        """Raise unless blocks of a tensor cover what is wanted, once."""
        if shape not in self._partial:
            self._partial[shape] = [
                list(accumulate((self._draw.randrange(_PRIME) for _ in range(n)), initial=0))
                for n in shape
            ]
        if self._total(shape, wanted) != self._total(shape, found):
            elements = [sum(volume(extents) for _, extents in x) for x in (found, wanted)]
            got = f"{len(found)} blocks with {elements[0]} elements where {elements[1]} are stored"
            raise _uncovered(key, got, "They do not cover it once")

    def _total(self, shape: tuple[int, ...], blocks: Sequence[Block]) -> int:
        total = 0
        for offset, extents in blocks:
            product = 1
            for partial, start, n in zip(self._partial[shape], offset, extents, strict=True):
                product = product * (partial[start + n] - partial[start]) % _PRIME
            total += product
        return total % _PRIME


def _uncovered(key: str, got: str, why: str) -> CheckpointError:
    return CheckpointError(complaint(f"checkpoint tensor {key}", got, why, _REPORT))
