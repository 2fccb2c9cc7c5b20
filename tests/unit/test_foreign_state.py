"""What Megatron-LM keeps beside tensors: settings refused by name, the optimizer taken over."""

from __future__ import annotations

import argparse
from pathlib import Path
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
from megatron.core.optimizer.loss_scale import DynamicLossScale
from megatron.core.optimizer.lr import LrSchedule, ParamScheduler, WdSchedule
from megatron.training import foreign_state
from megatron.training.checkpoint_config import read_common
from megatron.training.checkpointing import load_checkpoint
from megatron.training.progress import Progress
from megatron.training.schedule_entries import load_schedule
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


def test_no_steps_and_a_loss_scale():
    assert foreign_state.optimizer_scalars({}) is None
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
    entry = {"optimizer": {"param_groups": [{"step": 7}]}, "grad_scaler": scaler}
    scalars = foreign_state.optimizer_scalars({"optimizer": {0: entry}})
    own = DynamicLossScale()
    own.load_state_dict(scalars)
    assert own.state_dict() == {"loss_scale": 512.0, "good_steps": 3, "tolerance_left": 1}
    assert scalars["step"] == 7


THEIRS = {
    "max_lr": 2e-3, "min_lr": 1e-5, "lr_warmup_steps": 16, "lr_decay_steps": 320,
    "lr_decay_style": "cosine", "num_steps": 64, "start_wd": 0.05, "end_wd": 0.1,
    "wd_incr_style": "linear", "wd_incr_steps": 400,
}  # fmt: skip


def scheduler_of(**flags):
    lr = LrSchedule(1e-3, style="cosine", decay_samples=320, warmup_samples=16, min_lr=1e-5)
    return ParamScheduler([{}], lr, WdSchedule(0.05, 0.1, 400, "linear"), **flags)


def loaded(scheduler, state, args=None):
    common = {"args": argparse.Namespace(**(args or {}))}
    own = scheduler.state_dict()
    scheduler.load_state_dict(foreign_state.schedule_here(state, own, common, Path("ckpt")))
    return scheduler


def test_the_schedule_of_a_checkpoint_this_run_s_or_neither():
    taken = loaded(scheduler_of(use_checkpoint=True), THEIRS, {"lr_warmup_init": 1e-6})
    assert taken.lr == LrSchedule(2e-3, 1e-5, 1e-6, 16, 320, "cosine")
    assert taken.wd == WdSchedule(0.05, 0.1, 400, "linear")
    assert taken.num_samples == 64
    assert taken.groups[0]["lr"] == taken.lr.value(64) != scheduler_of().lr.value(64)
    kept = loaded(scheduler_of(override=True), THEIRS)
    assert (kept.lr, kept.num_samples) == (scheduler_of().lr, 64)
    with pytest.raises(CheckpointError, match=r"--lr: got 0.001. The checkpoint .* 0.002"):
        loaded(scheduler_of(), THEIRS)
    assert loaded(scheduler_of(), {**THEIRS, "max_lr": 1e-3}).num_samples == 64


def test_the_last_phase_of_wsd_is_in_the_arguments():
    state = {**THEIRS, "lr_decay_style": "WSD"}
    args = {"lr_wsd_decay_iters": 5, "lr_wsd_decay_style": "linear", "global_batch_size": 8}
    taken = loaded(scheduler_of(use_checkpoint=True), state, args).lr
    assert (taken.wsd_style, taken.wsd_decay_samples) == ("linear", 40)
    samples = {"lr_wsd_decay_samples": 24, "lr_wsd_decay_iters": None}
    assert loaded(scheduler_of(use_checkpoint=True), state, samples).lr.wsd_decay_samples == 24
    with pytest.raises(CheckpointError, match=r"has no lr_wsd_decay_iters \(in args\)"):
        loaded(scheduler_of(use_checkpoint=True), state)


def test_a_schedule_that_is_not_complete():
    state = {k: v for k, v in THEIRS.items() if k not in ("num_steps", "end_wd")}
    with pytest.raises(CheckpointError, match="opt_param_scheduler has no num_steps, end_wd"):
        loaded(scheduler_of(override=True), state)


def test_a_schedule_that_is_not_there():
    common, lines = {"optimizer_scalars": {"step": 2}}, []
    kept = scheduler_of()
    load_schedule(small_config(), common, Path("ckpt"), None, kept, lines.append)
    assert len(lines) == 1
    assert "the schedule starts anew" in lines[0]
    wanted = small_config(load="ckpt", use_checkpoint_opt_param_scheduler=True)
    for settings in ({}, {"no_load_optim": True}):
        with pytest.raises(CheckpointError, match=r"--use-checkpoint-opt_param-scheduler: got "):
            load_schedule(wanted.replace(**settings), common, Path("ckpt"), None, kept, print)
    common["opt_param_scheduler"] = THEIRS
    taken = scheduler_of(use_checkpoint=True)
    load_schedule(wanted.replace(no_load_optim=True), common, Path("c"), None, taken, print)
    assert (taken.lr.max_lr, taken.num_samples) == (2e-3, 64)


def test_adam_is_not_continued_without_its_step_count():
    optimizer = SimpleNamespace(load_scalars=None)
    with pytest.raises(CheckpointError, match="no step count.*--no-load-optim"):
        load_schedule(small_config(), {}, Path("ckpt"), optimizer, None, print)
    load_schedule(small_config(no_load_optim=True), {}, Path("ckpt"), optimizer, None, print)


def test_counters_and_where_the_data_was():
    args = {"consumed_train_samples": 40, "consumed_valid_samples": 8, "skipped_train_samples": 2}
    common = {"args": argparse.Namespace(**args), "iteration": 5,
              "num_floating_point_operations_so_far": 1e9}  # fmt: skip
    found = foreign_state.counters(common, Path("ckpt"))
    assert found == {**args, "iteration": 5, "floating_point_operations_so_far": 1e9}
    del common["args"].consumed_train_samples
    with pytest.raises(CheckpointError, match="iteration 5, whose args have no consumed_train"):
        foreign_state.counters(common, Path("ckpt"))


def test_what_is_not_taken_over_is_named():
    common = {"args": None, "iteration": 5, "checkpoint_version": 3.0, "opt_param_scheduler": {},
              "optimizer": {"optimizer": {"param_groups": [{"step": 1}]}},
              "tokens_seen_by_my_fork": 4}  # fmt: skip
    blobs = ["rng_state/shard_0.0_1.1", "rerun_state_machine_state/shard_0_1",
             "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2", schema.COMMON_KEY]  # fmt: skip
    lines = foreign_state.left_out(common, blobs, small_config(bf16=True))
    assert [line.rpartition(": ")[2] for line in lines] == [
        "rerun_state_machine_state", "tokens_seen_by_my_fork",
    ]  # fmt: skip
    eight = small_config(bf16=True, fp8_format="hybrid")
    assert "FP8 scales (_extra_state)" in foreign_state.left_out(common, blobs, eight)[0]
    sixteen = small_config(fp16=True)
    assert "a loss scale, which it has none of" in foreign_state.left_out(common, [], sixteen)[0]
    common["optimizer"]["grad_scaler"] = {"scale": torch.tensor([4.0])}
    assert not any("loss scale" in n for n in foreign_state.left_out(common, [], sixteen))
    assert "(grad_scaler)" in foreign_state.left_out(common, [], small_config(bf16=True))[0]
    common["optimizer"] = {0: {"optimizer": {"param_groups": [{"is_decoupled_lr": True}]}}}
    assert "--decoupled-lr" in foreign_state.left_out(common, [], small_config())[0]
    assert foreign_state.left_out({**common, "progress": {}}, blobs, eight) == []


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


MASTER = "optimizer.state.param."
BUCKET = "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_d.bucket_idx_0"


def as_megatron_writes(root, tmp_path, form):
    """The same checkpoint with Megatron-LM's keys of masters and its entry for the optimizer."""
    reader = open_reader(root)
    common = read_common(reader)
    tensors = {key: whole(reader.read(key)) for key in reader.tensors}
    if form == "by_rank":
        tensors = {k: v for k, v in tensors.items() if not k.startswith("optimizer.")}
        tensors |= {f"{BUCKET}.{kind}": whole(torch.zeros(64)) for kind in ("param", "exp_avg")}
        common["content_metadata"] = {"distrib_optim_sharding_type": "dp_reshardable"}
    elif form == "without_masters":  # its optimizer of fp32 parameters
        tensors = {k: v for k, v in tensors.items() if not k.startswith(MASTER)}
    else:
        old, new = MASTER, "chained_0.optimizer.state.fp32_param."
        tensors = {k.replace(old, new): v for k, v in tensors.items()}
    for name in ("optimizer_scalars", "progress", "given", "arrangement"):
        del common[name]
    common["opt_param_scheduler"] = None
    blobs = {schema.COMMON_KEY: plain.dump(common)}
    return io.save(tmp_path, 1, tensors, blobs, Peers(Axis.single("world")), {}).directory


def trained(tmp_path, **settings):
    """A model and its optimizer after a step, saved."""
    config = small_config(save=str(tmp_path / "ours"), save_interval=1, **settings)
    model, build = build_model(config)
    optimizer = build_optimizer(config, model, ParallelState.single())
    for param in model.parameters():
        param.main_grad = torch.randn(param.shape)
    optimizer.step()
    save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=optimizer, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=1, consumed_train_samples=2),
    )  # fmt: skip
    return model, optimizer


def resumed(tmp_path, **settings):
    """Another model and its optimizer, loaded from what Megatron-LM would have written."""
    own = small_config(load=str(tmp_path / "theirs"), seed=99, **settings)
    fresh, build = build_model(own)
    other = build_optimizer(own, fresh, ParallelState.single())
    load_checkpoint(
        own, ParallelState.single(), model=fresh, optimizer=other, scheduler=None,
        fp8=build.fp8, progress=Progress(), say=lambda line: None,
    )  # fmt: skip
    return fresh, other


@pytest.mark.parametrize(("form", "bf16"), [("masters", True), ("without_masters", False)])
def test_moments_masters_and_steps_of_megatron_core(form, bf16, tmp_path):
    _, optimizer = trained(tmp_path, bf16=bf16)
    as_megatron_writes(tmp_path / "ours" / "iter_0000001", tmp_path / "theirs", form)
    _, other = resumed(tmp_path, bf16=bf16)
    assert other.scalars()["step"] == 1
    expected = dict(optimizer.named_state())
    for name, kinds in other.named_state():
        for kind, tensor in kinds.items():
            assert torch.equal(tensor, expected[name][kind]), (name, kind)


def test_rounded_weights_are_no_masters(tmp_path):
    trained(tmp_path, bf16=True)
    root = tmp_path / "ours" / "iter_0000001"
    as_megatron_writes(root, tmp_path / "theirs", "without_masters")
    with pytest.raises(CheckpointError, match=r"missing .*optimizer\.state\.param\."):
        resumed(tmp_path, bf16=True)


def test_weights_beside_an_optimizer_by_rank(tmp_path):
    model, _ = trained(tmp_path)
    as_megatron_writes(tmp_path / "ours" / "iter_0000001", tmp_path / "theirs", "by_rank")
    with pytest.raises(CheckpointError, match="dp_reshardable.*--no-load-optim"):
        resumed(tmp_path)
    fresh, _ = resumed(tmp_path, no_load_optim=True)
    for a, b in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
