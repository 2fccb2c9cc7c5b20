"""What a resumed run changes is said in one line, and so is another run's place to save."""

from __future__ import annotations

import pytest

from megatron.config import make_config
from megatron.core.mesh import ParallelState
from megatron.training.changed_settings import changes
from megatron.training.checkpointing import check_save
from megatron.training.progress import Progress
from tests.saving import save_checkpoint
from tests.small_models import build_model, small_config

TINY = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8}


def settings(**fields):
    return make_config(1, **TINY, **fields)


def test_what_changes_the_result_is_named_once():
    saved = settings(adam_beta1=0.8, clip_grad=0.5, log_interval=7, lr=1.0).to_dict()
    (line,) = changes(saved, settings())
    assert line.startswith("  NOTE: ")
    assert line.endswith(": --adam-beta1 0.8 -> 0.9, --clip-grad 0.5 -> 1.0")


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_settings_of_another_optimizer_do_not_count(optimizer):
    saved = settings(optimizer=optimizer, adam_eps=1e-4, sgd_momentum=0.1).to_dict()
    (line,) = changes(saved, settings(optimizer=optimizer))
    assert ("--adam-eps" in line) == (optimizer == "adam")
    assert ("--sgd-momentum" in line) == (optimizer == "sgd")


def test_nothing_is_said_without_a_difference_or_without_knowledge():
    assert changes(settings().to_dict(), settings()) == []
    assert changes({"log_interval": 3}, settings(hidden_dropout=0.0)) == []


@pytest.mark.parametrize("continued", [False, True])
def test_saving_beside_the_checkpoints_of_another_run_is_said(tmp_path, continued):
    mesh, place = ParallelState.single(), {"save": str(tmp_path), "save_interval": 1}
    model, build = build_model(small_config(**place))
    save_checkpoint(
        small_config(**place), mesh, model=model, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=7),
    )  # fmt: skip
    lines = []
    check_save(small_config(**place, load=str(tmp_path) if continued else None), mesh, lines.append)
    assert len(lines) == (not continued)
    for line in lines:
        assert line.startswith(f"WARNING: --save: {tmp_path} holds checkpoints up to iteration 7")
