"""Run a function on several gloo ranks of this machine: `run_ranks(fn, world_size, *args)`.

Ranks are forked from this process for each call, so they inherit its imports (spawning would import
torch anew in every rank, some 3 s each) and leave no state behind for the next call.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers import it when they are built: 0.4 s for each rank, or once here
import torch.distributed as dist

from megatron.core.errors import MegatronError
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    linear,
)
from megatron.training.failures import lost_contact

_fork = multiprocessing.get_context("fork")
_COLLECTIVE_TIMEOUT_S = 180
_GRACE_AFTER_FAILURE_S = 20.0  # for others to say what happened to them
_GRACE_FOR_CAUSE_S = 60.0  # as long as all that is known is that another rank went away
_GRACE_FOR_END_S = 60.0  # from the end of a rank's connection to that of its process
_GRACE_FOR_STACKS_S = 10.0
_NO_RANK = -1
_DONE, _FAILED, _LOST_CONTACT = "done", "failed", "lost contact"


@functools.cache
def compile_kernels() -> None:
    """Compile FP8 kernels in this process, which every forked rank would compile for itself."""
    recipes = (DelayedScaling(), MXFP8BlockScaling(), Float8BlockScaling(), NVFP4BlockScaling())
    for dtype, recipe in itertools.product((torch.float32, torch.bfloat16), recipes):
        state = Fp8State(Fp8Policy(recipe=recipe), params_dtype=dtype)
        x, weight = (torch.ones(16, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        total = linear(x, weight, None, state.for_linear("layer")).sum()
        total.backward()  # type: ignore[no-untyped-call]


class RankError(MegatronError):
    """A rank failed, died or hung; the text begins with the cause.

    Args:
        failures: (rank, traceback or what else is known): first the ranks with a problem of their
            own, then those that only lost contact to one; each in the order in which they came.

    Attributes:
        failures: As above.
    """

    def __init__(self, failures: Sequence[tuple[int, str]]) -> None:
        self.failures = list(failures)
        super().__init__("\n".join(text for _, text in failures))


@dataclass(frozen=True)
class _Worker:
    """A forked rank, the end of the pipe it answers on, and its files.

    Attributes:
        process: The rank.
        answers: Where its result arrives.
        stacks: File that the rank writes its stacks to on SIGUSR1.
        output: File with what it printed, None if that went to this process's output.
    """

    process: Any
    answers: Any
    stacks: Path
    output: Path | None

    def printed(self) -> str:
        """Return the end of what the rank printed."""
        if self.output is None or not self.output.exists():
            return ""
        text = self.output.read_text(errors="replace").strip()[-4000:]
        return f"\n--- what it printed ---\n{text}" if text else ""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 180,
    detail: bool = True,
    quiet: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` on every rank.

    Args:
        fn: Any callable, closures included. Its result must be picklable.
        world_size: Number of ranks.
        *args: Passed on.
        timeout: Seconds after which every rank is killed; stacks of the hung ranks are shown.
        detail: Let torch check that ranks call the same collectives with the same shapes, which
            plain gloo does not (about twice as slow).
        quiet: Show what a rank prints only if it fails.
        **kwargs: Passed on.

    Returns:
        One result per rank.

    Raises:
        RankError: If any rank failed.
    """
    torch.set_num_threads(1)  # a child of a parent with an OpenMP team hangs in its first op
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        workers: list[_Worker] = []
        for rank in range(world_size):
            ours, theirs = _fork.Pipe()
            output = directory / f"output{rank}" if quiet else None
            worker = _Worker(
                _fork.Process(
                    target=_rank_main,
                    args=(theirs, [w.answers for w in workers] + [ours], fn, rank, world_size),
                    kwargs={
                        "directory": directory,
                        "detail": detail,
                        "output": output,
                        "args": args,
                        "kwargs": kwargs,
                    },
                    daemon=True,
                ),
                ours,
                directory / f"stacks{rank}",
                output,
            )
            worker.process.start()
            theirs.close()
            workers.append(worker)
        try:
            return _collect(workers, timeout)
        finally:
            _end(workers)


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.process.exitcode is None and worker.process.is_alive():
            worker.process.join(0.5)
            worker.process.kill()
    for worker in workers:
        worker.process.join(5)
        worker.answers.close()


def _rank_main(
    conn: Any,
    inherited: Sequence[Any],
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    *,
    directory: Path,
    detail: bool,
    output: Path | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if output is not None:
        _print_to(output)
    stacks = open(directory / f"stacks{rank}", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    try:
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(directory / "store"), world_size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
            )
            # A rank that is done at once must not leave while others still connect to it.
            dist.barrier()
            outcome = (_DONE, fn(rank, world_size, *args, **kwargs))
        except BaseException as error:
            lost = isinstance(error, Exception) and lost_contact(error)
            text = f"--- rank {rank} of {world_size} ---\n{traceback.format_exc()}"
            outcome = (_LOST_CONTACT if lost else _FAILED, text)
        # Plain bytes: a tensor sent as such is shared memory that dies with this process.
        conn.send_bytes(pickle.dumps(outcome))
    finally:
        conn.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _print_to(path: Path) -> None:
    """Let everything this process prints, libraries included, go to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _collect(workers: Sequence[_Worker], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    causes: list[tuple[int, str]] = []
    consequences: list[tuple[int, str]] = []
    waiting: dict[Any, int] = {worker.answers: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting:
        left = deadline - time.monotonic()
        if causes:
            left = min(left, _GRACE_AFTER_FAILURE_S)
        elif consequences:
            left = min(left, _GRACE_FOR_CAUSE_S)
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
        if not ready:
            if not causes and not consequences:
                causes.append((_NO_RANK, _hung(workers, sorted(waiting.values()), timeout)))
            break
        conn: Any
        for conn in ready:
            rank = waiting.pop(conn)
            worker = workers[rank]
            try:
                state, value = pickle.loads(conn.recv_bytes())
            except (EOFError, OSError):  # killed before or while it answers
                worker.process.join(_GRACE_FOR_END_S)
                code = worker.process.exitcode
                text = f"--- rank {rank} died, exit code {code} ---{worker.printed()}"
                causes.append((rank, text))
                continue
            if state == _DONE:
                results[rank] = value
            elif state == _FAILED:
                causes.append((rank, value + worker.printed()))
            else:
                consequences.append((rank, value + worker.printed()))
    if causes or consequences:
        raise RankError(causes + consequences)
    return [results[rank] for rank in range(len(workers))]


def _hung(workers: Sequence[_Worker], ranks: Sequence[int], timeout: float) -> str:
    asked = [worker for worker in map(workers.__getitem__, ranks) if worker.stacks.exists()]
    for worker in asked:
        if worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _GRACE_FOR_STACKS_S
    while time.monotonic() < deadline and not all(worker.stacks.stat().st_size for worker in asked):
        time.sleep(0.05)
    time.sleep(0.3)  # stacks are written line by line
    text = [f"ranks {list(ranks)} still running after {timeout} s"]
    for rank in ranks:
        own = workers[rank].stacks
        stacks = own.read_text().strip() if own.exists() else "it has not begun yet"
        text.append(f"--- rank {rank} ---\n{stacks}")
    return "\n".join(text)
