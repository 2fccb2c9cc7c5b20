"""Reads back what a run wrote with ``--dllogger-json``.

A run may have ended in the middle of a line, may have been resumed into the same file, and may have
gone back to an earlier step: for each iteration the newest record counts, and what was left behind
is kept apart. Where a new run was written to the file of an old one, the new one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.errors import MegatronError, complaint

PREFIX = "DLLL "
_VALIDATION = "validation "


class RunLogError(MegatronError):
    """There is no log of a run, or not one alone."""


@dataclass(frozen=True)
class LoggedEvent:
    """Something that is neither a figure of a step nor of its casts.

    Attributes:
        kind: Name of the event's class.
        iteration: When; 0 before the first step.
        data: Its fields.
    """

    kind: str
    iteration: int
    data: dict[str, Any]


@dataclass
class RunLog:
    """A run, as far as its log tells.

    Attributes:
        path: The file.
        start: Fields of the newest `RunStart`; empty without one.
        steps: Iteration to the figures of the log interval that ends there.
        validation: Iteration to validation losses by name.
        stats: Iteration to the columns of its `Fp8Stats`.
        abandoned: Figures of intervals that the run went back behind, in the order of the file.
        precision: Lines of the newest precision table.
        events: Everything else, in the order of the file.
        starts: How often the run was started.
        earlier_runs: Runs before it that wrote to the same file from their first step on; nothing
            of them is kept.
        unreadable: Numbers of lines that could not be read, from 1.
        lines: How many lines there are.
    """

    path: Path
    start: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)
    stats: dict[int, dict[str, Any]] = field(default_factory=dict)
    abandoned: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    precision: list[dict[str, Any]] = field(default_factory=list)
    events: list[LoggedEvent] = field(default_factory=list)
    starts: int = 0
    earlier_runs: int = 0
    unreadable: list[int] = field(default_factory=list)
    lines: int = 0

    @property
    def last_iteration(self) -> int:
        """The newest iteration that the log knows of; 0 if none."""
        return max((*self.steps, *self.stats, *self.validation), default=0)

    @property
    def only_the_end_is_missing(self) -> bool:
        """Whether the last line is the only one that could not be read."""
        return self.unreadable == [self.lines]

    def _take(self, step: object, data: dict[str, Any], latest: int) -> int:
        """Take one record; returns the iteration that the log is at."""
        if step == "PARAMETER":
            return self._take_start(data, int(data.get("iteration") or 0))
        if isinstance(step, int):
            losses = {
                name.removeprefix(_VALIDATION): value
                for name, value in data.items()
                if name.startswith(_VALIDATION)
            }
            if losses:
                self.validation[step] = losses
            else:
                self.steps[step] = data
            return step
        for kind, fields in data.items():
            self._take_event(kind, fields, latest)
        return latest

    def _take_start(self, data: dict[str, Any], iteration: int) -> int:
        if iteration == 0 and self.starts:
            self.earlier_runs += 1
            self.starts = 0
            for kept in (self.steps, self.validation, self.stats):
                kept.clear()
            for told in (self.abandoned, self.precision, self.events):
                told.clear()
        self.start = data
        self.starts += 1
        self._go_back(iteration)
        return iteration

    def _take_event(self, kind: str, fields: Any, latest: int) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"{kind} is no event")
        at = fields.get("iteration")
        iteration = at if isinstance(at, int) else latest
        if kind == "Fp8Stats":
            self.stats[iteration] = fields
            return
        if kind == "PrecisionTable":
            lines = list(fields["lines"])
            if not self.precision or lines == self.precision:
                self.precision = lines
                return
            self.precision = lines
            fields = {"what": "layers run in another precision from here on"}
        if isinstance(fields.get("back_to"), int):
            self._go_back(fields["back_to"])
        self.events.append(LoggedEvent(kind, iteration, fields))

    def _go_back(self, iteration: int) -> None:
        """The run continues from there: later figures are not part of it any more."""
        self.abandoned += [(i, data) for i, data in self.steps.items() if i > iteration]
        for kept in (self.steps, self.validation, self.stats):
            for later in [i for i in kept if i > iteration]:
                del kept[later]


def find_log(place: Path) -> Path:
    """Return the log in a folder.

    Args:
        place: The folder, or the log itself.

    Raises:
        RunLogError: There is none, or several.
    """
    flag = "RUN_DIR"
    if not place.exists():
        raise RunLogError(complaint(flag, place, "There is no such folder", "Check the path"))
    if place.is_file():
        if _is_log(place):
            return place
        why = "It is no log of a run: its first line does not start with DLLL"
        raise RunLogError(complaint(flag, place, why, "Give the file of --dllogger-json"))
    found = sorted(path for path in place.iterdir() if path.is_file() and _is_log(path))
    if not found:
        why = "No file in it is the log of a run"
        fix = "Train with --dllogger-json FILE and give the folder of that file"
        raise RunLogError(complaint(flag, place, why, fix))
    if len(found) > 1:
        why = f"It holds the logs of {len(found)} runs: {', '.join(p.name for p in found)}"
        raise RunLogError(complaint(flag, place, why, "Give one of these files instead"))
    return found[0]


def _is_log(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(PREFIX)) == PREFIX.encode()
    except OSError:
        return False


def read_log(path: Path) -> RunLog:
    """Read a log; lines that cannot be read are counted and left out.

    Raises:
        RunLogError: The file cannot be read at all.
    """
    log, latest = RunLog(path), 0
    try:
        for number, line in enumerate(_lines(path), 1):
            log.lines = number
            try:
                record = json.loads(line.removeprefix(PREFIX))
                latest = log._take(record["step"], record["data"], latest)
            except (ValueError, KeyError, TypeError, AttributeError):
                log.unreadable.append(number)
    except OSError as error:
        why = f"It cannot be read: {error}"
        raise RunLogError(complaint("RUN_DIR", path, why, "Check the file")) from error
    return log


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file
