"""The sizes that FP8 takes: which backend refuses, what hardware pads, what is said."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError, make_config
from megatron.config.alignment import alignment_of, expert_alignment_of, misaligned, padding
from megatron.core.fp8 import Fp8State
from megatron.training import initialize
from megatron.training.precision import padding_note

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}


def config(**settings):
    return make_config(1, **{**SIZES, "fp8_format": "e4m3", **settings})


def test_the_table():
    recipes = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
    assert [alignment_of(r) for r in recipes] == [16, 16, 16, 32, 16]
    assert [expert_alignment_of(r) for r in recipes] == [16, 16, 16, 32, 128]


def test_a_backend_that_auto_chose_refuses_like_one_that_was_named():
    cfg = config(ffn_hidden_size=100)
    initialize._check_sizes(cfg, "native")
    with pytest.raises(ConfigError, match="--ffn-hidden-size.*got 100.*96 or 112.*impl native"):
        initialize._check_sizes(cfg, "transformer_engine")
    initialize._check_sizes(config(), "transformer_engine")
    initialize._check_sizes(make_config(1, **SIZES, ffn_hidden_size=100), "transformer_engine")


def test_all_sizes_of_the_smallest_width_are_seen():
    cfg = config(fp8_recipe="mxfp8", seq_length=31, hidden_size=60, ffn_hidden_size=100)
    found = {problem.flags[0] for problem in misaligned(cfg)}
    assert found == {"--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--seq-length"}


def test_what_padding_costs():
    line = padding(config(ffn_hidden_size=100, seq_length=31))
    assert "the MLP width of one rank 100 as 112 (+12.0%)" in line
    assert "the tokens of one microbatch 31 as 32 (+3.2%)" in line
    assert "hidden size" not in line
    assert padding(config()) == ""


def test_padding_is_mentioned_where_something_is_padded():
    for recipe, hardware, backend, said in (
        ("tensorwise", True, "native", True),
        ("tensorwise", False, "native", False),  # emulated: any size as it is
        ("mxfp8", True, "native", False),  # emulated on FP8 hardware, too
        ("tensorwise", True, "transformer_engine", False),
    ):
        cfg = config(ffn_hidden_size=100, fp8_recipe=recipe)
        state = Fp8State.from_config(cfg)
        state.hardware = hardware
        assert bool(padding_note(cfg, state, backend)) == said, (recipe, hardware, backend)
    assert padding_note(make_config(1, **SIZES), Fp8State.disabled(), "native") == ""


def test_gradients_in_e5m2_with_block_scales_are_mentioned():
    for recipe in ("blockwise", "mxfp8"):
        said = [n for n in config(fp8_recipe=recipe, fp8_format="hybrid").notices if "E5M2" in n]
        assert len(said) == 1
        assert recipe in said[0]
        assert not any("E5M2" in n for n in config(fp8_recipe=recipe).notices)
    assert not any("E5M2" in n for n in config(fp8_recipe="delayed", fp8_format="hybrid").notices)
