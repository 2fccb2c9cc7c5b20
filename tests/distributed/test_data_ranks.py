"""Several ranks at once: one index cache, the same data everywhere, no rank left waiting."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from megatron.config import make_config
from megatron.core.datasets import cache
from megatron.core.datasets.gpt import GPTDataset, SampleConfig
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.source import build_sources
from megatron.core.datasets.tokenizers import build_tokenizer
from megatron.core.errors import DataError
from megatron.core.mesh import MeshSizes, ParallelState
from tests.distpool import run_ranks


def corpus(folder, documents=40, length=20, first=0):
    folder.mkdir(exist_ok=True)
    with IndexedDatasetBuilder(folder / "corpus", np.uint16) as builder:
        for document in range(documents):
            builder.add_document((np.arange(first, first + length) + document) % 400)
        builder.finalize()
    return str(folder / "corpus")


def config(path, cache_path, world_size=2, **fields):
    return make_config(
        world_size=world_size,
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=8,
        micro_batch_size=2,
        global_batch_size=8,
        train_iters=10,
        eval_interval=5,
        eval_iters=2,
        tokenizer_type="NullTokenizer",
        vocab_size=1000,
        data_path=[path],
        split="8,1,1",
        data_cache_path=str(cache_path),
        num_workers=0,
        **fields,
    )


def sources_of(rank, world_size, cfg):
    mesh = ParallelState.build(MeshSizes.from_config(cfg, world_size), rank, world_size)
    made = build_sources(cfg, build_tokenizer(cfg.data), mesh)
    return (made.train, made.valid, made.test), mesh


def read_one_step(rank, world_size, cfg):
    (train, _, _), mesh = sources_of(rank, world_size, cfg)
    batches = [train.batch(16, m, mesh.dp.rank) for m in range(cfg.num_microbatches)]
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_reads_the_same_samples_on_any_number_of_ranks(tmp_path, world_size):
    path = corpus(tmp_path)
    cfg = config(path, tmp_path / "cache", world_size)
    rows = [row for part in run_ranks(read_one_step, world_size, cfg) for row in part]
    alone = config(path, tmp_path / "alone", 1)
    assert sorted(rows) == sorted(run_ranks(read_one_step, 1, alone)[0])
    assert len(rows) == 8
    assert len(list((tmp_path / "cache").glob("*-description.txt"))) == 3
    assert not list((tmp_path / "cache").glob("*tmp*"))


def test_each_node_builds_its_own_cache(tmp_path):
    """Two ranks with folders of their own, as on node-local disks."""
    path = corpus(tmp_path)

    def rank_main(rank, world_size):
        return read_one_step(rank, world_size, config(path, tmp_path / f"node{rank}"))

    rows = run_ranks(rank_main, 2)
    assert len({row for part in rows for row in part}) == 8
    for rank in range(2):
        assert len(list((tmp_path / f"node{rank}").glob("*-shuffle_index.npy"))) == 3


def failure(rank, world_size, cfgs):
    try:
        sources_of(rank, world_size, cfgs[rank])
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("other", [{"documents": 41}, {"first": 7}], ids=["longer", "as long"])
def test_another_copy_of_the_corpus_is_found_on_every_rank(tmp_path, other):
    paths = [corpus(tmp_path / "a"), corpus(tmp_path / "b", **other)]
    cfgs = [config(path, tmp_path / "cache") for path in paths]
    said = run_ranks(failure, 2, cfgs)
    assert all("data on rank 1 that differ from those on rank 0" in text for text in said)


def test_equal_copies_at_different_places_are_accepted(tmp_path):
    paths = [corpus(tmp_path / "a"), corpus(tmp_path / "b")]
    cfgs = [config(path, tmp_path / "cache") for path in paths]
    assert run_ranks(failure, 2, cfgs) == [None, None]


def test_a_missing_file_on_one_rank_stops_all(tmp_path):
    paths = [corpus(tmp_path / "a"), str(tmp_path / "missing")]
    cfgs = [config(path, tmp_path / "cache") for path in paths]
    begun = time.monotonic()
    said = run_ranks(failure, 2, cfgs)
    assert "rank 1 cannot read the data" in said[0]
    assert all("missing.idx does not exist" in text for text in said)
    assert time.monotonic() - begun < 120  # the time limit of a collective is longer


def race(path, cache_path, start, building, results):
    build = GPTDataset._build

    def counted(self):
        results.put("built")
        if building is None:
            time.sleep(0.3)
        else:
            building.wait(120)  # all have begun before one is done
        return build(self)

    GPTDataset._build = counted
    start.wait()
    settings = SampleConfig(sequence_length=8, cache_path=str(cache_path))
    data = GPTDataset(IndexedDataset(path), np.arange(40, dtype=np.int32), 30, "train", settings)
    results.put(data.order.shuffle_index.tolist())


@pytest.mark.parametrize("locks", [True, False])
def test_racing_processes_build_one_cache(tmp_path, locks, monkeypatch):
    """With locks one process builds; without, all build the same and none sees half of it."""
    if not locks:
        monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    context = multiprocessing.get_context("fork")
    path, results, start = corpus(tmp_path), context.Queue(), context.Barrier(3)
    building = None if locks else context.Barrier(3)
    processes = [
        context.Process(target=race, args=(path, tmp_path / "cache", start, building, results))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    got = [results.get(timeout=120) for _ in range(4 if locks else 6)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert results.empty()
    orders = [item for item in got if item != "built"]
    assert got.count("built") == (1 if locks else 3)
    assert orders == [orders[0]] * 3
    assert not list((tmp_path / "cache").glob("*tmp*"))


def no_locks(handle, operation):
    raise OSError(cache.errno.ENOLCK, "No locks available")
