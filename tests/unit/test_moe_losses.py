"""Balancing losses: their values by hand, their gradients, and how they enter a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.auxiliary import Auxiliary
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.random import RngStreams, checkpoint
from megatron.core.transformer.moe import losses

ONE = ParallelState.single()
CPU = torch.device("cpu")


def test_the_balancing_loss_of_two_tokens():
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]])
    experts = torch.tensor([[0, 1], [1, 2]])
    loads = losses.count_tokens(experts, 3)
    assert loads.tolist() == [1, 2, 1]
    # E / (k T^2) * (0.6 * 1 + 1.0 * 2 + 0.4 * 1)
    value = losses.balance_loss(scores, loads, 2, 2)
    assert value.item() == pytest.approx(3 / (2 * 4) * 3.0)


def test_an_even_load_has_loss_one():
    scores = torch.full((8, 4), 0.25)
    experts = torch.arange(8).unsqueeze(1) % 4
    assert losses.balance_loss(scores, losses.count_tokens(experts, 4), 8, 1).item() == 1.0
    assert losses.sequence_balance_loss(scores, experts, (4, 2), ONE).item() == 1.0


def test_the_loss_by_sequence_is_the_mean_over_sequences():
    generator = torch.Generator().manual_seed(0)
    s, b, count, topk = 6, 3, 4, 2
    scores = torch.randn(s * b, count, generator=generator).softmax(-1)
    experts = scores.topk(topk).indices
    value = losses.sequence_balance_loss(scores, experts, (s, b), ONE)
    each = []
    for i in range(b):  # tokens run through positions first, sequences last
        own, chosen = scores[i::b], experts[i::b]
        each.append(losses.balance_loss(own, losses.count_tokens(chosen, count), s, topk))
    torch.testing.assert_close(value, torch.stack(each).mean())


def test_z_loss():
    logits = torch.randn(5, 4)
    expected = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(losses.z_loss(logits, 5), expected)


def test_an_attached_term_adds_its_scaled_gradient_and_no_value():
    state = Auxiliary()
    state.start(gradient_scale=3.0)
    x = torch.ones(2, requires_grad=True)
    y = state.attach(x * 2, x.square().sum())
    assert y.tolist() == [2.0, 2.0]
    y.sum().backward()
    assert x.grad.tolist() == [2 + 3 * 2, 2 + 3 * 2]
    assert state.attach(x, None) is x


def test_the_scale_of_a_term_is_that_of_its_backward():
    """Backward of one microbatch may run after the forward of the next."""
    state = Auxiliary()
    x = torch.ones(1, requires_grad=True)
    y = state.attach(x, x.sum())
    state.start(gradient_scale=5.0)
    y.sum().backward()
    assert x.grad.item() == 1 + 5


def test_sums_of_a_step():
    state = Auxiliary()
    state.add_loss("z_loss", 2, torch.tensor(1.5))
    state.add_loss("z_loss", 2, torch.tensor(0.5))
    state.add_load(0, torch.tensor([1.0, 3.0]))
    assert state.losses(["other", "z_loss"], 3, CPU).tolist() == [[0, 0, 0], [0, 0, 2.0]]
    assert state.loads(2, 2, CPU).tolist() == [[1, 3], [0, 0]]
    state.start(1.0)
    assert state.losses(["z_loss"], 3, CPU).sum() == 0


def test_the_mean_over_microbatches_so_far():
    state = Auxiliary()
    one, two = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 2.0])
    assert state.running_mean(0, 0, one).tolist() == [4, 0]
    assert state.running_mean(0, 1, two).tolist() == [2, 1]
    assert state.running_mean(5, 0, two).tolist() == [0, 2]
    with state.recompute_contexts()[1]:  # what the first forward of microbatch 0 saw
        assert state.running_mean(0, 0, torch.zeros(2)).tolist() == [4, 0]
    state.start(1.0)
    assert state.running_mean(0, 0, two).tolist() == [0, 2]


def test_a_recomputed_forward_reports_once():
    state, rng = Auxiliary(), RngStreams(0)
    weight = nn.Parameter(torch.ones(3))

    def layer(x):
        state.add_loss("a", 0, (x * weight).sum())
        state.add_load(0, torch.ones(2))
        return state.attach((x * weight).exp(), (x * weight).sum())

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, rng=rng, also=(state,)).sum().backward()
    grad, weight.grad = weight.grad, None
    assert state.losses(["a"], 1, CPU).item() == 3.0
    assert state.loads(1, 2, CPU).tolist() == [[1, 1]]
    layer(x).sum().backward()
    assert torch.equal(grad, weight.grad)
