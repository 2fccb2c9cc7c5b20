"""What the ranks of a run know about each other when something is wrong: who is gone, who hangs.

A rank that waits in vain knows that somebody is to blame, but not who: the one that it waits for
may be waiting itself. Two threads sleep in every rank, at no cost, until they are needed. One
notices that a process of this machine has ended. The other answers a rank that asks everybody what
they are doing. The first verdict counts for all ranks.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from megatron.core.errors import complaint
from megatron.training.initialize import Process

_LOOK_S = 1.0  # connections break a moment before a process is gone
_ANSWER_S = 20.0  # on a machine that has too much to do
_LONG = timedelta(days=1000)
# Where a rank stands that waits for others or for its device: the innermost line of Python.
_WAITING = (".wait(", "synchronize(", ".item(", ".tolist(")
_TRANSFERS = os.path.join("torch", "distributed", "")
_OWN = str(Path(__file__).resolve().parents[1])
_UNREACHABLE = (RuntimeError, OSError)  # what a store raises when its server is gone


class Watch:
    """Keeps an eye on the other ranks.

    Args:
        rank: This process's rank.
        processes: The processes of all ranks.
        where: Says what this rank is doing.
        tell: Shows a verdict to the user; called at most once, from any thread.
        store: A connection that the ranks share; default that of `torch.distributed`.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[Process],
        where: Callable[[], str],
        tell: Callable[[str], None],
        store: Store | None = None,
    ) -> None:
        self._rank, self._processes, self._where, self._tell = rank, processes, where, tell
        base: Any = PrefixStore("watch", store or _get_default_store())
        # A store answers one thread at a time, and one of them waits for ever.
        self._store, self._calls = base.clone(), base.clone()
        self._lock = threading.Lock()
        self._told = self._left = self._asking = False
        self._wake = os.pipe()
        self._threads = [
            threading.Thread(target=target, name=target.__name__, daemon=True)
            for target in (self._answer_calls, self._watch_processes)
        ]

    def start(self) -> None:
        """Begin to watch. Every rank calls it."""
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Say that this rank ends with a message of its own or none to give; stop to watch."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(*_UNREACHABLE), self._lock:
            self._store.set(f"left/{self._rank}", "")
            self._store.set(f"call/{self._rank}", "")
        os.write(self._wake[1], b"x")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(1.0)

    def blame(self, cause: str) -> None:
        """Find out which rank is to blame for what this one has run into, and tell.

        Args:
            cause: What happened, a sentence without its full stop.
        """
        self._asking = True
        self._conclude(self._gone(cause, _LOOK_S) or self._hanging(cause))

    def _conclude(self, verdict: str) -> None:
        """Tell the first verdict of any rank, once."""
        with self._lock:
            with contextlib.suppress(*_UNREACHABLE):
                verdict = self._store.compare_set("verdict", "", verdict).decode()
            if self._told or self._left:
                return
            self._told = True
        self._tell(verdict)

    # -- ranks that have ended ------------------------------------------------------------------

    def _neighbours(self) -> Iterator[tuple[int, Process]]:
        machine = self._processes[self._rank].machine
        for rank, process in enumerate(self._processes):
            if rank != self._rank and process.machine == machine:
                yield rank, process

    def _gone(self, cause: str, patience_s: float) -> str:
        """Name the ranks that have ended; empty if none is known to have."""
        deadline = time.monotonic() + patience_s
        while True:
            gone = self._ended_ranks()
            if gone:
                return _ended(" and ".join(map(self._name, gone)), cause)
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.05)

    def _ended_ranks(self) -> list[int]:
        """Find ranks whose process has ended, else those that have said that it will."""
        ended = [rank for rank, process in self._neighbours() if process.has_ended()]
        if not ended:
            others = [rank for rank in range(len(self._processes)) if rank != self._rank]
            with contextlib.suppress(*_UNREACHABLE), self._lock:
                ended = [rank for rank in others if self._store.check([f"left/{rank}"])]
        return ended

    def _name(self, rank: int) -> str:
        process = self._processes[rank]
        return f"{process.label or f'rank {rank}'} (process {process.pid})"

    def _watch_processes(self) -> None:
        """Sleep until a process of this machine ends that has not said so."""
        open_files: dict[int, int] = {}
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        for rank, process in self._neighbours():
            with contextlib.suppress(OSError, AttributeError):  # gone already; not on this system
                open_files[os.pidfd_open(process.pid)] = rank
        for descriptor in open_files:
            poll.register(descriptor, select.POLLIN)
        while open_files and not self._left:
            for descriptor, _ in poll.poll():
                if descriptor not in open_files:
                    return  # woken up to leave
                rank = open_files.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                if not self._has_left(rank):
                    self._conclude(_ended(self._name(rank), "It said nothing"))

    def _has_left(self, rank: int) -> bool:
        try:
            with self._lock:
                return self._left or self._store.check([f"left/{rank}"])
        except _UNREACHABLE:
            return True  # a run without its store is being taken down

    # -- ranks that hang ------------------------------------------------------------------------

    def _hanging(self, cause: str) -> str:
        """Ask every rank what it is doing, and name those that are to blame."""
        answers = self._ask()
        if gone := self._gone(cause, 0.0):  # it took longer than expected
            return gone
        silent = [r for r in range(len(self._processes)) if r != self._rank and r not in answers]
        busy = {r: a for r, a in answers.items() if not a["waits"]}
        if silent:
            return self._silent(silent, cause)
        if busy:
            names = " and ".join(self._name(rank) for rank in busy)
            doing = "; ".join(f"{answer['where']}, {answer['line']}" for answer in busy.values())
            return complaint(
                names,
                "no answer",
                f"{cause}. It is still at work: {doing}",
                "Raise --distributed-timeout-minutes if that may take so long, else see why it "
                "hangs there. Resume from the last checkpoint",
            )
        places = "; ".join(f"{a['where']}, {a['line']}" for _, a in sorted(answers.items()))
        return complaint(
            "ranks",
            "no answer from another rank",
            f"{cause}. All of them wait: {places or 'none can be reached'}",
            "They wait for each other, or a connection is lost. Resume from the last checkpoint",
        )

    def _silent(self, ranks: Sequence[int], cause: str) -> str:
        """Name ranks that do not even answer."""
        machine = self._processes[self._rank].machine
        states = []
        for rank in ranks:
            process = self._processes[rank]
            if process.machine != machine:
                states.append(f"is on {process.machine.split()[0]}")
            else:
                states.append("is stopped, as by SIGSTOP" if process.is_stopped() else "is frozen")
        return complaint(
            " and ".join(self._name(rank) for rank in ranks),
            "no answer",
            f"{cause}. It does not react at all: it {' and '.join(dict.fromkeys(states))}",
            "Look at that process or machine. Resume from the last checkpoint",
        )

    def _ask(self) -> dict[int, dict[str, Any]]:
        """Collect what the others say within a few seconds."""
        others = [rank for rank in range(len(self._processes)) if rank != self._rank]
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _ANSWER_S
        with contextlib.suppress(*_UNREACHABLE):
            for rank in others:
                with self._lock:
                    self._store.set(f"call/{rank}", "what are you doing?")
            while time.monotonic() < deadline and not self._is_over(others, answers):
                for rank in others:
                    with self._lock:
                        if rank not in answers and self._store.check([f"answer/{rank}"]):
                            answers[rank] = json.loads(self._store.get(f"answer/{rank}"))
                time.sleep(0.05)
        return answers

    def _is_over(self, asked: Sequence[int], answers: Container[int]) -> bool:
        """Whether all have answered, or those that have not cannot, or one of them has ended."""
        open_ranks = [rank for rank in asked if rank not in answers]
        stopped = {rank for rank, process in self._neighbours() if process.is_stopped()}
        return stopped.issuperset(open_ranks) or bool(self._ended_ranks())

    def _answer_calls(self) -> None:
        """Sleep until another rank asks, and answer once."""
        with contextlib.suppress(*_UNREACHABLE):
            self._calls.wait([f"call/{self._rank}"], _LONG)
            if not self._left:
                answer = doing() | {"where": self._where()}
                answer["waits"] |= self._asking
                self._calls.set(f"answer/{self._rank}", json.dumps(answer))


def _ended(names: str, cause: str) -> str:
    return complaint(
        names,
        "no answer",
        f"The process has ended: {cause}",
        "Its own message says why; there is none if it was killed, for lack of memory for "
        "example. Resume from the last checkpoint",
    )


def doing() -> dict[str, Any]:
    """Return whether a thread of this process waits for another rank, and where the main one is."""
    frames = sys._current_frames()
    asking = threading.get_ident()
    main = frames.get(threading.main_thread().ident or 0)
    return {
        "waits": any(_waits(frame) for thread, frame in frames.items() if thread != asking),
        "line": _place(main) if main is not None else "somewhere",
    }


def _waits(frame: FrameType) -> bool:
    """Whether a thread's innermost frame is a transfer, or waits for one of this project's."""
    code: CodeType = frame.f_code
    if code.co_filename == __file__:
        return False  # a thread of a watch
    if _TRANSFERS in code.co_filename:
        return True
    line = linecache.getline(code.co_filename, frame.f_lineno)
    return code.co_filename.startswith(_OWN) and any(word in line for word in _WAITING)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
