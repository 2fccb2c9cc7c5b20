"""Fields, derived values, and configurations built in Python."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import yaml

from megatron.config import ConfigError, Fp8Config, ModelConfig, make_config
from megatron.config.field import field, specs_of
from megatron.config.schema import SECTIONS, SPECS
from megatron.config.values import coerce, yaml_value

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}


def tiny(world_size=1, **fields):
    return make_config(world_size, **{**TINY, **fields})


class TestFields:
    def test_every_field_explains_itself(self):
        for name, spec in SPECS.items():
            text = spec.setting.help
            assert text.endswith("."), name
            assert len(text) > 12, name

    def test_flags_are_unique_and_follow_the_name(self):
        flags = [flag for spec in SPECS.values() for flag in (*spec.flags, *spec.inverse_flags)]
        assert len(flags) == len(set(flags))
        assert all(flag.startswith("--") for flag in flags)
        assert SPECS["num_layers"].flags == ("--num-layers",)

    def test_sections_are_frozen_and_keyword_only(self):
        for cls in SECTIONS.values():
            section = cls()
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(section, dataclasses.fields(cls)[0].name, 1)
            with pytest.raises(TypeError):
                cls(1)

    def test_defaults_have_their_declared_type(self):
        for name, spec in SPECS.items():
            if spec.default is None:
                assert spec.optional, name
            elif not spec.setting.derived:
                assert coerce(spec, spec.default) == spec.default, name

    def test_a_field_without_help_is_refused(self):
        @dataclasses.dataclass(frozen=True)
        class Bare:
            size: int = 1

        with pytest.raises(TypeError, match="Bare.size"):
            specs_of("bare", Bare)

    def test_specs_carry_type_and_choices(self):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Some:
            paths: tuple[str, ...] | None = field(nargs="*", help="Some paths of things.")
            size: int | None = field(units="cm", help="How long a thing is.")

        paths, size = specs_of("some", Some)
        # Local classes resolve their annotations in this module.
        assert (paths.kind, paths.many, paths.optional) == (str, True, True)
        assert (size.kind, size.many, size.setting.units) == (int, False, "cm")

    def test_defaults_are_those_of_megatron(self):
        expected = {
            "tensor_model_parallel_size": 1,
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1,
            "fp8_amax_compute_algo": "most_recent",
            "fp8_margin": 0,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "init_method_std": 0.02,
            "norm_epsilon": 1e-5,
            "make_vocab_size_divisible_by": 128,
            "rotary_base": 10000,
            "log_interval": 100,
            "eval_iters": 100,
            "eval_interval": None,
            "lr_decay_style": "linear",
            "min_lr": 0.0,
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "adam_beta2": 0.999,
            "initial_loss_scale": 2**32,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "seed": 1234,
            "ckpt_format": "torch_dist",
            "distributed_timeout_minutes": 10,
            "num_workers": 2,
        }
        assert {name: SPECS[name].default for name in expected} == expected


class TestDerived:
    def test_shape(self):
        cfg = tiny()
        assert cfg.ffn_hidden_size == 256
        assert cfg.kv_channels == 16
        assert cfg.num_query_groups == 4
        assert cfg.max_position_embeddings == 32
        assert cfg.add_qkv_bias

    @pytest.mark.parametrize(
        ("hidden", "ffn"), [(64, 128), (4096, 10880), (768, 2048), (1024, 2688)]
    )
    def test_swiglu_width(self, hidden, ffn):
        assert tiny(hidden_size=hidden, swiglu=True).ffn_hidden_size == ffn

    def test_groups(self):
        assert tiny(group_query_attention=True).num_query_groups == 1
        assert tiny(group_query_attention=True, num_query_groups=2).num_query_groups == 2

    def test_sequence_from_positions(self):
        fields = {k: v for k, v in TINY.items() if k != "seq_length"}
        assert make_config(**fields, max_position_embeddings=48).seq_length == 48
        assert make_config(**fields).seq_length == 1024

    @pytest.mark.parametrize(
        ("vocab", "tp", "padded"),
        [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (32000, 4, 32256)]
        + [(128256, 1, 128256)],
    )
    def test_padded_vocabulary(self, vocab, tp, padded):
        cfg = tiny(tp, tensor_model_parallel_size=tp, vocab_size=vocab, num_attention_heads=8)
        assert cfg.padded_vocab_size == padded

    def test_padded_vocabulary_waits_for_the_tokenizer(self):
        cfg = tiny(tokenizer_type="SentencePieceTokenizer", tokenizer_model="t.model")
        assert cfg.vocab_size is None
        assert cfg.padded_vocab_size is None
        assert cfg.replace(vocab_size=300).padded_vocab_size == 384

    def test_mesh_and_batch(self):
        cfg = tiny(8, tensor_model_parallel_size=2, micro_batch_size=3)
        assert (cfg.world_size, cfg.data_parallel_size) == (8, 4)
        assert (cfg.global_batch_size, cfg.num_microbatches) == (12, 1)
        assert cfg.replace(global_batch_size=36).num_microbatches == 3

    def test_sequence_parallel_is_off_without_tensor_parallelism(self):
        cfg = tiny(sequence_parallel=True)
        assert not cfg.sequence_parallel
        assert not any("parallel" in line for line in cfg.notices)
        assert tiny(2, sequence_parallel=True, tensor_model_parallel_size=2).sequence_parallel

    def test_duration(self):
        cfg = tiny(train_iters=7)
        assert (cfg.train_iters, cfg.lr_decay_iters) == (7, 7)
        cfg = tiny(train_samples=100, global_batch_size=8)
        assert (cfg.train_iters, cfg.lr_decay_samples, cfg.lr_decay_iters) == (12, 100, None)

    def test_parameter_type(self):
        assert tiny().params_dtype == "float32"
        assert tiny(bf16=True).params_dtype == "bfloat16"
        assert tiny(fp16=True).params_dtype == "float16"

    def test_dynamic_loss_scaling_tolerates_overflow(self):
        assert not tiny(fp16=True).check_for_nan_in_loss_and_grad
        assert tiny(fp16=True, loss_scale=128).check_for_nan_in_loss_and_grad
        assert tiny(bf16=True).check_for_nan_in_loss_and_grad

    def test_recompute_activations_means_selective(self):
        assert tiny(recompute_activations=True).recompute_granularity == "selective"

    def test_tokenizer_follows_from_its_files(self):
        assert tiny(vocab_file="v", merge_file="m").tokenizer_type == "GPT2BPETokenizer"
        assert tiny(tokenizer_model="a.model").tokenizer_type == "SentencePieceTokenizer"
        assert tiny().tokenizer_type == "NullTokenizer"

    def test_missing_settings_have_defaults_and_notices(self):
        cfg = make_config()
        assert (cfg.num_layers, cfg.hidden_size, cfg.num_attention_heads) == (24, 1024, 16)
        assert (cfg.train_iters, cfg.lr, cfg.vocab_size) == (500, 1.5e-4, 50257)
        assert cfg.mock_data
        text = "\n".join(cfg.notices)
        for part in ("--num-layers 24", "--train-iters 500", "--lr", "--mock-data", "50257"):
            assert part in text
        assert "NO TRAINING DATA" in text

    def test_nothing_to_notice_when_all_was_said(self):
        cfg = tiny(train_iters=1, lr=1e-3, mock_data=True, vocab_size=64)
        assert cfg.notices == ()

    def test_a_schedule_that_ends_early_is_noticed(self):
        notice = "stays at --min-lr 0.0 after step 5 of 9"
        assert any(notice in n for n in tiny(train_iters=9, lr_decay_iters=5).notices)
        cfg = tiny(train_iters=9, lr_decay_iters=5, lr_decay_style="constant")
        assert not any("stays at" in n for n in (*cfg.notices, *tiny(train_iters=9).notices))

    def test_split_default_is_noticed_with_data(self):
        cfg = tiny(data_path=["a"], tokenizer_type="NullTokenizer", vocab_size=9)
        assert cfg.split == "969, 30, 1"
        assert any("969, 30, 1" in line for line in cfg.notices)

    def test_a_checkpoint_gives_the_size_that_was_not_given(self):
        cfg = make_config(load="ckpt")
        assert cfg.use_checkpoint_args
        assert cfg.use_checkpoint_opt_param_scheduler
        assert not tiny(load="ckpt").use_checkpoint_args


class TestRunConfig:
    def test_sections_and_flat_names_agree(self):
        cfg = tiny(bf16=True, fp8_format="hybrid")
        for name, spec in SPECS.items():
            assert getattr(cfg, name) == getattr(getattr(cfg, spec.section), name)
        assert isinstance(cfg.model, ModelConfig)
        assert isinstance(cfg.fp8, Fp8Config)

    def test_unknown_attribute(self):
        with pytest.raises(AttributeError, match="numlayers"):
            _ = tiny().numlayers

    def test_is_immutable(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            tiny().model = None

    def test_replace_derives_anew(self):
        cfg = tiny().replace(hidden_size=128)
        assert (cfg.ffn_hidden_size, cfg.kv_channels) == (512, 32)
        assert cfg.replace(world_size=4).data_parallel_size == 4
        assert cfg.replace(hidden_size=64) == tiny()

    def test_replace_with_none_resets(self):
        assert (
            tiny(seed=7, global_batch_size=4).replace(seed=None, global_batch_size=None) == tiny()
        )

    def test_replace_keeps_what_was_switched_off_in_words(self):
        cfg = tiny(fp8_format=None, fp8_recipe="delayed")
        assert cfg.replace(seed=7) == tiny(seed=7)
        with pytest.raises(ConfigError, match="--fp8-recipe"):
            cfg.replace(fp8_format=None)  # now nobody says so any more

    def test_replace_checks(self):
        with pytest.raises(ConfigError, match="--num-attention-heads"):
            tiny().replace(num_attention_heads=7)

    def test_survives_copies_and_processes(self):
        cfg = tiny(data_path=["a", "b"], vocab_size=9)
        assert pickle.loads(pickle.dumps(cfg)) == cfg
        assert copy.deepcopy(cfg) == cfg
        assert hash(copy.copy(cfg)) == hash(cfg)
        assert pickle.loads(pickle.dumps(cfg)).given == cfg.given

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"swiglu": True, "group_query_attention": True, "num_query_groups": 2},
            {"train_samples": 100, "global_batch_size": 4, "lr_warmup_fraction": 0.1},
            {"fp8_format": "hybrid", "fp16": True},
            {"data_path": ["0.3", "a", "0.7", "b"], "vocab_size": 9},
            {"load": "x"},
        ],
    )
    def test_dict_round_trip(self, fields):
        cfg = tiny(4, tensor_model_parallel_size=2, **fields)
        flat = cfg.to_dict()
        assert set(flat) == set(SPECS)
        assert yaml.safe_load(yaml.safe_dump(flat)) == flat
        assert make_config(4, **cfg.given_dict()) == cfg

    def test_yaml_round_trip(self, tmp_path):
        cfg = tiny(lr=1e-5, bf16=True, data_path=["a", "b: #c"], vocab_size=9, split="9,1,0")
        text = cfg.to_yaml()
        assert make_config(**yaml.safe_load(text)) == cfg
        assert "# data_parallel_size: 1" in text


class TestValues:
    @pytest.mark.parametrize(
        ("name", "value", "typed"),
        [
            ("num_layers", "3", 3),
            ("lr", "3e-4", 3e-4),
            ("lr", 1, 1.0),
            ("clip_grad", "1", 1.0),
            ("split", 100, "100"),
            ("save", Path("a/b"), "a/b"),
            ("data_path", "a b", ("a", "b")),
            ("data_path", ["a", 1], ("a", "1")),
            ("transformer_impl", "local", "native"),
            ("bf16", True, True),
            ("lr", None, None),
        ],
    )
    def test_converts(self, name, value, typed):
        result = coerce(SPECS[name], value)
        assert result == typed
        assert type(result) is type(typed)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_layers", 2.5),
            ("num_layers", True),
            ("num_layers", "2.0"),
            ("lr", "nan"),
            ("lr", float("inf")),
            ("lr", "fast"),
            ("bf16", 1),
            ("bf16", "true"),
            ("save", True),
            ("save", ["a"]),
            ("fp8_format", "e5m2"),
            ("seed", None),
            ("data_path", 3),
        ],
    )
    def test_refuses(self, name, value):
        with pytest.raises(ValueError):
            coerce(SPECS[name], value)
        with pytest.raises(ConfigError, match=SPECS[name].flag):
            tiny(**{name: value})

    @pytest.mark.parametrize(
        "value",
        [
            1e-05,
            1e22,
            0.1,
            2.0**32,
            1.5e-7,
            3,
            True,
            None,
            "no",
            "a'\"b",
            "é",
            "1",
            [],
            ["x", 1e-9],
        ],
    )
    def test_yaml_value_reads_back(self, value):
        assert yaml.safe_load(yaml_value(value)) == value
