"""Run a function on several gloo ranks: `run_ranks(fn, world_size, *args)`.

Ranks are forked from this process for each call, so they inherit its imports (spawning would import
torch anew in every rank, some 3 s each) and leave no state behind for the next test.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_fork = multiprocessing.get_context("fork")
_COLLECTIVE_TIMEOUT_S = 30
_GRACE_AFTER_FAILURE_S = 2.0  # a failing rank often takes others down: prefer its traceback


class RankError(AssertionError):
    """A rank failed, died or hung; the text shows the first traceback."""


def run_ranks(fn, world_size: int, *args, timeout: float = 60, detail: bool = True, **kwargs):
    """Call `fn(rank, world_size, *args, **kwargs)` on every rank.

    Args:
        fn: Any callable, closures included. Its result must be picklable.
        world_size: Number of ranks.
        timeout: Seconds after which every rank is killed; stacks of the hung ranks are printed.
        detail: Let torch check that ranks call the same collectives with the same shapes, which
            plain gloo does not (about twice as slow).

    Returns:
        One result per rank.

    Raises:
        RankError: If any rank failed.
    """
    torch.set_num_threads(1)  # a child of a parent with an OpenMP team hangs in its first op
    with tempfile.TemporaryDirectory() as directory:
        workers = []
        for rank in range(world_size):
            ours, theirs = _fork.Pipe()
            inherited = [conn for _, conn in workers] + [ours]
            process = _fork.Process(
                target=_rank_main,
                args=(theirs, inherited, fn, rank, world_size, Path(directory), detail),
                kwargs={"args": args, "kwargs": kwargs},
                daemon=True,
            )
            process.start()
            theirs.close()
            workers.append((process, ours))
        try:
            return _collect(workers, timeout, Path(directory))
        finally:
            for process, _ in workers:
                if process.exitcode is None and process.is_alive():
                    process.join(0.5)
                    process.kill()
            for process, conn in workers:
                process.join(5)
                conn.close()


def _rank_main(conn, inherited, fn, rank, world_size, directory, detail, args, kwargs):
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = open(directory / f"stacks{rank}", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(directory / "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
            )
            # A rank that is done at once must not leave while others still connect to it.
            dist.barrier()
            outcome = (True, fn(rank, world_size, *args, **kwargs))
        except BaseException:
            outcome = (False, f"--- rank {rank} of {world_size} ---\n{traceback.format_exc()}")
        # Plain bytes: a tensor sent as such is shared memory that dies with this process.
        conn.send_bytes(pickle.dumps(outcome))
    finally:
        conn.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _collect(workers, timeout, directory) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {conn: rank for rank, (_, conn) in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting:
        left = deadline - time.monotonic()
        if failures:
            left = min(left, _GRACE_AFTER_FAILURE_S)
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
        if not ready:
            if not failures:
                failures.append(_hung(workers, sorted(waiting.values()), timeout, directory))
            break
        for conn in ready:
            rank = waiting.pop(conn)
            try:
                good, value = pickle.loads(conn.recv_bytes())
            except EOFError:
                workers[rank][0].join(1)
                failures.append(f"--- rank {rank} died, exit code {workers[rank][0].exitcode} ---")
                continue
            if good:
                results[rank] = value
            else:
                failures.append(value)
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank] for rank in range(len(workers))]


def _hung(workers, ranks, timeout, directory) -> str:
    for rank in ranks:
        process = workers[rank][0]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    text = [f"ranks {ranks} still running after {timeout} s"]
    for rank in ranks:
        stack = (directory / f"stacks{rank}").read_text().strip()
        text.append(f"--- rank {rank} ---\n{stack}")
    return "\n".join(text)
