"""Layers with experts: what they equal, what they hold, what they leave alone."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8.precision import PrecisionRow
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.router import gate
from tests.small_models import LLAMA, batch, small_model, spread_weights

MOE = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 48}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}
BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.25,
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 0.01,
}


def gradients(model, config, seed=0):
    """Loss and gradients of a batch."""
    model.zero_grad()
    loss = model(*batch(config, seed)).sum()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def copy_dense_weights(dense, moe):
    """Give every expert the weights of the dense model's MLP, and all else the rest."""
    source = dict(dense.named_parameters())
    with torch.no_grad():
        for name, param in moe.named_parameters():
            if name.endswith("router.weight"):
                continue
            dense_name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            if ".experts." in name:
                dense_name = dense_name.replace("experts.", "").rstrip("0123456789")
            param.copy_(source[dense_name])


@pytest.mark.parametrize(
    "experts",
    [
        {"num_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"num_experts": 4, "moe_router_topk": 2},
        {"num_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"},
        {"num_experts": 4, "moe_router_topk": 3, "moe_router_score_function": "sigmoid"},
    ],
    ids=["one", "four", "four-alltoall", "four-sigmoid"],
)
def test_equal_experts_are_a_dense_model(experts):
    """Weights that sum up to 1 over experts that are all the same change nothing."""
    dense, build = small_model(**LLAMA)
    spread_weights(dense)
    moe, _ = small_model(**{**LLAMA, **experts, "moe_ffn_hidden_size": 48})
    copy_dense_weights(dense, moe)
    loss, grads = gradients(dense, build.config)
    ours, found = gradients(moe, build.config)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, grad in grads.items():
        if ".mlp.linear_fc" in name and not name.endswith("layer_norm_weight"):
            prefix, rest = name.split(".mlp.")
            parts = [g for n, g in found.items() if n.startswith(f"{prefix}.mlp.experts.{rest}")]
            assert len(parts) == experts["num_experts"]
            total = sum(parts)
        else:
            total = found[name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")]
        # fp32 sums in another order.
        torch.testing.assert_close(total, grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())


def moe_model(**settings):
    model, build = small_model(**MOE, **settings)
    spread_weights(model)
    return model, build


def test_the_output_is_the_weighted_sum_of_the_chosen_experts():
    model, build = moe_model(**SHARED)
    layer: MoELayer = model.decoder.layers[1].mlp
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = layer(x)
        logits = x.view(10, 32) @ layer.router.weight.t()
        weights, experts = logits.topk(2)
        weights = weights.softmax(-1)
        expected = torch.zeros(10, 32)
        for token in range(10):
            for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
                wide = (
                    x.view(10, 32)[token] @ getattr(layer.experts.linear_fc1, f"weight{expert}").t()
                )
                inner = torch.nn.functional.silu(wide[:48]) * wide[48:]
                expected[token] += weight * (
                    inner @ getattr(layer.experts.linear_fc2, f"weight{expert}").t()
                )
        shared = layer.shared_experts
        gated = (x @ shared.gate_weight.t()).sigmoid() * MLP.forward(shared, x)
    torch.testing.assert_close(found, expected.view(5, 2, 32) + gated, rtol=1e-4, atol=1e-5)


def test_dispatchers_and_recomputation_change_nothing():
    settings = {**BALANCED, **SHARED}
    model, build = moe_model(**settings)
    build.auxiliary.start(2.0)
    loss, grads = gradients(model, build.config)
    sums = build.auxiliary.losses(["load_balancing_loss", "z_loss"], 2, build.device)
    for change in ({"moe_token_dispatcher_type": "alltoall"}, RECOMPUTE):
        other, own = moe_model(**settings, **change)
        own.auxiliary.start(2.0)
        ours, found = gradients(other, own.config)
        assert torch.equal(ours, loss), change
        for name, grad in grads.items():
            assert torch.equal(found[name], grad), (name, change)
        again = own.auxiliary.losses(["load_balancing_loss", "z_loss"], 2, build.device)
        assert torch.equal(again, sums)  # counted once


def test_losses_reach_the_router_with_their_weights():
    """The gradient of the whole is that of the tokens plus weight x scale x that of each term."""
    plain, build = moe_model()
    _, without = gradients(plain, build.config)
    found = {}
    for scale in (1.0, 3.0):
        model, own = moe_model(moe_aux_loss_coeff=[0.5])
        own.auxiliary.start(scale)
        found[scale] = gradients(model, own.config)[1]
    name = "decoder.layers.0.mlp.router.weight"
    once = found[1.0][name] - without[name]
    assert once.abs().max() > 1e-4
    torch.testing.assert_close(found[3.0][name] - without[name], 3 * once, rtol=1e-3, atol=1e-5)


def test_evaluation_leaves_no_trace():
    model, build = moe_model(**BALANCED, **BIAS, moe_input_jitter_eps=0.1)
    build.auxiliary.start(1.0)
    model.eval()
    try:
        with torch.no_grad():
            first = model(*batch(build.config))
            assert torch.equal(first, model(*batch(build.config)))
        assert build.auxiliary.losses(["z_loss"], 2, build.device).sum() == 0
        assert build.auxiliary.loads(2, 4, build.device).sum() == 0
    finally:
        model.train()


def test_jitter_is_drawn_anew_for_every_microbatch_and_again_when_recomputed():
    settings = {"moe_input_jitter_eps": 0.2}
    model, build = moe_model(**settings)
    build.rng.position = (1, 0)
    loss, grads = gradients(model, build.config)
    build.rng.position = (1, 1)
    assert gradients(model, build.config)[0] != loss
    again, own = moe_model(**settings, **RECOMPUTE)
    own.rng.position = (1, 0)
    ours, found = gradients(again, own.config)
    assert torch.equal(ours, loss)
    assert all(torch.equal(found[n], g) for n, g in grads.items())


def test_forced_balance_spreads_the_tokens():
    model, build = moe_model(moe_router_force_load_balancing=True)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.mlp.router.weight.zero_()
            layer.mlp.router.weight[0] = 5.0
    build.auxiliary.start(1.0)
    _, grads = gradients(model, build.config)
    loads = build.auxiliary.loads(2, 4, build.device)
    assert (loads > 4).all()
    assert all(torch.isfinite(g).all() for g in grads.values())


def test_capacity_drops_and_filling_up_changes_nothing():
    dropping = {"moe_expert_capacity_factor": 0.5}
    model, build = moe_model(**dropping)
    whole, _ = moe_model()
    loss, grads = gradients(model, build.config)
    assert loss != gradients(whole, build.config)[0]
    for change in ({}, {"moe_token_dispatcher_type": "alltoall"}):
        filled, own = moe_model(**dropping, **change, moe_pad_expert_input_to_capacity=True)
        ours, found = gradients(filled, own.config)
        assert torch.equal(ours, loss)
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def test_the_bias_moves_against_the_load():
    model, _ = small_model(**MOE, **BIAS)
    router = model.decoder.layers[0].mlp.router
    router.move_bias(torch.tensor([10.0, 2.0, 4.0, 4.0]))
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    router.move_bias(torch.tensor([5.0, 5.0, 5.0, 5.0]))
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert "decoder.layers.0.mlp.router.expert_bias" in model.state_dict()
    assert not any("expert_bias" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_router_computes_in_its_own_type(dtype):
    x = torch.randn(6, 8).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(4, 8).bfloat16())
    weight.main_grad = torch.zeros(4, 8)
    logits = gate(x, weight, dtype)
    assert logits.dtype == dtype
    assert torch.equal(logits, x.to(dtype) @ weight.to(dtype).t())
    upstream = torch.randn(6, 4, dtype=dtype)
    logits.backward(upstream)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, (upstream.t() @ x.to(dtype)).float())
    assert x.grad.dtype == torch.bfloat16
    plain = torch.nn.Parameter(weight.detach().clone())
    gate(x, plain, dtype).backward(upstream)
    assert plain.grad.dtype == torch.bfloat16


def test_only_the_layers_of_the_pattern_have_experts():
    model, _ = small_model(**{**MOE, "num_layers": 4, "moe_layer_freq": "([0]*1+[1]*2+[0])"})
    kinds = [type(layer.mlp).__name__ for layer in model.decoder.layers]
    assert kinds == ["MLP", "MoELayer", "MoELayer", "MLP"]
    names = dict(model.named_parameters())
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.0.pre_mlp_layernorm.weight" not in names


def test_the_precision_table_names_the_router():
    model, _ = small_model(**MOE, fp8_format="hybrid", moe_router_dtype="fp64")
    rows = {row.path: row for row in model.named_precision_rows()}
    router: PrecisionRow = rows["decoder.layers.0.mlp.router"]
    assert (router.delivered, router.is_fallback) == ("fp64", False)
    assert any(".experts." in path and row.delivered == "fp8" or "fp8" in row.delivered
               for path, row in rows.items() if ".experts." in path)  # fmt: skip
