"""SIGKILL at random moments of saving, many times: the test's own rounds, and those of a run.

`python -m tests.kills 100` kills whole runs on two ranks, with and without ``--async-save``, each
continued by the next one, and prints what was lost. The test suite does a few rounds of `saves`.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.retention import Retention
from megatron.core.dist_checkpointing.shard import Piece, Sharded, whole
from megatron.core.dist_checkpointing.writing import HostBuffers
from megatron.core.mesh import Axis
from tests.e2e.launch import launch
from tests.e2e.refusals import MOCK, changed

PEERS = Peers(Axis.single("world"))


def state(value):
    pieces = [Piece(torch.full((64, 512), float(value)), (64 * i, 0)) for i in range(8)]
    return {"big": Sharded((512, 512), pieces), "step": whole(torch.tensor(float(value)))}


def _save_on_and_on(root, first, same, behind, keep, report):
    buffers, iteration = HostBuffers(), first
    os.write(report, b"\n")  # from here on a kill hits a save
    care = io.Care(retention=Retention(root, keep) if keep else None)
    while True:
        tensors = state(iteration if not same else first + (iteration - first) / 1000)
        number = first if same else iteration
        saving = io.Saving(root, number, tensors, {"x": b"y"}, PEERS, care=care)
        if behind:
            saving.write_behind(buffers)
            for one in (p for t in tensors.values() for p in t.pieces):
                one.local.fill_(-1.0)  # the run goes on
        else:
            saving.write()
        saving.finish()
        os.write(report, f"{iteration}\n".encode())
        iteration += 1


def saves(root, rounds, same=False, behind=False, keep=0, seed=0) -> Iterator[tuple]:
    """Kill a process that does nothing but save, again and again.

    Args:
        root: The save directory, with a checkpoint in it.
        rounds: How often.
        same: Whether it saves the same iteration over and over.
        behind: Whether it writes behind its own back.
        keep: How many checkpoints stay; 0 for all.
        seed: Of the moments.

    Yields:
        The first iteration of the round, those whose save returned, and the names of leftovers.
    """
    rng = random.Random(seed)
    newest = place.find(root).iteration
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _save_on_and_on(root, newest + 1, same, behind, keep, writer)
        os.close(writer)
        assert os.read(reader, 1) == b"\n"
        time.sleep(rng.uniform(0.002, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader) as lines:
            returned = [int(line) for line in lines.read().splitlines()]
        left = [n for n in os.listdir(root) if n.endswith((".tmp", ".old", ".del"))]
        yield newest + 1, returned, left
        newest = place.find(root).iteration


def runs(rounds: int, behind: bool, seed: int = 0) -> dict[str, object]:
    """Kill a run on two ranks that saves at every second step; the next one continues it.

    Returns:
        Counts of rounds, of interrupted saves, and the most iterations that were lost.
    """
    rng, lost, interrupted, warned = random.Random(seed), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        args = changed(MOCK, "--train-iters", 100000, "--lr-decay-iters", 100000)
        args += ["--save", folder, "--load", folder, "--save-interval", "2", "--keep-last", "3"]
        args += ["--async-save"] if behind else []
        before = 0
        for _ in range(rounds):

            def kill(pids, log):
                deadline = time.monotonic() + 60
                while "iteration " not in log.read_text() and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0.0, 0.6))
                order = list(pids.values())
                rng.shuffle(order)
                for pid in order:
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(rng.choice((0.0, 0.0, 0.02)))

            done = launch(2, args, during=kill)
            reached = max([before, *map(int, re.findall(r"\] iteration +(\d+)/", done.out))])
            said = [int(n) for n in re.findall(r"saved checkpoint from iteration +(\d+)", done.out)]
            interrupted += any(path.suffix in (".tmp", ".old", ".del") for path in root.iterdir())
            warned += "is left out" in done.out or "Falling back" in done.out
            found = place.find(root)
            now = 0
            if found is not None:
                now = found.iteration
                assert not found.notes, found.notes
                io.open_checkpoint(found.directory, PEERS)
            assert now >= max([before, *said]), (now, before, said)
            lost.append(reached - now)
            before = now
    return {
        "rounds": rounds,
        "async": behind,
        "saves interrupted": interrupted,
        "damaged ones met at a start": warned,
        "most iterations lost, of 2 in an interval": max(lost),
        "iterations": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("sync", "async"))
    given = parser.parse_args()
    for behind in (False, True):
        if given.only in (None, "async" if behind else "sync"):
            print(runs(given.rounds, behind, given.seed), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
