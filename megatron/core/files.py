"""Getting files to the disk: what was synced survives a crash of the machine."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import IO, Any


def sync(file: IO[Any]) -> None:
    """Put what was written to an open file on the disk; an upload into a store is on none."""
    file.flush()
    with contextlib.suppress(io.UnsupportedOperation):
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Put new names and renames inside a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
