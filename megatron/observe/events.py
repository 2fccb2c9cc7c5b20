"""What a run has to say, as values: code emits these, the bus decides who renders them and when.

Every event is frozen and holds plain numbers, strings and tuples, so that it can be rendered,
written as JSON or compared without a reference to live tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunStart:
    """The run is set up and the first iteration is about to start.

    Attributes:
        config: Flat resolved configuration.
        world_size: Number of ranks.
        device: Device type, e.g. ``cuda``.
        backend: Name of the layer backend in use.
        backend_reason: Why that backend was chosen.
        parameters: Number of parameters of the whole model.
        flops_per_iteration: Model FLOPs of one iteration over all ranks.
        iteration: Iteration from which the run continues (0 for a new run).
    """

    config: Mapping[str, object]
    world_size: int
    device: str
    backend: str
    backend_reason: str
    parameters: int
    flops_per_iteration: float
    iteration: int = 0


@dataclass(frozen=True)
class Message:
    """One or more lines of plain text about the run as a whole."""

    text: str


@dataclass(frozen=True)
class PrecisionLine:
    """One GEMM of a group of equal layers: what was asked for and what runs.

    Attributes:
        module: Module path with ``*`` for layer numbers that agree.
        gemm: Which GEMM (fprop, dgrad, wgrad).
        requested: Precision that the configuration asks for.
        delivered: Precision that runs.
        kernel: What computes it.
        reason: Why `delivered` is what it is.
        count: Number of modules in the group.
    """

    module: str
    gemm: str
    requested: str
    delivered: str
    kernel: str
    reason: str
    count: int


@dataclass(frozen=True)
class PrecisionTable:
    """Which GEMM of which layer runs in which precision on which kernel, and why.

    Attributes:
        lines: The whole model.
        changed: Whether the run has shown one before, so that the console shows only what does not
            run as requested.
        shares: How much of a step's FLOPs runs in FP8 or FP4: of linear layers, and of those and
            attention together where that is listed. Empty if nobody asked.
    """

    lines: tuple[PrecisionLine, ...]
    changed: bool = False
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class PrecisionChange:
    """A layer runs in another precision from the next iteration on, and this is why.

    Attributes:
        iteration: The iteration after which it was decided.
        layer: Path of the layer; of experts, of the matrix that all of them have.
        before: How it ran: ``fp8``, ``high precision`` or ``fp8 on probation``.
        after: How it runs now.
        rule: ``amax variation``, ``saturation``, ``underflow``, ``gradient norm``, ``probe`` or
            ``healthy``.
        what: The reason in words.
        figures: What the rule looked at, by name.
        probe_at: Iteration after which it tries FP8 again; 0 if it need not.
    """

    iteration: int
    layer: str
    before: str
    after: str
    rule: str
    what: str
    figures: Mapping[str, float]
    probe_at: int = 0


@dataclass(frozen=True)
class StepEnd:
    """One iteration of training is over.

    Attributes:
        iteration: Number of this iteration, counted from 1.
        train_iters: Number of iterations of the whole run.
        consumed_samples: Training sequences read so far.
        losses: Name to token-weighted global mean of this iteration; empty when skipped.
        learning_rate: Learning rate after this iteration's scheduler step.
        global_batch_size: Sequences of this iteration.
        tokens: Tokens of this iteration, over all ranks.
        flops: Model FLOPs of this iteration, over all ranks.
        loss_scale: Loss scale in use.
        grad_norm: Global gradient norm before clipping, None when it is not known.
        num_zeros: Number of gradient elements that are zero, None when not asked for.
        params_norm: Global norm of the parameters, None when not asked for.
        skipped: True when the optimizer step was skipped.
        nan: True when the loss was not finite.
        figures: More numbers by name, which the console leaves out.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    losses: Mapping[str, float]
    learning_rate: float
    global_batch_size: int
    tokens: int
    flops: float
    loss_scale: float = 1.0
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    skipped: bool = False
    nan: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IntervalEnd:
    """Summary of the iterations since the last line of the log; made by the bus.

    Attributes:
        last: The newest step of the interval.
        iterations: Number of iterations since the last line.
        losses: Name to mean over the iterations of the interval that took a step.
        seconds_per_iteration: Wall time per iteration of the slowest rank.
        fastest_seconds_per_iteration: The same of the fastest rank.
        tflops_per_rank: Model TFLOP/s of one rank.
        tokens_per_second: Tokens per second over all ranks.
        skipped_iterations: Number of skipped iterations in the interval.
        nan_iterations: Number of iterations of the interval with a non-finite loss.
    """

    last: StepEnd
    iterations: int
    losses: Mapping[str, float]
    seconds_per_iteration: float
    fastest_seconds_per_iteration: float
    tflops_per_rank: float
    tokens_per_second: float
    skipped_iterations: int
    nan_iterations: int


@dataclass(frozen=True)
class EvalEnd:
    """An evaluation is over.

    Attributes:
        prefix: Where it took place, e.g. ``iteration 100``.
        iteration: Training iteration after which it ran.
        losses: Name to token-weighted mean over the evaluation.
        consumed_samples: Training sequences read when it ran.
        name: The validation set, if there are several.
    """

    prefix: str
    iteration: int
    losses: Mapping[str, float]
    consumed_samples: int = 0
    name: str = ""

    @property
    def title(self) -> str:
        """``validation``, with the name of the set if it has one."""
        return f"validation-{self.name}" if self.name else "validation"


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    iteration: int
    path: str


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank after an iteration, in bytes.

    Attributes:
        rank: The rank.
        iteration: The iteration.
        source: What was measured: ``cuda`` (the allocator) or ``process`` (resident memory).
        allocated_bytes: In use now.
        peak_allocated_bytes: The most so far.
        reserved_bytes: Held by the allocator now.
        peak_reserved_bytes: The most so far.
        routine: Whether it is one of a regular series, which the console leaves out.
    """

    rank: int
    iteration: int
    source: str
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    routine: bool = False


@dataclass(frozen=True)
class Rollback:
    """Training went wrong, returned to an earlier moment and leaves data out.

    Attributes:
        iteration: The iteration that was wrong.
        back_to: The iteration whose end it returned to.
        reason: What was wrong, in words and figures.
        loss: Loss of the wrong iteration.
        grad_norm: Its gradient norm.
        first_sample: First training sequence that is left out.
        end_sample: The one after the last that is left out.
        without_fp8_until: Last iteration that runs without FP8 because of it; 0 for none.
        count: Rollbacks of the run so far, this one included.
        limit: How many there may be.
    """

    iteration: int
    back_to: int
    reason: str
    loss: float
    grad_norm: float
    first_sample: int
    end_sample: int
    without_fp8_until: int
    count: int
    limit: int


@dataclass(frozen=True)
class Incident:
    """Something went wrong that does not stop the run.

    Attributes:
        what: One sentence.
        where: Which part says so, e.g. ``sink tensorboard``.
        shared: Whether every rank says the same, so that the console shows it once.
    """

    what: str
    where: str = ""
    shared: bool = False


@dataclass(frozen=True)
class Fp8Figures:
    """What the casts of one tensor of one layer did in one step, over microbatches and ranks.

    Attributes:
        path: The layer; experts of one layer share a line, with ``*`` for their number.
        role: Which of its tensors: ``input``, ``weight`` or ``grad_output``.
        amax: Largest magnitude.
        scale: The smallest multiplier in use.
        saturated: Share of elements beyond the format's largest value; None if not measured.
        underflow: Share of elements that are not zero and became zero; None if not measured.
        snr_db: Energy of the tensor over that of its error; None if not measured, all zero or
            without error.
        elements: How many elements the shares were measured on.
        nonfinite: How many elements are NaN or infinite.
    """

    path: str
    role: str
    amax: float
    scale: float
    saturated: float | None
    underflow: float | None
    snr_db: float | None
    elements: int
    nonfinite: int = 0


@dataclass(frozen=True)
class Fp8Stats:
    """The FP8 casts of one iteration, all layers of the model."""

    iteration: int
    figures: tuple[Fp8Figures, ...]


@dataclass(frozen=True)
class Fp8Alert:
    """Something about FP8 casts that a user should look at.

    Attributes:
        iteration: The iteration.
        kind: ``amax jump``, ``outlier``, ``saturation``, ``underflow``, ``degenerate scale``,
            ``not finite`` or ``not cast``.
        path: The layer that shows it most.
        role: Which of its tensors.
        value: What was measured.
        limit: From where it is reported.
        what: One sentence.
        others: Further tensors that show it too, as ``path role``.
        where: Which ranks hold the layer.
    """

    iteration: int
    kind: str
    path: str
    role: str
    value: float
    limit: float
    what: str
    others: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class RunEnd:
    """The run ended as it should.

    Attributes:
        iteration: Last iteration that ran.
        reason: ``done``, or why it left early.
        last_checkpoint: Newest complete checkpoint, empty when there is none.
    """

    iteration: int
    reason: str
    last_checkpoint: str = ""


Event = (
    RunStart
    | Message
    | PrecisionTable
    | PrecisionChange
    | StepEnd
    | IntervalEnd
    | EvalEnd
    | CheckpointSaved
    | MemoryUse
    | Rollback
    | Incident
    | Fp8Stats
    | Fp8Alert
    | RunEnd
)
