"""tools/checkpoint/inspect.py on small checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron.config import make_config
from megatron.core.dist_checkpointing import io, lock
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import whole
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.mesh import Axis, ParallelState
from megatron.training.checkpoint_config import read_common
from megatron.training.inspection.compare import compare
from megatron.training.progress import Progress
from tests.saving import save_checkpoint
from tests.small_models import LLAMA, build_model, small_config
from tests.trained_parts import build, fetch, make_checkpoint
from tools.checkpoint import inspect

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
SCRIPTS = ROOT / "tools" / "checkpoint"


@pytest.fixture
def root(tmp_path):
    config = small_config(**LLAMA, save=str(tmp_path), save_interval=1)
    model, build = build_model(config)
    for iteration in (3, 4):
        save_checkpoint(
            config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
            fp8=build.fp8, progress=Progress(iteration=iteration),
        )  # fmt: skip
    return tmp_path


def run(capsys, *args):
    code = inspect.main([str(a) for a in args])
    return code, capsys.readouterr()


def test_list_marks_the_latest_and_names_damage(root, capsys):
    code, said = run(capsys, "list", root)
    assert code == 0
    first, second = said.out.splitlines()
    assert first.split()[0] == "3"
    assert first.endswith("complete")
    assert second.startswith("*")
    file = root / "iter_0000003" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert "damaged" in run(capsys, "list", root)[1].out.splitlines()[0]
    code, said = run(capsys, "list", root / "typo")
    assert code == 2
    assert f"{root / 'typo'}. There is no such directory" in said.err


def test_tensors(root, capsys):
    code, said = run(capsys, "tensors", root, "--step", "3")
    assert code == 0
    assert "decoder.layers.mlp.linear_fc1.weight  [2, 96, 32]  float32" in said.out


def test_config_rebuilds_the_run(root, capsys):
    code, said = run(capsys, "config", root)
    assert code == 0
    again = make_config(**yaml.safe_load(said.out))
    assert again == small_config(**LLAMA, save=str(root), save_interval=1)


def test_verify(root, capsys):
    code, said = run(capsys, "verify", root)
    assert code == 0
    assert "sound" in said.out
    file = root / "iter_0000004" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(bytes(content))
    code, said = run(capsys, "verify", root)
    assert code == 1
    assert "__0_0.distcp" in said.out


def test_nothing_there(tmp_path, capsys):
    assert run(capsys, "list", tmp_path)[0] == 2
    code, said = run(capsys, "tensors", tmp_path)
    assert code == 2
    assert "latest_checkpointed_iteration.txt" in said.err


FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint with optimizer and FP8 state, after two steps."""
    root = tmp_path_factory.mktemp("trained")
    make_checkpoint(0, 1, root, **FP8)
    return root


def stored(root, tensors):
    """A checkpoint of these tensors alone."""
    shards = {key: whole(tensor) for key, tensor in tensors.items()}
    return Reader(io.save(root, 1, shards, {}, Peers(Axis.single("world"))).directory)


def test_diff_finds_what_changed(trained, tmp_path, capsys):
    code, said = run(capsys, "diff", trained, trained)
    assert code == 0
    assert "0 differ" in said.out
    other = tmp_path / "other"
    make_checkpoint(0, 1, other, **FP8, seed=4321)
    code, said = run(capsys, "diff", trained, other, "--json")
    found = json.loads(said.out)
    assert code == 1
    assert (found["equal"], found["missing"], found["extra"]) == (False, [], [])
    by_name = {t["name"]: t for t in found["tensors"]}
    assert len(by_name) == len(Reader(trained / "iter_0000002").tensors)
    key = "decoder.layers.mlp.linear_fc2.weight"
    one, two = (Reader(d / "iter_0000002").read(key).double() for d in (trained, other))
    gap = (one - two).abs()
    assert by_name[key]["max_abs"] == float(gap.max())
    assert by_name[key]["max_rel"] == float((gap / torch.maximum(one.abs(), two.abs())).max())
    assert by_name[key]["different"] == int((one != two).sum())
    assert by_name[key]["worst"] == f"decoder.layers.{int(gap.amax((1, 2)).argmax())}.{key[15:]}"
    assert run(capsys, "diff", trained, other, "--atol", "1e9")[0] == 0
    assert run(capsys, "diff", trained, other, "--only", "final_layernorm", "--weights")[0] == 1
    assert run(capsys, "diff", trained, other, "--only", "nothing")[0] == 2


def test_values_decide_not_how_layers_types_and_padding_are_stored(tmp_path):
    layers, words = torch.randn(2, 5), torch.randn(6, 3)
    kind = "optimizer.state.exp_avg."
    one = stored(tmp_path / "a", {
        "decoder.layers.mlp.w": layers, f"{kind}decoder.layers.mlp.w": layers,
        "output_layer.weight": words, f"{kind}output_layer.weight": words,
        "n": torch.tensor([1.0, float("nan")]),
    })  # fmt: skip
    padded = torch.cat([words, torch.zeros(2, 3)])
    apart = {f"{k}decoder.layers.{i}.mlp.w": layers[i] for i in (0, 1) for k in ("", kind)}
    other = stored(tmp_path / "b", {
        **apart, "output_layer.weight": padded, f"{kind}output_layer.weight": padded,
        "n": torch.tensor([1.0, float("nan")], dtype=torch.float64),
    })  # fmt: skip
    found = compare(one, other)
    assert found.equal
    assert len(found.tensors) == 5
    assert {t.name: t.dtypes for t in found.tensors}["n"] == ("float32", "float64")
    changed = {**apart, "n": torch.tensor([float("nan")] * 2), "more": torch.ones(1)}
    changed["decoder.layers.1.mlp.w"] = layers[1] + torch.tensor([0, 0, 0.5, 0, 0])
    found = compare(one, stored(tmp_path / "c", changed))
    assert found.missing == [f"{kind}output_layer.weight", "output_layer.weight"]
    assert found.extra == ["more"]
    by_name = {t.name: t for t in found.tensors}
    assert by_name["n"].max_abs == float("inf")
    assert by_name["decoder.layers.mlp.w"].different == 1
    assert by_name["decoder.layers.mlp.w"].max_abs == pytest.approx(0.5, rel=1e-6)
    assert by_name["decoder.layers.mlp.w"].worst == "decoder.layers.1.mlp.w"


def test_settings_of_two(trained, root, capsys):
    assert run(capsys, "config", trained, trained)[0] == 0
    code, said = run(capsys, "config", trained, root, "--json")
    assert code == 1
    assert json.loads(said.out)["fp8_format"] == ["hybrid", None]


def test_fp8_state(trained, root, capsys):
    code, said = run(capsys, "fp8", trained, "--json")
    assert code == 0
    found = json.loads(said.out)
    assert (found["recipe"], found["format"]) == ("delayed", "hybrid")
    assert found["settings"]["fp8_amax_history_len"] == 4
    figures = found["layers"]["decoder.layers.1.mlp.linear_fc2"]
    key = "fp8_state.layers.decoder.layers.1.mlp.linear_fc2.amax_history_fwd"
    history = Reader(trained / "iter_0000002").read(key)
    assert figures["amax_history_fwd"] == history.tolist()
    assert len(figures["scale_fwd"]) == 3
    text = run(capsys, "fp8", trained)[1].out
    assert "largest of 4: " + ", ".join(f"{x:g}" for x in history.amax(0).tolist()) in text
    assert "no scales" in run(capsys, "fp8", root)[1].out


def test_rename(trained, tmp_path, capsys):
    out = tmp_path / "renamed"
    code, said = run(capsys, "rename", trained, out, "--map", r"\bmlp\.(\w+)", r"ffn.\1")
    assert code == 0, said.err
    before, after = Reader(trained / "iter_0000002"), Reader(out / "iter_0000002")
    fp8 = {k for k in before.tensors if k.startswith("fp8_state.")}
    changed = {k if k in fp8 else k.replace(".mlp.", ".ffn."): k for k in before.tensors}
    assert set(after.tensors) == set(changed)
    assert all(torch.equal(after.read(new), before.read(old)) for new, old in changed.items())
    assert "decoder.layers.ffn.linear_fc1._extra_state/shard_0_2" in after.blobs
    assert run(capsys, "verify", out)[0] == 0
    back = tmp_path / "back"
    assert run(capsys, "rename", out, back, "--map", r"\.ffn\.", ".mlp.")[0] == 0
    assert run(capsys, "diff", trained, back)[0] == 0
    for number, (rule, expected) in enumerate({
        ("nowhere", "x"): "No key becomes another",
        ("(", "x"): "--map: got (",
        (r".*linear_fc\d\.weight$", "w"): "become w. A key names one tensor",
        ("^output_layer.weight$|^embedding.word_embeddings.weight$", "common_state/shard_0_1"):
            "A key names one tensor",
    }.items()):  # fmt: skip
        code, said = run(capsys, "rename", trained, tmp_path / str(number), "--map", *rule)
        assert code == 2
        assert expected in said.err
        assert not (tmp_path / str(number)).exists()


def test_a_pruned_copy_is_smaller_and_loads(trained, tmp_path, capsys):
    out = tmp_path / "small"
    code, said = run(capsys, "prune", trained, out, "--drop", "optimizer", "rng", "fp8")
    assert code == 0, said.err
    reader = Reader(out / "iter_0000002")
    assert not [k for k in reader.tensors if k.startswith(("optimizer.", "fp8_state."))]
    assert not [k for k in reader.blobs if k.startswith("rng_state")]
    assert read_common(reader)["optimizer"] is None  # nor Megatron-LM's entry
    assert run(capsys, "diff", trained, out, "--weights")[0] == 0
    assert run(capsys, "diff", trained, out)[0] == 1
    cfg, mesh, parts, _ = build(0, 1, load=str(out), no_load_optim=True, no_load_rng=True, **FP8)
    fetch(cfg, mesh, parts)
    assert run(capsys, "prune", trained, out, "--drop", "rng")[0] == 2  # in use


def test_old_iterations(root, capsys, monkeypatch):
    shutil.copytree(root / "iter_0000003", root / "iter_0000002")
    code, said = run(capsys, "prune", root, "--keep-last", "1", "--dry-run")
    assert code == 0
    assert said.out.count("would be deleted") == 3
    assert (root / "iter_0000003").exists()
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    assert run(capsys, "prune", root, "--keep-last", "1")[0] == 0
    assert sorted(p.name for p in root.glob("iter_*")) == ["iter_0000003", "iter_0000004"]
    assert run(capsys, "prune", root / "iter_0000003", "--keep-last", "1")[0] == 2
    shutil.copytree(root / "iter_0000003", root / "iter_0000001")
    (root / lock.LOCK_FILE).write_text(json.dumps({"host": "elsewhere", "process": 1}))
    monkeypatch.setattr(lock, "_is_still", lambda path: False)  # instead of a minute of waiting
    code, said = run(capsys, "prune", root, "--keep-last", "1")
    assert code == 2
    assert "Another job saves there" in said.err
    assert (root / "iter_0000001").exists()


def test_the_only_checkpoint_that_reads_well_is_not_pruned(root, capsys):
    shutil.copytree(root / "iter_0000003", root / "iter_0000002")
    file = root / "iter_0000004" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1  # its size stays
    file.write_bytes(bytes(content))
    assert run(capsys, "prune", root, "--keep-last", "1")[0] == 0
    assert sorted(p.name for p in root.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


@pytest.mark.parametrize("flags", [
    [], ["out"], ["--drop", "rng"], ["--keep-last", "0"], ["--keep-last", "1", "--drop", "rng"],
    ["out", "--drop", "rng", "--dry-run"], ["--keep-last", "1", "--step", "3"],
])  # fmt: skip
def test_prune_needs_one_purpose(root, capsys, flags):
    assert run(capsys, "prune", root, *flags)[0] == 2
    assert len(list(root.glob("iter_*"))) == 2


def test_megatron_core(tmp_path, capsys):
    source = GOLDEN / "megatron_core_checkpoint"
    assert run(capsys, "list", source)[0] == 0
    assert run(capsys, "verify", source)[0] == 2  # nothing to compare with
    assert run(capsys, "diff", source, source)[0] == 0
    assert run(capsys, "fp8", source)[0] == 0
    out = tmp_path / "copy"
    code, said = run(capsys, "prune", source, out, "--drop", "optimizer", "rng")
    assert code == 0, said.err
    assert run(capsys, "diff", source, out, "--weights")[0] == 0


@pytest.mark.parametrize("script", ["inspect.py", "convert.py"])
def test_scripts_do_not_hide_the_standard_librarys_inspect(script):
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=SCRIPTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: " + script in done.stdout
