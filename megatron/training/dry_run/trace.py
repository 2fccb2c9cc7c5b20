"""One rank's step on paper: the code of a real step, on tensors without values.

Two or more microbatches are run instead of all of them: the first one to warm up (it makes the FP8
copies of the weights), and one of every kind that the schedule has. What an action sends and what
it does to memory is the same for every microbatch of a kind, so the whole step follows from the
schedule.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.config import RunConfig
from megatron.core.backends.native import NativeBackend
from megatron.core.comm_log import (
    CONTROL,
    GRADIENT_SYNC,
    OPTIMIZER,
    PARAMETER_GATHER,
    CommLog,
    Transfer,
)
from megatron.core.datasets.batch import Batch
from megatron.core.mesh import PaperGroup, ParallelState
from megatron.core.pipeline_parallel.schedule import Action
from megatron.training.communication import Row, table
from megatron.training.dry_run.footprint import kept_tensors
from megatron.training.dry_run.live_memory import LiveMemory, Span
from megatron.training.initialize import Launch, Runtime
from megatron.training.providers import Parts, setup_model
from megatron.training.signals import ExitWatch
from megatron.training.step import TrainStep

META = torch.device("meta")
# Sent once a step, in whatever action it happens.
_ONCE = frozenset({GRADIENT_SYNC, PARAMETER_GATHER, OPTIMIZER, CONTROL})


@dataclass(frozen=True)
class PaperRank:
    """A rank with everything that it holds, on paper.

    Attributes:
        runtime: Configuration, mesh, device.
        parts: Model, optimizer and the rest.
        log: Notes what it sends.
    """

    runtime: Runtime
    parts: Parts
    log: CommLog

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self.runtime.config

    @property
    def mesh(self) -> ParallelState:
        """The mesh as this rank sees it."""
        return self.runtime.mesh


def paper_mesh(cfg: RunConfig, rank: int) -> ParallelState:
    """Return the mesh of a run as one of its ranks sees it, without the others."""
    return ParallelState.build(cfg, rank, cfg.world_size, lambda _: PaperGroup())


def paper_runtime(cfg: RunConfig, rank: int) -> Runtime:
    """Return what a started process has, on paper; nothing is started."""
    return Runtime(
        config=cfg,
        mesh=paper_mesh(cfg, rank),
        backend=NativeBackend(),
        backend_reason="a dry run",
        device=META,
        launch=Launch(rank, cfg.world_size, rank, cfg.world_size),
        started=time.monotonic(),
    )


def build_rank(cfg: RunConfig, rank: int) -> PaperRank:
    """Build a rank on paper.

    Args:
        cfg: The finished configuration; `padded_vocab_size` must be known.
        rank: Global rank.

    Raises:
        MegatronError: What a real rank would raise.
    """
    log = CommLog()
    runtime = paper_runtime(cfg, rank)
    runtime = replace(runtime, mesh=runtime.mesh.recording(log))
    return PaperRank(runtime, setup_model(cfg, runtime), log)


class _PaperSource:
    """Batches of the right shapes."""

    def __init__(self, cfg: RunConfig) -> None:
        self._shape = (cfg.micro_batch_size, cfg.seq_length)
        self._documents = cfg.reset_attention_mask

    def batch(self, consumed_samples: int, microbatch: int, dp_rank: int) -> Batch:
        whole, real = (
            torch.empty(self._shape, dtype=dtype, device=META)
            for dtype in (torch.int64, torch.float32)
        )
        starts = torch.zeros(self._shape, dtype=torch.int64) if self._documents else None
        return Batch(whole, whole.clone(), real, whole.clone(), starts)


Kind = tuple[str, int, int]  # operation, stage within the rank, kind of microbatch


@dataclass(frozen=True)
class Peak:
    """The most memory of a step at any moment, beside what is kept between steps.

    Attributes:
        activations: What forward passes kept for their backward passes, and tensors on their way.
        total: With what an operation needs while it runs.
        microbatches: Passes through a stage whose activations were kept at the same time.
    """

    activations: int
    total: int
    microbatches: int


class Trace:
    """What the actions of a rank send and do to memory.

    Args:
        rank: The rank; it is run through a step here.
        actions: Its actions in the real schedule.

    Attributes:
        cached_bytes: What the first step made and later steps keep: FP8 copies of the weights.
    """

    def __init__(self, rank: PaperRank, actions: Sequence[Action]) -> None:
        self._stages = rank.mesh.pp.size
        chosen, self._kinds = _one_of_every_kind(actions, self._stages)
        step = TrainStep(rank.config, rank.runtime, rank.parts, _PaperSource(rank.config), chosen)
        rank.log.clear()
        rank.log.place = lambda: step.current
        memory = LiveMemory(META, lambda: step.current)
        memory.ignore(kept_tensors(rank.parts))
        watch = ExitWatch(rank.config, rank.mesh.world, META, rank.runtime.started)
        with memory:
            step.run(rank.config.fp8_warmup_iters + 1, 0)
            watch.reason(1)
        self.cached_bytes = memory.live_bytes
        self._counts: Mapping[Transfer, int] = rank.log.counts
        self._spans: dict[Kind | str, Span] = {}
        for place, span in memory.spans.items():
            kind = self._traced(place)
            if kind is not None:
                self._spans[kind] = span

    def _traced(self, place: str) -> Kind | str | None:
        """Say what a place of the traced step stands for; None for the warm-up."""
        action = Action.parse(place) if place else None
        if action is None or action.microbatch is None:
            return action.op.name if action else ""
        if action.microbatch == 0:
            return None
        return (action.op.name, action.stage // self._stages, action.microbatch - 1)

    def _kind(self, action: Action) -> Kind | str:
        if action.microbatch is None:
            return action.op.name
        kind = self._kinds[action.microbatch]
        return (action.op.name, action.stage // self._stages, kind)

    def communication(self, actions: Sequence[Action]) -> tuple[Row, ...]:
        """Return what a rank with these actions sends in a step."""
        happens = Counter(self._kind(action) for action in actions)

        def times(transfer: Transfer) -> int:
            kind = self._traced(transfer.place)
            if transfer.part in _ONCE or isinstance(kind, str):
                return 1
            return 0 if kind is None else happens[kind]

        return table(self._counts, times)

    def peak(self, actions: Sequence[Action]) -> Peak:
        """Play a rank's schedule and return the most memory that it needs."""
        live = activations = total = passes = most = 0
        for kind in [*(self._kind(action) for action in actions), ""]:
            span = self._spans.get(kind, Span())
            total = max(total, live + span.peak_bytes)
            live += span.kept_bytes
            if kind[:1] == ("F",):
                passes += 1
            most = max(most, passes)
            activations = max(activations, live)
            if kind[:1] == ("B",):
                passes -= 1
        return Peak(activations, total, most)


def _one_of_every_kind(
    actions: Sequence[Action], stages: int
) -> tuple[list[Action], dict[int, int]]:
    """Choose microbatches that stand for all.

    Microbatches are of one kind if the rank does the same things with them.

    Returns:
        Actions of a step with the first microbatch as number 0 and one of each kind as numbers 1,
        2, ..; and the kind of each microbatch, counted from 0.
    """
    own: dict[int, list[Action]] = {}
    for action in actions:
        if action.microbatch is not None:
            own.setdefault(action.microbatch, []).append(action)
    signatures = {m: frozenset((a.stage, a.op) for a in mine) for m, mine in own.items()}
    numbers: dict[frozenset[object], int] = {}
    examples: list[int] = []
    for microbatch, signature in signatures.items():
        if signature not in numbers:
            numbers[signature] = len(examples)
            examples.append(microbatch)
    chosen = [
        Action(action.stage, action.op, number)
        for number, microbatch in enumerate([examples[0], *examples])
        for action in own[microbatch]
    ]
    chosen += [action for action in actions if action.microbatch is None]
    return chosen, {m: numbers[signature] for m, signature in signatures.items()}
