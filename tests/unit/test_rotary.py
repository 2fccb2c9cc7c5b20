"""Rotary positions: frequencies, rotation, its gradient, and the split of the fused projection."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer.rotary import (
    RotaryEmbedding,
    Rotation,
    apply_rotary,
    inverse_frequencies,
    split_qkv,
)


def embedding(*, kv_channels=16, percent=1.0, base=10000, scaling=False, factor=8.0, longer=None):
    config = SimpleNamespace(
        kv_channels=kv_channels,
        rotary_percent=percent,
        rotary_base=base,
        rotary_seq_len_interpolation_factor=longer,
        use_rope_scaling=scaling,
        rope_scaling_factor=factor,
    )
    return RotaryEmbedding(build=SimpleNamespace(config=config, device=torch.device("cpu")))


def rotation_for(s, b=1, pairs=8, dtype=torch.float32):
    angles = torch.rand(s, b, pairs, dtype=dtype) * 6
    return Rotation(angles.cos(), angles.sin())


def slow_rotate(x, rotation):
    """Pair (i, i + p) of every head as a complex number times exp(i * angle)."""
    p = rotation.cos.shape[-1]
    turned = torch.complex(rotation.cos, rotation.sin)[:, :, None, :]
    pairs = torch.complex(x[..., :p].to(turned.real.dtype), x[..., p : 2 * p].to(turned.real.dtype))
    out = x.to(turned.real.dtype).clone()
    out[..., :p], out[..., p : 2 * p] = (pairs * turned).real, (pairs * turned).imag
    return out


def test_plain_frequencies():
    found = inverse_frequencies(8, 10000.0)
    assert found.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_llama3_scaling_keeps_fast_stretches_slow_and_blends_between():
    plain = inverse_frequencies(128, 500000.0)
    scaled = inverse_frequencies(128, 500000.0, scaling_factor=8.0)
    for one, other in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / one
        if wavelength < 8192 / 4:
            assert other == one
        elif wavelength > 8192:
            assert other == pytest.approx(one / 8, rel=1e-6)
        else:
            blend = (8192 / wavelength - 1) / 3
            assert other == pytest.approx(one / 8 * (1 - blend) + one * blend, rel=1e-5)
    assert 0 < (plain != scaled).sum() < len(plain)


def test_llama3_scaling_equals_huggingface():
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=500000.0, rope_scaling=parameters
    )
    expected, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    found = inverse_frequencies(64, 500000.0, scaling_factor=32.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_angles_are_position_times_frequency_and_equal_rows_share_them():
    rope = embedding()
    rotation = rope(torch.arange(5).expand(3, 5))
    assert rotation.cos.shape == (5, 1, 8)
    expected = torch.outer(torch.arange(5.0), inverse_frequencies(16, 10000.0))
    torch.testing.assert_close(rotation.cos[:, 0], expected.cos())
    torch.testing.assert_close(rotation.sin[:, 0], expected.sin())


def test_interpolated_positions_are_those_of_a_shorter_sequence():
    longer, plain = embedding(longer=4), embedding()
    stretched = longer(torch.arange(0, 20, 4)[None])
    torch.testing.assert_close(stretched.cos, plain(torch.arange(5)[None]).cos)


def test_positions_that_restart_inside_a_row_are_honoured():
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    rotation = embedding()(positions)
    assert rotation.cos.shape == (4, 2, 8)
    assert torch.equal(rotation.sin[2, 1], rotation.sin[0, 0])


def test_the_table_is_no_part_of_a_checkpoint():
    assert embedding().state_dict() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [8, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotation_equals_complex_multiplication(dtype, pairs, batch):
    torch.manual_seed(0)
    x = torch.randn(7, 2, 3, 16).to(dtype)
    rotation = rotation_for(7, batch, pairs)
    found = apply_rotary(x, rotation)
    expected = slow_rotate(x, rotation)
    assert found.dtype == dtype
    # One rounding: in bf16 the result is the rounded fp32 result.
    torch.testing.assert_close(
        found,
        expected.to(dtype),
        rtol=1e-6 if dtype.itemsize == 4 else 0,
        atol=1e-6 if dtype.itemsize == 4 else 2**-9,
    )


def test_rotation_in_several_chunks_equals_one_by_one():
    x = torch.randn(40, 4, 8, 64)
    rotation = rotation_for(40, 1, 32)
    whole = apply_rotary(x, rotation)
    rows = [
        apply_rotary(x[i : i + 1], Rotation(rotation.cos[i : i + 1], rotation.sin[i : i + 1]))
        for i in range(40)
    ]
    assert torch.equal(whole, torch.cat(rows))


def test_gradients_of_the_rotation():
    x = torch.randn(3, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    rotation = rotation_for(3, 1, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, rotation), x)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("groups", "heads"), [(1, 4), (2, 2), (4, 1)])
def test_split_takes_each_groups_queries_key_and_value(groups, heads, rotated):
    torch.manual_seed(1)
    d = 8
    mixed = torch.randn(5, 2, groups * (heads + 2) * d, dtype=torch.float64, requires_grad=True)
    rotation = rotation_for(5, 1, 4, torch.float64) if rotated else None
    query, key, value = split_qkv(mixed, groups, heads, rotation)

    by_group = mixed.view(5, 2, groups, heads + 2, d)
    expected_q = by_group[:, :, :, :heads].reshape(5, 2, groups * heads, d)
    expected_k, expected_v = by_group[:, :, :, heads], by_group[:, :, :, heads + 1]
    if rotation:
        expected_q, expected_k = (
            slow_rotate(expected_q, rotation),
            slow_rotate(expected_k, rotation),
        )
    torch.testing.assert_close(query, expected_q)
    torch.testing.assert_close(key, expected_k)
    assert torch.equal(value, expected_v)

    weights = [torch.randn_like(x) for x in (query, key, value)]
    found = torch.autograd.grad(
        sum((x * w).sum() for x, w in zip((query, key, value), weights, strict=True)), mixed
    )
    expected = torch.autograd.grad(
        sum(
            (x * w).sum()
            for x, w in zip((expected_q, expected_k, expected_v), weights, strict=True)
        ),
        mixed,
    )
    torch.testing.assert_close(found, expected)


def test_relative_positions_are_all_that_scores_see():
    torch.manual_seed(0)
    rope = embedding(base=100)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i, j):
        turned_q = apply_rotary(q, rope(torch.tensor([[i]])))
        turned_k = apply_rotary(k, rope(torch.tensor([[j]])))
        return (turned_q * turned_k).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
