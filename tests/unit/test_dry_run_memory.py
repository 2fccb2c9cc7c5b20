"""The activations of a dry run against what autograd keeps in a real step."""

from __future__ import annotations

import pytest
import torch

from megatron.config import make_config
from megatron.core.fp8 import state as fp8_state
from megatron.training.dry_run.ranks import World
from megatron.training.initialize import Launch, start
from megatron.training.parity.source import SyntheticSource
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.saved_activations import SavedActivations, cached_weights

MODEL = {
    "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256,
    "vocab_size": 512, "micro_batch_size": 2, "global_batch_size": 4, "device": "cpu", "lr": 1e-3,
    "train_iters": 1, "transformer_impl": "native", "mock_data": True, "bf16": True,
}  # fmt: skip
LLAMA = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "add_bias_linear": False, "group_query_attention": True, "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
EXPERTS = {
    **LLAMA, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 128, "moe_layer_freq": "([0]*1+[1]*3)",
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}
# Kernels of an accelerator keep one number a row and head more than those of a CPU, and the batch
# itself counts on paper: a hundredth of the smallest of these models.
TOLERANCE = 0.01


def real_bytes(cfg):
    """What autograd keeps in a step, beside quantized weights that are there already."""
    runtime = start(cfg, Launch())
    parts = setup_model(cfg, runtime)
    step = TrainStep(cfg, runtime, parts, SyntheticSource(cfg, 1))
    parts.fp8.sync = lambda *_: None  # new scales would make new ones

    def run():
        step._batches.start(0)
        parts.ddp.zero_grad_buffer()
        step._runner.run(step._plan.actions)

    if parts.fp8.recipe is not None:
        run()
    saved = SavedActivations([*parts.model.parameters(), *cached_weights(parts.fp8)])
    with saved.measured():
        run()
    return saved.peak_bytes


def paper_peak(cfg):
    (one,) = World(cfg).classes()
    return one.peak


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bf16": False},
        {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        LLAMA,
        {**LLAMA, "recompute_granularity": "selective"},
        {**FULL, "recompute_method": "uniform"},
        {**FULL, "recompute_method": "block"},
        EXPERTS,
    ],
    ids=["gpt", "fp32", "no dropout", "llama", "selective", "uniform", "block", "experts"],
)
def test_activations(fields):
    cfg = make_config(**{**MODEL, **fields})
    assert paper_peak(cfg).activations == pytest.approx(real_bytes(cfg), rel=TOLERANCE)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_activations(recipe, monkeypatch):
    """With operands in the FP8 type, as on FP8 hardware: torch multiplies them on a CPU too."""
    monkeypatch.setattr(fp8_state, "has_fp8_hardware", lambda device: True)
    cfg = make_config(**{**MODEL, "fp8_format": "hybrid", "fp8_recipe": recipe})
    # On an accelerator attention keeps its result as well, 2 bytes an element, and a norm whose
    # fp32 result is cast keeps an fp32 copy of its input instead of the input, 2 bytes more.
    elements = cfg.seq_length * cfg.micro_batch_size * cfg.hidden_size * cfg.num_layers
    more = elements * (2 + (2 * 2 if recipe == "delayed" else 0))
    expected = real_bytes(cfg) + more
    assert paper_peak(cfg).activations == pytest.approx(expected, rel=TOLERANCE)


def test_fp8_attention_keeps_bytes(monkeypatch):
    """Its own kernel on every device: what it keeps is the same everywhere."""
    monkeypatch.setattr(fp8_state, "has_fp8_hardware", lambda device: True)
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    cfg = make_config(**{**MODEL, **fp8, "fp8_dot_product_attention": True})
    found = paper_peak(cfg).activations
    assert found == pytest.approx(real_bytes(cfg), rel=TOLERANCE)
    # Of a token and layer Q, K and V take half, and the result is not kept.
    elements = cfg.seq_length * cfg.micro_batch_size * cfg.hidden_size * cfg.num_layers
    plain = paper_peak(make_config(**{**MODEL, **fp8})).activations
    assert plain - found == pytest.approx(elements * (3 + 2), rel=0.02)


def test_recomputation_keeps_less_and_needs_more_at_a_time():
    plain, full = (
        paper_peak(make_config(**{**MODEL, **fields}))
        for fields in ({}, {**FULL, "recompute_method": "uniform"})
    )
    assert full.activations < plain.activations / 5
    assert full.total - full.activations > plain.total - plain.activations


def test_quantized_weights_are_listed_apart():
    fields = {"fp8_format": "hybrid", "ffn_hidden_size": 1024, "fp8_amax_history_len": 16}
    (one,) = World(make_config(**{**MODEL, **fields})).classes()
    linear = 4 * (256 * 768 + 256 * 256 + 2 * 256 * 1024)  # weights of four layers
    numbers = 16 * 8 * 4  # of each layer a few: scale, magnitude, limits of the formats
    assert 2 * linear <= one.cached_bytes <= 2 * linear + numbers
    assert one.kept.fp8 == 4 * 16 * 5 * (16 + 1)  # columns of histories and scales


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_weights_that_rest_in_fp8_have_no_copies(recipe):
    fields = {"fp8_format": "e4m3", "fp8_recipe": recipe, "use_distributed_optimizer": True,
              "num_layers": 1}  # fmt: skip
    plain, resting = (
        World(make_config(**{**MODEL, **fields, "fp8_param_gather": on})).classes()[0]
        for on in (False, True)
    )
    linear = 256 * 768 + 256 * 256 + 2 * 256 * 1024
    assert resting.cached_bytes < 1024  # a magnitude each, and a table of codes
    saved = plain.kept.weights - resting.kept.weights
    if recipe == "mxfp8":  # twice a byte, and twice a scale for 32 of them
        assert saved == pytest.approx(-linear * 8 / 32, rel=0.01)
        assert plain.cached_bytes >= 4 * linear  # held in bf16
    else:
        assert saved == pytest.approx(linear, rel=0.01)
    assert resting.total_bytes < plain.total_bytes - linear


def test_on_paper_there_are_no_values():
    cfg = make_config(**MODEL)
    world = World(cfg)
    assert {p.device for p in world.stages[0].parts.model.parameters()} == {torch.device("meta")}
