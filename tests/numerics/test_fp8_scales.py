"""Scales from magnitudes: delayed scaling's update, current scaling's formula, special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.fp8.amax import AmaxBook
from megatron.core.fp8.formats import E4M3, Format
from megatron.core.fp8.quantizers import CurrentQuantizer
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Role,
    current_scale,
)

NAN, INF = float("nan"), float("inf")
FLT_MAX = torch.finfo(torch.float32).max


def book_with(algorithm="max", length=4, **kwargs):
    """A book of one layer, and its input column."""
    recipe = DelayedScaling(
        fp8_format=Format.E4M3,
        amax_history_len=length,
        amax_compute_algo=algorithm,
        **kwargs,
    )
    book = AmaxBook(recipe)
    return book, book.register("layer").of(Role.INPUT)


def run(book, slot, amaxes):
    """Scale after each step."""
    scales = []
    for amax in amaxes:
        book.history[0, slot.index()] = amax
        book.sync()
        scales.append(slot.scale.item())
    return scales


def history(book, slot):
    return book.history[:, slot.index()].tolist()


def test_first_use_has_scale_one_and_no_history():
    book, slot = book_with()
    assert slot.scale.item() == 1.0
    assert history(book, slot) == [0, 0, 0, 0]


def test_max_over_the_window_and_no_roll_for_an_idle_step():
    book, slot = book_with()
    assert run(book, slot, [2, 8, 4]) == [224, 56, 56]
    assert history(book, slot) == [0, 2, 8, 4]
    assert run(book, slot, [0]) == [56]
    assert history(book, slot) == [0, 2, 8, 4]  # nothing recorded: nothing moves
    assert run(book, slot, [1, 1, 1, 1]) == [56, 56, 112, 448]


def test_newest_is_last_and_the_staging_row_is_empty():
    book, slot = book_with()
    for amax in (3.0, 5.0, 7.0, 11.0, 13.0):
        run(book, slot, [amax])
        assert history(book, slot)[0] == 0
        assert history(book, slot)[-1] == amax
    assert history(book, slot) == [0, 7, 11, 13]


def test_history_of_one():
    book, slot = book_with(length=1)
    assert run(book, slot, [2, 8, 4]) == [224, 56, 112]
    assert history(book, slot) == [0]


def test_most_recent():
    book, slot = book_with("most_recent")
    book.history[:, slot.index()] = torch.tensor([4.0, 0.0, 2.0, 8.0])
    book.sync()
    assert slot.scale.item() == 112
    assert history(book, slot) == [0, 2, 8, 4]


def test_margin_leaves_powers_of_two_free():
    book, slot = book_with(margin=1)
    (scale,) = run(book, slot, [920.0])
    assert scale == pytest.approx(448 / 2 / 920, rel=1e-7)
    assert scale == pytest.approx(0.243478, abs=1e-6)


def test_infinity_freezes_the_scale_while_it_is_in_the_window():
    book, slot = book_with()
    assert run(book, slot, [2, INF, 4, 4, 4, 4]) == [224, 224, 224, 224, 224, 112]


def test_nan_is_no_candidate_for_the_maximum():
    book, slot = book_with()
    assert run(book, slot, [2, NAN, 4]) == [224, 224, 112]


def test_most_recent_keeps_the_scale_at_nan_and_infinity():
    book, slot = book_with("most_recent")
    assert run(book, slot, [2, NAN, INF, 4]) == [224, 224, 224, 112]


@pytest.mark.parametrize("amax", [1e-38, 1e-45])
def test_tiny_magnitude_gives_the_largest_scale_not_infinity(amax):
    book, slot = book_with()
    assert run(book, slot, [amax]) == [FLT_MAX]


def test_backward_columns_use_the_backward_format():
    book = AmaxBook(DelayedScaling(amax_history_len=2))
    slot = book.register("layer").of(Role.GRAD_OUTPUT)
    assert run(book, slot, [2]) == [28672]


def test_unused_columns_never_move():
    book, slot = book_with()
    run(book, slot, [2, 8])
    view = book.register("other").forward
    assert view.amax_history.shape == (4, 3)
    assert view.scale.tolist() == [1, 1, 1]
    output = book.columns("layer", "forward").start + 2
    assert book.scale[output] == 1
    assert book.history[:, output].tolist() == [0, 0, 0, 0]


def test_recording_keeps_the_largest_of_a_step():
    book, slot = book_with()
    for amax in (1.0, 3.0, 2.0):
        slot.record(torch.tensor(amax))
    assert history(book, slot) == [3, 0, 0, 0]


def test_functions_for_amax_and_scale_roll_at_every_update():
    recipe = DelayedScaling(
        fp8_format=Format.E4M3, amax_history_len=4, amax_compute_algo=lambda h: h.amax(0)
    )
    book = AmaxBook(recipe)
    slot = book.register("layer").of(Role.INPUT)
    assert run(book, slot, [2, 8, 4, 0]) == [224, 56, 56, 56]
    assert history(book, slot) == [0, 8, 4, 0]
    assert run(book, slot, [1, 1, 1, 1]) == [56, 112, 448, 448]

    recipe = DelayedScaling(scaling_factor_compute_algo=lambda amax, old, top, r: old * 0 + 3.0)
    book = AmaxBook(recipe)
    slot = book.register("layer").of(Role.INPUT)
    assert run(book, slot, [2]) == [3.0]


# -- current scaling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amax", "plain", "power_of_two"),
    [
        (0.0, 1.0, 1.0),
        (INF, 1.0, 1.0),
        (NAN, 1.0, 1.0),
        (448.0, 1.0, 1.0),
        (2.0, 224.0, 128.0),
        (3.0, 448 / 3, 128.0),
        (1e-38, FLT_MAX, 2.0**127),
        (1e-45, FLT_MAX, 2.0**127),
    ],
)
def test_current_scale_table(amax, plain, power_of_two):
    amax = torch.tensor(amax)
    assert current_scale(amax, 448.0).item() == pytest.approx(plain, rel=1e-7)
    assert current_scale(amax, 448.0, power_2_scale=True).item() == power_of_two
    assert torch.isfinite(current_scale(amax, 448.0))


@pytest.mark.parametrize("power_2_scale", [False, True])
def test_one_number_and_many_take_the_same_scale(power_2_scale):
    bits = torch.randint(0, 0x7FFFFFFF, (2000,), generator=torch.Generator().manual_seed(1))
    amax = bits.to(torch.int32).view(torch.float32)
    together = current_scale(amax, 57344.0, power_2_scale, 1e-20)
    apart = torch.stack([current_scale(a, 57344.0, power_2_scale, 1e-20) for a in amax])
    assert torch.equal(together, apart)


def test_scales_are_one_correctly_rounded_fp32_division():
    amax = torch.rand(2000, generator=torch.Generator().manual_seed(2)) * 100
    want = torch.from_numpy(np.float32(448) / amax.numpy())
    assert torch.equal(current_scale(amax, 448.0), want)
    limits = torch.full_like(amax, 448.0)
    assert torch.equal(DelayedScaling().update_scale(amax, torch.ones(2000), limits), want)


def test_epsilon_is_a_lower_bound():
    assert current_scale(torch.tensor(0.5), 448.0, epsilon=2.0).item() == 224
    assert current_scale(torch.tensor(4.0), 448.0, epsilon=2.0).item() == 112
    assert current_scale(torch.tensor(0.0), 448.0, epsilon=2.0).item() == 224


@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8CurrentScaling(power_2_scale=True)]
)
def test_quantizer_uses_the_scale_of_the_table(recipe):
    quantizer = CurrentQuantizer(recipe, Role.INPUT)
    for amax in (0.0, 1e-45, 1e-38, 3.0, 448.0, 1e38):
        made = quantizer.rowwise(torch.tensor([[amax, 0.0]]))
        want = recipe.scale(torch.tensor(amax), E4M3.max)
        assert made.scale_inv == want.reciprocal()


def test_current_scaling_by_hand():
    quantizer = CurrentQuantizer(Float8CurrentScaling(fp8_format=Format.E4M3), Role.GRAD_OUTPUT)
    made = quantizer.rowwise(torch.tensor([[-920.0, 3.5, 511.0]]))
    assert made.data.tolist() == [[-448, 1.75, 256]]
    torch.testing.assert_close(
        made.dequantize(), torch.tensor([[-920.0, 3.594, 525.71]]), rtol=1e-4, atol=0
    )
    assert quantizer.rowwise(torch.tensor([[INF, 1.0]])).data.tolist() == [[448, 1]]
    nan = quantizer.rowwise(torch.tensor([[NAN, 2.0]]))
    assert nan.scale_inv.item() == pytest.approx(1 / 224)
    assert torch.isnan(nan.data[0, 0])
    assert nan.data[0, 1] == 448
    zero = quantizer.rowwise(torch.zeros(2, 2))
    assert (zero.scale_inv.item(), zero.data.abs().max().item()) == (1, 0)


def test_hybrid_gradients_use_e5m2():
    quantizer = CurrentQuantizer(Float8CurrentScaling(), Role.GRAD_OUTPUT)
    made = quantizer.rowwise(torch.tensor([[2.0]]))
    assert made.fmt.name == "e5m2"
    assert made.scale_inv.item() == pytest.approx(1 / 28672)


def test_colwise_is_the_transpose_of_rowwise():
    quantizer = CurrentQuantizer(Float8CurrentScaling(), Role.WEIGHT)
    x = torch.randn(5, 3)
    row, col = quantizer.rowwise(x), quantizer.colwise(x)
    assert col.shape == (3, 5)
    assert torch.equal(row.dequantize().t(), col.dequantize())
