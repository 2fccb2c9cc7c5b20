"""Both dispatchers against arithmetic on one process, down to ranks that no token is sent to."""

from __future__ import annotations

import pytest
import torch
from distpool import run_ranks

from megatron.core.fp8.recipe import Role
from megatron.core.fp8.row_codec import row_codec
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.transformer.moe.dispatcher import DISPATCHERS
from megatron.core.transformer.moe.journey import PLAIN, Journeys
from megatron.core.transformer.moe.router import Routing
from tests.small_models import LLAMA, batch, build_model, small_config

EXPERTS, TOPK, TOKENS, HIDDEN = 4, 2, 6, 40


def tokens_of(rank):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))


def routing_of(rank, kind):
    """Experts and weights of a rank's tokens; 4 stands for a token that was dropped."""
    generator = torch.Generator().manual_seed(100 + rank)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    if kind == "skewed":
        scores[:, :2] += 2  # nothing for the last two experts
    weights, experts = scores.topk(TOPK, dim=-1)
    if kind == "dropped":
        experts = experts.masked_fill(torch.rand(TOKENS, TOPK, generator=generator) < 0.4, EXPERTS)
    return experts, weights


class Rounded(torch.autograd.Function):
    """What a codec leaves of tokens in the forward, and of gradients in the backward pass."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.codec = backward
        return Rounded.of(x, forward)

    @staticmethod
    def backward(ctx, grad):
        return Rounded.of(grad, ctx.codec), None, None

    @staticmethod
    def of(x, codec):
        if codec is None:
            return x.clone()
        return codec.unpack(codec.pack(x), HIDDEN).dequantize()


def by_hand(rank, kind, journeys):
    """Output of a rank, and gradients of its tokens and weights for the sum of squares."""
    x, (experts, weights) = tokens_of(rank).requires_grad_(), routing_of(rank, kind)
    weights = weights.requires_grad_()
    factor = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])[experts]
    sent = Rounded.apply(x, journeys.tokens, None)
    out = ((factor * weights).sum(1, keepdim=True) * sent.square()) / 2
    out = Rounded.apply(out, None, journeys.gradients)
    out.square().sum().backward()
    return out.detach(), x.grad, weights.grad


JOURNEYS = {
    "plain": PLAIN,
    "fp8": Journeys(
        row_codec("mxfp8", None, Role.INPUT, fold=True),
        row_codec("blockwise", None, Role.GRAD_OUTPUT, fold=False),
    ),
}


def dispatched(rank, world, name, kind, ep, etp, fill, form):
    mesh = ParallelState.build(MeshSizes(world=world, ep=ep, etp=etp), rank, world)
    x, (experts, weights) = tokens_of(rank).requires_grad_(), routing_of(rank, kind)
    weights = weights.requires_grad_()
    dispatcher = DISPATCHERS[name](mesh, EXPERTS, JOURNEYS[form])
    sent = dispatcher.dispatch(x, Routing(experts, weights), fill)
    assert sum(sent.tokens_per_expert) == sent.rows.shape[0]
    first = mesh.ep.rank * (EXPERTS // ep)
    factor = torch.tensor([float(first + i + 1) for i, n in enumerate(sent.tokens_per_expert)
                           for _ in range(n)])  # fmt: skip
    # Ranks that share an expert have a part of its result each.
    part = torch.tensor([0.25, 0.75])[mesh.etp.rank] if etp == 2 else 1.0
    results = part * (factor * sent.weights).unsqueeze(1) * sent.rows.square() / 2
    out = dispatcher.combine(results, sent)
    out.square().sum().backward()
    for found, expected in zip(
        (out, x.grad, weights.grad), by_hand(rank, kind, JOURNEYS[form]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return sent.tokens_per_expert


@pytest.mark.parametrize("name", list(DISPATCHERS))
@pytest.mark.parametrize(
    ("kind", "form"),
    [("even", "plain"), ("skewed", "plain"), ("dropped", "plain"), ("skewed", "fp8")],
)
@pytest.mark.parametrize(
    ("world", "ep", "etp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)], ids=["ep2", "etp2", "ep2-etp2"]
)
def test_tokens_come_back_with_their_experts_results(name, kind, world, ep, etp, form):
    counts = run_ranks(dispatched, world, name, kind, ep, etp, None, form)
    if kind == "skewed" and ep == 2:
        assert sum(counts[-1]) == 0  # a rank without any token
    filled = run_ranks(dispatched, world, name, kind, ep, etp, TOKENS, form)
    assert {count for rank in filled for count in rank} == {TOKENS * ep * etp}


def logits(rank, world, lengths):
    """Logits of sequences of any length, as generation has them."""
    config = small_config(
        world,
        **{**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 48, "seq_length": 8},
        tensor_model_parallel_size=world,
    )
    mesh = ParallelState.build(config, rank, world) if world > 1 else ParallelState.single()
    model, _ = build_model(config, mesh)
    model.eval()
    tokens, positions, _ = batch(config)
    with torch.no_grad():
        return [model(tokens[:, :n], positions[:, :n]) for n in lengths]


def test_tensor_parallel_ranks_share_sequences_of_any_length():
    lengths = (1, 3, 8)
    (expected,) = run_ranks(logits, 1, lengths)
    shards = run_ranks(logits, 2, lengths)
    for i, whole in enumerate(expected):
        found = torch.cat([rank[i] for rank in shards], dim=-1)
        # The order of fp32 additions.
        torch.testing.assert_close(found[..., :50], whole[..., :50], rtol=1e-4, atol=1e-5)
