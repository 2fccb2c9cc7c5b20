"""The ranks of a run on paper: which of them differ, and what each needs and sends."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron.config import RunConfig
from megatron.core.distributed.buffers import GradBuffer
from megatron.core.fp8 import PrecisionRow
from megatron.core.mesh import MeshSizes, groups_of
from megatron.core.pipeline_parallel.layout import checked_schedule
from megatron.training.communication import Row
from megatron.training.dry_run.footprint import Footprint, footprint, optimizer_bytes
from megatron.training.dry_run.trace import PaperRank, Peak, Trace, build_rank, paper_mesh

_NUMBERS = (
    (re.compile(r"(?<=\.)\d+(?=\.|$)"), "*"),  # decoder.layers.3.mlp
    (re.compile(r"\(\d+\):"), "(*):"),  # print(model)
    (re.compile(r"layer_number=\d+"), "layer_number=*"),
)


def _nameless(text: str) -> str:
    """Leave the numbers of layers out."""
    for pattern, star in _NUMBERS:
        text = pattern.sub(star, text)
    return text


@dataclass(frozen=True)
class RankClass:
    """Ranks that need and send the same.

    Attributes:
        pipeline_ranks: Where they are in the pipeline.
        ranks: How many there are.
        parameters: Of one rank.
        kept: What a rank keeps between steps; of the optimizer the most that one of them keeps.
        least_optimizer: The least optimizer state that one of them keeps.
        cached_bytes: FP8 copies of the weights.
        peak: What a step needs beside that.
        communication: What a rank sends in a step.
    """

    pipeline_ranks: tuple[int, ...]
    ranks: int
    parameters: int
    kept: Footprint
    least_optimizer: int
    cached_bytes: int
    peak: Peak
    communication: tuple[Row, ...]

    @property
    def total_bytes(self) -> int:
        """The most memory that a rank's tensors take at any moment."""
        return self.kept.total + self.cached_bytes + self.peak.total


class World:
    """All ranks of a run on paper.

    Ranks that differ in their place along `tp`, `cp` and `dp` only hold tensors of the same shapes
    and send the same, but for the ranges that the distributed optimizer gives them. So one rank of
    every pipeline rank is built, and one of those that hold the same is run through a step.

    Args:
        cfg: The finished configuration; `padded_vocab_size` must be known.

    Attributes:
        stages: A rank of every pipeline rank.
        different: Those of them that hold different things.
        schedule: What every pipeline rank does in a step.

    Raises:
        MegatronError: What real ranks would raise.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.config = cfg
        self.schedule = checked_schedule(cfg)
        self.stages = [build_rank(cfg, rank) for rank in paper_mesh(cfg, 0).pp.ranks]
        self._content = [_content(rank) for rank in self.stages]
        first = {content: i for i, content in reversed(list(enumerate(self._content)))}
        self._examples = sorted(first.values())
        self.different = [self.stages[i] for i in self._examples]
        self._traces: dict[Hashable, Trace] = {}
        self._optimizer: dict[Hashable, set[int]] = {}

    def trace(self, pipeline_rank: int) -> Trace:
        """Run a rank of that pipeline rank through a step, or one that holds the same."""
        content = self._content[pipeline_rank]
        if content not in self._traces:
            example = self._content.index(content)
            self._traces[content] = Trace(self.stages[example], self.schedule[example])
        return self._traces[content]

    def precision_rows(self) -> list[PrecisionRow]:
        """The precision table of the whole model."""
        rows = [row for rank in self.stages for row in rank.parts.model.named_precision_rows()]
        return list(dict.fromkeys(rows))  # a tied embedding is on two stages

    def classes(self) -> list[RankClass]:
        """Return the ranks by what they need and send."""
        alike: dict[RankClass, list[int]] = {}
        for number in range(len(self.stages)):
            alike.setdefault(self._describe(number), []).append(number)
        return [
            replace(one, pipeline_ranks=tuple(numbers), ranks=one.ranks * len(numbers))
            for one, numbers in alike.items()
        ]

    def communication(self) -> list[tuple[tuple[int, ...], tuple[Row, ...]]]:
        """Return pipeline ranks and what ranks there send, once for those that send the same."""
        alike: dict[tuple[Row, ...], list[int]] = {}
        for number, actions in enumerate(self.schedule):
            alike.setdefault(self.trace(number).communication(actions), []).append(number)
        return [(tuple(numbers), rows) for rows, numbers in alike.items()]

    def _optimizer_bytes(self, pipeline_rank: int) -> set[int]:
        """What the optimizers of all replicas keep; the same for ranks that hold the same."""
        content = self._content[pipeline_rank]
        if content not in self._optimizer:
            parts = self.stages[pipeline_rank].parts
            own = optimizer_bytes(parts, self.config)
            places = [_places(self.config, buffer) for buffer in parts.ddp.buffers_by_axis]
            together = set(zip(*places, strict=True))
            self._optimizer[content] = {
                sum(sizes[place] for sizes, place in zip(own, each, strict=True))
                for each in together
            }
        return self._optimizer[content]

    def _describe(self, number: int) -> RankClass:
        rank, actions = self.stages[number], self.schedule[number]
        trace, kept = self.trace(number), footprint(rank.parts)
        optimizer = self._optimizer_bytes(number)
        return RankClass(
            pipeline_ranks=(),
            ranks=self.config.world_size // len(self.stages),
            parameters=sum(p.numel() for p in rank.parts.model.parameters()),
            kept=replace(kept, optimizer=max(optimizer)),
            least_optimizer=min(optimizer),
            cached_bytes=trace.cached_bytes,
            peak=trace.peak(actions),
            communication=trace.communication(actions),
        )


def _places(cfg: RunConfig, buffer: GradBuffer) -> list[int]:
    """Return the place of every rank of the run among those that share a buffer's optimizer."""
    sizes = MeshSizes.from_config(cfg, cfg.world_size)
    found = [0] * sizes.world
    if buffer.sharded:
        token = buffer.axis.name.removesuffix("-inner")
        for group in groups_of(token, sizes.as_dict(), sizes.order):
            for place, rank in enumerate(group):
                found[rank] = place % buffer.axis.size
    return found


def _content(rank: PaperRank) -> Hashable:
    """Describe what a rank holds without the numbers of its layers."""
    model = rank.parts.model
    return (
        tuple((s.num_layers, s.embedding, s.loss) for s in model.stages),
        tuple(
            (_nameless(name), tuple(param.shape), param.dtype)
            for name, param in model.named_parameters()
        ),
        tuple(
            (_nameless(row.path), row.gemm, row.delivered, row.kernel)
            for row in model.named_precision_rows()
        ),
        _nameless(str(model)),
    )


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, e.g. `0, 2-5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
