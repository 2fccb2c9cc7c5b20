"""Causal attention against an fp64 oracle: values, gradients, dropout, cached keys."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fp8 import Fp8State
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer import attention_kernel
from megatron.core.transformer.attention_kernel import causal_attention
from megatron.core.transformer.core_attention import NativeCoreAttention

# (queries, keys, batch, heads, groups, head size): one chunk, several, cached keys, one query,
# grouped and multi-query heads, more batch x groups than are worked on at once.
SHAPES = [
    (5, 5, 2, 2, 2, 4),
    (150, 150, 2, 4, 2, 8),
    (7, 20, 3, 6, 1, 4),
    (1, 9, 1, 4, 4, 8),
    (130, 130, 2, 12, 12, 8),
    (33, 33, 9, 2, 1, 16),
]


def tensors(shape, dtype=torch.float64, seed=0):
    s, t, b, n, g, d = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(s, b, n, d), (t, b, g, d), (t, b, g, d)]
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


def oracle(query, key, value, scale, keep=None, starts=None):
    """Plain softmax attention in fp64 with repeated key and value heads."""
    q, k, v = (x.double() for x in (query, key, value))
    s, b, n, d = q.shape
    t, g = k.shape[0], k.shape[2]
    k, v = k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * scale
    hidden = torch.arange(t)[None, :] > torch.arange(t - s, t)[:, None]
    if starts is not None:
        hidden = hidden | (torch.arange(t) < starts[:, None, :, None])
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    if keep is not None:
        weights = weights * keep
    return torch.einsum("bnst,tbnd->sbnd", weights, v).reshape(s, b, n * d)


def gradients(out, inputs, seed=1):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    return torch.autograd.grad(out, inputs, weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp64_values_and_gradients_equal_the_oracle(shape):
    inputs = tensors(shape)
    found = causal_attention(*inputs, scale=0.3)
    expected = oracle(*inputs, 0.3)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_bf16_error_is_that_of_rounding_the_results():
    """Scores up to 40 in size: rounding them to bf16 would cost whole percents of probability."""
    inputs = tensors((192, 192, 1, 2, 2, 64), torch.bfloat16)
    with torch.no_grad():
        inputs[0].mul_(8)
    found = causal_attention(*inputs, scale=0.125)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle(*wide, 0.125)
    assert relative_error(found, expected) < 2.0e-3  # bf16 keeps 8 bits: 2^-9 / sqrt(3) = 1.1e-3
    d_out = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    ours = torch.autograd.grad(found, inputs, d_out)
    theirs = torch.autograd.grad(expected, wide, d_out.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one, other) < 2.0e-3


def test_it_is_no_less_accurate_than_torch_attention():
    inputs = tensors((160, 160, 1, 4, 4, 64), torch.bfloat16)
    expected = oracle(*inputs, 0.125)
    library = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in inputs), is_causal=True, scale=0.125
    )
    library = library.permute(2, 0, 1, 3).reshape(expected.shape)
    ours = causal_attention(*inputs, scale=0.125)
    assert relative_error(ours, expected) <= relative_error(library, expected) * 1.01


def test_inputs_may_be_views_and_grads_come_back_in_their_shape():
    mixed = torch.randn(20, 2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    query, key, value = (mixed[:, :, i] for i in range(3))
    found = causal_attention(query, key, value, scale=0.5)
    expected = oracle(query, key, value, 0.5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, mixed), gradients(expected, mixed))


def test_future_tokens_have_no_influence():
    query, key, value = tensors((50, 50, 1, 2, 2, 8))
    before = causal_attention(query, key, value, scale=0.4)[:30]
    with torch.no_grad():
        key[30:], value[30:], query[30:] = 7.0, -3.0, 2.0
    assert torch.equal(before, causal_attention(query, key, value, scale=0.4)[:30])


def test_huge_scores_stay_finite():
    query, key, value = tensors((20, 20, 1, 1, 1, 8), torch.float32)
    out = causal_attention(query * 1e4, key * 1e4, value, scale=1.0)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(out, (query, key, value)))


def captured_masks(monkeypatch, shape, dropout, seed):
    """The factors that a call draws, put together to `[b, n, s, t]`."""
    query, key, value = tensors(shape)
    s, t, b, n, g, _ = shape
    full = torch.zeros(b, g, s, n // g, t, dtype=torch.float64)
    plans = []

    class Spy(attention_kernel.Plan):
        def __init__(self, *args):
            super().__init__(*args)
            plans.append(self)
            self.where = ((p, c) for p in self.parts() for c in self.chunks(p))

        def probabilities(self, q, k, chunk):
            weights, keep = super().probabilities(q, k, chunk)
            part, chunk = next(self.where)
            rows = slice(chunk.rows.start // self.r, chunk.rows.stop // self.r)
            window = full[part][:, :, rows, :, chunk.keys]
            window.copy_(keep.view(window.shape))
            return weights, keep

    monkeypatch.setattr(attention_kernel, "Plan", Spy)
    out = causal_attention(query, key, value, scale=0.3, dropout=dropout, seed=seed)
    keep = full.transpose(2, 3).reshape(b, n, s, t)
    return (query, key, value), out, keep.clone(), plans


@pytest.mark.parametrize("shape", [(70, 70, 2, 4, 2, 8), (70, 70, 3, 10, 10, 4)])
def test_dropout_drops_weights_and_backward_draws_the_same_masks(monkeypatch, shape):
    inputs, out, keep, plans = captured_masks(monkeypatch, shape, 0.25, seed=11)
    expected = oracle(*inputs, 0.3, keep)
    torch.testing.assert_close(out, expected)
    for one, other in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert len(plans) == 2  # forward and backward
    seen = keep[:, :, torch.ones(70, 70, dtype=torch.bool).tril()]
    assert set(seen.unique().tolist()) == {0.0, 1 / 0.75}
    assert (seen == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


def module(dropout=0.0, tp_rank=0, seed=5):
    axis = Axis.single("cp")
    mesh = SimpleNamespace(tp=SimpleNamespace(rank=tp_rank), dp=axis, cp=axis)
    config = SimpleNamespace(
        kv_channels=16, attention_dropout=dropout, cp_comm_type=("p2p",), fp8_cp_exchange=True
    )
    rng, fp8 = RngStreams(seed, mesh), Fp8State.disabled()
    path = "layers.0.core_attention"
    build = SimpleNamespace(config=config, mesh=mesh, rng=rng, fp8=fp8, path=path)
    return NativeCoreAttention(build=build, layer_number=1), rng


def test_module_scales_by_the_head_size():
    inputs = tensors((9, 9, 2, 4, 2, 16))
    attention, _ = module()
    torch.testing.assert_close(attention(*inputs), oracle(*inputs, 0.25))


def test_module_dropout_depends_on_position_and_rank_and_stops_in_eval():
    inputs = tensors((16, 16, 1, 2, 2, 16), torch.float32)
    attention, rng = module(0.5)
    first = attention(*inputs)
    assert torch.equal(first, attention(*inputs))
    rng.position = (0, 1)
    assert not torch.equal(first, attention(*inputs))
    rng.position = (0, 0)
    assert torch.equal(first, attention(*inputs))
    assert not torch.equal(first, module(0.5, tp_rank=1)[0](*inputs))
    attention.eval()
    assert torch.equal(attention(*inputs), module(0.0)[0](*inputs))


def starts_of(*rows):
    """`[b, s]` from the lengths of each sequence's documents."""
    found = []
    for lengths in rows:
        ends = list(itertools.accumulate(lengths))
        found.append([end - n for end, n in zip(ends, lengths, strict=True) for _ in range(n)])
    return torch.tensor(found)


# Two sequences of 150: many documents, of one token too, and borders on and off the chunks' edges.
PACKED = starts_of([64, 1, 1, 30, 54], [3, 125, 22])


def packed_inputs(dtype=torch.float64):
    return tensors((150, 150, 2, 4, 2, 8), dtype)


def by_document(query, key, value, scale, starts):
    """The CUDA path, which torch's library also runs on a CPU."""
    block = attention_kernel.Block(scale)
    return attention_kernel._attention_by_document(query, key, value, starts, block)


def chunked(query, key, value, scale, starts):
    return causal_attention(query, key, value, scale=scale, starts=starts)


def in_blocks(query, key, value, scale, starts):
    """Keys in three blocks of unequal size, joined by the online softmax; no gradient."""
    out, lse = torch.zeros_like(query), torch.full((*query.shape[:3], 1), -torch.inf)
    lse = lse.to(query.dtype)
    for first, last in ((70, 150), (0, 64), (64, 70)):
        block = attention_kernel.Block(scale, -first, starts - first)
        attention_kernel.accumulate(query, key[first:last], value[first:last], block, out, lse)
    return out.flatten(2)


@pytest.mark.parametrize("attend", [chunked, by_document])
def test_documents_equal_the_oracle(attend):
    inputs = packed_inputs()
    found = attend(*inputs, 0.3, PACKED)
    expected = oracle(*inputs, 0.3, starts=PACKED)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("attend", [chunked, by_document, in_blocks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_documents_do_not_change_a_bit(attend, dtype):
    if attend is in_blocks and dtype == torch.bfloat16:
        pytest.skip("accumulates in the working dtype")
    query, key, value = (x.detach() for x in packed_inputs(dtype))
    before = attend(query, key, value, 0.3, PACKED)
    for x in (query, key, value):
        x[:66, 0] = -3.0
        x[:3, 1] = 50.0
    after = attend(query, key, value, 0.3, PACKED)
    assert torch.equal(before[66:, 0], after[66:, 0])
    assert torch.equal(before[3:, 1], after[3:, 1])
    assert not torch.equal(before[:66, 0], after[:66, 0])


def test_the_cost_of_documents_is_linear():
    """Documents of 100 tokens: twice the sequence, twice the scores."""

    def scores(s):
        query = torch.zeros(s, 1, 1, 1)
        block = attention_kernel.Block(1.0, 0, starts_of([100] * (s // 100)))
        plan = attention_kernel.Plan(query, query, block)
        return sum(
            (c.rows.stop - c.rows.start) * (c.keys.stop - c.keys.start)
            for part in plan.parts()
            for c in plan.chunks(part)
        )

    assert scores(4000) == pytest.approx(2 * scores(2000), rel=0.05)
    assert scores(4000) < 4000 * 200


def blocks(s, pieces, dropout=0.0, starts=None):
    """(rows, keys, Block) of queries and keys cut in `pieces`."""
    size = s // pieces
    for i, j in itertools.product(range(pieces), range(pieces)):
        rows, keys = (slice(x * size, (x + 1) * size) for x in (i, j))
        mine = None if starts is None else starts[:, rows] - j * size
        yield rows, keys, attention_kernel.Block(0.3, (i - j) * size, mine, dropout, 7 * i + j)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("starts", [None, PACKED])
def test_blocks_of_keys_add_up_to_the_oracle(monkeypatch, dropout, starts):
    """Values and gradients, with the dropout factors that the blocks really drew."""
    query, key, value = inputs = packed_inputs()
    full = torch.ones(2, 2, 150, 2, 150, dtype=torch.float64)  # [b, g, s, r, t]
    where = []

    class Spy(attention_kernel.Plan):
        def scores(self, q, k, chunk):
            where.append(chunk)
            return super().scores(q, k, chunk)

        def parts(self):
            for part in super().parts():
                where.append(part)
                yield part

        def keep(self, weights):
            found = super().keep(weights)
            if found is not None:
                chunk = where[-1]
                part = next(x for x in reversed(where) if isinstance(x, tuple))
                rows = slice(at[0] + chunk.rows.start // 2, at[0] + chunk.rows.stop // 2)
                seen = slice(at[1] + chunk.keys.start, at[1] + chunk.keys.stop)
                window = full[part][:, :, rows, :, seen]
                window.copy_(found.view(window.shape))
            return found

    monkeypatch.setattr(attention_kernel, "Plan", Spy)
    out, lse = torch.zeros_like(query), torch.full((150, 2, 4, 1), -torch.inf, dtype=query.dtype)
    for rows, keys, block in blocks(150, 3, dropout, starts):
        at = (rows.start, keys.start)
        q, k, v = (x.detach() for x in (query[rows], key[keys], value[keys]))
        attention_kernel.accumulate(q, k, v, block, out[rows], lse[rows])
    keep = full.transpose(2, 3).reshape(2, 4, 150, 150)
    expected = oracle(*inputs, 0.3, keep.clone(), starts)
    torch.testing.assert_close(out.flatten(2), expected)

    d_out = torch.randn(out.shape, dtype=out.dtype)
    found = tuple(torch.zeros_like(x) for x in inputs)
    delta = (d_out * out).sum(-1, keepdim=True)
    for rows, keys, block in blocks(150, 3, dropout, starts):
        at = (rows.start, keys.start)
        attention_kernel.accumulate_gradients(
            tuple(x.detach() for x in (query[rows], key[keys], value[keys])),
            block,
            d_out[rows],
            lse[rows],
            delta[rows],
            (found[0][rows], found[1][keys], found[2][keys]),
        )
    wanted = torch.autograd.grad(expected, inputs, d_out.flatten(2))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_library_path_equals_the_oracle(shape):
    inputs = [x.detach().cuda().to(torch.bfloat16).requires_grad_() for x in tensors(shape)]
    found = causal_attention(*inputs, scale=0.3)
    expected = oracle(*(x.detach().cpu() for x in inputs), 0.3)
    assert relative_error(found.cpu(), expected) < 5e-3


@pytest.mark.gpu
def test_cuda_dropout_repeats_with_its_seed_and_leaves_the_generator_alone():
    inputs = [x.detach().cuda().to(torch.bfloat16) for x in tensors(SHAPES[1])]
    state = torch.cuda.get_rng_state()
    first = causal_attention(*inputs, scale=0.3, dropout=0.5, seed=3)
    assert torch.equal(first, causal_attention(*inputs, scale=0.3, dropout=0.5, seed=3))
    assert not torch.equal(first, causal_attention(*inputs, scale=0.3, dropout=0.5, seed=4))
    assert torch.equal(state, torch.cuda.get_rng_state())
