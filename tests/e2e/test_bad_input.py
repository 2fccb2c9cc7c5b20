"""What a user gets wrong: one clear message, an exit code on every rank, nothing lost, no hang.

Every message has the form ``<flag or name>: got X. <why>. <what to do>.``
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import resource
import shutil
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config import ConfigError
from megatron.config import cli as config_cli
from megatron.config.cli import parse
from megatron.core.datasets.indexed import HEADER, IndexedDatasetBuilder, bin_path, idx_path
from megatron.training.step import TrainStep
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
    done = launch(world_size, [str(a) for a in args], timeout=60, **kw)
    check_refused(done, code, *parts)
    return done


def tool_refused(script, args, code, *parts):
    return refused(args, code, *parts, world_size=1, script=ROOT / "tools" / script)


def accepted(args, *parts, world_size=2):
    done = launch(world_size, [str(a) for a in args], timeout=60)
    assert done.codes == [0] * world_size, done.out
    for part in parts:
        assert part in done.out, done.out
    return done


def snapshot(root):
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


# ------------------------------------------------------------------------------- configuration


def problems(args, world_size=2):
    with pytest.raises(ConfigError) as caught:
        parse([str(a) for a in args], world_size)
    for problem in caught.value.problems:
        assert FORM.fullmatch(str(problem)), problem
    return [str(problem) for problem in caught.value.problems]


CONTRADICTIONS = {
    "heads and TP": (
        [*changed(MOCK, "--num-attention-heads", 1), *TP2],
        ["--num-attention-heads, --tensor-model-parallel-size: got 1 and 2"],
    ),
    "groups and TP": (
        [*MOCK, *TP2, "--group-query-attention", "--num-query-groups", "1"],
        ["--num-query-groups, --tensor-model-parallel-size: got 1 and 2"],
    ),
    "groups and heads": (
        [*MOCK, "--group-query-attention", "--num-query-groups", "3"],
        ["--num-query-groups, --num-attention-heads: got 3 and 4"],
    ),
    "ffn and TP": ([*MOCK, *TP2, "--ffn-hidden-size", "129"], ["got 129 and 2", "130"]),
    "heads and width": (changed(MOCK, "--num-attention-heads", 3), ["got 32 and 3"]),
    "batch": (changed(MOCK, "--global-batch-size", 3), ["got 3 and 1 with 2 replicas", "2 or 4"]),
    "two precisions": ([*MOCK, "--fp16", "--bf16"], ["--fp16, --bf16: got both"]),
    "two sources": (
        [*MOCK, "--data-path", "x", "--tokenizer-type", "NullTokenizer"],
        ["--mock-data, --data-path: got both"],
    ),
    "two durations": (
        [*MOCK, "--train-samples", "100"],
        ["--train-iters, --train-samples: got 2", "--lr-decay-iters, --train-samples: got 2"],
    ),
    "sequence and positions": (
        changed(MOCK, "--max-position-embeddings", 16),
        ["--seq-length, --max-position-embeddings: got 32 and 16"],
    ),
    "save without interval": ([*MOCK, "--save", "x"], ["--save-interval, --save: got nothing"]),
    "step without load": ([*MOCK, "--ckpt-step", "3"], ["--ckpt-step, --load: got 3 and nothing"]),
    "corpus without tokenizer": (
        [*MODEL[2:], "--data-path", "x"],
        ["--tokenizer-type, --data-path: got nothing and x"],
    ),
    "FP8 width": (
        [*changed(MOCK, "--hidden-size", 60), *FP8],
        ["--hidden-size: got 60", "multiple of 16", "48 or 64"],
    ),
    "FP8 sequence": (
        [*changed(MOCK, "--seq-length", 31), *FP8],
        ["--seq-length, --micro-batch-size: got 31", "16 or 32"],
    ),
    "FP8 width of a rank": (
        [*MOCK, *FP8, *TP2, "--ffn-hidden-size", "48"],
        ["--ffn-hidden-size, --tensor-model-parallel-size: got 24", "one rank"],
    ),
    "pipeline": (
        [*MOCK, "--pipeline-model-parallel-size", "2", "--num-layers", "3"],
        ["--num-layers, --pipeline-model-parallel-size: got 3 layers over 2 stages"],
    ),
    "experts": (
        [*MOCK, "--expert-model-parallel-size", "2"],
        ["--expert-model-parallel-size: got 2", "mixture-of-experts layers are not"],
    ),
    "recipe of another release": (
        [*MOCK, *FP8, "--fp8-recipe", "mxfp8"],
        ["--fp8-recipe: got mxfp8", "delayed or tensorwise"],
    ),
    "recipe misspelt": ([*MOCK, *FP8, "--fp8-recipe", "delyed"], ["Did you mean delayed?"]),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_settings_that_cannot_work_together(case):
    args, parts = CONTRADICTIONS[case]
    text = "\n".join(problems(args))
    for part in parts:
        assert part in text, text


MISTYPED = {
    "--hiden-size 3": "--hiden-size: got 3. There is no such flag. Did you mean --hidden-size?",
    "--foo-bar x": "--foo-bar: got x. There is no such flag. docs/flags.md lists",
    "--seed": "--seed: got nothing. It takes a value",
    "--seed 1 2": "--seed: got 2. --seed takes one value",
    "--seed one": "--seed: got 'one'. It takes a whole number",
    "--num-layers 2.5": "--num-layers: got '2.5'. It takes a whole number",
    "--num-layers 0": "--num-layers: got 0. It must be at least 1",
    "--lr nan": "--lr: got 'nan'. It takes a number",
    "--bf16 true": "--bf16: got true. --bf16 is a switch",
    "--split a,b": "--split: got a,b.",
    "--save=": "--save: got ''. It takes text that is not empty",
    "--seed 99999999999": "--seed: got 99999999999. The order of the samples",
    "--transformer-impl cuda": "--transformer-impl: got 'cuda'. The choices are auto, native",
    "--num-experts 8": "--num-experts: got 8. Megatron-LM has this flag, but mixture-of-experts",
    "--use-megatron-fsdp": "--use-megatron-fsdp: got",
}


@pytest.mark.parametrize("typed", MISTYPED)
def test_a_flag_that_is_not_read(typed):
    flag = typed.split()[0]
    args = MOCK
    if flag in args:
        at = args.index(flag)
        args = [*args[:at], *args[at + 2 :]]
    assert any(MISTYPED[typed] in line for line in problems([*args, *typed.split()]))


YAMLS = {
    "hiden_size: 3": "hiden_size: got 3 in {file}. There is no setting of this name. Did you mean "
    "hidden_size?",
    "- a": "--config: got {file}. A settings file maps names to values",
    "just text": "--config: got {file}. A settings file maps names to values",
    "a: [1": "--config: got {file}. It is not YAML",
    "\tseed: 1": "--config: got {file}. It is not YAML",
    "seed: 1\nseed: 2": "seed stands there twice in line 2",
    "seed: !!python/object/apply:os.getcwd []": "--config: got {file}. It is not YAML",
    "seed: one": "--seed: got 'one' in {file}. It takes a whole number",
    "clip_grad: yes": "--clip-grad: got True in {file}. It takes a number",
    "log_params_norm: 3": "--log-params-norm: got 3 in {file}. It takes true or false",
    "weight_decay: [1]": "--weight-decay: got [1] in {file}. It takes a number",
    "model: {seed: 1}": "model: got a mapping in {file}. Settings are not nested",
}


@pytest.mark.parametrize("text", YAMLS)
def test_a_settings_file_that_is_not_read(text, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    wanted = YAMLS[text].format(file=file)
    assert any(wanted in line for line in problems([*MOCK, "--config", file]))


@pytest.mark.parametrize("where", ["nowhere.yaml", ".", "binary"])
def test_a_settings_file_that_cannot_be_opened(where, tmp_path):
    (tmp_path / "binary").write_bytes(b"\x80\x00\xff")
    assert any("--config: got" in x for x in problems([*MOCK, "--config", tmp_path / where]))


def test_all_problems_are_listed_at_once_on_one_rank_and_all_ranks_leave():
    done = refused([*MOCK, "--fp16", "--bf16", "--hiden-size", "3"], 2, "--fp16, --bf16: got both")
    assert done.out.startswith("2 configuration problems:\n")
    assert len(messages(done.out)) == 2


def test_processes_that_cannot_be_divided():
    refused([*MOCK, *TP2], 2, "got 2, 1 and 1 on 3 processes", world_size=3)


def test_a_settings_file_that_one_rank_lacks(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\n")
    read = config_cli.read_yaml

    def missing_on_one(path):
        return read(f"{path}.{os.environ['RANK']}" if os.environ["RANK"] == "1" else path)

    monkeypatch.setattr(config_cli, "read_yaml", missing_on_one)
    monkeypatch.setattr("megatron.training.failures._MEET_S", 1)
    monkeypatch.setattr("tests.e2e.launch._GRACE_S", 0.5)
    done = launch(2, [*MOCK, "--config", str(file)], timeout=60)
    assert done.codes[1] == 2
    assert done.codes[0] != 0  # ended by the launcher, as it waits for the other
    assert f"[rank 1] 1 configuration problem:\n  - --config: got {file}.1. It cannot" in done.out


def test_retired_spellings_are_accepted_with_a_notice():
    old = ["--use-mcore-models", "--no-fp16-lgs", "--use-flash-attn"]
    _, notices = parse([*MOCK, *old], 1)
    assert [notice.split(":")[0] for notice in notices] == old
    accepted([*MOCK, *old], "NOTE: --use-flash-attn: ", world_size=1)


def test_a_backend_that_cannot_run():
    refused(
        [*MOCK, "--transformer-impl", "transformer_engine"],
        1,
        "--transformer-impl: got transformer_engine",
        "native: can run",
        "Choose auto or native",
    )


def test_a_model_that_does_not_fit():
    refused([*MOCK, "--ffn-hidden-size", "1000000000000"], 1, "memory: got", "can't allocate")


def test_outputs_that_cannot_be_written_do_not_stop_training(tmp_path):
    (tmp_path / "file").touch()
    bad = ["--dllogger-json", tmp_path / "file" / "x", "--tensorboard-dir", tmp_path / "file"]
    done = accepted([*MOCK, *bad], world_size=1)
    assert len(done.lines("WARNING: --")) == 2


# ------------------------------------------------------------------------------------- corpora


def corpus(folder, name="corpus", documents=40, length=50, top=128):
    prefix = folder / name
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            builder.add_document(rng.integers(0, top, size=length))
        builder.finalize()
    return prefix


def on(prefix, *more):
    return [*MODEL, "--tokenizer-type", "NullTokenizer", "--data-path", prefix, *more]


def overwrite(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


POINTERS = HEADER.size + 4 * 40

BROKEN = {
    "short tokens": (lambda p: cut(bin_path(p), 7), "corpus.bin: got 3993 bytes", "cut short"),
    "long tokens": (
        lambda p: bin_path(p).write_bytes(bytes(4002)),
        "corpus.bin: got 4002 bytes",
        "not the one this index was made for",
    ),
    "wrong magic": (lambda p: overwrite(idx_path(p), 0, b"X"), "corpus.idx: got the first bytes"),
    "wrong version": (lambda p: overwrite(idx_path(p), 9, b"\7"), "got format version 7"),
    "wrong type": (lambda p: overwrite(idx_path(p), 17, b"\x63"), "got dtype code 99"),
    "short index": (lambda p: cut(idx_path(p), 7), "corpus.idx: got", "40 sequences"),
    "empty index": (lambda p: idx_path(p).write_bytes(b""), "corpus.idx: got the first bytes b''"),
    "length below 0": (
        lambda p: overwrite(idx_path(p), HEADER.size, struct.pack("<i", -5)),
        "got length -5 of sequence 0",
    ),
    "pointers outside": (
        lambda p: overwrite(idx_path(p), POINTERS, struct.pack("<q", 10**9) * 39),
        "corpus.idx: got a sequence of",
        "corpus.bin has 4000 bytes",
    ),
    "no tokens": (lambda p: bin_path(p).unlink(), "--data-path: got", "corpus.bin does not exist"),
    "no index": (lambda p: idx_path(p).unlink(), "--data-path: got", "corpus.idx does not exist"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_corpus(damage, tmp_path):
    prefix = corpus(tmp_path)
    break_it, *parts = BROKEN[damage]
    break_it(prefix)
    before = snapshot(tmp_path)
    refused(on(prefix), 1, *parts)
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_a_corpus_for_another_vocabulary(tmp_path):
    refused(on(corpus(tmp_path, top=500)), 1, "--data-path", "got token id", "ids 0 to 127")


def test_one_foreign_token_that_one_rank_reads(tmp_path):
    prefix = corpus(tmp_path)
    tokens = np.fromfile(bin_path(prefix), np.uint16)
    tokens[1003] = 300
    tokens.tofile(bin_path(prefix))
    iters = ["--train-iters", "30", "--lr-decay-iters", "30"]
    done = refused(on(prefix, *iters), 1, "got token id 300 in document 20")
    reader = next(m for m in messages(done.out) if "token id 300" in m)
    other = next(m for m in messages(done.out) if "got no answer" in m)
    read, lost = (re.match(r"\[rank (\d) .*, iteration (\d+), ", m) for m in (reader, other))
    assert read[1] != lost[1]
    assert read[2] == lost[2]
    assert f"] rank {read[1]} (process" in other


@pytest.mark.parametrize(
    ("documents", "length", "says"),
    [(0, 1, "got an empty corpus"), (1, 10, "1 of 1 documents with 10 tokens")],
)
def test_a_corpus_without_one_sample(documents, length, says, tmp_path):
    prefix = corpus(tmp_path, documents=documents, length=length)
    refused(on(prefix), 1, f"--data-path {prefix}: got", says, "One sample takes 33 tokens")


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ("100,0,0", "--split: got 100,0,0. The valid split is empty"),
        ("999,1,0", "valid split of 0 of 40"),
    ],
)
def test_evaluation_without_validation_data(split, says, tmp_path):
    evaluation = ["--split", split, "--eval-interval", "1", "--eval-iters", "1"]
    refused(on(corpus(tmp_path), *evaluation), 1, says)


def test_a_cache_that_cannot_be_written(tmp_path):
    prefix = corpus(tmp_path)
    cache = bin_path(prefix)
    refused(on(prefix, "--data-cache-path", cache), 1, f"--data-cache-path: got {cache}")


def test_a_blend_with_weights_in_the_wrong_place(tmp_path):
    prefix = corpus(tmp_path)
    refused(on(prefix, "0.5", prefix, "0.5"), 1, "--data-path: got", "must be a weight")


def test_tokenizers_that_cannot_be_built(tmp_path):
    (tmp_path / "garbage").write_bytes(b"garbage" * 9)
    kind = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    data = [*MODEL, "--data-path", corpus(tmp_path)]
    refused([*data, *kind, tmp_path / "none"], 1, f"--tokenizer-model: got {tmp_path / 'none'}")
    refused([*data, *kind, tmp_path / "garbage"], 1, "It is not a SentencePiece model")
    # ByteLevelTokenizer has 257 ids, the model 128.
    refused([*data, "--tokenizer-type", "ByteLevelTokenizer"], 1, "--vocab-size: got 128", "257")


# --------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "ckpt"
    accepted([*MOCK, "--save", root, "--save-interval", "1"])
    assert {"iter_0000001", "iter_0000002"} < set(os.listdir(root))
    return root


@pytest.fixture
def ckpt(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def resume(root, *more):
    args = changed(MOCK, "--train-iters", 4, "--lr-decay-iters", 4)
    return [*args, "--override-opt-param-scheduler", "--load", root, "--save", root, *more,
            "--save-interval", "1"]  # fmt: skip


def shard(root):
    return root / "iter_0000002" / "__0_0.distcp"


def test_checkpoints_of_another_model(saved):
    before = snapshot(saved)
    wider = changed(resume(saved), "--hidden-size", 64)
    refused(wider, 1, "--load: got", "--hidden-size is 32 in the checkpoint and 64 in this run")
    deeper = changed(resume(saved), "--num-layers", 3)
    refused(deeper, 1, "--load: got", "--num-layers is 2 in the checkpoint and 3 in this run")
    assert snapshot(saved) == before


DAMAGED = {
    "missing": (lambda r: shard(r).unlink(), "__0_0.distcp is missing"),
    "cut": (lambda r: cut(shard(r), 100), "bytes instead of"),
    "altered": (lambda r: overwrite(shard(r), 999, b"\x81"), "other content than was written"),
    "index": (
        lambda r: (r / "iter_0000002" / ".metadata").write_bytes(b"x"),
        ".metadata has 1 bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_checkpoint(damage, ckpt):
    break_it, says = DAMAGED[damage]
    break_it(ckpt)
    before = snapshot(ckpt)
    another = f"newest other complete checkpoint is {ckpt / 'iter_0000001'}"
    refused(resume(ckpt), 1, f"--load: got {ckpt / 'iter_0000002'}", says, another)
    assert snapshot(ckpt) == before


@pytest.mark.parametrize("file", ["manifest.json", ".metadata"])
def test_damage_that_nothing_else_would_notice(file, ckpt):
    """Without the list of files, the readers themselves have to."""
    (ckpt / "iter_0000002" / "manifest.json").unlink()
    (ckpt / "iter_0000002" / file).write_bytes(b"junk")
    # Neither a model nor a size is given: the settings come from the checkpoint.
    for args in (resume(ckpt), ["--load", ckpt, "--device", "cpu"]):
        refused(args, 1, file)


@pytest.mark.parametrize("text", ["", "77", "seven"])
def test_a_tracker_that_names_no_checkpoint(text, ckpt):
    (ckpt / "latest_checkpointed_iteration.txt").write_text(text)
    one_more = changed(resume(ckpt), "--train-iters", 3)
    done = accepted(one_more, "Falling back to the newest complete checkpoint, iteration 2")
    assert len(done.losses()) == 1
    for name in ("iter_0000001", "iter_0000002", "iter_0000003"):
        shutil.rmtree(ckpt / name)
    (ckpt / "latest_checkpointed_iteration.txt").write_text(text)
    refused(resume(ckpt), 1, "--load: got", "There is no complete checkpoint to fall back to")


def test_nothing_to_load(tmp_path):
    load = ["--load", tmp_path / "nowhere"]
    accepted(
        [*MOCK, *load],
        f"WARNING: could not find the metadata file {tmp_path / 'nowhere'}",
        "will not load any checkpoints and will start from random",
    )
    refused(
        [*MOCK, *load, "--exit-on-missing-checkpoint"],
        1,
        "--exit-on-missing-checkpoint: got --load",
        "There is no checkpoint",
    )
    (tmp_path / "file").touch()
    refused([*MOCK, "--load", tmp_path / "file"], 1, "--load: got", "It is a file")


def test_a_run_that_is_finished_says_so(saved):
    before = snapshot(saved)
    accepted([*MOCK, "--load", saved, "--save", saved, "--save-interval", "1"], "nothing is left")
    assert snapshot(saved) == before


def test_another_schedule_than_the_checkpoints(saved):
    longer = changed(resume(saved), "--lr-decay-iters", 9)
    longer.remove("--override-opt-param-scheduler")
    refused(longer, 1, "got 36 samples. The checkpoint was trained with 8 samples", "Pass --over")


def test_an_iteration_that_was_not_saved(saved):
    refused([*resume(saved), "--ckpt-step", "9"], 1, "--ckpt-step: got 9", "(1, 2)")


@pytest.mark.parametrize("below", ["", "sub"])
def test_an_unwritable_save_directory_is_found_before_training(below, tmp_path):
    (tmp_path / "file").write_text("precious")
    save = tmp_path / "file" / below if below else tmp_path / "file"
    done = refused([*MOCK, "--save", save, "--save-interval", "1"], 1, f"--save: got {save}")
    assert not done.losses()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_warning_before_checkpoints_of_another_run_are_replaced(ckpt):
    accepted([*MOCK, "--save", ckpt, "--save-interval", "9"], "WARNING: --save:", "up to iteration")


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Files end there; it is inherited by the ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_during_a_save(ckpt):
    before = snapshot(ckpt)
    assert max(len(content) for content in before.values()) > 150_000
    with file_size_limit(100_000):
        refused(resume(ckpt), 1, "--save: got", "File too large", "Earlier checkpoints")
    assert snapshot(ckpt) == before
    accepted(resume(ckpt), "successfully loaded checkpoint")


# --------------------------------------------------------------------------- while it is running


@pytest.mark.parametrize(
    ("layout", "number"),
    [([], signal.SIGKILL), ([], signal.SIGTERM), (TP2, signal.SIGKILL), (PP2, signal.SIGKILL)],
    ids=["dp2", "dp2 SIGTERM", "tp2", "pp2"],
)
def test_a_rank_that_dies(layout, number):
    died = []

    def kill(pids, log):
        deadline = time.monotonic() + 50
        while "iteration        3/" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(pids[1], number)
        died.append((pids[1], time.monotonic()))

    done = launch(2, [*MOCK, *LONG, *layout], during=kill)
    ((pid, when),) = died
    assert time.monotonic() - when < 20
    assert done.codes == [1, -number], done.out
    assert "Traceback" not in done.out
    (line,) = [m for m in messages(done.out) if "got no answer" in m]
    assert re.match(rf"\[rank 0 .*, iteration \d+, \S+\] rank 1 \(process {pid}\): got", line)


def test_ctrl_c_leaves_without_a_traceback():
    def interrupt(pids, log):
        deadline = time.monotonic() + 50
        while "iteration        2/" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in pids.values():
            os.kill(pid, signal.SIGINT)

    done = launch(2, [*MOCK, *LONG], during=interrupt)
    # The second rank may find the first one gone before it gets its own signal.
    assert 130 in done.codes, done.out
    assert set(done.codes) <= {130, 1}, done.out
    assert "] interrupted" in done.out
    assert "Traceback" not in done.out, done.out


def poison(monkeypatch, iteration):
    """Make one weight NaN before an iteration, on all ranks."""
    run = TrainStep.run

    def poisoned(self, number, consumed_samples):
        if number == iteration:
            with torch.no_grad():
                next(self.parts.model.parameters()).view(-1)[5] = float("nan")
        return run(self, number, consumed_samples)

    monkeypatch.setattr(TrainStep, "run", poisoned)


@pytest.mark.parametrize(
    "more",
    [TP2, PP2, ["--fp16"], [*TP2, *FP8]],
    ids=["tp2", "pp2", "dp2 fp16", "tp2 fp8"],
)
def test_weights_that_are_no_numbers(more, tmp_path, monkeypatch):
    poison(monkeypatch, 3)
    args = [*MOCK, *LONG, *more]
    good = tmp_path / "iter_0000002"
    done = refused(
        [*args, "--save", tmp_path, "--save-interval", "1"],
        1,
        "iteration 5] loss: got nan or inf. Iterations 3 to 5 were not finite",
        f"Last good checkpoint: {good}",
    )
    assert len(done.lines("WARNING: no checkpoint at iteration")) == 2
    # A plain --load does not take up the broken weights.
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(p.name for p in tmp_path.glob("iter_*"))[-1] == good.name


def test_weights_that_are_no_numbers_without_a_checkpoint(monkeypatch):
    poison(monkeypatch, 1)
    refused([*MOCK, *LONG], 1, "Last good checkpoint: none", "Start again with")


# --------------------------------------------------------------------------------------- tools


def preprocess(source, out):
    return ["--input", source, "--output-prefix", out, "--tokenizer-type", "NullTokenizer",
            "--vocab-size", "100"]  # fmt: skip


LINES = {
    b'{"text": "1 2"}\nnot json\n': "lines:2: Expecting value",
    b"[1, 2]\n": "lines:1: the line is a JSON list",
    b'{"content": "1"}\n': "no field 'text'; the fields are content",
    b'{"text": 5}\n': "field 'text' holds a JSON int",
    b'{"text": "words"}\n': "It reads numbers separated by spaces",
    b'{"text": "500"}\n': "The text has id 500",
    b"\xff\xfe\x00": "lines:1: ",
    b"": "No text is left for 'text'",
    gzip.compress(b'{"text": "1"}\n' * 9999)[:-20]: "It cannot be read after line",
}


@pytest.mark.parametrize("content", LINES, ids=lambda x: str(x[:20]))
def test_text_that_is_no_corpus(content, tmp_path):
    (tmp_path / "lines").write_bytes(content)
    args = preprocess(tmp_path / "lines", tmp_path / "out" / "x")
    tool_refused("preprocess_data.py", args, 1, "error: --input: got", LINES[content])
    assert not any((tmp_path / "out").iterdir())


def test_a_bad_line_leaves_the_previous_corpus(tmp_path):
    (tmp_path / "lines").write_text('{"text": "1 2"}\n')
    args = [str(a) for a in preprocess(tmp_path / "lines", tmp_path / "x")]
    script = ROOT / "tools" / "preprocess_data.py"
    assert launch(1, args, script=script).codes == [0]
    before = snapshot(tmp_path)
    (tmp_path / "lines").write_text('{"text": "1 2"}\n' * 600 + "{\n")
    tool_refused("preprocess_data.py", args, 1, "lines:601: ")
    assert snapshot(tmp_path).keys() == before.keys()
    for file in (bin_path(tmp_path / "x_text_document"), idx_path(tmp_path / "x_text_document")):
        assert file.read_bytes() == before[file.name]


def test_preprocessing_where_nothing_can_be_written(tmp_path):
    (tmp_path / "lines").write_text('{"text": "1 2"}\n')
    out = tmp_path / "lines" / "x"
    args = preprocess(tmp_path / "lines", out)
    tool_refused("preprocess_data.py", args, 1, f"--output-prefix: got {out}")
    (tmp_path / "lines").write_text('{"text": "%s"}\n' % ("7 " * 9000))
    with file_size_limit(9000):
        args = preprocess(tmp_path / "lines", tmp_path / "x")
        tool_refused("preprocess_data.py", args, 1, "--output-prefix: got", "File too large")
    assert os.listdir(tmp_path) == ["lines"]


PREPROCESS = preprocess("nothing", "out")
GENERATE = ["--load", "{ckpt}", "--prompt", "1 2", "--max-new-tokens", "3"]
EVALUATE = ["--load", "{ckpt}", "--data-path", "{corpus}"]
CONVERT = ["--model-type", "GPT", "--load-dir", "{ckpt}", "--save-dir", "{out}"]

# script, its arguments, exit code, what it says
TOOL_CALLS = [
    ("preprocess_data.py", [], 2, "--input, --output-prefix, --tokenizer-type: got nothing"),
    ("preprocess_data.py", [*PREPROCESS, "--worker", "3"], 2, "Did you mean --workers?"),
    ("preprocess_data.py", [*PREPROCESS, "--workers", "three"], 2, "It takes a whole number"),
    ("preprocess_data.py", PREPROCESS, 1, "--input: got nothing. No file has this name"),
    ("preprocess_data.py", ["--tokenizer-type", "Nope"], 2, "--tokenizer-type: got 'Nope'"),
    ("build_corpus.py", [], 2, "--output-dir: got nothing"),
    ("build_corpus.py", ["--output-dir", "{out}", "--min-megabytes", "nan"], 1, "got nan"),
    ("build_corpus.py", ["--output-dir", "{out}", "--min-megabytes", "-1"], 1, "got -1.0"),
    ("build_corpus.py", ["--output-dir", "{out}", "--statistics"], 1, "--data-path: got {out}"),
    ("generate.py", ["--load", "{ckpt}"], 1, "--prompt: got nothing"),
    ("generate.py", ["--load", "{out}", "--prompt", "1"], 1, "--load: got {out}"),
    ("generate.py", ["--load", "{corpus}.bin", "--prompt", "1"], 1, "It is a file"),
    ("generate.py", [*GENERATE, "--ckpt-step", "9"], 1, "--ckpt-step: got 9"),
    ("generate.py", [*GENERATE, "--max-new-tokens", "99"], 1, "--max-new-tokens: got 99"),
    ("generate.py", [*GENERATE, "--temperature", "-1"], 1, "--temperature: got -1.0"),
    ("generate.py", [*GENERATE, "--prompt-file", "{corpus}.idx"], 1, "--prompt-file: got"),
    ("generate.py", [*GENERATE, "--prompt", "word"], 1, "It reads numbers"),
    ("generate.py", [*GENERATE, "--promt", "1"], 2, "Did you mean --prompt?"),
    ("generate.py", [*GENERATE, "--device", "cud"], 2, "Did you mean cuda?"),
    ("generate.py", [*GENERATE, "lone"], 2, "lone: got a lone value"),
    ("evaluate.py", ["--load", "{ckpt}"], 2, "--data-path, --text: got nothing"),
    ("evaluate.py", [*EVALUATE, "--text", "x"], 2, "--text, --data-path: got both"),
    ("evaluate.py", [*EVALUATE, "--seq-length", "999"], 1, "--seq-length: got 999"),
    ("evaluate.py", ["--load", "{ckpt}", "--data-path", "{out}"], 1, "--data-path: got {out}"),
    ("evaluate.py", ["--load", "{ckpt}", "--text", "{out}"], 1, "--text: got {out}"),
    ("evaluate.py", ["--load", "{out}", "--data-path", "{corpus}"], 1, "--load: got {out}"),
    ("checkpoint/convert.py", [], 2, "--model-type, --load-dir, --save-dir: got nothing"),
    ("checkpoint/convert.py", ["--model-type", "BERT"], 2, "--model-type: got 'BERT'"),
    ("checkpoint/convert.py", [*CONVERT, "--loader", "hf"], 1, "--load-dir: got {ckpt}"),
    ("checkpoint/convert.py", [*CONVERT, "--load-dir", "{out}"], 1, "--load-dir: got {out}"),
    ("checkpoint/convert.py", [*CONVERT, "--save-dir", "{ckpt}"], 1, "--save-dir: got {ckpt}"),
    ("checkpoint/convert.py", [*CONVERT, "--save-dir", "{corpus}.bin/x"], 1, "cannot be written"),
]


@pytest.mark.parametrize("call", TOOL_CALLS, ids=lambda c: f"{c[0]} {' '.join(c[1][-2:])}")
def test_a_tool_with_wrong_arguments(call, saved, tmp_path):
    script, args, code, says = call
    names = {"ckpt": saved, "corpus": corpus(tmp_path), "out": tmp_path / "out"}
    before = snapshot(tmp_path), snapshot(saved)
    args = [str(a).format(**names) for a in args]
    tool_refused(script, args, code, says.format(**names))
    assert (snapshot(tmp_path), snapshot(saved)) == before


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
HF_FILES = {
    "no json": ({"config.json": "{"}, "config.json is not JSON"),
    "a list": ({"config.json": "[]"}, "config.json holds no dictionary"),
    "another model": ({"config.json": '{"model_type": "bert"}'}, "got model_type 'bert'"),
    "no size": ({"config.json": json.dumps({"model_type": "llama"})}, "num_hidden_layers is None"),
    "words": (
        {"config.json": json.dumps({**LLAMA, "hidden_size": "wide"})},
        "hidden_size is 'wide': a size is a whole number",
    ),
    "no weights": ({"config.json": json.dumps(LLAMA)}, "It holds neither model.safetensors"),
    "junk": (
        {"config.json": json.dumps(LLAMA), "model.safetensors": "junk" * 9},
        "model.safetensors is damaged",
    ),
    "a bad index": (
        {"config.json": json.dumps(LLAMA), "model.safetensors.index.json": "{}"},
        "is no index of weight files",
    ),
}


@pytest.mark.parametrize("case", HF_FILES)
def test_a_directory_that_is_not_what_it_seems(case, tmp_path):
    files, says = HF_FILES[case]
    source = tmp_path / "source"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    args = ["--model-type", "GPT", "--loader", "hf", "--load-dir", source, "--save-dir",
            tmp_path / "out"]  # fmt: skip
    tool_refused("checkpoint/convert.py", args, 1, "--load-dir: got", says)
    assert os.listdir(tmp_path) == ["source"]
