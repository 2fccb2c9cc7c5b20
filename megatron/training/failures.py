"""How a run that fails says so: one message, the failing rank's place, an exit code, no hang."""

from __future__ import annotations

import datetime
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.config import ConfigError
from megatron.config.tool_flags import output_is_closed
from megatron.core.errors import MegatronError, complaint
from megatron.training.initialize import Launch, Runtime
from megatron.training.watch import Watch

FAILED = 1
BAD_CONFIG = 2
INTERRUPTED = 130  # what a shell reports for Ctrl-C
_MEET_S = 30  # where every rank has the same problem, sooner or later
_MEET_LATER_S = 2  # in a run, where a rank may be alone with its problem
_KEEP = "Write it to a file, or read it to its end"
_PROBLEM, _SEEN, _ALL_SEEN = "bad_config/text", "bad_config/seen", "bad_config/all_seen"


class Report:
    """Context that turns an exception into text on the error stream and an exit code.

    Args:
        launch: This process's place among the others.

    Attributes:
        launch: As above; may be set once it is known.
        exit_code: 0, `FAILED`, `BAD_CONFIG` for a configuration that cannot work, or
            `INTERRUPTED` after Ctrl-C.
        where: Says which rank this is and what it is doing; set it to more as more is known.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.exit_code = 0
        self.where: Callable[[], str] = lambda: f"rank {self.launch.rank}"
        self._watch: Watch | None = None

    def follow(self, runtime: Runtime) -> None:
        """Take note of this rank's place, and begin to watch the other ranks. Every rank calls it.

        Args:
            runtime: The started process.
        """
        self.where = runtime.mesh.label
        if runtime.processes:
            self._watch = Watch(
                self.launch.rank, runtime.processes, lambda: self.where(), self._tell
            )
            self._watch.start()

    def leave(self) -> None:
        """Say to the other ranks that this one ends, and not for a reason that they should tell."""
        if self._watch is not None:
            self._watch.leave()

    def __enter__(self) -> Report:
        """Start to listen."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Report an exception and swallow it; SystemExit passes."""
        try:
            return self._report(kind, error, trace)
        except KeyboardInterrupt:  # while it ends anyway
            self.exit_code = self.exit_code or INTERRUPTED
            return True

    def _report(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not (isinstance(error, Exception) and lost_contact(error)):
            self.leave()
        if isinstance(error, BrokenPipeError) and output_is_closed():
            if self.launch.world_size > 1:
                self._tell(complaint("output", "a closed pipe", "Who read it has left", _KEEP))
            return False
        if isinstance(error, KeyboardInterrupt):
            self.exit_code = INTERRUPTED
            _write(f"[{self.where()}] interrupted")
            return True
        if not isinstance(error, Exception):
            return False
        self.exit_code = BAD_CONFIG if isinstance(error, ConfigError) else FAILED
        if isinstance(error, ConfigError):
            self._refuse(str(error))
        elif isinstance(error, MegatronError):
            self._fail(str(error), error.shared)
        elif lost_contact(error):
            self._lost(error)
            self.leave()
        elif _out_of_memory(error):
            self._fail(_too_large(error), shared=False)
        else:
            # The last line is enough to know who, where and what.
            shown = "".join(traceback.format_exception(kind, error, trace))
            _write(f"{shown}[{self.where()}] {type(error).__name__}: {error}")
        return True

    def _refuse(self, text: str) -> None:
        """Show what is wrong with the configuration once, unless ranks differ in that."""
        launch = self.launch
        if launch.rank == 0:
            _write(text)
        if launch.world_size > 1 and not _said_by_first_rank(launch, text, _MEET_S) and launch.rank:
            _write(f"[{self.where()}] {text}")

    def _fail(self, text: str, shared: bool) -> None:
        """Show what went wrong; once, if it is the same on the first rank.

        Args:
            text: What.
            shared: Whether all ranks fail here.
        """
        launch = self.launch
        if launch.rank == 0:
            self._tell(text)
        if launch.world_size == 1:
            return
        patience_s = _MEET_S if shared or self._watch is None else _MEET_LATER_S
        if not _said_by_first_rank(launch, text, patience_s) and launch.rank:
            self._tell(text)

    def _lost(self, error: Exception) -> None:
        """Say which rank is gone or hangs."""
        # The launcher ends the other ranks as well; this one has something to say first.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        cause = _first_sentence(error)
        if self._watch is not None:
            self._watch.blame(cause)
            return
        self._tell(
            complaint(
                "ranks",
                "no answer from another rank",
                f"It failed, hangs, or cannot be reached: {cause}",
                "Look for its own message",
            )
        )

    def _tell(self, text: str) -> None:
        _write(f"[{self.where()}] {text}")


def _first_sentence(error: Exception) -> str:
    """Return what a transport has to say, without its source line and its advice."""
    text = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))
    return text.partition(". This is ")[0][:300]


def _out_of_memory(error: Exception) -> bool:
    """Return whether there was no room for a tensor or an object."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _too_large(error: Exception) -> str:
    text = " ".join(str(error).split()) or "there is none left"
    return complaint(
        "memory",
        "a request that cannot be met",
        text.partition("DefaultCPUAllocator: ")[2] or text,
        "Lower --micro-batch-size or --seq-length, recompute activations (--recompute-granularity)"
        ", raise --tensor-model-parallel-size, or choose a smaller model",
    )


def _write(text: str) -> None:
    """Write in one go, so that the texts of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def lost_contact(error: Exception) -> bool:
    """Return whether a collective failed because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "gloo" in text
        or "Connection closed by peer" in text
        or "Timed out waiting" in text
        or "monitoredBarrier" in text
    )


def _said_by_first_rank(launch: Launch, text: str, patience_s: float) -> bool:
    """Agree with the other ranks, which normally have the same problem, that one shows it.

    A launcher ends all ranks as soon as one has left, so the others wait for the first rank, which
    writes before it calls this, and the first rank waits until the others have seen it.

    Returns:
        Whether the first rank shows the same text.
    """
    timeout = datetime.timedelta(seconds=patience_s)
    try:
        where = rendezvous(
            "env://", rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
        store = next(where)[0]
        store.set_timeout(timeout)
        if launch.rank == 0:
            store.set(_PROBLEM, text)
        said = bool(store.get(_PROBLEM).decode() == text)
        if store.add(_SEEN, 1) == launch.world_size:
            store.set(_ALL_SEEN, "")
        if launch.rank == 0:
            store.wait([_ALL_SEEN], timeout)
    except (RuntimeError, ValueError):  # no such problem there, or gone already
        return False
    return said
