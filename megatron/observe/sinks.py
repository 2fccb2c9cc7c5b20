"""Where events end up: console, progress bar, JSON lines, TensorBoard, Weights & Biases.

The only file that prints and the only one that imports tracking libraries.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from megatron.config import RunConfig
from megatron.observe.bus import Sink
from megatron.observe.events import (
    EvalEnd,
    Event,
    Fp8Alert,
    Fp8Figures,
    Fp8Stats,
    Incident,
    IntervalEnd,
    MemoryUse,
    Message,
    PrecisionChange,
    PrecisionTable,
    Rollback,
    RunStart,
    StepEnd,
)
from megatron.observe.lines import (
    alert_line,
    arguments_dump,
    change_line,
    memory_line,
    perplexity,
    precision_table,
    rollback_line,
    training_line,
    validation_lines,
)


def _print(text: str, stream: TextIO | None = None) -> None:
    """Print in one go: the lines of several ranks do not mix even without buffers."""
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()


class ConsoleSink:
    """Prints. The first rank speaks for the run, the last rank prints losses.

    Args:
        first: Whether this is the first rank.
        last: Whether this is the last rank.
        log_throughput: Whether training lines show the throughput.
    """

    name = "console"

    def __init__(self, *, first: bool, last: bool, log_throughput: bool = False) -> None:
        self._first, self._last, self._log_throughput = first, last, log_throughput

    def handle(self, event: Event) -> None:
        """Print what this rank prints of `event`."""
        if isinstance(event, Incident):
            if event.shared and not self._first:
                return
            where = f"{event.where}: " if event.where else ""
            _print(f"WARNING: {where}{event.what}", sys.stderr)
        elif isinstance(event, MemoryUse):
            if not event.routine:
                _print(memory_line(event))
        elif self._last and isinstance(event, IntervalEnd):
            _print(training_line(event, datetime.now(), self._log_throughput))
        elif self._last and isinstance(event, EvalEnd):
            _print(validation_lines(event))
        elif self._first:
            self._speak_for_the_run(event)

    def _speak_for_the_run(self, event: Event) -> None:
        if isinstance(event, Message):
            _print(event.text)
        elif isinstance(event, Fp8Alert):
            _print(alert_line(event), sys.stderr)
        elif isinstance(event, PrecisionTable):
            _print(precision_table(event.lines, event.changed, event.shares))
        elif isinstance(event, PrecisionChange):
            _print(change_line(event))
        elif isinstance(event, Rollback):
            _print(rollback_line(event))
        elif isinstance(event, RunStart):
            _print(arguments_dump(event.config))
            _print(
                f"layer backend: {event.backend} ({event.backend_reason}); device: {event.device}; "
                f"{event.parameters:,} parameters on {event.world_size} rank(s)"
            )

    def close(self) -> None:
        """Nothing to let go of."""


class ProgressSink:
    """A progress bar on a terminal; made only where the error stream is one.

    Args:
        stream: The terminal.
        width: Characters of the bar.
    """

    name = "progress bar"
    min_interval_s = 0.1

    def __init__(self, stream: TextIO, width: int = 30) -> None:
        self._stream, self._width, self._shown_at = stream, width, 0.0

    def handle(self, event: Event) -> None:
        """Redraw after a step; clear the line before something else is printed."""
        if not isinstance(event, StepEnd):
            self._stream.write("\r\033[K")
            return
        now = time.monotonic()
        if now - self._shown_at < self.min_interval_s and event.iteration < event.train_iters:
            return
        self._shown_at = now
        done = self._width * event.iteration // max(event.train_iters, 1)
        losses = " ".join(f"{name} {value:.4f}" for name, value in event.losses.items())
        bar = "#" * done + "." * (self._width - done)
        self._stream.write(f"\r\033[K[{bar}] {event.iteration}/{event.train_iters} {losses}")
        self._stream.flush()

    def close(self) -> None:
        """Leave a clean line."""
        self._stream.write("\r\033[K")
        self._stream.flush()


class DlloggerSink:
    """Writes ``DLLL {json}`` lines, the format of the DLLogger library's JSON files.

    Args:
        path: The file; its folder is made when missing, and an existing file is continued.
    """

    name = "dllogger"

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        self._started = time.time()

    def handle(self, event: Event) -> None:
        """Write one line, but for text and what every step or every rank says."""
        if isinstance(event, RunStart):
            self._write("PARAMETER", asdict(event))
        elif isinstance(event, IntervalEnd):
            self._write(event.last.iteration, dict(_interval_figures(event)))
        elif isinstance(event, EvalEnd):
            figures = {f"{event.title} {n}": v for n, v in event.losses.items()}
            self._write(event.iteration, {"at": event.prefix, **figures})
        elif not isinstance(event, Message | StepEnd | MemoryUse):
            self._write([], {type(event).__name__: _plain(event)})

    def _write(self, step: object, data: dict[str, Any]) -> None:
        now = time.time()
        record = {
            "timestamp": f"{now:.6f}",
            "elapsedtime": f"{now - self._started:.6f}",
            "datetime": str(datetime.fromtimestamp(now)),
            "type": "LOG",
            "step": step,
            "data": data,
        }
        self._file.write(f"DLLL {json.dumps(record, default=str)}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(event: Event) -> dict[str, Any]:
    """An event as JSON has it. Figures of casts go by columns, which is a third as long."""
    if not isinstance(event, Fp8Stats):
        return asdict(event)
    columns = {
        column.name: [_rounded(getattr(one, column.name)) for one in event.figures]
        for column in fields(Fp8Figures)
    }
    return {"iteration": event.iteration, **columns}


def _rounded(value: object) -> object:
    """A number with the digits that fp32 has; None for what JSON cannot say."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None


def _interval_figures(event: IntervalEnd) -> Iterator[tuple[str, float]]:
    """Yield everything a log interval has to say, by name."""
    step = event.last
    yield from event.losses.items()
    yield "learning_rate", step.learning_rate
    yield "loss_scale", step.loss_scale
    for name in ("grad_norm", "num_zeros", "params_norm"):
        value = getattr(step, name)
        if value is not None:
            yield name, value
    yield "consumed_samples", step.consumed_samples
    yield "global_batch_size", step.global_batch_size
    yield "iteration_time_ms", event.seconds_per_iteration * 1000.0
    yield "fastest_rank_iteration_time_ms", event.fastest_seconds_per_iteration * 1000.0
    yield "tokens_per_second", event.tokens_per_second
    yield "tflops_per_gpu", event.tflops_per_rank
    yield "skipped_iterations", event.skipped_iterations
    yield "nan_iterations", event.nan_iterations
    yield from step.figures.items()


Write = Callable[[str, float, int], None]


class ScalarSink:
    """Turns events into named scalars, with the names that Megatron's dashboards use.

    Args:
        name: The sink's name in messages.
        write: Stores one scalar: name, value, step.
        finish: Flushes and closes.
        cfg: Decides which scalars are written.
    """

    def __init__(self, name: str, write: Write, finish: Callable[[], None], cfg: RunConfig) -> None:
        self.name = name
        self._write, self._finish, self._cfg = write, finish, cfg

    def handle(self, event: Event) -> None:
        """Write the scalars of steps, intervals, evaluations and memory."""
        if isinstance(event, StepEnd):
            if event.iteration % self._cfg.tensorboard_log_interval == 0:
                for name, value in self._step_scalars(event):
                    self._write(name, value, event.iteration)
                    self._write(f"{name} vs samples", value, event.consumed_samples)
        elif isinstance(event, IntervalEnd):
            if self._cfg.log_timers_to_tensorboard:
                self._write("iteration-time", event.seconds_per_iteration, event.last.iteration)
            if self._cfg.log_throughput:
                self._write("throughput", event.tflops_per_rank, event.last.iteration)
        elif isinstance(event, EvalEnd):
            self._write_evaluation(event)
        elif isinstance(event, MemoryUse) and self._cfg.log_memory_to_tensorboard:
            self._write("mem-allocated-bytes", event.allocated_bytes, event.iteration)
            self._write("mem-max-allocated-bytes", event.peak_allocated_bytes, event.iteration)
            self._write("mem-reserved-bytes", event.reserved_bytes, event.iteration)
        elif isinstance(event, Fp8Stats):
            self._write_fp8(event)

    def _step_scalars(self, step: StepEnd) -> Iterator[tuple[str, float]]:
        yield "learning-rate", step.learning_rate
        yield "batch-size", step.global_batch_size
        yield from step.losses.items()
        yield from step.figures.items()
        if self._cfg.log_loss_scale_to_tensorboard:
            yield "loss-scale", step.loss_scale
        if self._cfg.log_world_size_to_tensorboard:
            yield "world-size", self._cfg.world_size
        for name in ("grad_norm", "num_zeros", "params_norm"):
            value = getattr(step, name)
            if value is not None:
                yield name.replace("_", "-"), value

    def _write_fp8(self, event: Fp8Stats) -> None:
        for one in event.figures:
            for name in ("amax", "scale", "saturated", "underflow", "snr_db"):
                value = getattr(one, name)
                if value is not None:
                    self._write(f"fp8 {name}/{one.path}/{one.role}", value, event.iteration)

    def _write_evaluation(self, event: EvalEnd) -> None:
        for name, value in event.losses.items():
            figures = {f"{name} {event.title}": value}
            if self._cfg.log_validation_ppl_to_tensorboard:
                figures[f"{name} {event.title} ppl"] = perplexity(value)
            for title, figure in figures.items():
                self._write(title, figure, event.iteration)
                self._write(f"{title} vs samples", figure, event.consumed_samples)

    def close(self) -> None:
        """Flush and close."""
        self._finish()


def _tensorboard(cfg: RunConfig) -> ScalarSink:
    """Open a TensorBoard writer.

    Raises:
        ImportError: The tensorboard package is missing.
    """
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional package)

    writer = SummaryWriter(log_dir=cfg.tensorboard_dir, max_queue=cfg.tensorboard_queue_size)
    return ScalarSink("tensorboard", writer.add_scalar, writer.close, cfg)


def _wandb(cfg: RunConfig) -> ScalarSink:
    """Start a Weights & Biases run.

    Raises:
        ImportError: The wandb package is missing.
    """
    import wandb  # noqa: PLC0415  (optional package)

    run = wandb.init(
        project=cfg.wandb_project,
        name=cfg.wandb_exp_name,
        entity=cfg.wandb_entity,
        dir=cfg.wandb_save_dir,
        config=cfg.to_dict(),
    )

    def write(name: str, value: float, step: int) -> None:
        if not name.endswith(" vs samples"):  # one horizontal axis: iterations
            run.log({name: value}, step=step)

    return ScalarSink("wandb", write, run.finish, cfg)


def build_sinks(cfg: RunConfig, rank: int) -> tuple[list[Sink], list[Incident]]:
    """Build the sinks of one rank.

    Returns:
        The sinks, and what could not be opened: a missing tracking package costs its output, not
        the run.
    """
    last = rank == cfg.world_size - 1
    console = ConsoleSink(first=rank == 0, last=last, log_throughput=cfg.log_throughput)
    sinks: list[Sink] = [console]
    if not last:
        return sinks, []
    if sys.stderr.isatty():
        sinks.insert(0, ProgressSink(sys.stderr))
    openers: list[tuple[str, object, Callable[[], Sink]]] = [
        ("--dllogger-json", cfg.dllogger_json, lambda: DlloggerSink(cfg.dllogger_json)),
        ("--tensorboard-dir", cfg.tensorboard_dir, lambda: _tensorboard(cfg)),
        ("--wandb-project", cfg.wandb_project, lambda: _wandb(cfg)),
    ]
    incidents = []
    for flag, wanted, opener in openers:
        if not wanted:
            continue
        try:
            sinks.append(opener())
        except Exception as error:  # third-party code may fail in any way; it is reported
            what = f"{type(error).__name__}: {error}. This output is left out; training goes on."
            incidents.append(Incident(what, where=flag))
    return sinks, incidents
