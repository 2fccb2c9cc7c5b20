from __future__ import annotations

import pytest
import yaml

from megatron.config import make_config
from megatron.core.mesh import ParallelState
from megatron.training.checkpointing import save_checkpoint
from megatron.training.progress import Progress
from tests.small_models import LLAMA, build_model, small_config
from tools.checkpoint import inspector


@pytest.fixture
def root(tmp_path):
    config = small_config(**LLAMA, save=str(tmp_path), save_interval=1)
    model, build = build_model(config)
    for iteration in (3, 4):
        save_checkpoint(
            config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
            fp8=build.fp8, progress=Progress(iteration=iteration), say=lambda line: None,
        )  # fmt: skip
    return tmp_path


def run(capsys, *args):
    code = inspector.main([str(a) for a in args])
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
    assert run(capsys, "list", tmp_path)[0] == 1
    code, said = run(capsys, "tensors", tmp_path)
    assert code == 1
    assert "latest_checkpointed_iteration.txt" in said.err
