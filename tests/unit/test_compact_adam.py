"""Adam with moments in 16 bits: arithmetic in fp32, storage that keeps what it can."""

from __future__ import annotations

import pytest
import torch

from megatron.config import make_config
from megatron.core.mesh import ParallelState
from megatron.core.optimizer import build_optimizer
from megatron.core.optimizer.compact import CompactAdamW, scale_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make(exp_avg, exp_avg_sq, size=50):
    param = torch.randn(size, generator=torch.Generator().manual_seed(1))
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    dtypes = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return param, CompactAdamW([{"params": [param]}], dtypes=dtypes, **settings), settings


def train(param, optimizer, steps, scale=1.0):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        param.grad = torch.randn(param.shape, generator=generator) * scale
        optimizer.step()


def test_fp32_moments_are_ordinary_adamw_bitwise():
    ours, optimizer, settings = make(FP32, FP32)
    theirs = ours.clone()
    reference = torch.optim.AdamW([theirs], fused=True, **settings)
    train(ours, optimizer, 5)
    train(theirs, reference, 5)
    assert torch.equal(ours, theirs)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[ours][kind], reference.state[theirs][kind])


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e3])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (BF16, FP16), (FP16, FP32)])
def test_16_bits_stay_close(dtypes, scale):
    exact, reference, _ = make(FP32, FP32)
    param, optimizer, _ = make(*dtypes)
    train(exact, reference, 10, scale)
    train(param, optimizer, 10, scale)
    for kind, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True):
        assert optimizer.state[param][kind].dtype == dtype
    # An update is at most about lr; a moment's relative error is at most 2^-8 a step.
    assert (param - exact).abs().max() < 10 * 0.01 * 2.0**-7


def test_storing_what_was_stored_changes_nothing():
    param, optimizer, _ = make(FP16, FP16, size=400)
    generator = torch.Generator().manual_seed(3)
    for exponent in (-30, -3, 0, 9):
        values = torch.randn(400, generator=generator).square() * 2.0**exponent
        spread = values * 2.0 ** torch.randint(-40, 1, (400,), generator=generator)
        optimizer.set_moment(param, "exp_avg_sq", spread)
        once = optimizer.moment(param, "exp_avg_sq").clone()
        optimizer.set_moment(param, "exp_avg_sq", once)
        assert torch.equal(optimizer.moment(param, "exp_avg_sq"), once)
        assert ((once > 0) == (spread > 0)).all()


def test_scales():
    for amax in (1e-20, 3e-5, 1.0, 1.0 - 2**-12, 1.0 - 2**-11, 5e9):
        scale = scale_of(torch.tensor([0.0, -amax]))
        assert torch.frexp(scale).mantissa == 0.5
        assert 2.0**13 < amax / scale < 2.0**15.01
    assert torch.isfinite(scale_of(torch.zeros(3)))
    assert scale_of(torch.zeros(3)) > 0


def test_masters_and_moments_survive_a_load():
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8}
    cfg = make_config(
        **shape, mock_data=True, train_iters=9, lr=0.1, use_precision_aware_optimizer=True,
        exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16",
    )  # fmt: skip

    def fresh():
        torch.manual_seed(0)
        net = torch.nn.Linear(5, 3).bfloat16()
        for param in net.parameters():
            param.main_grad = torch.randn(param.shape)
        return net, build_optimizer(cfg, net, ParallelState.single())

    net, optimizer = fresh()
    optimizer.step()
    saved = {n: {k: t.clone() for k, t in s.items()} for n, s in optimizer.named_state()}
    assert saved["weight"]["exp_avg"].dtype == BF16
    assert saved["weight"]["exp_avg_sq"].dtype == FP32
    other, resumed = fresh()
    for name, tensors in resumed.loadable_state():
        for kind, tensor in tensors.items():
            tensor.copy_(saved[name][kind])
    resumed.finish_load()
    resumed.load_scalars(optimizer.scalars())
    for own, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, theirs)
        theirs.main_grad.copy_(own.main_grad)
    optimizer.step()
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
