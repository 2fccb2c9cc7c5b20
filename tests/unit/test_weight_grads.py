"""Weight gradients that are put off are the same, only later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8 import DelayedScaling, Fp8Policy, Fp8State, linear
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import Axis


class Layer(nn.Module):
    def __init__(self, recipe=None, queue=None, wgrad=True):
        super().__init__()
        state = Fp8State(Fp8Policy(recipe=recipe, wgrad=wgrad), params_dtype=torch.bfloat16)
        self.precision, self.queue = state.for_linear("layer"), queue
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(32, 16, generator=generator).bfloat16())
        self.bias = nn.Parameter(torch.zeros(32).bfloat16())

    def forward(self, x):
        return linear(x, self.weight, self.bias, self.precision, later=self.queue)


def batches():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(48, 16, generator=generator).bfloat16() for _ in range(3)]


@pytest.mark.parametrize(
    ("recipe", "wgrad"),
    [(None, True), (DelayedScaling(), True), (DelayedScaling(), False)],
    ids=["bf16", "fp8", "fp8, wgrad in bf16"],
)
def test_it_is_bitwise_the_gradient_of_one_pass(recipe, wgrad):
    queue = WeightGradQueue()
    one, two = Layer(recipe, wgrad=wgrad), Layer(recipe, queue, wgrad)
    for layer in (one, two):
        DistributedDataParallel(layer, Axis.single("dp"))
    for i, x in enumerate(batches()):
        x.requires_grad_()
        one(x).square().sum().backward()
        straight, x.grad = x.grad, None
        with queue.collect(i):
            two(x).square().sum().backward()
        assert torch.equal(x.grad, straight)
        assert queue.owes(two.weight)
    assert not two.weight.main_grad.any()
    assert torch.equal(two.bias.main_grad, one.bias.main_grad)
    for i in range(3):
        queue.run(i)
    assert torch.equal(two.weight.main_grad, one.weight.main_grad)
    assert one.weight.main_grad.any()
    assert not queue.owes(two.weight)
    with pytest.raises(KeyError):
        queue.run(0)


def test_without_a_main_grad_or_a_pass_nothing_is_put_off():
    queue = WeightGradQueue()
    layer = Layer(DelayedScaling(), queue)
    with queue.collect(0):
        layer(batches()[0]).sum().backward()
    assert layer.weight.grad is not None
    queue.run(0)
    layer.weight.main_grad = torch.zeros(32, 16)
    layer(batches()[0]).sum().backward()
    assert layer.weight.main_grad.any()
    with pytest.raises(RuntimeError, match="outside of collect"):
        queue.put(layer.weight, lambda: None)


def test_operands_are_freed_as_each_product_is_done():
    queue = WeightGradQueue()
    freed = []

    class Operand:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            freed.append(self.name)

    weight = torch.zeros(1)
    with queue.collect(0):
        for name in "ab":
            operand = Operand(name)
            queue.put(weight, lambda operand=operand: freed.append(f"run {operand.name}"))
            del operand
    queue.run(0)
    assert freed == ["run a", "a", "run b", "b"]


def test_a_bucket_waits_for_what_is_put_off():
    """With overlap the last weight pass completes the gradient, not the last backward pass."""
    queue = WeightGradQueue()
    layer = Layer(queue=queue)
    ddp = DistributedDataParallel(layer, Axis.single("dp"), overlap_reduce=True, weight_grads=queue)
    (bucket,) = ddp._buckets
    ddp.zero_grad_buffer()
    for i, x in enumerate(batches()):
        if i == 2:
            ddp.expect_last_backward()
        with queue.collect(i):
            ddp(x).sum().backward()
    for i in range(3):
        assert not bucket.is_launched
        queue.run(i)
    assert bucket.is_launched
    ddp.finish_grad_sync()
