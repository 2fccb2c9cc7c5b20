from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.errors import CheckpointError
from megatron.training import hf_files, hf_map
from megatron.training.hf_config import fields_from_hf, hf_from_fields
from megatron.training.safetensors_file import Planned

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 17,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 17,
}


# ------------------------------------------------------------------ layouts


def test_fused_qkv_rows_go_group_by_group():
    # 2 groups, 2 query heads each, width 1: the row's value says whose it is.
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    fused = hf_map.interleave_qkv([q, k, v], groups=2, width=1)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_rows_of_a_head_stay_together():
    q, k, v = torch.arange(4.0), torch.arange(4.0) + 10, torch.arange(4.0) + 20
    fused = hf_map.interleave_qkv([q, k, v], groups=2, width=2)
    assert fused.tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_splitting_undoes_fusing(heads, groups):
    width, hidden = 3, 5
    parts = [torch.randn(n * width, hidden) for n in (heads, groups, groups)]
    back = hf_map.split_qkv(hf_map.interleave_qkv(parts, groups, width), groups, width)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


def table(config):
    return {r.key: r for r in hf_map.rows_for(fields_from_hf(config), config["model_type"])}


def test_gate_comes_before_up():
    row = table(LLAMA)["decoder.layers.mlp.linear_fc1.weight"]
    assert row.names == (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    )
    gate, up = torch.zeros(10, 12), torch.ones(10, 12)
    assert row.join([gate, up])[:10].sum() == 0
    assert row.join([gate, up])[10:].sum() == 120


def test_gpt2_matrices_are_transposed():
    row = table(GPT2)["decoder.layers.mlp.linear_fc1.weight"]
    stored = torch.randn(12, 48)
    assert torch.equal(row.join([stored]), stored.t())
    fused = table(GPT2)["decoder.layers.self_attention.linear_qkv.weight"]
    stored = torch.randn(12, 36)
    rows = fused.join([stored])
    assert torch.equal(rows[3:6], stored[:, 12:15].t())  # keys of head 0 follow its queries


VARIANTS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "multi-head": {**LLAMA, "num_key_value_heads": 4},
    "one group": {**LLAMA, "num_key_value_heads": 1},
    "wide heads": {**LLAMA, "head_dim": 8},
    "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {
        **LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8
    },
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False, "n_inner": 20},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_is_a_bijection_with_the_declared_shapes(name):
    for row in table(VARIANTS[name]).values():
        parts = [torch.randn(shape) for shape in row.shapes]
        ours = row.join(parts)
        assert tuple(ours.shape) == row.shape
        back = row.split(ours)
        assert len(back) == len(row.names)
        for a, b in zip(parts, back, strict=True):
            assert torch.equal(a, b), row.key


@pytest.mark.parametrize("name", VARIANTS)
def test_configurations_survive_a_round_trip(name):
    fields = fields_from_hf(VARIANTS[name])
    again = fields_from_hf(hf_from_fields(fields, "float32"))
    assert again == fields


# ------------------------------------------------------------------ configurations


def test_fields_of_a_llama():
    fields = fields_from_hf(LLAMA)
    assert fields["group_query_attention"] is True
    assert fields["num_query_groups"] == 2
    assert fields["kv_channels"] == 3
    assert fields["rotary_base"] == 50000
    assert fields["norm_epsilon"] == 1e-6
    assert fields["untie_embeddings_and_output_weights"] is True
    assert fields["add_bias_linear"] is False


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_the_llama3_scaling(style):
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    if style == "rope_scaling":
        config.update(rope_theta=500000.0, rope_scaling=LLAMA3)
    else:
        config["rope_parameters"] = {**LLAMA3, "rope_theta": 500000.0}
    fields = fields_from_hf(config)
    assert (fields["rotary_base"], fields["use_rope_scaling"]) == (500000, True)
    assert fields["rope_scaling_factor"] == 32.0
    assert hf_from_fields(fields, "float32")["rope_scaling"] == LLAMA3


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, r"rope_scaling.factor is 2\.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, r"rope_scaling\.low_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_theta": 10000.5}, "rope_theta"),
        ({"rope_theta": "x"}, "rope_theta is 'x'"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_parameters": [1]}, "rope_parameters is .1.: it is no dictionary"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor is '8'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
             "sliding_window": 4096},
            "sliding_window",
        ),
    ],
)  # fmt: skip
def test_what_the_model_cannot_compute_is_refused_by_name(change, name):
    with pytest.raises(CheckpointError, match=name):
        fields_from_hf({**LLAMA, **change})


def test_all_reasons_are_listed_at_once():
    with pytest.raises(CheckpointError, match=r"hidden_act.*quantization_config|quantiz.*hidden"):
        fields_from_hf({**LLAMA, "hidden_act": "relu", "quantization_config": {}})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"activation_function": "gelu"}, "activation_function"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
    ],
)
def test_gpt2_options_that_change_the_arithmetic_are_refused(change, name):
    with pytest.raises(CheckpointError, match=name):
        fields_from_hf({**GPT2, **change})


@pytest.mark.parametrize(
    ("base", "change", "name"),
    [
        (LLAMA, {"normalization": "LayerNorm"}, "normalization"),
        (LLAMA, {"swiglu": False}, "swiglu"),
        (LLAMA, {"rotary_percent": 0.5}, "rotary_percent"),
        (LLAMA, {"position_embedding_type": "none"}, "position_embedding_type"),
        (LLAMA, {"qk_layernorm": True, "add_qkv_bias": True}, "qk_layernorm"),
        (GPT2, {"add_bias_linear": False}, "add_bias_linear"),
        (GPT2, {"swiglu": True}, "swiglu"),
        (GPT2, {"group_query_attention": True, "num_query_groups": 2}, "num_query_groups"),
        (GPT2, {"vocab_size": None}, "vocab_size"),
    ],
)
def test_models_without_a_huggingface_counterpart_are_refused_by_name(base, change, name):
    with pytest.raises(CheckpointError, match=name):
        hf_from_fields({**fields_from_hf(base), **change}, "float32")


# ------------------------------------------------------------------ files


def planned(tensors):
    return [Planned(n, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()]


def test_large_models_are_written_in_shards_with_an_index(tmp_path):
    tensors = {f"t{i}": torch.randn(4, 4) for i in range(5)}
    names = hf_files.write_weights(tmp_path, planned(tensors), torch.float32, max_shard_bytes=130)
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    weights = hf_files.HfWeights(tmp_path)
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights.get(name), tensor)
        assert weights.shape(name) == (4, 4)


def test_views_of_one_tensor_are_written_separately(tmp_path):
    whole = torch.randn(4, 3)
    hf_files.write_weights(tmp_path, planned({"a": whole[:2], "b": whole.t()}), torch.float32)
    weights = hf_files.HfWeights(tmp_path)
    assert torch.equal(weights.get("a"), whole[:2])
    assert torch.equal(weights.get("b"), whole.t())


def test_pickled_weights_are_read_without_running_them(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert hf_files.HfWeights(tmp_path).get("a").tolist() == [1.0, 1.0]
    torch.save({"a": object}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no plain weight file"):
        hf_files.HfWeights(tmp_path)
    for odd in ({"a": 1}, {5: torch.ones(2)}, {"a": torch.ones(2).to_sparse()}):
        torch.save({"b": torch.ones(2), **odd}, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="more than plain tensors by name"):
            hf_files.HfWeights(tmp_path)


def test_missing_and_damaged_weight_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        hf_files.HfWeights(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        hf_files.HfWeights(tmp_path).get("a")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        hf_files.HfWeights(tmp_path)
