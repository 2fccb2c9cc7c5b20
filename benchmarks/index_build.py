"""How long does it take to open a corpus of ten billion tokens, and to put it into order?

Writes an index of so many tokens beside an empty (sparse) token file, opens it, builds the index
files of one pass, opens everything again from the cache and reads samples. Memory is the largest
resident set of a process of its own, mapped files included.

    python benchmarks/index_build.py
    python benchmarks/index_build.py --tokens 10000000000 --documents 100000000 --folder DIR
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np

from megatron.core.datasets.blend import blending_indices
from megatron.core.datasets.gpt import GPTDataset, SampleConfig
from megatron.core.datasets.indexed import HEADER, MAGIC, IndexedDataset, bin_path, idx_path


def write(prefix: Path, tokens: int, documents: int) -> None:
    """Write an index of documents of random lengths, and a sparse token file for it."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * tokens // documents, documents, dtype="<i4")
    total = int(lengths.sum(dtype=np.int64))
    lengths[0] += max(0, tokens - total)
    pointers = np.zeros(documents, dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= 2
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        for part in (lengths, pointers, np.arange(documents + 1, dtype="<i8")):
            part.tofile(file)
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))


def peak_mib() -> float:
    """Return the largest resident set of this process so far.

    `getrusage` would count what the parent had before this process began.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(prefix: Path, length: int) -> dict[str, float]:
    """Open, build, and read a thousand samples; in this process."""
    before = peak_mib()
    begun = time.perf_counter()
    corpus = IndexedDataset(prefix)
    corpus.fingerprint()
    opened = time.perf_counter()
    config = SampleConfig(sequence_length=length, cache_path=str(prefix.parent / "cache"))
    documents = np.arange(len(corpus), dtype=np.int32)
    data = GPTDataset(corpus, documents, None, "train", config)
    built, peak = time.perf_counter(), peak_mib()
    for index in range(1000):
        data.window(index)
    done = time.perf_counter()
    return {
        "tokens": corpus.num_tokens,
        "documents": len(corpus),
        "samples": len(data),
        "open_s": opened - begun,
        "index_s": built - opened,
        "samples_a_second": 1000 / (done - built),
        "before_mib": before,
        "peak_mib": peak,
        "index_files_mib": sum(p.stat().st_size for p in prefix.parent.rglob("*.npy")) / 2**20,
        "idx_mib": idx_path(prefix).stat().st_size / 2**20,
    }


def blend(size: int) -> dict[str, float]:
    """Let five corpora take turns."""
    begun = time.perf_counter()
    blending_indices([0.4, 0.3, 0.15, 0.1, 0.05], size)
    return {
        "samples": size,
        "seconds": time.perf_counter() - begun,
        "peak_mib": peak_mib(),
    }


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=10_000_000_000)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        prefix = Path(folder) / "corpus"
        write(prefix, args.tokens, args.documents)
        for name in ("build", "again"):
            with spawn.Pool(1) as pool:
                results[name] = pool.apply(measure, (prefix, args.seq_length))
        with spawn.Pool(1) as pool:
            results["blend"] = pool.apply(blend, (results["build"]["samples"],))
    for name, figures in results.items():
        print(name, " ".join(f"{key} {value:,.1f}" for key, value in figures.items()))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
