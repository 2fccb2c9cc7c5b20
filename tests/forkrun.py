"""torchrun's environment without its cost: `python tests/forkrun.py N script.py [args...]`.

Imports torch once and forks the ranks, each of which runs the script as `__main__`. The first rank
that fails ends the others; its exit code becomes this program's.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import traceback

import sympy  # noqa: F401 - torch imports it lazily, which every rank would pay for
import torch
import torch._dynamo
import torch.distributed

# Forked ranks hang if their parent ever started an OpenMP team.
torch.set_num_threads(1)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_rank(rank: int, world_size: int, port: int, script: str, args: list[str]) -> int:
    """Run the script as one rank of a job on this machine; return its exit code."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(world_size: int, script: str, args: list[str]) -> int:
    """Run all ranks; return the exit code of the first that failed, or 0."""
    port = free_port()
    ranks: dict[int, int] = {}

    def end_all(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)

    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = run_rank(rank, world_size, port, script, args)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # the parent's exit handlers are not this process's
        ranks[pid] = rank
    signal.signal(signal.SIGTERM, end_all)
    result = 0
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not result:
            result = code if code > 0 else 128 - code
            print(f"[forkrun] rank {rank} exited with {code}", file=sys.stderr)
            end_all()
    return result


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
