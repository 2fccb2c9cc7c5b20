"""A rank's experts together are bit for bit so many dense layers, one for each expert."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from megatron.core.fp8 import DelayedScaling, Float8CurrentScaling, Fp8Policy, Fp8State, linear
from megatron.core.fp8.grouped import grouped_linear
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.tensor_parallel.random import checkpoint

RECIPES = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
    "tensorwise": Float8CurrentScaling(),
}
GROUP, IN, OUT = "decoder.layers.0.mlp.experts.linear_fc1", 24, 40
COUNTS = ([3, 0, 17, 1], [5, 8, 0, 4], [0, 0, 9, 0])  # one line a step
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


class Experts:
    """The same experts, computed together or one by one."""

    def __init__(self, recipe, together, *, dtype=torch.bfloat16, wgrad=True, **options):
        self.together, self.later = together, None
        policy = Fp8Policy(recipe=recipe, wgrad=wgrad)
        emulation = options.get("emulation", "fast")
        self.state = Fp8State(policy, params_dtype=dtype, emulation=emulation)
        self.state.hardware = options.get("hardware", False)  # torch has the product on a CPU too
        generator = torch.Generator().manual_seed(0)
        self.weights, self.precisions = [], []
        for number in range(4):
            self.precisions.append(self.state.for_linear(f"{GROUP}.{number}", is_expert=together))
            weight = torch.nn.Parameter(torch.randn(OUT, IN, generator=generator).to(dtype))
            weight.main_grad = torch.zeros(OUT, IN)
            self.weights.append(weight)

    @property
    def book(self):
        return self.state.expert_book if self.together else self.state.book

    def __call__(self, x, counts):
        if self.together:
            return grouped_linear(x, self.weights, self.precisions, counts, self.later)
        parts = zip(x.split(counts), self.weights, self.precisions, strict=True)
        return torch.cat([linear(p, w, None, c) for p, w, c in parts if p.shape[0]])

    def step(self, counts, seed, *, factor=None):
        """One step; returns output and input gradient."""
        generator = torch.Generator().manual_seed(seed)
        dtype = self.weights[0].dtype
        x = torch.randn(sum(counts), IN, generator=generator).to(dtype).requires_grad_()
        dy = torch.randn(sum(counts), OUT, generator=generator).to(dtype)
        y = self(x, counts)
        y.backward(dy)
        self.state.sync()
        return y.detach(), x.grad

    def results(self):
        book = [self.book.scale, self.book.history] if self.book else []
        return [*(w.main_grad for w in self.weights), *book]


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "options", [{}, {"wgrad": False}, {"emulation": "exact"}, {"hardware": True}], ids=str
)
def test_experts_are_dense_layers(recipe, dtype, options):
    together, alone = (Experts(recipe, t, dtype=dtype, **options) for t in (True, False))
    for seed, counts in enumerate(COUNTS):
        got, expected = together.step(counts, seed), alone.step(counts, seed)
        for ours, dense in zip(got, expected, strict=True):
            assert torch.equal(ours, dense)
    for ours, dense in zip(together.results(), alone.results(), strict=True):
        assert torch.equal(ours, dense)


def test_an_expert_without_tokens_keeps_scale_and_history():
    experts = Experts(RECIPES["delayed"], True)
    experts.step([3, 2, 4, 1], 0)
    slots = [p.slots for p in experts.precisions]
    views = [view for s in slots for view in (s.forward, s.backward)]
    before = [(v.scale.clone(), v.amax_history.clone()) for v in views]
    with torch.no_grad():
        for weight in experts.weights:
            weight.mul_(3)
    experts.step([3, 0, 4, 0], 1)
    for index, (view, (scale, history)) in enumerate(zip(views, before, strict=True)):
        idle = index // 2 in (1, 3)
        assert torch.equal(view.amax_history, history) == idle
        assert torch.equal(view.scale, scale) or not idle


@EVERY_RECIPE
def test_no_tokens_at_all(recipe):
    experts = Experts(recipe, True)
    y, dx = experts.step([0, 0, 0, 0], 0)
    assert (y.shape, dx.shape) == ((0, OUT), (0, IN))
    assert all(w.grad is None and w.grad_added_to_main_grad for w in experts.weights)
    for weight in experts.weights:
        del weight.main_grad
    experts.step([0, 0, 0, 0], 0)
    assert [float(w.grad.abs().sum()) for w in experts.weights] == [0] * 4


@EVERY_RECIPE
def test_padding_rows_change_nothing(recipe):
    """Zero rows behind an expert's own, as kernels want them, touch no scale and no gradient."""
    counts, padded = [3, 0, 17, 1], [16, 0, 32, 16]
    results = []
    for pad in (False, True):
        experts = Experts(recipe, True, emulation="exact")
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(sum(counts), IN, generator=generator).bfloat16().requires_grad_()
            dy = torch.randn(sum(counts), OUT, generator=generator).bfloat16()
            if pad:
                parts = [
                    torch.nn.functional.pad(p, (0, 0, 0, n - p.shape[0]))
                    for p, n in zip(x.split(counts), padded, strict=True)
                ]
                y = experts(torch.cat(parts), padded)
                y = torch.cat([p[:n] for p, n in zip(y.split(padded), counts, strict=True)])
            else:
                y = experts(x, counts)
            y.backward(dy)
            experts.state.sync()
        results.append([y, x.grad, *experts.results()])
    *gradients, with_book = zip(*results, strict=True), results
    for plain, with_padding in gradients[0]:
        # The longer sum may be cut into other blocks.
        torch.testing.assert_close(plain, with_padding, rtol=1e-6, atol=1e-6)
    if experts.book is not None:
        assert torch.equal(with_book[0][-1], with_book[1][-1])
        assert torch.equal(with_book[0][-2], with_book[1][-2])


@pytest.mark.parametrize("recipe", [RECIPES["delayed"]])
def test_recompute_uses_the_same_scales_and_records_once(recipe):
    results = []
    for recompute in (False, True):
        experts = Experts(recipe, True)
        experts.step([3, 2, 4, 1], 0)
        x = torch.randn(7, IN, generator=torch.Generator().manual_seed(3)).bfloat16()
        x.requires_grad_()
        run = lambda x, e=experts: e(x, [2, 0, 4, 1])  # noqa: E731
        y = checkpoint(run, x, fp8=experts.state) if recompute else run(x)
        experts.state.book.scale.fill_(7.0)  # not an expert's
        y.backward(torch.ones_like(y))
        results.append([y, x.grad, *experts.results()])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_a_frozen_weight_keeps_no_input():
    experts = Experts(RECIPES["delayed"], True)
    for weight in experts.weights:
        weight.requires_grad_(requires_grad=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts.step([2, 2, 2, 2], 0)
    shapes = {tuple(t.shape) for t in kept}
    assert shapes == {(IN, OUT), ()}
    assert all(float(w.main_grad.abs().sum()) == 0 for w in experts.weights)


def test_each_weight_is_cast_once_until_weight_or_scale_changes():
    experts = Experts(RECIPES["delayed"], True)
    x = torch.randn(4, IN).bfloat16()

    def codes():
        experts(x, [1, 1, 1, 1])
        return [p._cached.row.data.data_ptr() for p in experts.precisions]

    first = codes()
    assert codes() == first
    with torch.no_grad():
        experts.weights[2].mul_(2)
    second = codes()
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]


@EVERY_RECIPE
def test_weight_gradients_that_are_put_off_are_the_same(recipe):
    queue, results = WeightGradQueue(), []
    for put_off in (False, True):
        experts = Experts(recipe, True)
        for seed, counts in enumerate(COUNTS):
            experts.later = queue if put_off else None
            with queue.collect(seed) if put_off else nullcontext():
                experts.step(counts, seed)
        if put_off:
            assert float(experts.weights[0].main_grad.abs().sum()) == 0
            assert queue.owes(experts.weights[1])
            for seed in range(len(COUNTS)):
                queue.run(seed)
        results.append(experts.results())
    for now, later in zip(*results, strict=True):
        assert torch.equal(now, later)
