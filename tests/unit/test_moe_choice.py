"""How tokens choose experts, against a token-by-token account in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.mesh import Axis
from megatron.core.transformer.moe.choice import (
    Choice,
    balanced_scores,
    choose,
    random_logits,
    sinkhorn,
    sinkhorn_choice,
)

ALONE = Axis.single("tp-cp")


def by_hand(logits, rule, bias=None):
    """Experts (a set) and weights (by expert) of one token."""
    count = len(logits)
    if rule.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    elif rule.score_function == "sqrtsoftplus":
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    elif rule.pre_softmax:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = list(logits)
    ranked = [s + (bias[i] if bias else 0) for i, s in enumerate(scores)]
    allowed = set(range(count))
    if rule.num_groups:
        size = count // rule.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(rule.num_groups)]
        best = rule.topk // rule.group_topk
        value = [sum(sorted((ranked[i] for i in g), reverse=True)[:best]) for g in groups]
        kept = sorted(range(len(groups)), key=lambda g: -value[g])[: rule.group_topk]
        allowed = {i for g in kept for i in groups[g]}
    experts = sorted(allowed, key=lambda i: -ranked[i])[: rule.topk]
    weights = {i: scores[i] for i in experts}
    if rule.score_function == "softmax":
        if not rule.pre_softmax:
            total = sum(math.exp(w) for w in weights.values())
            weights = {i: math.exp(w) / total for i, w in weights.items()}
    elif rule.topk > 1:
        total = sum(weights.values()) + 1e-20
        weights = {i: w / total for i, w in weights.items()}
    return {i: w * (rule.scaling_factor or 1) for i, w in weights.items()}


RULES = [
    Choice(2),
    Choice(3, scaling_factor=2.5),
    Choice(1, pre_softmax=True),
    Choice(2, pre_softmax=True, scaling_factor=0.5),
    Choice(2, "sigmoid"),
    Choice(1, "sigmoid"),
    Choice(3, "sqrtsoftplus", scaling_factor=1.5),
    Choice(4, "sigmoid", num_groups=4, group_topk=2),
    Choice(2, num_groups=2, group_topk=1),
    Choice(2, pre_softmax=True, num_groups=4, group_topk=2),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_rule(rule, with_bias):
    if with_bias and rule.score_function == "softmax":
        return  # refused by a rule of the configuration
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 8, generator=generator) * 2
    bias = torch.randn(8, generator=generator) * 0.3 if with_bias else None
    experts, weights = choose(logits, rule, bias)
    assert weights.dtype == torch.float32
    for row, chosen, weight in zip(logits.tolist(), experts.tolist(), weights, strict=True):
        expected = by_hand(row, rule, bias.tolist() if with_bias else None)
        assert set(chosen) == set(expected)
        wanted = torch.tensor([expected[i] for i in chosen])
        # Both are fp32 or better; the oracle works in fp64.
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-7)


def test_the_bias_changes_the_choice_and_not_the_weights():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bias = torch.tensor([9.0, 9.0, 0.0, 0.0])
    experts, weights = choose(logits, Choice(2, "sigmoid"), bias)
    assert set(experts[0].tolist()) == {0, 1}
    scores = logits.sigmoid()[0, experts[0]]
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_weights_carry_the_gradient_of_the_scores():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    for rule in RULES[:7]:
        experts = choose(logits, rule)[0]

        def of_these(x, rule=rule, experts=experts):
            return choose(x, rule)[1].gather(1, experts.argsort(1))

        assert torch.autograd.gradcheck(of_these, (logits,))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-200.0, -60.0, 0.0, 60.0])
def test_balanced_scores_cannot_be_escaped(score_function, dtype, shift):
    """Scores of all experts sum up to 1 even where each one is far below any epsilon."""
    base = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = (base + shift).requires_grad_()
    scores = balanced_scores(logits, score_function)
    torch.testing.assert_close(scores.sum(-1), torch.ones(16, dtype=dtype))
    # With every token on the experts it likes best the loss is at least 1, its value when even.
    loads = torch.bincount(scores.argmax(-1), minlength=4)
    loss = 4 / 16**2 * (scores.sum(0) * loads).sum()
    assert loss >= 1 - 1e-5
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    if shift == -60.0 and score_function != "softmax":
        assert logits.grad.abs().max() > 1e-4


def test_weights_stay_finite_where_scores_vanish():
    for function in ("sigmoid", "sqrtsoftplus"):
        logits = torch.full((3, 4), -200.0, requires_grad=True)
        _, weights = choose(logits, Choice(2, function))
        weights.sum().backward()
        assert torch.isfinite(weights).all()
        assert torch.isfinite(logits.grad).all()


def test_sinkhorn_gives_tokens_and_experts_their_shares():
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 3
    plan = sinkhorn(logits, ALONE, tolerance=1e-7, rounds=1000)
    torch.testing.assert_close(plan.sum(0), torch.full((4,), 1 / 4), rtol=1e-4, atol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64), rtol=1e-4, atol=0)
    assert torch.isfinite(sinkhorn(logits * 1000, ALONE)).all()


def test_sinkhorn_stops_when_the_factors_settle_or_after_its_rounds():
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    settled = sinkhorn(logits, ALONE, tolerance=0.0, rounds=200)
    torch.testing.assert_close(sinkhorn(logits, ALONE), settled, rtol=1e-3, atol=0)
    once = sinkhorn(logits, ALONE, rounds=1)
    assert not torch.allclose(once, settled, rtol=1e-3)


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_balances_only_while_training(topk):
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    logits[:, 0] += 6  # everybody's favourite
    balanced, weights = sinkhorn_choice(logits, topk, ALONE, training=True)
    plain, _ = sinkhorn_choice(logits, topk, ALONE, training=False)
    assert (balanced == 0).sum() < 24 * topk
    assert (plain == 0).sum() == 64
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    torch.testing.assert_close(weights, scores.gather(1, balanced))


def test_random_logits_pass_gradients_on():
    logits = torch.zeros(5, 4, requires_grad=True)
    out = random_logits(logits, torch.Generator().manual_seed(0))
    assert out.std() > 0.5
    (out * torch.arange(4.0)).sum().backward()
    torch.testing.assert_close(logits.grad, torch.arange(4.0).expand(5, 4))
