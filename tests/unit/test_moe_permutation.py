"""Tokens to rows by expert, and back."""

from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.moe.permutation import (
    plan_regrouping,
    plan_rows,
    to_rows,
    to_tokens,
    weights_of_rows,
)

# Three experts; 3 stands for a slot without an expert.
EXPERTS = torch.tensor([[2, 0], [0, 3], [1, 2], [3, 3], [0, 1]])
X = torch.arange(5.0).unsqueeze(1) + torch.tensor([[1.0, 100.0]])
WEIGHTS = torch.arange(10.0).view(5, 2) + 1


def test_rows_are_sorted_by_expert_and_token():
    plan = plan_rows(EXPERTS, 0, 3)
    assert plan.counts == [3, 2, 2]
    rows = to_rows(X, plan)
    assert (rows[:, 0] - 1).tolist() == [0, 1, 4, 2, 4, 0, 2]
    assert weights_of_rows(WEIGHTS, plan).tolist() == [2, 3, 9, 5, 10, 1, 6]


def test_experts_of_other_ranks_have_no_rows():
    plan = plan_rows(EXPERTS, 1, 3)
    assert plan.counts == [2, 2]
    assert (to_rows(X, plan)[:, 0] - 1).tolist() == [2, 4, 0, 2]
    back = to_tokens(to_rows(X, plan), plan)
    assert (back[:, 0] / X[:, 0]).tolist() == [1, 0, 2, 0, 1]


def test_filling_up_adds_zero_rows_and_changes_no_result():
    plan, plain = plan_rows(EXPERTS, 0, 3, rows_per_expert=4), plan_rows(EXPERTS, 0, 3)
    assert plan.counts == [4, 4, 4]
    rows, weights = to_rows(X, plan), weights_of_rows(WEIGHTS, plan)
    assert rows.shape[0] == plan.num_rows == 12
    assert rows[3].tolist() == [0, 0]
    assert weights[3] == 0
    torch.testing.assert_close(to_tokens(rows, plan), to_tokens(to_rows(X, plain), plain))


@pytest.mark.parametrize("fill", [None, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_gradients(fill, first):
    plan = plan_rows(EXPERTS, first, 3, fill)
    x = X.double().requires_grad_()
    rows = torch.randn(plan.num_rows, 2, dtype=torch.float64, requires_grad=True)
    weights = WEIGHTS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: to_rows(t, plan), (x,))
    assert torch.autograd.gradcheck(lambda t: to_tokens(t, plan), (rows,))
    assert torch.autograd.gradcheck(lambda t: weights_of_rows(t, plan), (weights,))


def test_no_rows_at_all():
    plan = plan_rows(torch.full((3, 2), 5), 0, 2)
    x = torch.ones(3, 4, requires_grad=True)
    back = to_tokens(to_rows(x, plan), plan)
    back.sum().backward()
    assert plan.counts == [0, 0]
    assert back.abs().sum() == x.grad.abs().sum() == 0


def test_a_token_s_rows_are_added_in_fp32_and_rounded_once():
    plan = plan_rows(torch.tensor([[0, 1, 2]]), 0, 3)
    rows = torch.tensor([[256.0], [0.75], [0.75]], dtype=torch.bfloat16)
    assert to_tokens(rows, plan).item() == 258.0  # one by one it stays at 256


def test_batches_of_rows_are_regrouped_by_expert():
    counts = [[1, 2], [0, 1], [2, 0]]
    plan = plan_regrouping(counts, torch.device("cpu"))
    rows = torch.arange(6.0).unsqueeze(1)
    assert plan.counts == [3, 3]
    assert to_rows(rows, plan).flatten().tolist() == [0, 4, 5, 1, 2, 3]
    assert torch.equal(to_tokens(to_rows(rows, plan), plan), rows)
