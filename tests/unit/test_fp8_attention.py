"""What decides about FP8 attention, what the table says of it, what a checkpoint carries."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ConfigError, make_config
from megatron.core.backends.native import NativeBackend
from megatron.core.errors import CheckpointError, PrecisionError
from megatron.core.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Fp8Policy,
    Fp8State,
    MXFP8BlockScaling,
)
from megatron.core.fp8.attention import AttentionChoice
from megatron.training.initialize import _tell_attention
from tests.gpu import attention_cases
from tests.small_models import batch, small_model

DELAYED = DelayedScaling(amax_history_len=4)
CORE = "decoder.layers.{}.self_attention.core_attention"
ON = AttentionChoice(True)


def state_of(recipe=DELAYED, choice=ON, layers=2, **policy):
    state = Fp8State(Fp8Policy(recipe=recipe, num_layers=layers, **policy), attention=choice)
    for number in range(layers):
        state.for_linear(f"decoder.layers.{number}.mlp.linear_fc1")
        state.for_attention(CORE.format(number))
    return state


# -- decisions ------------------------------------------------------------------------------------


def test_it_is_off_unless_asked_for():
    state = state_of(choice=AttentionChoice())
    precision = state.attention_layers[CORE.format(0)]
    assert not precision.active
    (row,) = precision.rows()
    assert (row.gemm, row.requested, row.delivered) == ("all", "bf16", "bf16")
    assert row.kernel == "softmax attention"
    assert row.reason == "attention runs in FP8 with --fp8-dot-product-attention only"
    assert state.book.paths() == [f"decoder.layers.{n}.mlp.linear_fc1" for n in range(2)]
    assert "--fp8-format" in state_of(None).attention_layers[CORE.format(0)].rows()[0].reason


def test_layers_kept_in_bf16_keep_their_attention():
    state = state_of(layers=4, first_in_bf16=1, last_in_bf16=1)
    active = [precision.active for precision in state.attention_layers.values()]
    assert active == [False, True, True, False]
    reason = state.attention_layers[CORE.format(3)].rows()[0].reason
    assert reason == "--first-last-layers-bf16: among the last 1 layers"


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (Float8BlockScaling(), "a scale for each block"),
        (MXFP8BlockScaling(), "compute capability 10 only"),
    ],
    ids=["blockwise", "mxfp8"],
)
def test_recipes_without_attention_are_refused(recipe, why):
    with pytest.raises(PrecisionError, match=f"--fp8-dot-product-attention: got .*{why}"):
        state_of(recipe)
    state_of(recipe, AttentionChoice())


def test_rows_name_products_and_kernels():
    rows = state_of().attention_layers[CORE.format(1)].rows()
    assert [(row.gemm, row.delivered) for row in rows] == [
        ("qk", "fp8 e4m3xe4m3 delayed"),
        ("pv", "fp8 e4m3xe4m3 delayed"),
        ("backward", "fp8 e5m2xe4m3 delayed"),
    ]
    assert {row.kernel for row in rows[:2]} == {"emulated e4m3xe4m3 fp32 GEMM"}
    assert not any(row.is_fallback or row.reason for row in rows)
    plain = state_of(choice=AttentionChoice(True, backward=False))
    row = plain.attention_layers[CORE.format(1)].rows()[2]
    assert (row.delivered, row.reason, row.is_fallback) == ("bf16", "--no-fp8-dpa-bwd", False)


def test_suspended_and_switched_off():
    state = state_of()
    precision = state.attention_layers[CORE.format(0)]
    precision.suspended = "its maxima jump"
    assert not precision.active
    row = precision.rows()[0]
    assert (row.delivered, row.by_policy, row.is_fallback) == ("bf16", True, False)
    again = state_of()
    again.load_state_dict(state.state_dict())
    assert again.attention_layers[CORE.format(0)].suspended == "its maxima jump"
    state.enabled = False
    row = state.attention_layers[CORE.format(1)].rows()[0]
    assert row.is_fallback
    assert "switched off" in row.reason


def test_the_models_table_has_a_line_for_each_product():
    settings = {"bf16": True, "fp8_format": "hybrid", "hidden_size": 64}
    model, _ = small_model(**settings, fp8_dot_product_attention=True)
    rows = [row for row in model.named_precision_rows() if "core_attention" in row.path]
    assert [(row.path[15], row.gemm) for row in rows] == [
        (layer, product) for layer in "01" for product in ("qk", "pv", "backward")
    ]
    assert all(row.delivered.startswith("fp8") for row in rows)
    model, _ = small_model(**settings)
    rows = [row for row in model.named_precision_rows() if "core_attention" in row.path]
    assert [(row.gemm, row.delivered) for row in rows] == [("all", "bf16")] * 2


def test_a_policy_may_hold_single_steps_back():
    """A model that switches attention on and off between steps, as a guard does."""
    model, build = small_model(bf16=True, fp8_format="hybrid", fp8_dot_product_attention=True)
    tokens, positions, labels = batch(build.config)
    losses = []
    for reason in ("", "held", ""):
        for precision in build.fp8.attention_layers.values():
            precision.suspended = reason
        with torch.no_grad(), build.fp8.not_recording():
            losses.append(model(tokens, positions, labels).sum())
    assert losses[0] == losses[2] != losses[1]


# -- state ----------------------------------------------------------------------------------------


def filled(state):
    for book in state.books:
        book.history[0] = 2.0
    state.sync()
    return state


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()], ids=lambda r: r.name)
def test_scales_come_back(recipe):
    state, again = filled(state_of(recipe)), state_of(recipe)
    assert again.load_state_dict(state.state_dict()) == []
    for path, precision in state.attention_layers.items():
        for view in ("scaling_fwd", "scaling_bwd"):
            ours, theirs = precision.fp8_meta[view], again.attention_layers[path].fp8_meta[view]
            assert torch.equal(ours.scale, theirs.scale)
            assert (ours.scale != 1).all()
            assert torch.equal(ours.amax_history, theirs.amax_history)


def test_columns_have_the_tensors_names():
    state = state_of()
    names = [name for name in state.book.names() if name.startswith(CORE.format(1))]
    short = [name.rpartition(".")[2] for name in names]
    assert [short[i] for i in (2, 3, 8)] == ["qkv", "o", "s"]
    assert [short[9 + i] for i in (0, 3, 5)] == ["dqkv", "do", "dp"]
    assert len(set(names)) == 15


def test_current_scaling_keeps_the_newest_magnitude_of_attention_alone():
    state = state_of(Float8CurrentScaling(fp8_format=Format.E4M3))
    assert state.book is None
    book = state.attention_book
    assert (book.recipe.amax_history_len, book.recipe.amax_compute_algo) == (1, "most_recent")
    assert book.recipe.fp8_format is Format.E4M3
    assert state.books == [book]
    assert set(state.state_dict()["attention"]) == set(state.attention_layers)
    assert "attention" not in state_of().state_dict()


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()], ids=lambda r: r.name)
def test_attention_may_enter_and_leave_fp8_between_runs(recipe):
    without = filled(state_of(recipe, AttentionChoice()))
    state = state_of(recipe)
    (message,) = state.load_state_dict(without.state_dict())
    assert "layers.0-1.self_attention.core_attention: saved with bf16, this run uses" in message
    assert all(
        (precision.fp8_meta["scaling_fwd"].scale == 1).all()
        for precision in state.attention_layers.values()
    )
    if state.book is not None:
        assert torch.equal(state.book.scale[:3], without.book.scale[:3])
    back = state_of(recipe, AttentionChoice())
    (message,) = back.load_state_dict(filled(state).state_dict())
    assert "layers.0-1.self_attention.core_attention: saved with" in message
    assert "this run uses bf16" in message


def test_missing_linear_layers_are_refused_all_the_same():
    saved = filled(state_of()).state_dict()
    del saved["layers"]["decoder.layers.1.mlp.linear_fc1"]
    with pytest.raises(CheckpointError, match="without decoder.layers.1.mlp.linear_fc1"):
        state_of().load_state_dict(saved)


@pytest.mark.parametrize("recipe", list(attention_cases.RECIPES))
def test_the_case_for_a_gpu_runs(recipe):
    assert set(attention_cases.agree(torch.device("cpu"), NativeBackend(), recipe).values()) == {0}


# -- the environment ------------------------------------------------------------------------------


def config(**fields):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    return make_config(**sizes, **fields)


FP8_ATTENTION = {"fp8_format": "hybrid", "fp8_dot_product_attention": True}


def test_transformer_engine_is_told_about_the_backward_pass():
    for flag, told in ((True, "1"), (False, "0")):
        environment = {}
        cfg = config(**FP8_ATTENTION, fp8_dpa_bwd=flag)
        _tell_attention(cfg, "transformer_engine", environment)
        assert environment["NVTE_FP8_DPA_BWD"] == told
        # A second run of the same process may differ.
        other = config(**FP8_ATTENTION, fp8_dpa_bwd=not flag)
        _tell_attention(other, "transformer_engine", environment)
        assert environment["NVTE_FP8_DPA_BWD"] != told
    environment = {}
    _tell_attention(config(**FP8_ATTENTION), "native", environment)
    _tell_attention(config(fp8_format="hybrid"), "transformer_engine", environment)
    assert environment == {}


@pytest.mark.parametrize("backend", ["native", "transformer_engine"])
def test_an_environment_that_says_otherwise_is_an_error(backend):
    with pytest.raises(ConfigError, match="NVTE_FP8_DPA_BWD: got 0 without --no-fp8-dpa-bwd"):
        _tell_attention(config(**FP8_ATTENTION), backend, {"NVTE_FP8_DPA_BWD": "0"})
    _tell_attention(config(**FP8_ATTENTION), backend, {"NVTE_FP8_DPA_BWD": "1"})
    _tell_attention(config(fp8_format="hybrid"), backend, {"NVTE_FP8_DPA_BWD": "0"})


def test_another_recipe_for_attention_in_the_environment_is_an_error():
    environment = {"NVTE_DPA_FP8_RECIPE": "F16"}
    with pytest.raises(ConfigError, match="NVTE_DPA_FP8_RECIPE: got F16.*Unset the variable"):
        _tell_attention(config(**FP8_ATTENTION), "transformer_engine", environment)
    _tell_attention(config(**FP8_ATTENTION), "native", environment)
