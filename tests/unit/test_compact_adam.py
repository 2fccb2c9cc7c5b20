"""Adam with moments in few bits: arithmetic in fp32, storage that keeps what it can."""

from __future__ import annotations

import pytest
import torch

from megatron.config import make_config
from megatron.core.mesh import ParallelState
from megatron.core.optimizer import build_optimizer
from megatron.core.optimizer.compact import CompactAdamW
from megatron.core.optimizer.moments import BLOCK, FP8, fp8_storage, from_fp8, scale_of, to_fp8

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make(exp_avg, exp_avg_sq, size=50):
    param = torch.randn(size, generator=torch.Generator().manual_seed(1))
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    dtypes = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer = CompactAdamW(
        [{"params": [param]}], dtypes=dtypes, names={param: "weight"}, **settings
    )
    return param, optimizer, settings


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


@pytest.mark.parametrize("dtype", [FP16, FP8])
def test_storing_what_was_stored_changes_nothing(dtype):
    param, optimizer, _ = make(dtype, dtype, size=400)
    generator = torch.Generator().manual_seed(3)
    for exponent in (-30, -3, 0, 9):
        values = torch.randn(400, generator=generator).square() * 2.0**exponent
        spread = values * 2.0 ** torch.randint(-40, 1, (400,), generator=generator)
        noise = torch.Generator().manual_seed(exponent + 40)
        optimizer.set_moment(param, "exp_avg_sq", spread, noise)
        once = optimizer.moment(param, "exp_avg_sq").clone()
        for again in (None, noise):
            optimizer.set_moment(param, "exp_avg_sq", once, again)
            assert torch.equal(optimizer.moment(param, "exp_avg_sq"), once)
        assert ((once > 0) == (spread > 0)).all()


def stored(values, squares, noise=None):
    codes, exponents = fp8_storage(values)
    to_fp8(values, codes, exponents, squares, noise)
    return from_fp8(codes, exponents, values.shape, squares)


def spread_out(*shape, seed=0):
    """Values over 25 powers of two, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * 2.0 ** torch.randint(-25, 1, shape, generator=generator)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("exponent", [-40, 0, 40])
def test_fp8_rounds_to_a_neighbour(squares, exponent):
    values = spread_out(3, 111) * 2.0**exponent
    values = values.square() if squares else values
    root = values.sqrt() if squares else values
    blocks = torch.nn.functional.pad(root.reshape(-1), (0, -root.numel() % BLOCK)).view(-1, BLOCK)
    amax = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: root.numel()]
    for noise in (None, torch.Generator().manual_seed(0)):
        found = stored(values, squares, noise)
        found = found.sqrt() if squares else found
        # Four significant bits down to 2^-14 of the block's largest magnitude, then fixed steps.
        step = torch.maximum(root.abs() * 2.0**-3, amax.view(root.shape) * 2.0**-16)
        # (Of squares, what would become zero becomes one such step instead.)
        nearest = noise is None and not squares
        assert ((found - root).abs() <= step * (0.5 if nearest else 1.0)).all()
        assert (found[values != 0] * root[values != 0] >= 0).all()


def test_random_rounding_is_right_on_average_and_repeatable():
    values = spread_out(64, seed=1)
    total = torch.zeros_like(values)
    for seed in range(2000):
        found = stored(values, False, torch.Generator().manual_seed(seed))
        total += found
    step = torch.maximum(values.abs() * 2.0**-3, values.abs().max() * 2.0**-16)
    # Of 2000 draws, each within a step: 5 standard deviations of half a step at most.
    assert ((total / 2000 - values).abs() < 5 * 0.5 * step / 2000**0.5).all()
    again = stored(values, False, torch.Generator().manual_seed(seed))
    assert torch.equal(again, found)


def test_fp8_of_nothing_and_of_zeros():
    for shape in ((0,), (5,), (2, 64), (129,)):
        zeros = torch.zeros(shape)
        for squares in (False, True):
            assert torch.equal(stored(zeros, squares), zeros)
    assert stored(torch.tensor([float("nan"), 1.0]), False).isnan().tolist() == [True, False]


def test_an_old_square_fades_in_fp8():
    """By a thousandth in a step, a fiftieth of the distance to the next number."""
    param, optimizer, _ = make(FP32, FP8, size=2000)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.set_moment(param, "exp_avg_sq", torch.ones(2000))
    for _ in range(1000):
        param.grad = torch.zeros(2000)
        optimizer.step()
    # Roots are right on average; their squares a little larger. exp(-1) is 0.368.
    assert optimizer.moment(param, "exp_avg_sq").mean().item() == pytest.approx(0.375, abs=0.02)


def test_the_rounding_depends_on_name_and_step_alone():
    one, optimizer, _ = make(FP8, FP8)
    train(one, optimizer, 3)
    two, other, _ = make(FP8, FP8)
    train(two, other, 3)
    assert torch.equal(one, two)
    other._names[two] = "bias"
    for param, each in ((one, optimizer), (two, other)):
        train(param, each, 2)
    assert not torch.equal(one, two)


def regression(exp_avg, exp_avg_sq):
    """Error of a linear model after 300 noisy steps, with inputs of very different size."""
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(40, 8, generator=generator)
    sizes = 2.0 ** torch.linspace(-2, 2, 40).unsqueeze(1)
    weight = torch.zeros(40, 8)
    dtypes = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer = CompactAdamW(
        [{"params": [weight]}], lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
        dtypes=dtypes, names={weight: "weight"},
    )  # fmt: skip
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 300)
        x = torch.randn(64, 40, generator=generator) * sizes.T
        weight.grad = x.T @ (x @ (weight - truth)) / 64
        optimizer.step()
    return (weight - truth).square().mean().item()


def test_fp8_moments_learn():
    start = torch.randn(40, 8, generator=torch.Generator().manual_seed(5)).square().mean().item()
    exact, small = regression(FP32, FP32), regression(FP8, FP8)
    assert exact < 0.1 * start
    assert small == pytest.approx(exact, rel=0.1)  # rounded to the nearest it is half of that


def test_scales():
    for amax in (1e-20, 3e-5, 1.0, 1.0 - 2**-12, 1.0 - 2**-11, 5e9):
        scale = scale_of(torch.tensor([0.0, -amax]))
        assert torch.frexp(scale).mantissa == 0.5
        assert 2.0**13 < amax / scale < 2.0**15.01
    assert torch.isfinite(scale_of(torch.zeros(3)))
    assert scale_of(torch.zeros(3)) > 0


@pytest.mark.parametrize("small", ["fp16", "fp8"])
def test_masters_and_moments_survive_a_load(small):
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8}
    cfg = make_config(
        **shape, mock_data=True, train_iters=9, lr=0.1, use_precision_aware_optimizer=True,
        exp_avg_dtype="bf16", exp_avg_sq_dtype=small,
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
