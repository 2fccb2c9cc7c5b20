"""A small run, and what it takes to see that something was refused in the right way."""

from __future__ import annotations

import contextlib
import re
import resource

import numpy as np

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from tests.e2e.launch import ROOT, launch

MODEL = [
    "--vocab-size", "128", "--num-layers", "2", "--hidden-size", "32",
    "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "64",
    "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "2",
    "--lr-decay-iters", "2", "--lr", "1e-3", "--log-interval", "1", "--device", "cpu",
]  # fmt: skip
MOCK = [*MODEL, "--mock-data"]
LONG = ["--train-iters", "100000", "--lr-decay-iters", "100000"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
FP8 = ["--bf16", "--fp8-format", "hybrid"]

# A name, what was there, why that cannot work, what to do.
FORM = re.compile(r"(?:\[rank [^]]+\] |  - |error: )?[^ :][^:]*: got .+\. .+\. .+[.?]")


def changed(args, *pairs):
    """`args` with other values of some flags, which are appended where they are missing."""
    result = list(args)
    for flag, value in zip(pairs[::2], pairs[1::2], strict=True):
        if flag in result:
            result[result.index(flag) + 1] = str(value)
        else:
            result += [flag, str(value)]
    return result


def messages(text):
    return [line for line in text.splitlines() if FORM.fullmatch(line)]


def check_refused(done, code, *parts):
    """Every rank left by itself with `code`, and one message of the form has all parts."""
    assert done.codes == [code] * len(done.codes), done.out
    assert "Traceback" not in done.out, done.out
    assert any(all(part in line for part in parts) for line in messages(done.out)), done.out


def refused(args, code, *parts, world_size=2, **kw):
    done = launch(world_size, [str(a) for a in args], **kw)
    check_refused(done, code, *parts)
    return done


def tool_refused(script, args, code, *parts):
    return refused(args, code, *parts, world_size=1, script=ROOT / "tools" / script)


def accepted(args, *parts, world_size=2):
    done = launch(world_size, [str(a) for a in args])
    assert done.codes == [0] * world_size, done.out
    for part in parts:
        assert part in done.out, done.out
    return done


def snapshot(root):
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def corpus(folder, name="corpus", documents=40, length=50, top=128):
    prefix = folder / name
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            builder.add_document(rng.integers(0, top, size=length))
        builder.finalize()
    return prefix


def overwrite(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Files end there; it is inherited by the ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
