"""Replicas that read together: the same bits, every block read once, no rank left waiting."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron.core.dist_checkpointing.schema import is_expert_key
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError
from tests.distpool import run_ranks
from tests.distributed.test_any_to_any import CP2, EP2, MODEL, PP2, TP2, ZERO
from tests.trained_parts import build, content, fetch, make_checkpoint, store

TOGETHER = {"ckpt_fully_parallel_load": True}
LAYOUTS = {
    "dp2 x tp2 sharded": {**TP2, **ZERO},
    "dp2 x tp2": TP2,
    "dp4 sharded, ep2": {**EP2, **ZERO},
    "cp2 x pp2": {**CP2, **PP2},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    run_ranks(make_checkpoint, 2, root, detail=False, **MODEL, **EP2, **ZERO)
    return root


class Watched:
    """Notes which blocks a rank reads and which it needs."""

    def __init__(self, monkeypatch):
        self.read, self.needed = [], set()
        stored, jobs = Reader.stored, Reader.jobs

        def noted(reader, job):
            self.read.append((*job.place, job.num_bytes))
            return stored(reader, job)

        def listed(reader, targets):
            found = jobs(reader, targets)
            if not any(key.startswith("fp8_state.") for key in targets):
                for job in found[0]:
                    self.needed.add((*job.place, job.num_bytes, is_expert_key(job.key)))
            return found

        monkeypatch.setattr(Reader, "stored", noted)
        monkeypatch.setattr(Reader, "jobs", listed)


def pass_each_on(rank, world, source, target):
    """Load and save again at every layout; what this rank read and needed, and its replicas."""
    found = {}
    for name, layout in LAYOUTS.items():
        fields = {**MODEL, **layout, **TOGETHER, "load": str(source), "save": str(target / name)}
        cfg, mesh, parts, _ = build(rank, world, **fields)
        with pytest.MonkeyPatch.context() as monkeypatch:
            watched = Watched(monkeypatch)
            fetch(cfg, mesh, parts)
        store(cfg, mesh, parts)
        found[name] = watched.read, watched.needed, {False: mesh.dp_cp.ranks, True: mesh.edp.ranks}
    return found


def test_every_block_is_read_once_by_a_group_of_replicas(saved, tmp_path):
    expected = content(saved)
    by_rank = run_ranks(pass_each_on, 4, saved, tmp_path, detail=False)
    shared = 0
    for name in LAYOUTS:
        again = content(tmp_path / name)
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[key], value) for key, value in expected.items()), name
        reads = [Counter(found[name][0]) for found in by_rank]
        for _, needed, groups in (found[name] for found in by_rank):
            for *block, experts in needed:
                count = sum(reads[rank][tuple(block)] for rank in groups[experts])
                assert count == 1, (name, block)
                others = [by_rank[rank][name][1] for rank in groups[experts]]
                shared += sum((*block, experts) in other for other in others) > 1
        for group in {found[name][2][False] for found in by_rank}:
            sizes = [sum(size for *_, size in by_rank[rank][name][0]) for rank in group]
            assert min(sizes) > 0.3 * max(sizes), (name, sizes)  # the reading is divided
    assert shared > 100


def load_damaged(rank, world, root, victim):
    cfg, mesh, parts, _ = build(rank, world, load=str(root), **MODEL, **TOGETHER)
    stored = Reader.stored

    def broken(reader, job):
        if rank == victim:
            raise CheckpointError(f"{job.place[0]} cannot be read")
        return stored(reader, job)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Reader, "stored", broken)
        with pytest.raises(CheckpointError) as caught:
            fetch(cfg, mesh, parts)
    return str(caught.value)


def test_a_rank_that_cannot_read_is_the_error_of_all(saved):
    texts = run_ranks(load_damaged, 2, saved, 1, detail=False)
    assert texts[0] == texts[1]
    assert "rank 1 has a problem" in texts[0]
    assert "distcp cannot be read" in texts[0]
