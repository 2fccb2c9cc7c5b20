"""Train one model at several layouts and compare each with one process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config import ConfigError, RunConfig, make_config
from megatron.core.errors import MegatronError, MeshError
from megatron.training.initialize import Launch
from megatron.training.parity.judge import (
    Comparison,
    Difference,
    compare_exactly,
    compare_rounded,
)
from megatron.training.parity.layouts import Layout, one_process, parse_layout, usual_layouts
from megatron.training.parity.outcome import Outcome, fingerprints, train
from megatron.training.parity.ranks import RankError, compile_kernels, run_ranks
from megatron.training.parity.shrink import (
    Model,
    fits,
    in_fp32,
    neutral,
    overridden,
    own_precision,
    shrink,
    with_batch,
)

FP32 = "fp32"


class LayoutError(MegatronError):
    """A layout does not fit the user's model."""


@dataclass(frozen=True)
class Plan:
    """What is trained where.

    Attributes:
        model: The model, without a placement.
        layouts: The layouts.
        skipped: (layout, why) of those that nobody asked for and that do not fit.
        precisions: `fp32`, and the model's own where it is another.
        steps: Iterations.
    """

    model: Model
    layouts: tuple[Layout, ...]
    skipped: tuple[tuple[str, str], ...]
    precisions: tuple[str, ...]
    steps: int

    def fields(self, layout: Layout | None, precision: str) -> dict[str, Any]:
        """Return the settings of one training; of one process where `layout` is None."""
        placed = one_process(self.model.fields)
        if layout is not None:
            placed = layout.settings(self.model.fields)
        return in_fp32(placed) if precision == FP32 else placed


@dataclass
class Result:
    """What became of one layout.

    Attributes:
        layout: The layout's text.
        ranks: Its processes.
        comparisons: With one process, by precision.
        failures: (precision, what the failed rank said).
    """

    layout: str
    ranks: int
    comparisons: list[Comparison] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def inside(self) -> bool:
        """Whether it ran and everything it did is accepted."""
        return not self.failures and all(one.inside for one in self.comparisons)


def prepare(
    cfg: RunConfig,
    texts: Sequence[str] | None,
    *,
    steps: int,
    small: bool = True,
    sizes: Mapping[str, str] | None = None,
) -> Plan:
    """Decide what to train.

    Args:
        cfg: The user's configuration.
        texts: Layouts; None for the usual ones.
        steps: Iterations.
        small: Whether to shrink the model.
        sizes: Sizes that the user chose, as they are written.

    Raises:
        MeshError: A layout cannot be read.
        LayoutError: The user's model, or the small one, cannot run at a layout.
    """
    full = neutral(cfg)
    layouts, skipped = _sorted_out(cfg, full, texts)
    model = shrink(cfg, full, layouts) if small else full
    model = with_batch(cfg, overridden(model, sizes or {}), layouts, steps)
    own = own_precision(model.fields)
    plan = Plan(model, tuple(layouts), tuple(skipped), (FP32, own) if own else (FP32,), steps)
    for precision in plan.precisions:
        try:
            make_config(1, **plan.fields(None, precision))
        except ConfigError as error:
            raise LayoutError(f"one process in {precision}: {error}") from error
        for layout in layouts:
            try:
                make_config(layout.ranks, **plan.fields(layout, precision))
            except ConfigError as error:
                raise LayoutError(_misfit(layout, error, "The small model")) from error
    return plan


def _sorted_out(
    cfg: RunConfig, full: Model, texts: Sequence[str] | None
) -> tuple[list[Layout], list[tuple[str, str]]]:
    """Return the layouts that fit the user's model, and of the usual ones those that do not."""
    layouts: list[Layout] = []
    skipped: list[tuple[str, str]] = []
    refused: list[MegatronError] = []
    for text in usual_layouts(cfg) if texts is None else texts:
        try:
            layout = parse_layout(text)
            fits(cfg, full, layout)
        except ConfigError as error:
            skipped.append((text, "; ".join(str(p) for p in error.problems)))
            refused.append(LayoutError(_misfit(layout, error, "This configuration")))
        except MeshError as error:
            refused.append(error)
        else:
            layouts.append(layout)
    if texts is not None and refused:
        raise refused[0] if len(refused) == 1 else LayoutError("\n".join(map(str, refused)))
    return layouts, skipped


def _misfit(layout: Layout, error: ConfigError, what: str) -> str:
    problems = "\n".join(f"  - {problem}" for problem in error.problems)
    return f"--layouts: got {layout.text!r}. {what} cannot run there:\n{problems}"


# -- running ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trained:
    """One training: what rank 0 gathered, and fingerprints of what every rank holds."""

    outcome: Outcome
    prints: list[dict[str, str]]

    def drifted(self) -> Difference:
        """Compare the ranks bit by bit."""
        for rank, held in enumerate(self.prints):
            for name, value in held.items():
                if value != self.prints[0][name]:
                    return Difference(f"{name} (ranks 0 and {rank})", 1.0, 0.0)
        return Difference("", 0.0, 0.0)


def _run_rank(
    rank: int, world_size: int, fields: Mapping[str, Any]
) -> tuple[Outcome | None, dict[str, str]]:
    cfg = make_config(world_size, **fields)
    outcome = train(cfg, Launch(rank, world_size, rank, world_size), last_grads=True)
    return (outcome if rank == 0 else None), fingerprints(outcome)


def _trained(fields: Mapping[str, Any], ranks: int, timeout: float) -> _Trained:
    """Train on ranks of their own.

    Raises:
        RankError: One of them failed.
    """
    results = run_ranks(_run_rank, ranks, fields, timeout=timeout, detail=False, quiet=True)
    return _Trained(results[0][0], [prints for _, prints in results])


def failure_of(error: RankError) -> str:
    """Return what the first failed rank said: the project's own errors without a traceback."""
    _, text = error.failures[0]
    lines = text.rstrip().splitlines()
    own = re.compile(r"^megatron\.\S*(?:Error|Unavailable): ")
    for number, line in enumerate(lines):
        if own.match(line):
            head = lines[0].strip("- ")
            return f"{head}: {own.sub('', line)}" + "".join(f"\n{x}" for x in lines[number + 1 :])
    return "\n".join(lines)


def check(plan: Plan, timeout: float) -> Iterator[Result]:
    """Train one process and then every layout; yields what became of each.

    The first result is that of one process, without comparisons.

    Args:
        plan: What to train.
        timeout: Seconds that one training may take.
    """
    if any("fp8" in precision or "fp4" in precision for precision in plan.precisions):
        compile_kernels()
    alone = Result("one process", 1)
    references: dict[str, Outcome] = {}
    for precision in plan.precisions:
        try:
            references[precision] = _trained(plan.fields(None, precision), 1, timeout).outcome
        except RankError as error:
            alone.failures.append((precision, failure_of(error)))
    yield alone
    if alone.failures:
        return
    vocab_size = int(plan.model.fields["vocab_size"])
    for layout in plan.layouts:
        result = Result(layout.text, layout.ranks)
        for precision in plan.precisions:
            try:
                ours = _trained(plan.fields(layout, precision), layout.ranks, timeout)
            except RankError as error:
                result.failures.append((precision, failure_of(error)))
                continue
            reference = references[precision]
            if precision == FP32:
                comparison = compare_exactly(ours.outcome, reference, vocab_size)
            else:
                exact = references[FP32]
                comparison = compare_rounded(ours.outcome, reference, exact, vocab_size, precision)
            comparison.measures["copies"] = ours.drifted()
            result.comparisons.append(comparison)
        yield result
