"""The folder of an output that is being written: one writer, and progress that survives a crash."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import DataError, complaint
from megatron.core.files import sync, sync_directory

ENDING = ".partial"
# Not .json: the output may lie in a folder whose texts are its input.
_STATE, _LOCK = "progress", "lock"
_LOGS = ("tokens", "lengths", "documents")  # whose lengths are stored
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


class UnfinishedOutput:
    """``PREFIX.partial``: unfinished files, and how far they go.

    Args:
        prefix: The target.
        settings: What the output depends on, as JSON; must be the same when a run is resumed.
        resume: Go on from what is there instead of refusing to overwrite it.

    Attributes:
        folder: Where unfinished files belong.
        state: What `save` stored last; None at a fresh start.
        kept: Whether there is progress worth keeping after a failure.

    Raises:
        DataError: Another run writes the same output, progress is there but was not asked for, or
            it belongs to other settings.
        OSError: The folder cannot be written.
    """

    def __init__(self, prefix: str, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.prefix, self.folder = prefix, Path(prefix + ENDING)
        # Through JSON, so that it compares equal with what is read back.
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.state: dict[str, Any] | None = None
        self.kept = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        try:
            self._read(resume)
        except BaseException:
            os.close(self._lock)
            raise

    def _locked(self) -> int:
        lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have finished, and removed the folder, since it was opened here.
            alone = os.path.samestat(os.fstat(lock), os.stat(self.folder / _LOCK))
        except BlockingIOError:
            alone = False
        except OSError as error:
            alone = error.errno in _NO_LOCKS
        if alone:
            return lock
        os.close(lock)
        raise DataError(
            complaint(
                "--output-prefix",
                self.prefix,
                f"Another run is writing it ({self.folder} is locked)",
                "Wait for that run, or choose another prefix",
            )
        )

    def _read(self, resume: bool) -> None:
        path = self.folder / _STATE
        if not path.exists():
            # Of a run that was killed before it got anywhere.
            self._clear()
            return
        self.kept = True
        try:
            stored = json.loads(path.read_text())
            before, state = stored["settings"], stored["state"]
            self._check_lengths(state["written"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._incomplete(f"{path.name} is damaged: {error!r}") from error
        if not resume:
            raise DataError(
                complaint(
                    "--output-prefix",
                    self.prefix,
                    f"{self.folder} holds the progress of a run that was interrupted",
                    f"Add --resume to go on from there, or remove {self.folder}",
                )
            )
        different = _differences(before, self._settings)
        if different:
            raise DataError(
                complaint(
                    "--resume",
                    f"another {different[0]}",
                    f"The interrupted run had {different[1]}, and this one has {different[2]}; the "
                    "output would be a mixture of both",
                    f"Repeat the command as it was, or remove {self.folder} to start again",
                )
            )
        self.state = state

    def _check_lengths(self, written: Mapping[str, Mapping[str, int]]) -> None:
        # A shorter file would be filled up with zeros, which are tokens.
        for stem, sizes in written.items():
            for name in _LOGS:
                path = self.folder / f"{stem}.{name}"
                have = path.stat().st_size if path.is_file() else 0
                if have < sizes[name]:
                    raise self._incomplete(f"{path.name} has {have} of {sizes[name]} bytes")

    def _incomplete(self, why: str) -> DataError:
        return DataError(
            complaint(
                "--output-prefix",
                self.prefix,
                f"{self.folder} holds the progress of another run, and cannot be used: {why}",
                f"Remove {self.folder} to start again",
            )
        )

    def save(self, state: Mapping[str, Any], *, keep: bool = True) -> None:
        """Store how far the files go; they must be on the disk already.

        Args:
            state: Anything that is JSON.
            keep: Whether this is worth keeping when the run fails.
        """
        path = self.folder / _STATE
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({"settings": self._settings, "state": state}, file)
            sync(file)
        os.replace(temporary, path)
        sync_directory(self.folder)
        self.kept = self.kept or keep

    def remove(self) -> None:
        """Remove the folder."""
        # The state first: what is left of a removal that was cut short is then no progress.
        (self.folder / _STATE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let other runs in."""
        os.close(self._lock)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                path.unlink()


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the name of the first setting that differs, and its two values in words."""
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            old, new = _first_unequal(old, new)
        return name, str(old), str(new)
    return None


def _first_unequal(old: list[Any], new: list[Any]) -> tuple[object, object]:
    pairs: Iterable[tuple[object, object]] = zip(old, new, strict=False)
    for before, now in pairs:
        if before != now:
            return before, now
    return f"{len(old)} of them", f"{len(new)}"
