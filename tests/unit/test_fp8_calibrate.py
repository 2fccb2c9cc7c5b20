"""A layer that is held in high precision records what a cast would have recorded."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8 import DelayedScaling, Float8CurrentScaling, Fp8Policy, Fp8State, Role
from megatron.core.fp8.grouped import grouped_linear
from megatron.core.fp8.linear import linear

X = torch.linspace(-3.0, 2.0, 6 * 16).view(6, 16)
WEIGHT = torch.linspace(-0.5, 0.7, 8 * 16).view(8, 16)
DY = torch.linspace(-5.0, 0.1, 6 * 8).view(6, 8)


def held(how="layer", recipe=None):
    state = Fp8State(Fp8Policy(recipe=recipe or DelayedScaling(amax_history_len=4)))
    layer = state.for_linear("decoder.layers.0.a")
    if how == "layer":
        layer.suspended = "it misbehaves"
    elif how == "model":
        state.held = "a loss spike"
    elif how == "off":
        layer.suspended, state.enabled = "it misbehaves", False
    return state, layer


def recorded(layer):
    rows = layer.slots.book.history[0]
    return [float(rows[layer.slots.of(role).index()]) for role in Role]


def weight_of(main_grad):
    weight = torch.nn.Parameter(WEIGHT.clone())
    if main_grad:
        weight.main_grad = torch.zeros_like(weight)
    return weight


@pytest.mark.parametrize("how", ["layer", "model"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_forward_and_backward_are_recorded_and_not_changed(how, main_grad):
    state, layer = held(how)
    x, weight = X.clone().requires_grad_(), weight_of(main_grad)
    y = linear(x, weight, None, layer)
    assert torch.equal(y, X @ WEIGHT.t())
    assert recorded(layer) == [float(X.abs().max()), float(WEIGHT.abs().max()), 0.0]
    y.backward(DY)
    assert torch.equal(x.grad, DY @ WEIGHT)
    expected = [float(t.abs().max()) for t in (X, WEIGHT, DY)]
    assert recorded(layer) == expected
    linear(X / 2, weight, None, layer)  # the largest of all microbatches
    assert recorded(layer) == expected
    state.sync()
    scales = [float(layer.slots.of(role).scale) for role in Role]
    wanted = [limit / amax for limit, amax in zip((448, 448, 57344), expected, strict=True)]
    assert scales == pytest.approx(wanted)
    linear(X / 2, weight, None, layer)
    assert recorded(layer) == [expected[0] / 2, expected[1], 0.0]


def test_what_records_nothing():
    for how in ("off", "nothing"):
        state, layer = held(how)
        if how == "nothing":
            with state.not_recording():  # an evaluation in FP8
                linear(X, weight_of(False), None, layer)
        else:
            linear(X, weight_of(False), None, layer)
        assert recorded(layer) == [0.0, 0.0, 0.0]
    state, layer = held()
    with state.not_recording():
        linear(X, weight_of(False), None, layer)
    assert recorded(layer) == [0.0, 0.0, 0.0]
    _, layer = held(recipe=Float8CurrentScaling())
    linear(X, weight_of(False), None, layer)  # keeps no magnitudes
    assert layer.slots is None


def test_experts():
    state = Fp8State(Fp8Policy(recipe=DelayedScaling(amax_history_len=4)))
    layers = [state.for_linear(f"decoder.layers.0.e.{n}", is_expert=True) for n in range(3)]
    for layer in layers:
        layer.suspended = "they misbehave"
    weights = [torch.nn.Parameter(WEIGHT * (n + 1)) for n in range(3)]
    grouped_linear(X.clone().requires_grad_(), weights, layers, [2, 0, 4]).backward(DY)
    assert recorded(layers[1]) == [0.0, 0.0, 0.0]  # without a token
    for number, rows in ((0, slice(0, 2)), (2, slice(2, 6))):
        seen = (X[rows], WEIGHT * (number + 1), DY[rows])
        assert recorded(layers[number]) == [float(t.abs().max()) for t in seen]
