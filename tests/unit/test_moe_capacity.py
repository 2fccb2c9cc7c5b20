"""Which tokens an expert drops."""

from __future__ import annotations

import pytest
import torch

from megatron.core.mesh import ParallelState
from megatron.core.transformer.moe.capacity import capacity_of, drop_beyond

ONE = ParallelState.single()


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "factor", "expected"),
    [
        (16, 2, 4, 1.0, 8),
        (16, 2, 4, 1.01, 9),
        (5, 1, 4, 1.0, 2),
        (1, 1, 64, 1.0, 1),
        (16, 2, 4, 1e308, 16),
    ],
)
def test_capacity(tokens, topk, experts, factor, expected):
    assert capacity_of(tokens, topk, experts, factor) == expected


def test_the_lowest_weights_are_dropped():
    experts = torch.tensor([[[0]], [[0]], [[1]], [[0]]])
    weights = torch.tensor([[[0.3]], [[0.9]], [[0.1]], [[0.5]]])
    kept = drop_beyond(2, experts, weights, 2, "probs", ONE)
    assert kept.flatten().tolist() == [2, 0, 1, 0]
    kept = drop_beyond(2, experts, weights, 2, "position", ONE)
    assert kept.flatten().tolist() == [0, 0, 1, 2]


def test_equal_weights_are_kept_in_order():
    experts = torch.zeros(6, 1, 1, dtype=torch.long)
    kept = drop_beyond(4, experts, torch.ones(6, 1, 1), 2, "probs", ONE)
    assert kept.flatten().tolist() == [0, 0, 0, 0, 2, 2]


def test_against_a_count_by_expert():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 3, 5, generator=generator).softmax(-1)
    weights, experts = scores.topk(2, dim=-1)
    for policy in ("probs", "position"):
        kept = drop_beyond(9, experts, weights, 5, policy, ONE)
        for expert in range(5):
            wanted = experts.flatten() == expert
            got = kept.flatten() == expert
            assert int(got.sum()) == min(9, int(wanted.sum()))
            assert not bool((got & ~wanted).any())
            lost = wanted & ~got
            if policy == "probs" and lost.any():
                flat = weights.flatten()
                assert flat[lost].max() <= flat[got].min()
            if policy == "position" and lost.any():
                assert lost.nonzero().min() > got.nonzero().max()
