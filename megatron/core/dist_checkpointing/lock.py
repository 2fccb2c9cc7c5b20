"""One job at a time saves into a directory.

The first rank of a run holds ``.lock`` in the save directory and touches it every few seconds. A
job that finds the file looks whether its writer is still there: by its process on the same machine,
by the restart count of the same scheduler job, otherwise by whether the file is still touched. What
a killed run left is taken over; a living one is an error.

A store has no file that only one of two can create. There the one that wrote last has it, and the
other notices: before its next save, or before that save counts.

The lock keeps two jobs from mixing their files. That a checkpoint is never half replaced does not
depend on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.store import StorePath
from megatron.core.errors import CheckpointError, complaint

LOCK_FILE = ".lock"
TOUCH_S = 10.0
SETTLE_S = 1.0  # in a store, until another job that claims it at this moment is seen
STALE_S = 60.0  # a lock that nobody touched for so long has no writer any more
_LOOK_S = 0.5


@dataclass(frozen=True)
class Job:
    """The scheduler's job that this process belongs to; empty without a scheduler."""

    id: str = ""
    restarts: int = 0


class Lock:
    """The right to save into a directory. Make one with `take`."""

    def __init__(self, path: Path, token: str, text: str) -> None:
        self._path, self._token, self._text, self._beats = path, token, text, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="checkpoint lock", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Make sure that the directory is still this run's.

        Raises:
            CheckpointError: Another job has taken it over.
        """
        holder = _read(self._path)
        if holder is None:
            _write(self._path, self._text)
        elif holder.get("token") != self._token:
            raise CheckpointError(
                complaint(
                    "--save",
                    self._path.parent,
                    f"Another job has taken it over: {_describe(holder)}",
                    "Save to another directory; what was saved before is untouched",
                )
            )

    def release(self) -> None:
        """Let others save there."""
        self._ended.set()
        self._thread.join()
        holder = _read(self._path)
        if holder is not None and holder.get("token") == self._token:
            self._path.unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._ended.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                if not isinstance(self._path, StorePath):
                    os.utime(self._path)
                elif (_read(self._path) or {}).get("token") == self._token:
                    self._beats += 1
                    _write(self._path, json.dumps({**json.loads(self._text), "beat": self._beats}))


def take(root: Path, job: Job | None = None) -> Lock:
    """Claim a save directory for this run.

    Waits for up to a minute where it cannot be known otherwise whether the last writer is gone.

    Args:
        root: The directory, which exists.
        job: The scheduler's job of this process.

    Raises:
        CheckpointError: A living job saves there.
    """
    path, token, job = root / LOCK_FILE, uuid.uuid4().hex, job or Job()
    text = _content(token, job)
    created = _create(path, text)
    if not created:
        holder = _read(path) or {}
        if not (_is_gone(holder, job) or _is_still(path)):
            raise CheckpointError(
                complaint(
                    "--save",
                    root,
                    f"Another job saves there: {_describe(holder)}",
                    f"End that job or choose another directory; if it is gone, remove {path}",
                )
            )
        _write(path, text)
    if isinstance(path, StorePath):
        time.sleep(SETTLE_S)
    if not created or isinstance(path, StorePath):
        now = _read(path)
        if now is None or now.get("token") != token:
            raise CheckpointError(
                complaint(
                    "--save",
                    root,
                    "Another job claimed it at the same moment",
                    "Start one of them only, or choose another directory",
                )
            )
    return Lock(path, token, text)


def _content(token: str, job: Job) -> str:
    return json.dumps(
        {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": _start_of(os.getpid()),
            "job": job.id,
            "restarts": job.restarts,
            "token": token,
        }
    )


def _create(path: Path, text: str) -> bool:
    """Write a lock if there is none; return whether there was none."""
    if isinstance(path, StorePath):
        if path.is_file():
            return False
        path.write_text(text)
        return True
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return True


def _write(path: Path, text: str) -> None:
    if isinstance(path, StorePath):
        path.write_text(text)
        return
    own = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    own.write_text(text, encoding="utf-8")
    os.replace(own, path)


def _read(path: Path) -> dict[str, Any] | None:
    """What the lock says; None without one, and nothing if it is unreadable."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_gone(holder: dict[str, Any], job: Job) -> bool:
    """Whether the writer of a lock is known to have ended, or is this process."""
    if holder.get("host") == socket.gethostname() and isinstance(holder.get("process"), int):
        process, started = holder["process"], holder.get("started")
        if process == os.getpid() or started is not None:
            return process == os.getpid() or _start_of(process) != started
    restarted = job.restarts > int(holder.get("restarts") or 0)
    return bool(job.id) and holder.get("job") == job.id and restarted


def _start_of(process: int) -> int | None:
    """When a process of this machine started, in ticks; None if there is none or it is unknown."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _is_still(path: Path) -> bool:
    """Whether nobody touches a lock any more. By the clock of its file system.

    In a store, where only contents are the same for everybody, by whether that changes.
    """
    if isinstance(path, StorePath):
        text, deadline = path.read_bytes(), time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            if not path.is_file() or path.read_bytes() != text:
                return not path.is_file()
        return True
    probe = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    with contextlib.suppress(FileNotFoundError):
        before = path.stat().st_mtime
        deadline = time.monotonic() + min(STALE_S - (now - before), STALE_S)
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            if path.stat().st_mtime != before:
                return False
    return True


def _describe(holder: dict[str, Any]) -> str:
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('process', '?')} on {holder.get('host', '?')}{job}"
