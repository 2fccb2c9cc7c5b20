"""Tokens and gradients in FP8 on their way to experts, on one process."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fp8.quantizers import BlockQuantizer
from megatron.core.fp8.recipe import Role
from megatron.core.fp8.row_codec import row_codec, values_of
from megatron.observe.lines import precision_table
from megatron.training.precision import summarize
from tests.small_models import LLAMA, batch, small_model, spread_weights

MOE = {
    **LLAMA,
    "num_experts": 4,
    "moe_ffn_hidden_size": 64,
    "hidden_size": 64,
    "moe_shared_expert_intermediate_size": 16,
}
THERE = {"moe_dispatch_fwd_dtype": "mxfp8"}
BACK = {"moe_combine_bwd_dtype": "mxfp8"}
BOTH = {**THERE, **BACK}
BLOCKWISE = {name: "blockwise" for name in BOTH}
RECIPES = {
    "none": {},
    "delayed": {"fp8_format": "hybrid"},
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "mxfp8-exact": {"fp8_format": "hybrid", "fp8_recipe": "mxfp8", "fp8_emulation": "exact"},
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
A2A = {"moe_token_dispatcher_type": "alltoall"}


def results(enabled=True, **settings):
    """Loss, gradients and scales of a model after one batch."""
    model, build = small_model(**{**MOE, **settings})
    spread_weights(model, 0.1)
    build.fp8.enabled = build.fp8.enabled and enabled
    loss = model(*batch(build.config)).sum()
    loss.backward()
    build.fp8.sync()
    found = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters()}
    for book in build.fp8.books:
        found |= {f"amax {path} {k}": v for path, entry in book.state_dict().items()
                  for k, v in entry.items()}  # fmt: skip
    return {"loss": loss.detach(), **found}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "mxfp8-exact"])
@pytest.mark.parametrize("dtype", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_experts_of_the_same_recipe_compute_what_they_compute_without(name, dtype):
    """One rounding only. Scales are powers of two, so blocks along tokens lose nothing either."""
    settings = RECIPES[name] | dtype
    travels = BLOCKWISE if name == "blockwise" else BOTH
    assert_same(results(**settings, **travels), results(**settings))


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_what_came_is_not_quantized_again(name, monkeypatch):
    """Two casts an expert and layer less: of its input and of its output's gradient."""
    casts = []
    blocks = BlockQuantizer._blocks
    monkeypatch.setattr(
        BlockQuantizer, "_blocks", lambda *args: (casts.append(args[2]), blocks(*args))[1]
    )
    results(**RECIPES[name], bf16=True)
    before = len(casts)
    casts.clear()
    results(**RECIPES[name], bf16=True, **(BLOCKWISE if name == "blockwise" else BOTH))
    assert before - len(casts) == 2 * MOE["num_experts"] * 2


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("change", [A2A, RECOMPUTE], ids=["alltoall", "recompute"])
def test_dispatcher_and_recomputation_change_nothing(name, change):
    settings = RECIPES[name] | BOTH | {"bf16": True}
    assert_same(results(**settings, **change), results(**settings))


def test_filling_up_changes_nothing():
    settings = BOTH | {"bf16": True, "moe_expert_capacity_factor": 0.5, **RECIPES["mxfp8"]}
    for change in ({}, A2A):
        filled = results(**settings, **change, moe_pad_expert_input_to_capacity=True)
        assert torch.equal(filled["loss"], results(**settings, **change)["loss"])


def test_experts_in_bf16_get_quantized_tokens_and_gradients(monkeypatch):
    """Each switch acts on its own direction, and on nothing else."""
    plain, there, back = (results(bf16=True, **s) for s in ({}, THERE, BACK))
    assert there["loss"] != plain["loss"]
    assert torch.equal(back["loss"], plain["loss"])
    name = "grad decoder.layers.1.mlp.experts.linear_fc2.weight0"
    assert not torch.equal(back[name], plain[name])
    # What the last layer's residual carries does not pass the experts.
    for untouched in ("grad decoder.final_layernorm.weight", "grad output_layer.weight"):
        assert torch.equal(back[untouched], plain[untouched])
        assert not torch.equal(there[untouched], plain[untouched])


def test_what_an_expert_gets():
    """The values of the codes, of tokens and of gradients; others see the tokens themselves."""
    model, _ = small_model(**MOE, **BOTH, bf16=True)
    spread_weights(model, 0.1)
    layer = model.decoder.layers[0].mlp
    seen = {}
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    fc1.register_forward_hook(lambda m, args, out: seen.update(x=args[0]))
    fc2.register_full_backward_hook(lambda m, gx, gy: seen.update(dy=gy[0]))
    router = []
    layer.router.register_forward_hook(lambda m, args, out: router.append((args[0], out)))
    x = torch.randn(8, 2, 64).bfloat16()
    out = layer(x)
    dy = torch.randn(8, 2, 64).bfloat16()
    out.backward(dy)
    assert torch.equal(router[0][0], x)
    codec = row_codec("mxfp8", None, Role.INPUT, fold=True)
    order = router[0][1].experts.reshape(-1).argsort(stable=True) // 2
    for found, source in ((seen["x"], x), (seen["dy"], dy)):
        tokens = source.reshape(16, 64)
        expected = values_of(codec.unpack(codec.pack(tokens), 64), torch.bfloat16)
        assert torch.equal(found, expected[order])
        assert not torch.equal(found, tokens[order])


def test_layers_that_fp8_leaves_alone_send_in_high_precision():
    """Of a policy, and while FP8 is switched off; without FP8 at all the switch stands alone."""
    settings = RECIPES["mxfp8"] | {"bf16": True}
    edges = settings | {"first_last_layers_bf16": True}  # both layers
    assert_same(results(**edges, **BOTH), results(**edges))
    off = results(enabled=False, **settings, **BOTH)
    assert_same(off, results(enabled=False, **settings))
    assert torch.equal(off["loss"], results(bf16=True)["loss"])


def test_the_precision_table_says_how_tokens_travel():
    def table(**settings):
        model, _ = small_model(**MOE, bf16=True, **settings)
        return precision_table(summarize(model.named_precision_rows()).lines)

    text = table(**THERE, moe_combine_bwd_dtype="blockwise", **RECIPES["delayed"])
    first, *lines = text.splitlines()
    cells = [line.split() for line in lines if "dispatcher" in line]
    assert [c[1] for c in cells] == ["dispatch", "combine"]
    assert "fp8 e4m3 mxfp8" in text
    assert "fp8 e4m3 blockwise" in text
    assert "dispatcher" not in table(**RECIPES["delayed"])
    assert first == table(**RECIPES["delayed"]).splitlines()[0]  # no linear layer more
    kept = table(**BOTH, **RECIPES["delayed"], first_last_layers_bf16=True)
    assert "--first-last-layers-bf16" in next(x for x in kept.splitlines() if "dispatcher" in x)
