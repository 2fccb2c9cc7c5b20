"""Run a script on several ranks as torchrun would, from a process that has imported torch already.

`launch` forks the ranks from this process, which costs a tenth of a second instead of the several
that each rank of a real launcher spends on imports. Each rank runs the script as ``__main__`` with
torchrun's environment variables and writes to one log. When a rank fails, the others are ended.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # every rank would import it when it builds its optimizer

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function hides it

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 60.0  # what failing ranks of one cause get to leave by themselves
_PORTS = range(15000, 30000)  # below those that a system hands out to connections


@dataclass(frozen=True)
class Finished:
    """What the ranks left behind: one exit code each, and everything they wrote."""

    codes: list[int]
    out: str

    def lines(self, part: str) -> list[str]:
        """Lines that contain `part`."""
        return [line for line in self.out.splitlines() if part in line]

    def losses(self) -> list[float]:
        """Training losses, by line."""
        return [float(x.split("lm loss: ")[1].split()[0]) for x in self.lines("| lm loss: ")]


def free_port() -> int:
    """A port that nobody listens on, and that no connection of other processes takes meanwhile."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(log: Path, text: str, timeout: float = 150) -> None:
    """Wait until ranks have written a text.

    Raises:
        AssertionError: They did not in so many seconds.
    """
    end = time.monotonic() + timeout
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < end, f"{text!r} does not come:\n{log.read_text()}"
        time.sleep(0.02)


def launch(
    world_size: int,
    args: list[str],
    *,
    script: Path = ROOT / "pretrain_gpt.py",
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    during: Callable[[dict[int, int], Path], None] | None = None,
) -> Finished:
    """Run `script` on `world_size` ranks and wait for all of them.

    Args:
        world_size: Number of ranks.
        args: Command line after the script's name.
        script: What to run.
        env: Further environment variables.
        timeout: Seconds after which all ranks are killed and the call fails.
        during: Called once after the start with (rank -> process id) and the log.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        port = free_port()
        pids = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _run_rank(rank, world_size, port, script, args, env or {}, log)
            pids[rank] = pid
        try:
            if during:
                during(dict(pids), log)
        except BaseException:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        codes = _wait(pids, timeout, log)
        return Finished([codes[r] for r in range(world_size)], log.read_text(errors="replace"))


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    script: Path,
    args: list[str],
    env: Mapping[str, str],
    log: Path,
) -> None:
    code = 1
    if rank:
        _connect_in_time(port)
    # Makes the thread pool anew: the parent's does not survive the fork, and two threads that find
    # out at the same time trip an assertion inside torch.
    torch.set_num_threads(1)
    try:
        out = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            **env,
        )
        sys.argv = [str(script), *args]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _connect_in_time(port: int) -> None:
    """Let this rank call the first one when that listens; torch tries anew after 0.5 s only."""
    connect = rendezvous._create_c10d_store

    def patient(*args, **settings):
        deadline = time.monotonic() + 1.0
        while not _listens(port) and time.monotonic() < deadline:
            time.sleep(0.005)
        return connect(*args, **settings)

    rendezvous._create_c10d_store = patient


def _listens(port: int) -> bool:
    """Whether somebody on this machine does; yes where that cannot be known."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.open()]
    return not lines or any(x[1].endswith(f":{port:04X}") and x[3] == "0A" for x in lines)


def _wait(pids: dict[int, int], timeout: float, log: Path) -> dict[int, int]:
    codes: dict[int, int] = {}
    left, deadline = dict(pids), time.monotonic() + timeout
    failed_at: float | None = None
    while left:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
                if codes[rank] and failed_at is None:
                    failed_at = time.monotonic()
        now = time.monotonic()
        late = now > deadline
        if late or (failed_at is not None and now > failed_at + _GRACE_S):
            for pid in left.values():
                os.kill(pid, signal.SIGKILL)
        if late:
            for pid in left.values():
                os.waitpid(pid, 0)
            raise AssertionError(f"ranks {sorted(left)} hang:\n{log.read_text(errors='replace')}")
        time.sleep(0.02)
    return codes
