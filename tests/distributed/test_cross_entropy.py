"""Vocabulary-parallel loss against torch in fp64, for every split and padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distpool import run_ranks

from megatron.core.errors import DataError
from megatron.core.mesh import Axis, MeshSizes, ParallelState
from megatron.core.tensor_parallel import cross_entropy as module
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

SEQ, BATCH, VOCAB = 6, 2, 21
SINGLE = Axis.single("tp")


def case(padded: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(SEQ, BATCH, padded, generator=generator) * 4).to(dtype)
    labels = torch.randint(0, VOCAB, (SEQ, BATCH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCAB - 1
    upstream = torch.rand(SEQ, BATCH, generator=generator)
    return logits, labels, upstream


def oracle(padded: int, dtype: torch.dtype):
    """Loss and gradient of the real columns in fp64."""
    logits, labels, upstream = case(padded, dtype)
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact[..., :VOCAB].flatten(0, 1), labels.flatten(), reduction="none")
    (loss.view_as(upstream) * upstream).sum().backward()
    return loss.detach().view_as(upstream), exact.grad


def run(axis: Axis, padded: int, dtype: torch.dtype, reuse: bool):
    logits, labels, upstream = case(padded, dtype)
    mine = logits.chunk(axis.size, -1)[axis.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine * 1, labels, axis, VOCAB, reuse_logits=reuse)
    (loss * upstream).sum().backward()
    return loss.detach(), mine.grad


def on_rank(rank, world, padded, dtype, reuse):
    axis = ParallelState.build(MeshSizes(world, tp=world), rank, world).tp
    return run(axis, padded, dtype, reuse)


def check(losses, gradient, padded, dtype):
    expected_loss, expected_gradient = oracle(padded, dtype)
    for loss in losses:
        assert loss.dtype == torch.float32
        # fp32 arithmetic on 21 terms of size e^10.
        torch.testing.assert_close(loss.double(), expected_loss, rtol=2e-6, atol=2e-6)
    assert gradient.dtype == dtype
    # The gradient is rounded once to the type of the logits.
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=rtol, atol=1e-6)
    assert gradient[..., VOCAB:].count_nonzero() == 0


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# 24 pads 3 columns; with 64 columns the last ranks hold padding only.
@pytest.mark.parametrize(("world", "padded"), [(2, 24), (4, 24), (4, 64)])
def test_split_vocabulary(world, padded, dtype, reuse):
    results = run_ranks(on_rank, world, padded, dtype, reuse)
    losses = [loss for loss, _ in results]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    check(losses, torch.cat([grad for _, grad in results], -1), padded, dtype)


@pytest.mark.parametrize("block", [1, 64, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [21, 24, 128])
def test_one_rank(monkeypatch, padded, dtype, block):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", block)
    loss, gradient = run(SINGLE, padded, dtype, reuse=False)
    check([loss], gradient, padded, dtype)


def test_padding_does_not_change_a_single_bit():
    logits, labels, _ = case(24, torch.float32)
    wide = torch.cat([logits, torch.full((SEQ, BATCH, 40), 99.0)], -1)
    losses = [vocab_parallel_cross_entropy(z, labels, SINGLE, VOCAB) for z in (logits, wide)]
    assert torch.equal(*losses)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, 0.0, -1e4]]])
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]), SINGLE, 3)
    assert loss.item() == pytest.approx(1e4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_show(bad):
    logits = torch.zeros(1, 1, 4)
    logits[0, 0, 2] = bad
    assert not vocab_parallel_cross_entropy(logits, torch.tensor([[0]]), SINGLE, 4).isfinite()


def test_reused_logits_cannot_be_read_by_autograd_again():
    weight = torch.randn(1, 2, 5, requires_grad=True)
    logits = weight * 1
    labels = torch.zeros(1, 2, dtype=torch.long)
    loss = vocab_parallel_cross_entropy(logits, labels, SINGLE, 5, reuse_logits=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("label", [-1, VOCAB, 23])
def test_labels_out_of_range(label):
    logits, labels, _ = case(24, torch.float32)
    labels[2, 1] = label
    with pytest.raises(DataError, match=rf"labels: got token ids from .*ids 0 to {VOCAB - 1}"):
        vocab_parallel_cross_entropy(logits, labels, SINGLE, VOCAB)


def test_labels_in_another_layout():
    logits, labels, _ = case(24, torch.float32)
    with pytest.raises(DataError, match="labels: got shape"):
        vocab_parallel_cross_entropy(logits, labels.t(), SINGLE, VOCAB)
