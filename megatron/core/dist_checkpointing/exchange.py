"""Loading by replicas together: each stored block is read by one of them and sent to the others.

Reading alone, every replica reads the same files, and a file system serves as many copies of the
checkpoint as there are replicas. Here the blocks are divided among the ranks that need them. In
each round every rank reads one block, then those that others need go round. So there is never more
than one block of its own and one that arrives in a rank's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core import wire
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.schema import is_expert_key
from megatron.core.dist_checkpointing.shard import Sharded
from megatron.core.dist_checkpointing.storage import Job, Reader
from megatron.core.errors import CheckpointError, UnusableCheckpointError
from megatron.core.mesh import Axis, ParallelState
from megatron.core.tensor_parallel.mappings import gather_objects

Place = tuple[str, int]


def load(
    reader: Reader, targets: Mapping[str, Sharded], mesh: ParallelState, device: torch.device
) -> int:
    """Do what `Reader.load` does, on all ranks together.

    Args:
        reader: The same checkpoint on every rank.
        targets: See `Reader.load`.
        mesh: Says who the replicas are: of experts others than of the rest.
        device: Where ranks can exchange tensors.

    Returns:
        Number of bytes of the blocks.

    Raises:
        CheckpointError: On every rank, when any rank failed.
    """
    peers = Peers(mesh.world)
    jobs, num_bytes = peers.attempt(lambda: reader.jobs(targets))
    problems = []
    for axis, experts in ((mesh.dp_cp, False), (mesh.edp, True)):
        own = {job.place: job for job in jobs if is_expert_key(job.key) == experts}
        problems += _load_along(reader, own, axis, device)
    peers.agree(next(iter(problems), None))
    return num_bytes


@dataclass(frozen=True)
class _Block:
    """A stored block that somebody along the axis needs.

    Attributes:
        place: Which one.
        source: Index of the rank that reads it.
        num_bytes: Of its values.
        shared: Whether another rank needs it, too.
    """

    place: Place
    source: int
    num_bytes: int
    shared: bool


def _load_along(
    reader: Reader, own: Mapping[Place, Job], axis: Axis, device: torch.device
) -> list[str]:
    """Fill what this rank needs; returns what went wrong, having taken part to the end."""
    needs = gather_objects([(place, job.num_bytes) for place, job in own.items()], axis)
    problems = []
    for blocks in _rounds(needs):
        mine = next((block for block in blocks if block.source == axis.rank), None)
        stored: Tensor | None = None
        if mine is not None:
            job = own[mine.place]
            try:
                stored = _read(reader, job)
                job.fill(stored)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
        for block in blocks:
            if block.shared:
                packed = _packed(stored if block is mine else None, block.num_bytes, device)
                wire.broadcast(packed, axis, block.source)
                if block is not mine and block.place in own:
                    _unpack(packed, own[block.place])
    return problems


def _rounds(needs: Sequence[Sequence[tuple[Place, int]]]) -> Iterator[list[_Block]]:
    """Divide the blocks among the ranks that need them, evenly; yield what is read at a time.

    Args:
        needs: Of each rank, the blocks that it needs and their bytes.
    """
    wanted: dict[Place, tuple[int, list[int]]] = {}
    for rank, blocks in enumerate(needs):
        for place, num_bytes in blocks:
            wanted.setdefault(place, (num_bytes, []))[1].append(rank)
    queues: list[list[_Block]] = [[] for _ in needs]
    read_bytes = [0] * len(needs)
    for place, (num_bytes, ranks) in sorted(wanted.items()):
        source = min(ranks, key=lambda rank: (read_bytes[rank], rank))
        read_bytes[source] += num_bytes
        queues[source].append(_Block(place, source, num_bytes, len(ranks) > 1))
    for number in range(max(map(len, queues))):
        yield [queue[number] for queue in queues if number < len(queue)]


def _read(reader: Reader, job: Job) -> Tensor:
    stored = reader.stored(job)
    if tuple(stored.shape) != job.shape or stored.dtype != job.dtype:
        raise UnusableCheckpointError(
            f"{reader.directory / job.place[0]}: {job.key} holds {stored.dtype} "
            f"{tuple(stored.shape)} where the index says {job.dtype} {job.shape}."
        )
    return stored


def _packed(stored: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """The bytes of a block, and one that tells whether they could be read."""
    packed = torch.empty(num_bytes + 1, dtype=torch.uint8, device=device)
    packed[-1] = stored is not None
    if stored is not None:
        packed[:-1] = stored.contiguous().view(-1).view(torch.uint8)
    return packed


def _unpack(packed: Tensor, job: Job) -> None:
    if packed[-1]:
        job.fill(packed[:-1].view(job.dtype).view(job.shape))
