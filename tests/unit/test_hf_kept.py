"""A model's own config.json comes back, with what the model says by now."""

from __future__ import annotations

from megatron.training import hf_kept
from megatron.training.hf_config import fields_from_hf, hf_from_fields
from tests.unit.test_hf_map import LLAMA
from tests.unit.test_hf_moe import GLM4

MORE = {
    "initializer_range": 0.041, "bos_token_id": 7, "eos_token_id": [8, 9], "pretraining_tp": 1,
    "transformers_version": "4.40.0", "attention_dropout": 0.0, "torch_dtype": "float16",
}  # fmt: skip


def back(kept, **change):
    built = hf_from_fields({**fields_from_hf(kept), **change}, "bfloat16")
    return hf_kept.restore(built, kept)


def test_everything_that_still_holds_comes_back():
    kept = {**LLAMA, **MORE}
    expected = {**kept, "torch_dtype": "bfloat16"}
    del expected["transformers_version"]
    assert back(kept) == expected


def test_one_spelling_of_the_type_is_written():
    kept = {n: v for n, v in LLAMA.items() if n != "torch_dtype"}
    newer = back({**kept, "dtype": "float32"})
    assert (newer["dtype"], "torch_dtype" in newer) == ("bfloat16", False)
    older = back(kept)
    assert (older["torch_dtype"], "dtype" in older) == ("bfloat16", False)


def test_a_relative_keeps_its_name():
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert back({**mistral, "sliding_window": None})["architectures"] == ["MistralForCausalLM"]
    qwen = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    window = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 21}
    config = back({**qwen, **window})
    assert {n: config[n] for n in window} == window


def test_what_has_changed_since_is_written():
    config = back({**LLAMA, **MORE}, max_position_embeddings=64, vocab_size=19)
    assert (config["max_position_embeddings"], config["vocab_size"]) == (64, 19)
    assert config["initializer_range"] == 0.041


def test_only_one_spelling_of_the_rope_is_left():
    kept = {n: v for n, v in LLAMA.items() if n != "rope_theta"}
    kept["rope_parameters"] = {"rope_type": "default", "rope_theta": 50000.0}
    assert back(kept)["rope_parameters"] == kept["rope_parameters"]
    assert "rope_theta" not in back(kept)
    config = back(kept, rotary_base=70000)
    assert config["rope_theta"] == 70000.0
    assert "rope_parameters" not in config


def test_another_family_has_a_configuration_of_its_own():
    config = back({**LLAMA, **MORE}, qk_layernorm=True)
    assert config["model_type"] == "qwen3"
    assert "pretraining_tp" not in config


def test_layers_that_were_left_out_are_not_announced():
    assert back({**GLM4, "num_nextn_predict_layers": 1})["num_nextn_predict_layers"] == 0


def test_quantization_and_code_of_its_own_do_not_come_back():
    kept = {**LLAMA, "quantization_config": {"quant_method": "fp8"}, "auto_map": {"x": "y"}}
    assert not {"quantization_config", "auto_map"} & set(back(kept))


def test_no_configuration_or_a_broken_one(tmp_path):
    built = hf_from_fields(fields_from_hf(LLAMA), "float32")
    assert hf_kept.restore(built, {}) == built
    (tmp_path / "x.json").write_text("[1")
    assert hf_kept.read(tmp_path / "x.json") == {}
    assert hf_kept.read(tmp_path / "absent.json") == {}
