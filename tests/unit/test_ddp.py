"""Gradient buffers in one process: accumulation, tied parameters, normalisation."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, finalize_gradients
from megatron.core.mesh import Axis, ParallelState


def wrap(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, Axis.single("dp"))


def test_main_grads_are_views_of_one_buffer_in_reverse_order():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    ddp = wrap(module)
    (buffer,) = ddp.buffers_by_axis
    assert buffer.flat.dtype == torch.float32
    assert buffer.flat.numel() == sum(p.numel() for p in module.parameters())
    offsets = [p.main_grad.storage_offset() for p in module.parameters()]
    assert offsets == sorted(offsets, reverse=True)
    for p in module.parameters():
        assert p.main_grad.shape == p.shape
        assert p.main_grad.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()


def test_ordinary_gradients_accumulate_in_fp32_and_are_freed():
    layer = nn.Linear(4, 1, bias=False).bfloat16()
    ddp = wrap(layer)
    x = torch.full((1, 4), 1.0, dtype=torch.bfloat16)
    small = torch.full((1, 4), 2.0**-10, dtype=torch.bfloat16)
    for batch in (x, small, small):
        ddp(batch).sum().backward()
        assert layer.weight.grad is None
    # bf16 would have lost both small addends.
    assert torch.equal(layer.weight.main_grad, torch.full((1, 4), 1.0 + 2.0**-9))
    ddp.zero_grad_buffer()
    assert layer.weight.main_grad.count_nonzero() == 0


def test_tied_parameters_have_one_slot_and_both_contributions():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    torch.manual_seed(0)
    model = Tied()
    tokens = torch.tensor([0, 2, 2])
    model(tokens).square().sum().backward()
    expected = model.embedding.weight.grad.clone()
    model.zero_grad()
    ddp = wrap(model)
    ddp(tokens).square().sum().backward()
    assert len(ddp.trained_params) == 1
    torch.testing.assert_close(model.embedding.weight.main_grad, expected, rtol=1e-6, atol=0)


def test_frozen_parameters_have_no_gradient():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    ddp = wrap(module)
    assert ddp.trained_params == [module.weight]
    assert not hasattr(module.bias, "main_grad")


def test_expert_parameters_lie_apart():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight.allreduce = False
    dp, edp = Axis("dp", 4, 0, (0, 1, 2, 3)), Axis("edp", 2, 0, (0, 2))
    dense, expert = DistributedDataParallel(module, dp, expert_dp_axis=edp).buffers_by_axis
    assert (dense.axis.name, dense.params) == ("dp", [module[0].weight])
    assert (expert.axis.name, expert.params) == ("edp", [module[1].weight])


def test_finalize_divides_by_the_tokens_of_the_batch():
    module = nn.Linear(3, 1, bias=False)
    ddp = wrap(module)
    for _ in range(2):
        ddp(torch.ones(4, 3)).sum().backward()
    total = finalize_gradients(ddp, ParallelState.single(), torch.tensor(8))
    assert total == 8
    assert torch.equal(module.weight.main_grad, torch.ones(1, 3))


def test_a_batch_without_tokens_has_no_gradient():
    module = nn.Linear(3, 1, bias=False)
    ddp = wrap(module)
    (ddp(torch.ones(4, 3)) * 0.0).sum().backward()
    finalize_gradients([ddp], ParallelState.single(), 0)
    assert torch.equal(module.weight.main_grad, torch.zeros(1, 3))


def test_a_model_without_trained_parameters():
    module = nn.Linear(1, 1).requires_grad_(False)
    assert finalize_gradients(wrap(module), ParallelState.single(), 3) == 3
