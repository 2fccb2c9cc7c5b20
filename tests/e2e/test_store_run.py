"""Whole runs on two ranks with their checkpoints in an object store, and the tools on them."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.dist_checkpointing.store import path_of
from tests import object_store
from tests.e2e.launch import ROOT, launch, wait_for
from tests.e2e.refusals import MOCK, TP2, accepted, changed, refused
from tests.e2e.test_convert import make_model, state_of
from tests.e2e.test_convert import run as convert
from tests.object_store import FlatStore, ThrottledError

URL = "flat://bucket/run"
TEN = changed(MOCK, "--train-iters", 10, "--lr-decay-iters", 10, "--save-interval", 5)
FIVE = changed(TEN, "--train-iters", 5)
INSPECT = ROOT / "tools" / "checkpoint" / "inspect.py"


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    object_store.without_pauses(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """The same ten steps without a stop, saved on a disk."""
    root = tmp_path_factory.mktemp("disk")
    accepted([*TEN, *TP2, "--save", root])
    return root


def tool(*args):
    return launch(1, [str(a) for a in args], script=INSPECT)


def contents(directory):
    reader = Reader(directory)
    return {key: reader.read(key) for key in reader.tensors}


@pytest.mark.parametrize("behind", [[], ["--async-save"]], ids=["sync", "async"])
def test_five_and_five_steps_are_ten(behind, at_once, tmp_path):
    more = [*TP2, "--save", URL, "--load", URL, "--verify-checkpoint", *behind]
    first = accepted([*FIVE, *more])
    assert first.lines("could not find the metadata file flat://bucket/run/latest_")
    done = accepted([*TEN, *more])
    assert done.lines("successfully loaded checkpoint from flat://bucket/run")
    for name in ("iter_0000005", "iter_0000010"):
        want, got = contents(at_once / name), contents(path_of(URL) / name)
        assert want.keys() == got.keys()
        assert all(torch.equal(value, got[key]) for key, value in want.items())
        ranks = {f"__{rank}_0.distcp" for rank in range(2)}
        assert ranks < set((path_of(URL) / name).sizes())
    assert [p for p in path_of(URL).sizes() if "/" not in p] == [place.TRACKER_FILE]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stores"]  # nothing is on the disk


def test_a_damaged_one_is_left_out_and_tools_tell(at_once):
    disk = sorted(p for p in at_once.rglob("*") if p.is_file())
    for file in disk:  # as one would move it there
        (path_of(URL) / file.relative_to(at_once)).write_bytes(file.read_bytes())
    assert tool("diff", URL, at_once).codes == [0]
    assert tool("verify", f"{URL}/iter_0000005").lines("sound")
    shard = path_of(URL) / "iter_0000010" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = tool("list", URL)
    assert (done.codes, len(done.lines("complete")), len(done.lines("damaged"))) == ([0], 1, 1)
    done = accepted([*TEN, *TP2, "--load", URL])
    assert done.lines("iteration 10 is left out: --load: got flat://bucket/run/iter_0000010.")
    assert done.lines("at iteration 5")
    done = tool("prune", f"{URL}/iter_0000005", "flat://bucket/small", "--drop", "optimizer")
    assert done.codes == [0], done.out
    assert tool("diff", "flat://bucket/small", f"{at_once}/iter_0000005", "--weights").codes == [0]


def test_an_upload_that_fails_ends_the_run_on_all_ranks(tmp_path):
    def failing(what, key):
        if what == "piece" and key.endswith("iter_0000004/__1_0.distcp"):
            raise ThrottledError("SlowDown")

    FlatStore.before = staticmethod(failing)
    args = changed(MOCK, "--train-iters", 8, "--save-interval", 2, "--save", URL)
    done = refused(args, 1, "--save: got flat://bucket/run", "ThrottledError: SlowDown", "(rank 1)")
    assert done.lines("successfully saved checkpoint from iteration       2")
    FlatStore.before = staticmethod(lambda what, key: None)
    names = set(path_of(URL).sizes())
    assert {n.split("/")[0] for n in names} == {"iter_0000002", place.TRACKER_FILE}


def test_rights_and_packages_are_known_before_the_first_step():
    def denied(what, key):
        raise PermissionError("Access Denied")

    FlatStore.before = staticmethod(denied)
    done = refused([*FIVE, "--save", URL], 1, f"--save: got {URL}", "Access Denied", "the bucket")
    assert not done.lines("lm loss")
    refused([*FIVE, "--save", "s3://bucket/run"], 1, "s3fs", "pip install s3fs", world_size=1)


def test_a_signal_with_a_deadline():
    args = changed(MOCK, "--train-iters", 100000, "--lr-decay-iters", 100000)
    args += ["--save", URL, "--save-interval", "100000", "--exit-signal-handler",
             "--exit-signal-deadline", "60"]  # fmt: skip

    def interrupt(pids, log):
        wait_for(log, "lm loss")
        os.kill(pids[1], signal.SIGUSR2)

    done = launch(2, [str(a) for a in args], during=interrupt)
    assert done.codes == [0, 0], done.out
    found = place.find(path_of(URL))
    assert found is not None
    assert not [n for n in path_of(URL).sizes() if ".incomplete" in n or ".lock" in n]


def test_conversions(tmp_path, capsys):
    make_model("llama", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"x": 1}')
    assert convert("huggingface", "megatron", tmp_path / "hf", URL) == 0
    assert "verified: all tensors equal" in capsys.readouterr().out
    assert (path_of(URL) / "release" / "tokenizer" / "tokenizer.json").is_file()
    assert convert("megatron", "megatron", URL, "flat://bucket/copy") == 0
    assert convert("megatron", "huggingface", "flat://bucket/copy", tmp_path / "back") == 0
    before, after = state_of(tmp_path / "hf"), state_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert convert("megatron", "huggingface", URL, tmp_path / "with", "--no-verify") == 0
    assert (tmp_path / "with" / "tokenizer.json").read_text() == '{"x": 1}'
    capsys.readouterr()
    assert convert("huggingface", "torch", tmp_path / "hf", "flat://bucket/ranks") == 1
    assert "--save-dir: got flat://bucket/ranks. The format torch is" in capsys.readouterr().err
    assert convert("huggingface", "megatron", "flat://bucket/hf", tmp_path / "x") == 1
    assert "--load-dir: got flat://bucket/hf. The format hugg" in capsys.readouterr().err
