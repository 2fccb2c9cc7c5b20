"""A checkpoint that Megatron-Core wrote, read here; and what ours hold so that it can read them."""

from __future__ import annotations

import argparse
import io
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import plain, schema
from megatron.core.dist_checkpointing.foreign import local_name, own_names
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError
from megatron.core.mesh import ParallelState
from megatron.training.checkpoint_config import read_common, saved_settings
from megatron.training.checkpointing import load_checkpoint
from megatron.training.hf_verify import load_ours
from megatron.training.progress import Progress
from tests.saving import save_checkpoint
from tests.small_models import build_model, small_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "megatron_core_checkpoint"
MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True,
    "add_bias_linear": False, "position_embedding_type": "rope", "seq_length": 16,
    "max_position_embeddings": 32, "untie_embeddings_and_output_weights": True, "vocab_size": 45,
}  # fmt: skip


def golden_logits():
    tokens = torch.arange(12).view(1, 12) * 7 % 45
    return tokens, load_file(GOLDEN / "logits.safetensors")["logits"]


@torch.no_grad()
def logits(model, tokens):
    return model.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def test_its_weights_give_its_logits():
    tokens, expected = golden_logits()
    found = place.find(GOLDEN)
    assert found.iteration == 5
    ours = load_ours(found.directory)
    assert (logits(ours, tokens)[..., :45] - expected[..., :45]).abs().max() < 1e-5


@pytest.mark.parametrize("multiple", [16, 64])
def test_a_run_continues_it_with_fresh_optimizer(multiple):
    tokens, expected = golden_logits()
    config = small_config(
        **MODEL, load=str(GOLDEN), no_load_optim=True, make_vocab_size_divisible_by=multiple
    )
    model, build = build_model(config)
    progress, lines = Progress(), []
    assert load_checkpoint(
        config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=progress, say=lines.append,
    )  # fmt: skip
    assert (progress.iteration, progress.consumed_train_samples) == (5, 40)
    assert (logits(model, tokens)[..., :45] - expected[..., :45]).abs().max() < 1e-5


def test_its_settings_are_understood():
    settings = saved_settings(read_common(Reader(GOLDEN / "iter_0000005")))
    assert settings["num_query_groups"] == 2
    assert settings["norm_epsilon"] == 1e-5
    assert "params_dtype" not in settings  # a torch.dtype there, no plain value


def test_another_model_is_refused():
    config = small_config(**{**MODEL, "num_layers": 3}, load=str(GOLDEN), no_load_optim=True)
    model, build = build_model(config)
    with pytest.raises(CheckpointError, match="--num-layers is 2 in the checkpoint and 3"):
        load_checkpoint(
            config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
            fp8=build.fp8, progress=Progress(), say=lambda line: None,
        )  # fmt: skip


def test_ours_hold_what_megatron_core_looks_up(tmp_path):
    config = small_config(**MODEL, save=str(tmp_path), save_interval=1)
    model, build = build_model(config)
    directory = save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=3, consumed_train_samples=6),
    )  # fmt: skip
    theirs, ours = Reader(GOLDEN / "iter_0000005"), Reader(directory)
    for key, entry in theirs.tensors.items():
        assert ours.tensors[key].shape == entry.shape, key
    assert set(theirs.blobs) <= set(ours.blobs)
    for key in theirs.blobs:
        assert torch.load(io.BytesIO(ours.read_blob(key)), weights_only=True) == [None]
    common = plain.load((directory / "common.pt").read_bytes(), "common.pt")
    assert (common["iteration"], common["checkpoint_version"]) == (3, 3.0)
    assert common["args"].num_layers == 2
    assert common["args"].consumed_train_samples == 6


# ------------------------------------------------------------------ values of unknown types


def test_objects_of_known_libraries_become_placeholders():
    buffer = io.BytesIO()
    numpy_state = np.random.RandomState(1).get_state()
    args = argparse.Namespace(
        num_layers=2, act=torch.nn.functional.silu, backend=torch.nn.Linear, dtype=torch.bfloat16,
        exit_signal=signal.SIGTERM, path=Path("/data"), raw=b"\xff\x00",
    )  # fmt: skip
    torch.save({"args": args, "iteration": 4, "rng": numpy_state, "io": io.BytesIO()}, buffer)
    values = plain.load(buffer.getvalue(), "common")
    assert values["iteration"] == 4
    assert values["args"].num_layers == 2
    assert values["args"].raw == b"\xff\x00"
    assert saved_settings(values) == {"num_layers": 2}


def test_plain_values_come_back():
    values = {"a": [1, 2.5, None, "x"], "b": {"c": True}, "t": torch.arange(3)}
    back = plain.load(plain.dump(values), "x")
    assert torch.equal(back.pop("t"), values.pop("t"))
    assert back == values


@pytest.mark.parametrize("data", [b"", b"garbage", plain.dump({"a": 1})[:-30]])
def test_damaged_values_are_an_error(data):
    with pytest.raises(CheckpointError, match="common"):
        plain.load(data, "common")


def test_older_ones_keep_the_common_entry_in_a_file(tmp_path):
    shutil.copytree(GOLDEN / "iter_0000005", tmp_path / "iter_0000005")
    (tmp_path / "iter_0000005" / schema.COMMON_FILE).unlink()
    with pytest.raises(CheckpointError, match="common_state"):
        read_common(Reader(tmp_path / "iter_0000005"))


# ------------------------------------------------------------------ experts, local modules

GOLDEN_MOE = GOLDEN.with_name("megatron_core_moe_checkpoint")
MOE = {
    **MODEL, "normalization": "RMSNorm", "vocab_size": 50, "num_experts": 2, "moe_router_topk": 1,
    "moe_ffn_hidden_size": 8, "moe_layer_freq": "([0]*1+[1]*1)",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 8,
}  # fmt: skip


def test_a_model_with_experts_of_local_modules():
    config = small_config(**MOE, load=str(GOLDEN_MOE), no_load_optim=True)
    model, build = build_model(config)
    assert load_checkpoint(
        config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=Progress(), say=lambda line: None,
    )  # fmt: skip
    expected = load_file(GOLDEN_MOE / "logits.safetensors")["logits"]
    tokens = torch.arange(16).view(1, 16) * 7 % 50
    # Both in fp32; sums of 16 products in another order.
    assert (logits(model, tokens)[..., :50] - expected).abs().max() < 1e-5


def test_only_norms_before_experts_have_another_name():
    keys = [
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.mlp.router.weight",
        "decoder.layers.11.mlp.linear_fc1.layer_norm_weight",
        "chained_0.optimizer.state.fp32_param.decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "chained_1.optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc1.layer_norm_bias",
        "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    ]
    names = {stored: own for own, stored in own_names(keys).items()}
    norm = "decoder.layers.1.pre_mlp_layernorm."
    assert [names[key] for key in keys] == [
        keys[0], f"{norm}weight", keys[2], keys[3],
        f"optimizer.state.param.{norm}weight", f"optimizer.state.exp_avg.{norm}bias", keys[6],
    ]  # fmt: skip
    layers = "decoder.layers.mlp."
    stacked = [f"{layers}linear_fc1.layer_norm_weight", f"{layers}router.weight"]
    assert "decoder.layers.pre_mlp_layernorm.weight" in own_names(stacked)
    assert set(own_names(stacked[:1])) == set(stacked[:1])
    assert local_name("decoder.layers.pre_mlp_layernorm.weight") == stacked[0]
