"""FP8 attention against a plain oracle that quantizes each tensor where it should be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megatron.core.fp8 import DelayedScaling, Float8CurrentScaling, Format, Fp8Policy, Fp8State
from megatron.core.fp8.attention import AttentionChoice, AttentionTensor
from megatron.core.transformer import attention_fp8, attention_kernel
from megatron.core.transformer.attention_fp8 import Whole, fp8_attention
from megatron.core.transformer.attention_kernel import Block, causal_attention

DELAYED = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
TENSORWISE = Float8CurrentScaling()
PATH = "decoder.layers.0.self_attention.core_attention"
# s, b, n, g, d: one chunk of rows, several, grouped and multi-query heads, odd sizes.
SHAPES = [(5, 2, 2, 2, 4), (150, 2, 4, 2, 8), (67, 1, 6, 1, 16), (1, 3, 2, 1, 7)]
SCALE = 0.3


def precision_of(recipe, backward=True):
    state = Fp8State(Fp8Policy(recipe=recipe), attention=AttentionChoice(True, backward))
    return state, state.for_attention(PATH)


def tensors(shape, seed=0, dtype=torch.float32):
    s, b, n, g, d = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(s, b, n, d), (s, b, g, d), (s, b, g, d), (s, b, n * d)]
    factors = (1.0, 2.0, 0.5, 1e-3)
    return [
        (torch.randn(size, generator=generator) * factor).to(dtype)
        for size, factor in zip(sizes, factors, strict=True)
    ]


def run(precision, inputs, block=None):
    """Result and gradients."""
    q, k, v, d_out = inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = fp8_attention(*leaves, precision, Whole(block or Block(SCALE)))
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


# -- the oracle -----------------------------------------------------------------------------------


def cast(x, scale, fmt):
    """Quantize with torch's own FP8 type and read back."""
    top, kind = {"e4m3": (448.0, torch.float8_e4m3fn), "e5m2": (57344.0, torch.float8_e5m2)}[fmt]
    scale = torch.as_tensor(scale, dtype=torch.float32)
    grid = (x.float() * scale).clamp(-top, top).to(kind).float()
    return grid * scale.reciprocal()


def own_scale(fmt, *parts):
    largest = max(x.abs().max() for x in parts)
    return torch.tensor({"e4m3": 448.0, "e5m2": 57344.0}[fmt]) / largest


class Oracle:
    """Attention over whole score matrices in fp64, with casts of fp32 values in between.

    Args:
        scales: By tensor; None takes the tensor's own magnitude, "off" does not quantize.
        backward: Whether the backward products are quantized.
        gradients: Format of gradients.
    """

    def __init__(self, scales, backward=True, gradients="e5m2"):
        self.scales, self.backward, self.gradients = scales, backward, gradients
        self.amax = {}

    def quantize(self, name, *parts):
        fmt = self.gradients if name.startswith("d") else "e4m3"
        self.amax[name] = max(x.abs().max() for x in parts).float()
        scale = self.scales[name]
        if isinstance(scale, str):
            return parts
        scale = own_scale(fmt, *(x.float() for x in parts)) if scale is None else scale
        return tuple(cast(x, scale, fmt) for x in parts)

    def __call__(self, q, k, v, d_out, starts=None, keep=None):
        s, b, n, d = q.shape
        r = n // k.shape[2]
        q, k, v = (x.double() for x in self.quantize("qkv", q, k, v))
        wide_k, wide_v = (x.repeat_interleave(r, dim=2) for x in (k, v))
        scores = torch.einsum("sbnd,tbnd->bnst", q, wide_k) * SCALE
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        if starts is not None:
            hidden = hidden | (torch.arange(s) < starts[:, None, :, None])
        exact = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        keep = torch.ones_like(exact) if keep is None else keep
        (p,) = self.quantize("s", (exact * keep).float())
        out = torch.einsum("bnst,tbnd->sbnd", p.double(), wide_v)
        (o,) = self.quantize("o", out.float())
        result = o.float().flatten(2)

        d_o = d_out.view(s, b, n, d)
        if self.backward:
            (d_o,) = self.quantize("do", d_o)
        else:
            p = exact * keep
        d_o = d_o.double()
        d_v = torch.einsum("bnst,sbnd->tbnd", p.double(), d_o)
        d_p = torch.einsum("sbnd,tbnd->bnst", d_o, wide_v) * keep
        d_scores = exact * (d_p - (exact * d_p).sum(-1, keepdim=True))
        if self.backward:
            (d_scores,) = self.quantize("dp", d_scores.float())
        d_scores = d_scores.double()
        d_q = torch.einsum("bnst,tbnd->sbnd", d_scores, wide_k) * SCALE
        d_k = torch.einsum("bnst,sbnd->tbnd", d_scores, q) * SCALE
        d_k, d_v = (x.unflatten(2, (-1, r)).sum(3) for x in (d_k, d_v))
        gradients = [x.float() for x in (d_q, d_k, d_v)]
        if self.backward:
            gradients = self.quantize("dqkv", *gradients)
        return [result, *(x.float() for x in gradients)]


def agree(found, expected):
    """Whether tensors are the same but for casts that fell to the other side of a boundary.

    fp32 sums and exponentials differ from fp64 ones in their last bits; one in a million values is
    on the boundary between two grid values. What depends on such a value moves by a grid step.
    """
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error = (one - other).abs() / other.abs().amax().clamp(min=1e-30)
        assert (error > 2e-6).float().mean() <= 2e-3
        assert error.max() < 0.07


NAMES = {
    AttentionTensor.QKV: "qkv",
    AttentionTensor.OUTPUT: "o",
    AttentionTensor.SOFTMAX: "s",
    AttentionTensor.GRAD_QKV: "dqkv",
    AttentionTensor.GRAD_OUTPUT: "do",
    AttentionTensor.GRAD_SCORES: "dp",
}


def columns(view_of, precision):
    """A number of each tensor's column: of `scale`, or of the staged magnitudes."""
    meta = precision.fp8_meta
    views = {"forward": meta["scaling_fwd"], "backward": meta["scaling_bwd"]}
    return {
        name: view_of(views[tensor.value[0]])[tensor.value[1]].clone()
        for tensor, name in NAMES.items()
    }


def scales_of(precision):
    return columns(lambda view: view.scale, precision)


def staged_of(precision):
    return columns(lambda view: view.amax_history[0], precision)


@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3], ids=["hybrid", "e4m3"])
@pytest.mark.parametrize("backward", [True, False], ids=["fp8-backward", "plain-backward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_delayed_equals_the_oracle(shape, backward, fmt):
    """The first step with scale 1, the next one with the scales that the first one left."""
    state, precision = precision_of(replace(DELAYED, fp8_format=fmt), backward)
    for seed in range(2):
        inputs = tensors(shape, seed)
        oracle = Oracle(scales_of(precision), backward, fmt.backward.name)
        agree(run(precision, inputs), oracle(*inputs))
        staged = staged_of(precision)
        for name, amax in oracle.amax.items():
            torch.testing.assert_close(staged.pop(name), amax, rtol=1e-5, atol=0.0)
        assert all(amax == 0 for amax in staged.values())
        state.sync()
    assert scales_of(precision)["s"] == 448  # the first token's P is 1


@pytest.mark.parametrize("backward", [True, False], ids=["fp8-backward", "plain-backward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensorwise_equals_the_oracle(shape, backward):
    """Q, K, V and dO by their own magnitude, P and dP by that of the step before."""
    state, precision = precision_of(TENSORWISE, backward)
    for seed in range(2):
        inputs = tensors(shape, seed)
        scales = scales_of(precision) | {"qkv": None, "do": None, "o": "off", "dqkv": "off"}
        oracle = Oracle(scales, backward)
        agree(run(precision, inputs), oracle(*inputs))
        staged = staged_of(precision)
        assert {name for name, amax in staged.items() if amax > 0} <= {"s", "dp"}
        state.sync()
    assert state.book is None
    assert scales_of(precision)["s"] == 448


def starts_of(*rows):
    found = []
    for lengths in rows:
        ends = list(itertools.accumulate(lengths))
        found.append([end - n for end, n in zip(ends, lengths, strict=True) for _ in range(n)])
    return torch.tensor(found)


def test_documents():
    shape, starts = SHAPES[1], starts_of([64, 1, 1, 30, 54], [3, 125, 22])
    _, precision = precision_of(TENSORWISE)
    inputs = tensors(shape)
    scales = scales_of(precision) | {"qkv": None, "do": None, "o": "off", "dqkv": "off"}
    found = run(precision, inputs, Block(SCALE, 0, starts))
    agree(found, Oracle(scales)(*inputs, starts=starts))


def test_dropout_comes_before_the_cast(monkeypatch):
    """P is 1 / 0.75 at most, and the backward pass draws the same masks."""
    shape, dropout = (70, 2, 4, 2, 8), 0.25
    s, b, n, g, _ = shape
    full = torch.zeros(b, g, s, n // g, s, dtype=torch.float64)

    class Spy(attention_kernel.Plan):
        def __init__(self, *args):
            super().__init__(*args)
            self.where = ((p, c) for p in self.parts() for c in self.chunks(p))

        def keep(self, weights):
            found = super().keep(weights)
            part, chunk = next(self.where)
            rows = slice(chunk.rows.start // self.r, chunk.rows.stop // self.r)
            window = full[part][:, :, rows, :, chunk.keys]
            window.copy_(found.view(window.shape))
            return found

    monkeypatch.setattr(attention_fp8, "Plan", Spy)
    state, precision = precision_of(DELAYED)
    inputs = tensors(shape)
    for _ in range(2):
        state.sync()
        oracle = Oracle(scales_of(precision))
        found = run(precision, inputs, Block(SCALE, 0, None, dropout, seed=11))
        agree(found, oracle(*inputs, keep=full.transpose(2, 3).reshape(b, n, s, s)))
        assert staged_of(precision)["s"] == torch.tensor(1 / 0.75)


def snr(found, exact):
    error = (found.double() - exact).square().sum()
    return (10 * torch.log10(exact.square().sum() / error)).item()


@pytest.mark.parametrize(
    ("recipe", "floors"),
    [(DELAYED, (24.5, 19.0, 19.0, 21.0)), (TENSORWISE, (25.0, 20.0, 20.0, 23.0))],
    ids=lambda x: getattr(x, "name", ""),
)
def test_signal_to_noise(recipe, floors):
    """A value rounded to E4M3 keeps 31.6 dB, to E5M2 25.6 dB.

    The result has the noise of V, of P and of the result itself, and that of Q and K, which the
    exponential passes on: 25 dB are left. Gradients of Q and K have gone through dO, V, P and dP,
    of which dO and dP are E5M2; that of V through P and dO.
    """
    state, precision = precision_of(recipe)
    for seed in range(2):
        q, k, v, d_out = tensors((256, 1, 4, 2, 64), seed, torch.bfloat16)
        k = k / 2
        found = run(precision, (q, k, v, d_out), Block(0.125))
        state.sync()
    assert {x.dtype for x in found} == {torch.bfloat16}
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves, scale=0.125)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, d_out.double())]
    measured = [snr(one, other) for one, other in zip(found, exact, strict=True)]
    assert all(a > b for a, b in zip(measured, floors, strict=True)), measured
    assert all(value < 40 for value in measured)  # it is FP8


def test_without_fp8_backward_only_the_gradients_differ():
    """And they are those of the softmax that ran: closer to the exact ones."""
    inputs = tensors((128, 1, 2, 2, 32), dtype=torch.bfloat16)
    results = {}
    for backward in (True, False):
        state, precision = precision_of(DELAYED, backward)
        run(precision, inputs)
        state.sync()
        results[backward] = run(precision, inputs)
    assert torch.equal(results[True][0], results[False][0])
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out = causal_attention(*leaves, scale=SCALE)
    exact = torch.autograd.grad(out, leaves, inputs[3].double())
    for in_fp8, plain, true in zip(results[True][1:], results[False][1:], exact, strict=True):
        assert snr(plain, true) > snr(in_fp8, true) + 1


@pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE], ids=lambda r: r.name)
def test_zeros_give_zeros(recipe):
    _, precision = precision_of(recipe)
    found = run(precision, [torch.zeros_like(x) for x in tensors(SHAPES[1])])
    assert all((x == 0).all() for x in found)


@pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE], ids=lambda r: r.name)
def test_huge_and_tiny_values_stay_finite(recipe):
    for factor in (1e10, 1e-30):
        state, precision = precision_of(recipe)
        inputs = [x * factor for x in tensors(SHAPES[1])]
        for _ in range(2):
            found = run(precision, inputs)
            state.sync()
            assert all(x.isfinite().all() for x in found), factor


def test_a_nan_does_not_hide():
    q, k, v, d_out = tensors(SHAPES[0])
    k[0, 0, 0, 0] = float("nan")
    state, precision = precision_of(DELAYED)
    out = run(precision, (q, k, v, d_out))[0]
    assert out[:, 0, : SHAPES[0][4]].isnan().all()  # every query of that head sees the first key
    assert out[:, 1].isfinite().all()
    state.sync()
    assert all(scale.isfinite() for scale in scales_of(precision).values())


def test_future_tokens_have_no_influence_but_on_the_scale():
    q, k, v, d_out = tensors((50, 1, 2, 2, 8))
    _, precision = precision_of(DELAYED)
    before = run(precision, (q, k, v, d_out))[0][:30]
    q[30:], k[30:], v[30:] = 2.0, 7.0, -3.0
    assert torch.equal(before, run(precision, (q, k, v, d_out))[0][:30])


def test_views_of_one_tensor():
    """As the fused projection hands them over."""
    mixed = torch.randn(20, 2, 4, 3, 8, generator=torch.Generator().manual_seed(3))
    views = [mixed[:, :, :, i] for i in range(3)]
    d_out = torch.randn(20, 2, 32, generator=torch.Generator().manual_seed(4))
    found = [
        run(precision_of(DELAYED)[1], [*x, d_out]) for x in (views, [v.clone() for v in views])
    ]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE], ids=lambda r: r.name)
def test_operands_in_the_fp8_type_give_the_same_bits(recipe):
    found = []
    for hardware in (False, True):
        state, precision = precision_of(recipe)
        state.hardware = hardware
        run(precision, tensors(SHAPES[1], 0))
        state.sync()
        found.append(run(precision, tensors(SHAPES[1], 1)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_records_nothing():
    state, precision = precision_of(DELAYED)
    with state.not_recording(), torch.no_grad():
        fp8_attention(*tensors(SHAPES[1])[:3], precision, Whole(Block(SCALE)))
    assert all(amax == 0 for amax in staged_of(precision).values())


def test_the_backward_pass_casts_p_with_the_scale_of_its_forward():
    """Even if scales move in between, as they do in a loop of one's own."""
    inputs = tensors(SHAPES[1])
    state, precision = precision_of(DELAYED)
    run(precision, inputs)
    state.sync()
    plain = run(precision, inputs)
    q, k, v, d_out = inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = fp8_attention(*leaves, precision, Whole(Block(SCALE)))
    precision.fp8_meta["scaling_fwd"].scale.fill_(3.0)
    again = torch.autograd.grad(out, leaves, d_out)
    assert all(torch.equal(a, b) for a, b in zip(again, plain[1:], strict=True))
