"""Policy and state: who gets FP8 and why, the table, and what a checkpoint carries."""

from __future__ import annotations

import pytest
import torch

from megatron.config import make_config
from megatron.core.errors import CheckpointError, PrecisionError
from megatron.core.fp8 import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    Fp8Policy,
    Fp8State,
    Role,
)

DELAYED = DelayedScaling(amax_history_len=4)


def state_of(recipe=DELAYED, paths=("decoder.layers.0.a", "decoder.layers.1.a"), **policy):
    state = Fp8State(Fp8Policy(recipe=recipe, **policy))
    for path in paths:
        state.for_linear(path)
    return state


def trained(recipe=DELAYED):
    state = state_of(recipe)
    if state.book is not None:
        for amax in (2.0, 8.0, 4.0):
            state.book.history[0] = amax
            state.sync()
    return state


# -- policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()], ids=lambda r: r.name)
def test_first_and_last_layers_in_bf16_with_every_recipe(recipe):
    policy = Fp8Policy(recipe=recipe, num_layers=6, first_in_bf16=1, last_in_bf16=2)
    kept = [policy.decide(f"decoder.layers.{i}.mlp.linear_fc1").recipe is None for i in range(6)]
    assert kept == [True, False, False, False, True, True]
    reason = policy.decide("decoder.layers.5.mlp.linear_fc1").reason
    assert reason == "--first-last-layers-bf16: among the last 2 layers"


def test_layer_number_outside_the_model():
    policy = Fp8Policy(recipe=DELAYED, num_layers=4)
    with pytest.raises(PrecisionError, match="got 5.*numbered from 1 to 4"):
        policy.decide("decoder.layers.4.mlp.linear_fc1")


def test_output_layer_and_switched_off():
    assert Fp8Policy(recipe=DELAYED).decide("output_layer").recipe is None
    assert Fp8Policy(recipe=DELAYED).decide("output_layer").reason
    assert "--fp8-format" in Fp8Policy().decide("decoder.layers.0.a").reason


# -- table ----------------------------------------------------------------------------------------


def test_rows_say_what_runs_and_why():
    state = state_of(num_layers=2, first_in_bf16=1, wgrad=False)
    rows = state.rows()
    assert [(r.path[-3], r.gemm, r.delivered) for r in rows] == [
        ("0", "fprop", "bf16"),
        ("0", "dgrad", "bf16"),
        ("0", "wgrad", "bf16"),
        ("1", "fprop", "fp8 e4m3xe4m3 delayed"),
        ("1", "dgrad", "fp8 e5m2xe4m3 delayed"),
        ("1", "wgrad", "bf16"),
    ]
    assert not any(row.is_fallback for row in rows)
    assert rows[3].kernel.startswith("emulated e4m3xe4m3")
    assert rows[5].reason == "--no-fp8-wgrad"


def test_a_switched_off_state_is_a_fallback():
    state = state_of()
    state.enabled = False
    row = state.rows()[0]
    assert row.is_fallback
    assert row.delivered == "bf16"
    assert "switched off" in row.reason


def test_exact_emulation_is_named():
    state = Fp8State(Fp8Policy(recipe=DELAYED), emulation="exact")
    assert state.for_linear("a").row().kernel == "emulated e4m3xe4m3 fp32 GEMM"
    with pytest.raises(PrecisionError, match="--fp8-emulation: got sloppy"):
        Fp8State(Fp8Policy(), emulation="sloppy")


def test_from_a_configuration():
    cfg = make_config(
        world_size=1, num_layers=3, hidden_size=32, num_attention_heads=2, seq_length=16,
        max_position_embeddings=16, micro_batch_size=1, mock_data=True, vocab_size=64,
        train_iters=1, lr=1e-3, bf16=True, fp8_format="e4m3", fp8_recipe="tensorwise",
        first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, fp8_wgrad=False,
        fp8_emulation="exact",
    )  # fmt: skip
    state = Fp8State.from_config(cfg)
    assert state.recipe == Float8CurrentScaling(fp8_format=Format.E4M3)
    assert (state.policy.first_in_bf16, state.policy.last_in_bf16) == (2, 1)
    assert (state.policy.wgrad, state.policy.num_layers) == (False, 3)
    assert state.emulation == "exact"
    assert state.params_dtype == torch.bfloat16
    assert state.book is None


def test_disabled_state():
    state = Fp8State.disabled()
    precision = state.for_linear("decoder.layers.0.a")
    assert not precision.active
    assert not precision.wants_fp32_norm
    assert precision.fp8_meta["recipe"] is None
    state.sync()
    assert state.load_state_dict(state.state_dict()) == []
    with pytest.raises(KeyError):
        precision.quantizer(Role.INPUT)


# -- steps ----------------------------------------------------------------------------------------


def test_not_recording_is_restored_after_an_error():
    state = state_of()
    with pytest.raises(KeyError), state.not_recording():
        {}[state.recording]
    assert state.recording
    with state.not_recording():
        assert not state.recording


def test_a_discarded_step_leaves_no_trace():
    state = trained()
    scale, history = state.book.scale.clone(), state.book.history.clone()
    state.book.history[0] = float("inf")
    state.discard()
    assert torch.equal(state.book.scale, scale)
    assert torch.equal(state.book.history, history)
    state.book.history[0] = 4.0
    state.sync()
    assert torch.isfinite(state.book.history).all()


# -- checkpoint -----------------------------------------------------------------------------------


def test_round_trip():
    saved, fresh = trained().state_dict(), state_of()
    assert saved["recipe"] == "delayed"
    assert set(saved["layers"]) == {"decoder.layers.0.a", "decoder.layers.1.a"}
    assert fresh.load_state_dict(saved) == []
    assert torch.equal(fresh.book.scale, trained().book.scale)
    assert torch.equal(fresh.book.history, trained().book.history)
    assert fresh.state_dict().keys() == saved.keys()


def test_a_state_that_never_ran_saves_the_same_keys():
    fresh, used = state_of().state_dict(), trained().state_dict()
    assert fresh["layers"].keys() == used["layers"].keys()


@pytest.mark.parametrize("empty", [None, {}])
def test_checkpoint_without_fp8(empty):
    (message,) = state_of().load_state_dict(empty)
    assert "the checkpoint has none" in message
    assert state_of(Float8CurrentScaling()).load_state_dict(empty)
    assert Fp8State.disabled().load_state_dict(empty) == []


def test_other_recipe_drops_the_state_and_says_so():
    (message,) = state_of().load_state_dict(trained(Float8CurrentScaling()).state_dict())
    assert "saved with recipe tensorwise, this run uses delayed" in message
    (message,) = Fp8State.disabled().load_state_dict(trained().state_dict())
    assert "not in FP8" in message


def test_other_format_converts_the_scales():
    fresh = state_of(DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3))
    (message,) = fresh.load_state_dict(trained().state_dict())
    assert "hybrid" in message
    backward = fresh.book.columns("decoder.layers.0.a", "backward")
    assert fresh.book.scale[backward].tolist() == [56, 56]  # 448 / 8, was 57344 / 8
    assert fresh.book.history[:, backward][:, 0].tolist() == [0, 2, 8, 4]


def test_missing_layers():
    more = state_of(paths=("decoder.layers.0.a", "decoder.layers.2.a", "decoder.layers.3.a"))
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.2\.a, decoder\.layers\.3\.a"):
        more.load_state_dict(trained().state_dict())


# -- experts --------------------------------------------------------------------------------------


def experts_of(numbers, length=4, **recipe):
    state = Fp8State(Fp8Policy(recipe=DelayedScaling(amax_history_len=length, **recipe)))
    state.for_linear("decoder.layers.0.mlp.router_dense")
    for number in numbers:
        state.for_linear(f"decoder.layers.0.mlp.experts.linear_fc1.{number}", is_expert=True)
    return state


def trained_experts(numbers):
    state = experts_of(numbers)
    for _ in range(3):
        for column, number in enumerate(numbers):
            for direction in ("forward", "backward"):
                path = state.expert_book.paths()[column]
                state.expert_book.history[0, state.expert_book.columns(path, direction)] = (
                    number + 2
                )
        state.sync()
    return state


def test_experts_keep_their_scales_in_a_book_of_their_own():
    state = trained_experts([0, 1])
    assert len(state.book.paths()) == 1
    assert state.expert_book.scale[:6].tolist() == [224] * 3 + [pytest.approx(448 / 3)] * 3
    assert state.book.scale.tolist() == [1] * 5
    state.expert_book.history[0] = 100
    state.discard()
    assert state.expert_book.history[0].abs().max() == 0


def test_experts_are_saved_as_groups_and_loaded_in_any_distribution():
    whole = trained_experts([0, 1, 2, 3])
    saved = whole.state_dict()
    group = saved["experts"]["decoder.layers.0.mlp.experts.linear_fc1"]
    assert group["numbers"] == [0, 1, 2, 3]
    assert group["scale_fwd"].shape == (4, 3)
    assert group["amax_history_bwd"].shape == (4, 4, 2)
    for numbers in ([2, 3], [1]):
        part = experts_of(numbers)
        assert part.load_state_dict(saved) == []
        for path in part.expert_book.paths():
            columns = part.expert_book.columns(path, "backward")
            there = whole.expert_book.columns(path, "backward")
            assert torch.equal(part.expert_book.scale[columns], whole.expert_book.scale[there])
            assert torch.equal(
                part.expert_book.history[:, columns], whole.expert_book.history[:, there]
            )


def test_missing_experts_are_listed():
    saved = trained_experts([0, 1]).state_dict()
    with pytest.raises(CheckpointError, match=r"without .*linear_fc1\.2, .*linear_fc1\.3"):
        experts_of([1, 2, 3]).load_state_dict(saved)
    del saved["experts"]  # of a model without experts
    with pytest.raises(CheckpointError, match=r"linear_fc1\.1"):
        experts_of([1]).load_state_dict(saved)


def test_expert_state_follows_history_length_and_format():
    saved = trained_experts([0, 1]).state_dict()
    other = experts_of([1], length=2, fp8_format=Format.E4M3)
    messages = other.load_state_dict(saved)
    assert len(messages) == 2
    assert other.expert_book.history[:, 0].tolist() == [0, 3]
    assert other.expert_book.scale[3] == pytest.approx(448 / 3)  # was 57344 / 3


def test_recompute_replays_the_scales_of_experts():
    state = trained_experts([0])
    slot = state.layers[state.expert_book.paths()[0]].slots.of(Role.INPUT)
    first, again = state.recompute_contexts()
    with first:
        before = float(slot.scale)
    state.expert_book.history[0] = 100.0
    state.sync()
    with again:
        assert float(slot.scale) == before
        assert not state.recording
    assert float(slot.scale) != before


def test_a_suspended_layer_runs_in_high_precision_and_is_no_fallback():
    state = trained()
    layer = state.layers["decoder.layers.1.a"]
    layer.suspended = "its maxima jump"
    assert not layer.active
    assert state.layers["decoder.layers.0.a"].active
    row = layer.row()
    assert (row.delivered, row.reason, row.is_fallback) == ("bf16", "its maxima jump", False)


def test_suspended_layers_stay_suspended_after_resume():
    state = trained()
    state.layers["decoder.layers.1.a"].suspended = "its maxima jump"
    for recipe in (DELAYED, Float8CurrentScaling()):
        resumed = state_of(recipe)
        resumed.load_state_dict(state.state_dict())
        assert resumed.suspended() == {"decoder.layers.1.a": "its maxima jump"}
