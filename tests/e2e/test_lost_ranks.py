"""Under the real launcher: a rank dies, stops or hangs, and the whole job ends and says which one.

The jobs run side by side, because most of their time is waiting for the time limit of a collective.
A stopped process goes on as soon as the launcher has asked it to end: the half minute that the
launcher would give it is not this project's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, free_port
from tests.e2e.refusals import LONG, MOCK, PP2, TP2

START_S, LIMIT_S = 300, 15  # for the ranks to meet, whose imports take long; then as the flag says
VICTIM = 1
SCRIPT = f"""
import os, sys, time
from datetime import timedelta
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
import pretrain_gpt
from megatron.training.step import TrainStep

meet, forward = dist.init_process_group, TrainStep.forward

def in_time(*args, timeout, **kwargs):
    meet(*args, timeout=timedelta(seconds={START_S}), **kwargs)

def limited(self, *args):
    if self.iteration == 2:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds={LIMIT_S}))
    return forward(self, *args)

def never_ending(self, *args):
    if os.environ["RANK"] == "{VICTIM}" and self.iteration == 3:
        time.sleep(3600)
    return limited(self, *args)

dist.init_process_group = in_time
TrainStep.forward = never_ending if sys.argv.pop(1) == "hang" else limited
os._exit(pretrain_gpt.main())
"""
# name -> (layout, ranks, signal to one of them)
JOBS = {
    "is stopped": (PP2, 2, signal.SIGSTOP),
    "dies": ([*TP2, *PP2], 4, signal.SIGKILL),
    "sleeps in forward": (TP2, 2, None),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks by /proc"),
]


@dataclass
class Job:
    """A launcher, its log, and its ranks' processes."""

    launcher: subprocess.Popen
    log: Path
    ranks: dict[int, int]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def find_ranks(self) -> None:
        """Note the processes of all ranks that the launcher has started."""
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        for pid in map(int, children.read_text().split()):
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next((x for x in env if x.startswith(b"RANK=")), None)
            if rank is not None:
                self.ranks[int(rank[5:])] = pid


def begin(name, folder):
    layout, ranks, number = JOBS[name]
    script = folder / "script.py"
    script.write_text(SCRIPT)
    log = folder / f"{name.replace(' ', '_')}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks,
               "--master-port", free_port(), script, "go on" if number else "hang",
               *MOCK, *LONG, *layout, "--distributed-timeout-minutes", LIMIT_S / 60]  # fmt: skip
    with log.open("w") as out:
        launcher = subprocess.Popen(
            [str(part) for part in command],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return Job(launcher, log, {})


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs, each with its victim."""
    folder = tmp_path_factory.mktemp("jobs")
    started = {name: begin(name, folder) for name in JOBS}
    try:
        for name, job in started.items():
            deadline = time.monotonic() + START_S
            last = "iteration        3/" if JOBS[name][2] else "iteration        2/"
            while last not in job.text() and time.monotonic() < deadline:
                assert job.launcher.poll() is None, job.text()
                time.sleep(0.05)
            job.find_ranks()
            assert sorted(job.ranks) == list(range(JOBS[name][1])), job.text()
            if JOBS[name][2]:
                os.kill(job.ranks[VICTIM], JOBS[name][2])
        yield started
    finally:
        for job in started.values():
            for pid in [job.launcher.pid, *job.ranks.values()]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            job.launcher.wait()


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def go_on_when_asked_to_end(pid):
    """Resume a stopped process once SIGTERM waits for it."""
    deadline, asked = time.monotonic() + START_S, 1 << (signal.SIGTERM - 1)
    while time.monotonic() < deadline and alive(pid):
        status = Path(f"/proc/{pid}/status").read_text()
        if int(re.search(r"ShdPnd:\t(\w+)", status)[1], 16) & asked:
            os.kill(pid, signal.SIGCONT)
            return
        time.sleep(0.05)


# What is said about the victim, after its rank, place and process.
SAYS = {
    "dies": r"The process has ended",
    "is stopped": rf"Timed out waiting {LIMIT_S}000ms .*it is stopped, as by SIGSTOP",
    "sleeps in forward": r"Timed out .*still at work: rank 1 .*, iteration 3, 0F\d, "
    r"script\.py:\d+ in never_ending",
}
PLACE = {"dies": "tp1 pp0 dp0", "is stopped": "tp0 pp1 dp0", "sleeps in forward": "tp1 pp0 dp0"}


@pytest.mark.parametrize("name", ["dies", "sleeps in forward", "is stopped"])
def test_the_whole_job_ends_and_names_the_rank(name, jobs):
    job = jobs[name]
    if JOBS[name][2] == signal.SIGSTOP:
        go_on_when_asked_to_end(job.ranks[VICTIM])
    assert job.launcher.wait(timeout=START_S) != 0
    text = job.text()
    told = [line for line in text.splitlines() if re.match(r"\[rank \d .*: got ", line)]
    assert told, text
    victim = rf"rank {VICTIM} {PLACE[name]} \(process {job.ranks[VICTIM]}\): got no answer\. "
    for line in told:  # whoever speaks, it is about the first cause
        assert re.match(rf"\[rank [^1] [^]]*iteration \d+[^]]*\] {victim}", line), line
        assert re.search(SAYS[name], line), line
    assert "Traceback" not in text.partition("torch/distributed/elastic")[0]
    assert not [pid for pid in job.ranks.values() if alive(pid)]
