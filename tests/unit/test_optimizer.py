"""Masters, clipping, loss scaling and state of the optimizer."""

from __future__ import annotations

import pytest
import torch

from megatron.config import make_config
from megatron.core.mesh import ParallelState
from megatron.core.optimizer import build_optimizer, build_scheduler
from megatron.core.optimizer.clip import clip_by_norm_, global_norm
from megatron.core.optimizer.loss_scale import DynamicLossScale

MESH = ParallelState.single()


def config(**fields):
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8}
    return make_config(**{**shape, "mock_data": True, "train_iters": 10, "lr": 0.1, **fields})


def model(dtype=torch.float32):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).to(dtype)
    for param in net.parameters():
        param.main_grad = torch.zeros(param.shape)
    return net


def set_grads(net, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for param in net.parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator) * scale)


def test_adam_equals_the_textbook_form_and_decays_matrices_only():
    cfg = config(weight_decay=0.1, clip_grad=0.0, adam_beta2=0.95, lr_decay_style="constant")
    net, twin = model(), model()
    optimizer = build_optimizer(cfg, net, MESH)
    build_scheduler(cfg, optimizer)
    matrix = [p for p in twin.parameters() if p.dim() > 1]
    rest = [p for p in twin.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrix}, {"params": rest, "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        foreach=False,
        fused=False,
    )
    for step in range(3):
        set_grads(net, step)
        for own, other in zip(net.parameters(), twin.parameters(), strict=True):
            other.grad = own.main_grad.clone()
        assert optimizer.step().success
        reference.step()
    for own, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)  # order of fused arithmetic
        assert own.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_step_bumps_the_version_of_every_parameter(dtype, name):
    net = model(dtype)
    optimizer = build_optimizer(config(optimizer=name), net, MESH)
    before = [p._version for p in net.parameters()]
    set_grads(net, 0)
    optimizer.step()
    assert all(p._version > v for p, v in zip(net.parameters(), before, strict=True))


def test_small_updates_survive_in_the_masters_of_bf16_parameters():
    net = model(torch.bfloat16)
    cfg = config(
        optimizer="sgd",
        sgd_momentum=0.0,
        lr=1e-4,
        lr_decay_style="constant",
        clip_grad=0.0,
        weight_decay=0.0,
    )
    optimizer = build_optimizer(cfg, net, MESH)
    weight = net[0].weight
    start = weight.detach().float().clone()
    for _ in range(100):
        weight.main_grad.fill_(0.5)
        optimizer.step()
    master = dict(optimizer.named_state())["0.weight"]["param"]
    torch.testing.assert_close(master, start - 100 * 0.5e-4)
    assert torch.equal(weight, master.bfloat16())


def test_clipping_bounds_the_norm_and_reports_it_before():
    net = model()
    cfg = config(clip_grad=0.5, log_num_zeros_in_grad=True)
    optimizer = build_optimizer(cfg, net, MESH)
    set_grads(net, 0, scale=10.0)
    net[0].bias.main_grad[1] = 0.0
    grads = [p.main_grad for p in net.parameters()]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    result = optimizer.step()
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert result.num_zeros == 1
    clipped = torch.cat([g.flatten() for g in grads]).norm()
    assert clipped.item() == pytest.approx(0.5, rel=1e-5)


def test_clip_accepts_a_generator_and_ignores_small_norms():
    grads = [torch.full((4,), 3.0), torch.full((1,), 8.0)]
    norm = global_norm((g for g in grads), MESH.world, torch.device("cpu"))
    assert norm.item() == 10.0
    clip_by_norm_((g for g in grads), 10.0, 20.0)
    assert grads[1].item() == 8.0
    clip_by_norm_((g for g in grads), 10.0, 5.0)
    assert grads[1].item() == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_skip_the_update(bad):
    net = model(torch.bfloat16)
    optimizer = build_optimizer(config(bf16=True), net, MESH)
    set_grads(net, 0)
    net[0].weight.main_grad[0, 0] = bad
    before = [p.clone() for p in net.parameters()]
    result = optimizer.step()
    assert not result.success
    assert not torch.isfinite(torch.tensor(result.grad_norm))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    set_grads(net, 0)
    assert optimizer.step().success


def test_fp16_takes_the_loss_scale_out_of_the_gradients():
    plain, scaled = model(torch.float16), model(torch.float16)
    cfg = config(clip_grad=0.0)
    one = build_optimizer(cfg, plain, MESH)
    other = build_optimizer(cfg.replace(fp16=True, initial_loss_scale=1024.0), scaled, MESH)
    set_grads(plain, 0)
    # Losses are sums over 8 tokens here; the scale means the mean.
    assert other.backward_scale == 1024.0 / 8
    set_grads(scaled, 0, scale=other.backward_scale)
    assert one.step().grad_norm == pytest.approx(other.step().grad_norm)
    assert torch.equal(plain[0].weight, scaled[0].weight)


def test_dynamic_loss_scale_waits_falls_and_grows():
    scale = DynamicLossScale(initial=16.0, minimum=2.0, window=3, hysteresis=2)
    values = []
    for overflow in [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]:
        scale.update(bool(overflow))
        values.append(scale.value)
    assert values == [16, 8, 4, 4, 4, 8, 8, 4, 2, 2, 2]


def test_a_step_skipped_for_its_loss_says_nothing_about_the_scale():
    settings = {"initial_loss_scale": 16.0, "loss_scale_window": 3, "hysteresis": 1}
    net = model(torch.float16)
    optimizer = build_optimizer(config(fp16=True, **settings), net, MESH)
    values = []
    for skip, overflow in [(1, 0), (1, 0), (0, 0), (1, 0), (0, 0), (0, 0), (1, 1), (0, 1)]:
        set_grads(net, 0)
        if overflow:
            net[0].bias.main_grad[0] = float("inf")
        optimizer.step(skip=bool(skip))
        values.append(optimizer.loss_scale.value)
    assert values == [16, 16, 16, 16, 16, 32, 16, 8]


def test_state_round_trips_through_names_and_scalars():
    cfg = config(fp16=True, initial_loss_scale=8.0)
    net, copy = model(torch.float16), model(torch.float16)
    optimizer, other = build_optimizer(cfg, net, MESH), build_optimizer(cfg, copy, MESH)
    for step in range(2):
        set_grads(net, step, scale=8.0)
        optimizer.step()
    for (name, state), (same, target) in zip(
        optimizer.named_state(), other.named_state(), strict=True
    ):
        assert name == same
        assert set(state) == {"param", "exp_avg", "exp_avg_sq"}
        for key, value in state.items():
            target[key].copy_(value)
    other.load_scalars(optimizer.scalars())
    other.write_model_params()
    assert other.scalars() == {**optimizer.scalars(), "step": 2}
    for each in (net, copy):
        set_grads(each, 7, scale=8.0)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), copy.parameters(), strict=True))


def test_masters_can_be_taken_from_the_model():
    net = model(torch.bfloat16)
    optimizer = build_optimizer(config(), net, MESH)
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    optimizer.reload_model_params()
    assert torch.all(dict(optimizer.named_state())["0.weight"]["param"] == 2.0)
    squares = sum(p.float().square().sum().item() for p in net.parameters())
    assert optimizer.params_norm() == pytest.approx(squares**0.5)


def test_schedule_of_samples_and_of_iterations():
    net = model()
    by_iteration = config(
        train_iters=100,
        lr=1e-3,
        min_lr=1e-5,
        lr_decay_style="cosine",
        lr_warmup_fraction=0.1,
        micro_batch_size=4,
        global_batch_size=32,
    )
    optimizer = build_optimizer(by_iteration, net, MESH)
    scheduler = build_scheduler(by_iteration, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0
    for _ in range(11):
        scheduler.step(32)
    assert f"{scheduler.learning_rate():.6E}" == "9.996985E-04"
    by_sample = config(
        train_iters=None,
        train_samples=3200,
        lr=1e-3,
        min_lr=1e-5,
        lr_decay_style="cosine",
        lr_warmup_samples=320,
        micro_batch_size=4,
        global_batch_size=32,
    )
    assert build_scheduler(by_sample, build_optimizer(by_sample, net, MESH)).lr == scheduler.lr
