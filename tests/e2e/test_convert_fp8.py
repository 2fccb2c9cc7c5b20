"""FP8 in HuggingFace directories through the converter's command line."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from megatron.core.dist_checkpointing.storage import Reader  # noqa: E402
from megatron.training import hf_verify  # noqa: E402
from tests.e2e.launch import launch  # noqa: E402
from tests.e2e.test_convert import (  # noqa: E402
    LIKE_LLAMA,
    SIZES,
    TRAIN,
    VOCAB,
    edit_config,
    logits,
    make_model,
    run,
    state_of,
)

CODES = torch.float8_e4m3fn


def raw(directory):
    return load_file(directory / "model.safetensors")


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def settings(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.fixture
def exported(tmp_path):
    """Returns a function that makes a bf16 model and exports it in FP8."""

    def make(name, *flags):
        make_model(name, tmp_path / "hf", torch.bfloat16)
        assert run("hf", "megatron", tmp_path / "hf", tmp_path / "bf16", "--no-verify") == 0
        command = ("megatron", "hf", tmp_path / "bf16", tmp_path / "fp8")
        assert run(*command, "--target-dtype", "fp8", *flags) == 0
        return tmp_path / "fp8"

    return make


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama", "tensor"),
        ("llama-tied", "channel"),
        ("glm4-moe", "channel"),
        ("mixtral", "tensor"),
    ],
)
def test_there_and_back_again(tmp_path, capsys, exported, name, weights, dtype):
    fp8 = exported(name, "--fp8-weights", weights)
    assert "verified: all tensors equal" in capsys.readouterr().out
    assert run("hf", "megatron", fp8, tmp_path / "ckpt", "--target-dtype", dtype) == 0
    out = capsys.readouterr().out
    assert "are in FP8 and are dequantized" in out
    assert "verified" in out
    command = ("megatron", "hf", tmp_path / "ckpt", tmp_path / "back", "--target-dtype", "fp8")
    assert run(*command, "--no-verify") == 0
    before, after = raw(fp8), raw(tmp_path / "back")
    assert list(before) == list(after)
    for key, value in before.items():
        assert (value.dtype, value.shape) == (after[key].dtype, after[key].shape), key
        assert torch.equal(bits(value), bits(after[key])), key
    assert settings(fp8) == settings(tmp_path / "back")
    kinds = {str(v.dtype) for k, v in before.items() if k.endswith("down_proj.weight")}
    assert kinds <= {str(CODES)}
    plain = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "norm.weight")
    assert {before[k].dtype for k in before if k.endswith(plain)} == {torch.bfloat16}


def test_dequantized_in_fp32_the_values_are_exact(tmp_path, exported):
    fp8 = exported("llama")
    assert run("hf", "hf", fp8, tmp_path / "plain", "--target-dtype", "fp32") == 0
    stored, plain = raw(fp8), raw(tmp_path / "plain")
    assert "quantization_config" not in settings(tmp_path / "plain")
    assert not [k for k in plain if k.endswith("scale")]
    for key, value in plain.items():
        own = stored[key].float()
        if stored[key].dtype == CODES:
            own = own * stored[f"{key}_scale"]
        assert torch.equal(value, own), key


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
@pytest.mark.parametrize("weights", ["tensor", "channel"])
def test_transformers_loads_the_export(tmp_path, exported, weights):
    """The package that owns the layout and the library that uses it, for real."""
    fp8 = exported("llama", "--fp8-weights", weights)
    from compressed_tensors.quantization import QuantizationConfig

    scheme = QuantizationConfig.model_validate(settings(fp8)["quantization_config"])
    assert scheme.config_groups["group_0"].weights.strategy == weights
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        fp8,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    ).eval()
    assert run("hf", "megatron", fp8, tmp_path / "ckpt", "--target-dtype", "fp32") == 0
    ours = hf_verify.load_ours(tmp_path / "ckpt" / "release")
    tokens = torch.randint(0, VOCAB, (2, 48))
    assert (logits(ours, tokens) - logits(theirs, tokens)).abs().max() <= 1e-4


def test_blocks_of_deepseeks_kind_are_read(tmp_path, capsys):
    make_model("llama", tmp_path / "hf", torch.bfloat16)
    state, block = raw(tmp_path / "hf"), 32
    expected, stored = {}, {}
    for key, value in state.items():
        stored[key] = expected[key] = value
        if key.endswith("_proj.weight"):
            grid = [-(-n // block) for n in value.shape]
            scale = torch.rand(grid) * 1e-3
            stored[key] = (torch.randn(value.shape) * 100).clamp(-448, 448).to(CODES)
            stored[f"{key}_scale_inv"] = scale
            wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            wide = wide[: value.shape[0], : value.shape[1]]
            expected[key] = stored[key].float() * wide
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    how = {"quant_method": "fp8", "weight_block_size": [block, block]}
    edit_config(tmp_path / "hf", quantization_config=how)
    command = ("hf", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--target-dtype", "fp32")
    assert run(*command) == 0
    assert "verified" in capsys.readouterr().out
    assert run("megatron", "hf", tmp_path / "ckpt", tmp_path / "back", "--no-verify") == 0
    back = state_of(tmp_path / "back")
    assert all(torch.equal(back[k], v.float()) for k, v in expected.items())
    del stored["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    assert run("hf", "megatron", tmp_path / "hf", tmp_path / "other") == 1
    assert "model.layers.1.mlp.up_proj.weight is in FP8 and has no scale" in capsys.readouterr().err


def test_scales_of_delayed_scaling_become_those_of_the_inputs(tmp_path, capsys):
    save = ["--save", f"{tmp_path}/ckpt", "--save-interval", "2"]
    fp8 = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
    done = launch(1, [*TRAIN, *SIZES, *LIKE_LLAMA, *fp8, *save])
    assert done.codes == [0], done.out
    command = ("megatron", "hf", tmp_path / "ckpt", tmp_path / "fp8", "--target-dtype", "fp8")
    assert run(*command, "--fp8-activations", "static") == 0
    assert "verified" in capsys.readouterr().out
    stored = raw(tmp_path / "fp8")
    reader = Reader(next((tmp_path / "ckpt").glob("iter_*")))
    prefix = "fp8_state.layers.decoder.layers.1."
    for ours, names in (
        ("self_attention.linear_qkv", ("q_proj", "k_proj", "v_proj")),
        ("mlp.linear_fc2", ("down_proj",)),
    ):
        factor = reader.read(f"{prefix}{ours}.scale_fwd")[0]
        assert factor != 1
        for name in names:
            (key,) = (
                k for k in stored if k.endswith(f"layers.1.{_block(name)}.{name}.input_scale")
            )
            assert torch.equal(stored[key], (1 / factor).reshape(1))
    group = settings(tmp_path / "fp8")["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] is False


def _block(name):
    return "mlp" if name == "down_proj" else "self_attn"


@pytest.mark.parametrize(
    ("name", "saver", "flags", "message"),
    [
        ("llama", "hf", ["--fp8-weights", "tensor"], "--fp8-weights: got tensor"),
        ("llama", "megatron", ["--target-dtype", "fp8"], "--target-dtype: got fp8"),
        ("gpt2", "hf", ["--target-dtype", "fp8"], "GPT-2's matrices are no linear layers"),
        (
            "llama", "hf", ["--target-dtype", "fp8", "--fp8-activations", "static"],
            "only delayed scaling keeps them",
        ),
    ],
)  # fmt: skip
def test_where_there_is_no_fp8(tmp_path, capsys, name, saver, flags, message):
    make_model(name, tmp_path / "hf")
    assert run("hf", saver, tmp_path / "hf", tmp_path / "out", *flags) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
