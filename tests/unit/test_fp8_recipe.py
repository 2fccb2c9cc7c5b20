"""Recipes are values; a mistake in one is an error."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import make_config
from megatron.core.errors import PrecisionError
from megatron.core.fp8 import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    NVFP4BlockScaling,
    recipe_from_config,
)


def test_defaults():
    delayed = DelayedScaling()
    assert (delayed.margin, delayed.fp8_format) == (0, Format.HYBRID)
    assert (delayed.amax_history_len, delayed.amax_compute_algo) == (1024, "max")
    current = Float8CurrentScaling()
    assert (current.power_2_scale, current.amax_epsilon) == (False, 0.0)


def test_recipes_compare_and_hash_by_value():
    assert DelayedScaling(margin=1) == DelayedScaling(margin=1)
    assert len({DelayedScaling(), DelayedScaling(), DelayedScaling(margin=1)}) == 2
    # Recipes that differ in the algorithm alone are different recipes.
    assert DelayedScaling() != DelayedScaling(amax_compute_algo="most_recent")
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 2


def test_other_spellings():
    assert Float8CurrentScaling(use_power_2_scales=True).power_2_scale
    assert DelayedScaling(fp8_format="e4m3").fp8_format is Format.E4M3


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: DelayedScaling(amax_history_length=4), "amax_history_len"),
        (lambda: DelayedScaling(override_linear_precision=(False,) * 3), "No such field"),
        (lambda: Float8CurrentScaling(margin=3), "margin"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "E4M3"),
        (lambda: DelayedScaling(fp8_format="e3m4"), "e3m4"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "most_recent"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), "amax_epsilon"),
    ],
)
def test_mistakes_are_value_errors(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def config(**fields):
    return make_config(
        world_size=1, num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16,
        max_position_embeddings=16, micro_batch_size=1, mock_data=True, vocab_size=64,
        train_iters=1, lr=1e-3, bf16=True, **fields,
    )  # fmt: skip


def test_recipe_of_a_configuration():
    assert recipe_from_config(config()) is None
    delayed = recipe_from_config(
        config(
            fp8_format="hybrid",
            fp8_margin=1,
            fp8_amax_history_len=16,
            fp8_amax_compute_algo="max",
        )
    )
    assert delayed == DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo="max")
    current = recipe_from_config(config(fp8_format="e4m3", fp8_recipe="tensorwise"))
    assert current == Float8CurrentScaling(fp8_format=Format.E4M3)
    assert recipe_from_config(config(fp4_format="e2m1")) == NVFP4BlockScaling()


def test_recipe_without_native_implementation():
    class Section:
        fp8_format, fp8_recipe = "e4m3", "custom"

    with pytest.raises(PrecisionError, match="--fp8-recipe: got custom"):
        recipe_from_config(Section)
