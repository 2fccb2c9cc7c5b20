"""What Megatron-LM keeps beside tensors: settings refused by name, the optimizer taken over."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing import io, plain, schema
from megatron.core.dist_checkpointing.mp_reader import open_reader
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import whole
from megatron.core.errors import CheckpointError
from megatron.core.mesh import Axis, ParallelState
from megatron.core.optimizer.build import build_optimizer
from megatron.training import foreign_state
from megatron.training.checkpoint_config import read_common
from megatron.training.checkpointing import load_checkpoint
from megatron.training.progress import Progress
from tests.saving import save_checkpoint
from tests.small_models import build_model, small_config


@pytest.mark.parametrize(
    ("name", "value"),
    [("multi_latent_attention", True), ("mtp_num_layers", 1), ("window_size", (128, 0)),
     ("softmax_type", "learnable"), ("rotary_interleaved", True), ("quick_geglu", True)],
)  # fmt: skip
def test_models_that_are_not_known_here(name, value, tmp_path):
    neutral = argparse.Namespace(num_layers=2, mtp_num_layers=None, softmax_type="vanilla")
    foreign_state.check_known_model({"args": neutral}, tmp_path)
    setattr(neutral, name, value)
    with pytest.raises(CheckpointError, match=f"--{name.replace('_', '-')} .*no model here"):
        foreign_state.check_known_model({"args": neutral}, tmp_path)


def test_optimizer_state_by_rank_is_refused(tmp_path):
    reader = SimpleNamespace(directory=tmp_path, tensors={}, blobs=[])
    foreign_state.check_optimizer_form({}, reader)
    known = {"content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}
    foreign_state.check_optimizer_form(known, reader)
    known = {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    with pytest.raises(CheckpointError, match="dp_resh.*--dist-ckpt-optim-fully-resh"):
        foreign_state.check_optimizer_form(known, reader)
    reader.tensors = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.exp_avg": None}
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        foreign_state.check_optimizer_form({}, reader)


@pytest.mark.parametrize(
    "entry",
    [
        {"optimizer": {"param_groups": [{"step": 7}, {"step": None}]}, "grad_scaler": {}},
        {0: {"optimizer": {"param_groups": [{"step": 7}]}}, 1: {"optimizer": {"param_groups": []}}},
        {"param_groups": [{"lr": 1.0}], "state": {"common_step": torch.tensor(7.0)}},
        {"optimizer": {"param_groups": [{}], "state": {"common_step": 7}}},
    ],
)  # fmt: skip
def test_steps_of_every_kind_of_optimizer(entry):
    assert foreign_state.optimizer_scalars({"optimizer": entry}) == {"step": 7}


def test_no_steps_and_schedules_of_our_own():
    assert foreign_state.optimizer_scalars({}) is None
    assert foreign_state.schedule_here({"lr": {}, "num_samples": 3}, {}) is None
    own = {"lr": {"a": 1}, "num_samples": 0}
    assert foreign_state.schedule_here({"num_steps": 64, "max_lr": 1e-3}, own) == {
        "lr": {"a": 1}, "num_samples": 64,
    }  # fmt: skip


def test_a_smaller_vocabulary_is_refused(tmp_path):
    config = small_config(save=str(tmp_path), save_interval=1)
    model, build = build_model(config)
    save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=1),
    )  # fmt: skip
    reader = open_reader(tmp_path / "iter_0000001")
    foreign_state.check_vocabulary(reader, 64)
    with pytest.raises(CheckpointError, match="has 64 rows with padding.*vocabulary has 65"):
        foreign_state.check_vocabulary(reader, 65)


def as_megatron_writes(root, tmp_path):
    """The same checkpoint with Megatron-LM's keys of masters and its entry for the optimizer."""
    reader = open_reader(root)
    common = read_common(reader)
    tensors = {
        key.replace("optimizer.state.param.", "chained_0.optimizer.state.fp32_param."): whole(
            reader.read(key)
        )
        for key in reader.tensors
    }
    step = common["optimizer_scalars"]["step"]
    for name in ("optimizer_scalars", "progress", "given", "arrangement"):
        del common[name]
    common["optimizer"] = {0: {"optimizer": {"param_groups": [{"step": step}]}}}
    common["opt_param_scheduler"] = None
    blobs = {schema.COMMON_KEY: plain.dump(common)}
    return io.save(tmp_path, 1, tensors, blobs, Peers(Axis.single("world")), {}).directory


def test_moments_masters_and_steps_of_megatron_core(tmp_path):
    config = small_config(save=str(tmp_path / "ours"), save_interval=1, bf16=True)
    model, build = build_model(config)
    optimizer = build_optimizer(config, model, ParallelState.single())
    for param in model.parameters():
        param.main_grad = torch.randn(param.shape)
    optimizer.step()
    save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=optimizer, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=1),
    )  # fmt: skip
    as_megatron_writes(tmp_path / "ours" / "iter_0000001", tmp_path / "theirs")
    own = small_config(load=str(tmp_path / "theirs"), bf16=True, seed=99)
    fresh, build = build_model(own)
    other = build_optimizer(own, fresh, ParallelState.single())
    load_checkpoint(
        own, ParallelState.single(), model=fresh, optimizer=other, scheduler=None,
        fp8=build.fp8, progress=Progress(), say=lambda line: None,
    )  # fmt: skip
    assert other.scalars()["step"] == 1
    expected = dict(optimizer.named_state())
    for name, kinds in other.named_state():
        for kind, tensor in kinds.items():
            assert torch.equal(tensor, expected[name][kind]), (name, kind)
