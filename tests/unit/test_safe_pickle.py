"""Files that try to run code are refused by name, wherever a pickle is opened."""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import io
import os
import pathlib
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import io as saving
from megatron.core.dist_checkpointing import plain, safe_pickle
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import whole
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis
from megatron.training.checkpoint_config import read_common

ROOT = Path(__file__).resolve().parents[2]


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def exploits(target):
    """What attackers write: each makes the file `target` when Python's unpickler reads it."""
    return {
        "system": Calls(os.system, f"touch {target}"),
        "eval": Calls(builtins.eval, f"__import__('pathlib').Path({str(target)!r}).touch()"),
        "exec": Calls(builtins.exec, f"open({str(target)!r}, 'w')"),
        "popen": Calls(subprocess.getoutput, f"touch {target}"),
        "open": Calls(open, str(target), "w"),
        "method": Calls(getattr, Path(target), "touch"),
        "nested": {"args": argparse.Namespace(x=[Calls(os.mkdir, str(target))])},
        "getattr": Calls(getattr, os, "system"),
        "import": Calls(builtins.__import__, "os"),
        "torch": Calls(torch.load, str(target)),
        "from_bytes": Calls(torch.storage._load_from_bytes, b""),
        "partial": functools.partial(os.system, f"touch {target}"),
    }


NAMES = {
    "system": "posix.system", "eval": "builtins.eval", "exec": "builtins.exec",
    "popen": "commands.getoutput", "open": "io.open", "nested": "posix.mkdir",
    "getattr": "builtins.getattr", "import": "builtins.__import__", "torch": "torch.",
    "from_bytes": "torch.storage._load_from_bytes", "partial": "posix.system",
    "method": "getattr",
}  # fmt: skip


class Saver(pickle.Pickler):
    """Also pickles modules, as attackers write them by hand."""

    def reducer_override(self, value):
        if isinstance(value, type(os)):
            return __import__, (value.__name__,)
        return NotImplemented


def archive(value):
    """What `torch.save` would write for a value without tensors."""
    content, buffer = io.BytesIO(), io.BytesIO()
    Saver(content, protocol=2).dump(value)
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", content.getvalue())
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", NAMES)
def test_exploits_in_an_archive(kind, tmp_path):
    target = tmp_path / "ran"
    data = archive(exploits(target)[kind])
    path = tmp_path / "model_optim_rng.pt"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(CheckpointError) as caught:
            safe_pickle.load(source, str(path))
        text = str(caught.value)
        assert str(path) in text
        assert "refused, because it asks for" in text
        assert NAMES[kind] in text or kind == "getattr"
        assert "unless you trust its author" in text
        assert not target.exists()


def test_the_exploits_work_elsewhere(tmp_path):
    """The negative control: Python's own unpickler runs them."""
    for kind in ("system", "eval", "exec", "popen", "open", "nested"):
        target = tmp_path / kind
        with zipfile.ZipFile(io.BytesIO(archive(exploits(target)[kind]))) as file:
            pickle.loads(file.read("archive/data.pkl"))
        assert target.exists(), kind


def saved(root):
    common = plain.dump({"iteration": 1, "args": argparse.Namespace(num_layers=1)})
    blobs = {"common_state/shard_0_1": common}
    peers = Peers(Axis.single("world"))
    return saving.save(root, 1, {"a": whole(torch.ones(4))}, blobs, peers, {}).directory


@pytest.mark.parametrize("kind", ["system", "nested", "eval"])
def test_exploits_in_every_place_of_a_checkpoint(kind, tmp_path):
    target = tmp_path / "ran"
    value = exploits(target)[kind]
    refused = pytest.raises(CheckpointError, match=f"refused, because it asks for {NAMES[kind]}")

    directory = saved(tmp_path / "index")
    index = pickle.loads((directory / ".metadata").read_bytes())
    index.planner_data = value["args"].x if kind == "nested" else value
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    with refused:
        Reader(directory)

    directory = saved(tmp_path / "common")  # a file beside, as up to 0.18
    index = pickle.loads((directory / ".metadata").read_bytes())
    keys = [k for k in index.storage_data if k.fqn.startswith("common")]
    for key in keys:
        del index.storage_data[key]
        del index.state_dict_metadata[key.fqn]
    (directory / ".metadata").write_bytes(pickle.dumps(index))
    (directory / "common.pt").write_bytes(archive(value))
    with refused:
        read_common(Reader(directory))

    for kept, read in (("common", read_common), ("a", lambda reader: reader.read("a"))):
        directory = saved(tmp_path / kept / "entry")
        index = pickle.loads((directory / ".metadata").read_bytes())
        (key,) = [k for k in index.storage_data if k.fqn.startswith(kept)]
        info = index.storage_data[key]
        file = directory / info.relative_path
        info.offset, info.length = file.stat().st_size, len(archive(value))
        with file.open("ab") as handle:
            handle.write(archive(value))
        (directory / ".metadata").write_bytes(pickle.dumps(index))
        with refused:
            read(Reader(directory))
    assert not target.exists()


def test_tensors_come_back_from_file_and_bytes(tmp_path):
    whole_ = torch.arange(24.0)
    values = {
        "matrix": whole_.view(4, 6).t(), "part": whole_[5:9], "shared": whole_[6:],
        "scalar": torch.tensor(3), "empty": torch.empty(0, 2), "flag": torch.tensor([True]),
        "bf16": torch.ones(3, dtype=torch.bfloat16), "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    torch.save(values, tmp_path / "x.pt")
    for source in (tmp_path / "x.pt", (tmp_path / "x.pt").read_bytes()):
        back = safe_pickle.load(source, "x")
        for name, value in values.items():
            assert back[name].dtype == value.dtype, name
            assert torch.equal(back[name].float(), value.detach().float()), name
        assert back["part"].untyped_storage().data_ptr() == (
            back["shared"].untyped_storage().data_ptr()
        )


def test_damage_is_named(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000)}, path)
    good = path.read_bytes()
    spoilt = bytearray(good)
    spoilt[good.index(torch.arange(1000).numpy().tobytes()) + 70] ^= 1
    old = io.BytesIO()
    torch.save({"a": torch.ones(1)}, old, _use_new_zipfile_serialization=False)
    cases = {
        "no complete archive": good[:-100], "checksum of .*data/0": bytes(spoilt),
        "before version 1.6": old.getvalue(), "no data.pkl": archive(1).replace(b"data.pkl", b"d"),
    }  # fmt: skip
    del cases["no data.pkl"]
    for match, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=match):
            safe_pickle.load(path)
    with pytest.raises(CheckpointError, match=r"cannot read it \(No such file"):
        safe_pickle.load(tmp_path / "absent.pt")


# ------------------------------------------------------------------ no other reading in the tree

# What a rank sends to the process that started it, or to the first rank, never was a file.
_PIPES = {
    "megatron/training/parity/ranks.py",
    "megatron/core/dist_checkpointing/writing.py",
}
_READERS = {("pickle", "load"), ("pickle", "loads"), ("cPickle", "load"), ("dill", "load"),
            ("dill", "loads"), ("joblib", "load"), ("shelve", "open"), ("marshal", "loads"),
            ("marshal", "load"), ("yaml", "load"), ("yaml", "unsafe_load"),
            ("pd", "read_pickle"), ("pickle", "Unpickler")}  # fmt: skip


def safe_yaml(call):
    """Whether a loader is named that is, or derives from, PyYAML's safe one."""
    given = [*call.args[1:], *(k.value for k in call.keywords if k.arg == "Loader")]
    return any(getattr(loader, "id", None) == "StrictLoader" for loader in given)


def unrestricted(path):
    """Calls in a file that would build whatever a pickle or YAML file names."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = getattr(node.func.value, "id", None)
        flags = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        call = (owner, node.func.attr)
        if call in _READERS and not (call == ("yaml", "load") and safe_yaml(node)):
            yield f"{path.name}:{node.lineno}: {owner}.{node.func.attr}"
        if call == ("torch", "load") and flags.get("weights_only") is not True:
            yield f"{path.name}:{node.lineno}: torch.load without weights_only=True"
        if node.func.attr == "load" and owner in ("np", "numpy") and flags.get("allow_pickle"):
            yield f"{path.name}:{node.lineno}: np.load(allow_pickle=True)"


def test_nothing_in_the_tree_reads_pickles_freely(tmp_path):
    found = []
    for top in ("megatron", "tools", "scripts", "benchmarks", "pretrain_gpt.py"):
        base = ROOT / top
        for path in [base] if base.is_file() else sorted(base.rglob("*.py")):
            if str(path.relative_to(ROOT)) not in _PIPES:
                found += unrestricted(path)
    assert not found
    bad = tmp_path / "bad.py"
    bad.write_text("torch.load(f)\npickle.loads(b)\nnp.load(f, allow_pickle=True)\nyaml.load(f)\n")
    assert len(list(unrestricted(bad))) == 4


def archive_of(pickled):
    """An archive of torch.save with this pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as out:
        out.writestr("archive/data.pkl", pickled)
    return content.getvalue()


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        ("pathlib", "PurePosixPath", "parent"),
        ("pathlib", "PosixPath", "parent"),
        ("argparse", "Namespace", "load"),
        ("torch._utils", "_rebuild_tensor_v2", "__defaults__"),
        ("builtins", "getattr", "__defaults__"),
    ],
)
def test_attributes_of_what_a_pickle_names_stay_in_it(module, name, attribute):
    """The opcode that restores an object's state also sets attributes of classes and functions."""
    before = safe_pickle._tensor.__defaults__, safe_pickle._member.__defaults__
    state = pickle.dumps((None, {attribute: (1,)}), 2)[2:-1]
    evil = archive_of(f"\x80\x02c{module}\n{name}\n".encode("latin1") + state + b"b.")
    with contextlib.suppress(CheckpointError):  # refusing it is as good
        safe_pickle.load(evil, "evil")
    changed = "parent" in vars(pathlib.PurePosixPath)
    if changed:
        del pathlib.PurePosixPath.parent  # pytest itself needs it
    assert not changed
    assert not hasattr(argparse.Namespace, "load")
    assert (safe_pickle._tensor.__defaults__, safe_pickle._member.__defaults__) == before


def test_a_pickle_that_wants_all_memory_is_refused():
    size = (1 << 46).to_bytes(8, "little")
    huge = archive_of(b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + size + b"\x85R.")
    with pytest.raises(CheckpointError, match="huge: it is damaged"):
        safe_pickle.load(huge, "huge")


@pytest.mark.parametrize(
    "value", [argparse.Namespace(lr=0.1, sizes=[1, 2]), pathlib.PurePosixPath("/a/b")], ids=str
)
def test_what_was_read_can_be_written_again(value):
    """Copies of checkpoints hold what the checkpoints held, as the same types."""
    read = safe_pickle.SafeUnpickler(io.BytesIO(pickle.dumps(value))).load()
    again = pickle.loads(pickle.dumps(read, protocol=2))  # as torch writes
    assert type(again) is type(value)
    assert again == read == value
