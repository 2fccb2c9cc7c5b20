"""How a run that fails says so: one message, the failing rank's place, an exit code, no hang."""

from __future__ import annotations

import contextlib
import datetime
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from megatron.config import ConfigError
from megatron.core.errors import MegatronError
from megatron.training.initialize import Launch

FAILED = 1
BAD_CONFIG = 2
_MEET_S = 10


class Report:
    """Context that turns an exception into text on the error stream and an exit code.

    Args:
        launch: This process's place among the others.

    Attributes:
        launch: As above; may be set once it is known.
        exit_code: 0, `FAILED`, or `BAD_CONFIG` for a configuration that cannot work.
        where: Says which rank this is and what it is doing; set it to more as more is known.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.exit_code = 0
        self.where: Callable[[], str] = lambda: f"rank {self.launch.rank}"

    def __enter__(self) -> Report:
        """Start to listen."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Report an exception and swallow it; SystemExit and KeyboardInterrupt pass."""
        if not isinstance(error, Exception):
            return False
        self.exit_code = BAD_CONFIG if isinstance(error, ConfigError) else FAILED
        if isinstance(error, ConfigError):
            if self.launch.rank == 0:
                _write(str(error))
            _meet(self.launch)
        elif isinstance(error, MegatronError):
            _write(f"[{self.where()}] {error}")
        elif _lost_contact(error):
            _write(
                f"[{self.where()}] Another rank failed or does not answer; its own message says "
                f"why. ({' '.join(str(error).split())[:300]})"
            )
        else:
            # The last line is enough to know who, where and what.
            shown = "".join(traceback.format_exception(kind, error, trace))
            _write(f"{shown}[{self.where()}] {type(error).__name__}: {error}")
        return True


def _write(text: str) -> None:
    """Write in one go, so that the texts of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _lost_contact(error: Exception) -> bool:
    """Return whether a collective failed because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "gloo" in text or "Connection closed by peer" in text or "Timed out waiting" in text
    )


def _meet(launch: Launch) -> None:
    """Wait a moment for the other ranks, which have the same configuration and the same problem.

    A launcher ends all ranks as soon as one has left; the first rank must have printed by then.
    """
    if launch.world_size == 1 or dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=_MEET_S)
    with contextlib.suppress(RuntimeError, ValueError):  # they may have left, which is as good
        dist.init_process_group(
            "gloo", rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
        dist.barrier()
