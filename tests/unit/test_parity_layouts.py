"""Layouts as texts, and small models that keep the features of large ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import ConfigError, fp8_policy, make_config
from megatron.config.cli import parse
from megatron.config.moe import auxiliary_losses
from megatron.config.schema import SPECS
from megatron.core.errors import MegatronError, MeshError
from megatron.training.parity.check import failure_of, prepare
from megatron.training.parity.layouts import one_process, parse_layout, usual_layouts
from megatron.training.parity.ranks import RankError
from megatron.training.parity.shrink import (
    fits,
    in_fp32,
    neutral,
    own_precision,
    sampled,
    shrink,
    with_batch,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LARGE = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "seq_length": 8192, "swiglu": True,
    "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "vocab_size": 128256, "bf16": True,
    "fp8_format": "hybrid", "first_last_layers_bf16": True, "tensor_model_parallel_size": 4,
    "sequence_parallel": True, "pipeline_model_parallel_size": 2, "lr": 3e-4,
    "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ranks", "fields"),
    [
        ("tp2", 2, {"tensor_model_parallel_size": 2}),
        ("tp2pp2cp1dp1", 4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 1}),
        ("PP2-vpp2_dp2", 4, {"num_virtual_stages_per_pipeline_rank": 2}),
        ("tp2sp", 2, {"sequence_parallel": True}),
        ("dp2distopt-recompute", 2, {"use_distributed_optimizer": True, "recompute_num_layers": 1}),
        (
            "pp2:pipeline_schedule=gpipe,micro_batch_size=5",
            2,
            {"pipeline_schedule": "gpipe", "micro_batch_size": "5"},
        ),
        ("tp2sp:tp_comm_overlap=true", 2, {"tp_comm_overlap": True}),
        ("tp2:tp_comm_overlap=true", 2, {"tp_comm_overlap": True}),  # refused, not dropped
        ("dp2:overlap-grad-reduce=true", 2, {"overlap_grad_reduce": True}),
        ("ep2", 2, {"expert_model_parallel_size": 2}),
        ("tp2ep2", 4, {"expert_model_parallel_size": 2}),
        ("tp2ep2etp1", 2, {"expert_tensor_parallel_size": 1}),
        ("cp2ep4", 4, {"expert_model_parallel_size": 4}),
    ],
)
def test_layouts_are_read(text, ranks, fields):
    layout = parse_layout(text)
    assert layout.ranks == ranks
    assert fields.items() <= layout.settings({}).items()


def test_a_layout_replaces_the_models_own():
    fields = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "num_layers": 4,
              "decoder_first_pipeline_num_layers": 3, "recompute_granularity": "selective",
              "account_for_loss_in_pipeline_split": True}  # fmt: skip
    assert parse_layout("cp2-norecompute").settings(fields) == {
        "sequence_parallel": True, "num_layers": 4, "context_parallel_size": 2,
    }  # fmt: skip
    assert parse_layout("pp2nosp").settings(fields)["account_for_loss_in_pipeline_split"]
    assert one_process(fields) == {"num_layers": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "tp has no size"),
        ("2tp", "It cannot be read"),
        ("tp2xp2", "It cannot be read from 'xp2' on"),
        ("tp2tp2", "It names tp twice"),
        ("tp0", "tp has no rank"),
        ("", "It names no axis"),
        ("tp4pp4", "It needs 16 ranks, and this command starts at most 8"),
        ("vpp2", "Only a pipeline has virtual stages"),
        ("dp2sp", "Sequences are split over the tensor-parallel ranks"),
        ("dp3ep2", "etp x ep = 2 does not divide tp x cp x dp = 3"),
        ("pp2:schedule=gpipe", "'schedule=gpipe' is no setting with a value"),
        ("tp" + "9" * 5000, "tp has no size that could be read"),
        ("pp2:num_layers=3", "num_layers is not about how ranks share the work"),
        ("pp2:bf16=true", "bf16 is not about how ranks share the work"),
        ("dp2:grad_reduce_in_bf16=true", "grad_reduce_in_bf16 is not about"),
        ("dp2:optimizer=adam", "optimizer is not about"),
        ("dp2:train_iters=1", "train_iters is not about"),
        ("dp2:load=somewhere", "load is not about"),
        ("dp2:pipeline_model_parallel_size=2", "Write pp with a size in front of the colon"),
        ("pp2:pipeline_schedul=gpipe", "Did you mean pipeline_schedule=...?"),
    ],
)
def test_layouts_that_cannot_be(text, said):
    with pytest.raises(MeshError) as caught:
        parse_layout(text)
    assert str(caught.value).startswith(f"--layouts: got {text!r}. ")
    assert said in str(caught.value)


def test_a_large_model_becomes_small_and_keeps_its_features():
    cfg = make_config(8, **LARGE)
    layouts = [parse_layout(text) for text in ("tp2sp", "pp2vpp2", "cp2", "dp2")]
    model = shrink(cfg, neutral(cfg), layouts)
    small = model.fields
    assert (small["num_layers"], small["num_query_groups"], small["num_attention_heads"]) == (
        4,
        2,
        8,
    )
    assert small["hidden_size"] == small["num_attention_heads"] * small["kv_channels"] == 128
    assert small["ffn_hidden_size"] * 4096 == 14336 * small["hidden_size"]
    assert small["recompute_num_layers"] == 1
    kept = ("swiglu", "bf16", "fp8_format", "normalization", "first_last_layers_bf16",
            "untie_embeddings_and_output_weights", "recompute_method",
            "sequence_parallel")  # fmt: skip
    assert all(small[name] == LARGE[name] for name in kept)
    assert {change.name for change in model.changes} >= {"optimizer", "clip_grad", "num_layers"}
    assert shrink(cfg, neutral(cfg), layouts) == model


def test_rules_of_a_policy_keep_their_place_in_a_small_model():
    text = """rules:
  - {layers: 0-1, recipe: bf16}
  - {module: "decoder.layers.30.*", recipe: mxfp8, format: e4m3}
  - {module: "*.linear_fc2", layers: "8,16-23", wgrad: bf16}
  - {module: "*.linear_fc2", layers: 24-29, recipe: tensorwise}
"""
    cfg = make_config(8, **{**LARGE, "first_last_layers_bf16": False}, fp8_policy=text,
                      fp8_warmup_iters=100)  # fmt: skip
    layouts = [parse_layout(text) for text in ("tp2sp", "pp2")]
    fields = shrink(cfg, neutral(cfg), layouts).fields
    assert (fields["num_layers"], fields["fp8_warmup_iters"]) == (2, 0)
    sized = with_batch(cfg, shrink(cfg, neutral(cfg), layouts), layouts, 1)
    small = make_config(2, **layouts[0].settings(sized.fields))
    rules = fp8_policy.read(small.fp8_policy_text).rules
    assert [(rule.modules, rule.layers, rule.recipe) for rule in rules] == [
        (("*",), ((0, 0),), "bf16"), (("decoder.layers.1.*",), (), "mxfp8")
    ]  # fmt: skip
    fits(cfg, neutral(cfg), parse_layout("pp5"))  # with 30 layers


def test_nothing_grows():
    cfg = make_config(1, num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
    model = shrink(cfg, neutral(cfg), [parse_layout("dp2")])
    before = {name: getattr(cfg, name) for name in ("num_layers", "hidden_size", "seq_length")}
    assert before.items() <= model.fields.items()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fp8_format": None, "first_last_layers_bf16": False, "rotary_percent": 0.25},
        {"cp_comm_type": ("p2p", "all_gather") * 16},
        {"cp_comm_type": ("a2a",), "account_for_loss_in_pipeline_split": True, "num_layers": 31},
        {"num_query_groups": 32},
        {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True},
        {"micro_batch_size": 4, "global_batch_size": 12, "reset_attention_mask": True},
        {"fp16": True, "bf16": False, "fp8_format": None, "first_last_layers_bf16": False},
    ],
    ids=str,
)
def test_small_models_fit_every_layout_that_the_large_one_fits(settings):
    """The configurations are finished here, so a size that does not divide is an error."""
    fields = {k: v for k, v in (LARGE | settings).items() if v is not None}
    cfg = make_config(8, **fields)
    texts = ["tp2sp", "tp4", "pp2", "pp2vpp2", "cp2", "tp2cp2dp2", "pp4dp2", "tp2pp2cp2"]
    plan = prepare(cfg, texts, steps=2)
    for layout in plan.layouts:
        for precision in plan.precisions:
            made = make_config(layout.ranks, **plan.fields(layout, precision))
            assert made.params_dtype == (cfg.params_dtype if precision != "fp32" else "float32")
            assert (made.fp8_format is not None) == ("fp8" in precision)
            assert made.num_microbatches >= 2
            assert made.hidden_dropout == made.attention_dropout == made.clip_grad == 0


@pytest.mark.parametrize("name", ["gpt3_126m", "gpt3_5b", "gpt3_175b", "llama3_8b"])
def test_configurations_of_the_project_have_usual_layouts(name):
    cfg, _ = parse(["--config", str(CONFIGS / f"{name}.yaml")], 32)
    plan = prepare(cfg, None, steps=2)
    assert {"tp2", "tp2sp", "pp2", "cp2", "dp2"} <= {layout.text for layout in plan.layouts}
    assert plan.skipped == ()
    assert plan.model.fields["hidden_size"] <= 256


def test_models_with_experts_keep_their_router():
    experts = {
        "num_experts": 64, "moe_router_topk": 6, "moe_router_num_groups": 8,
        "moe_router_group_topk": 3, "moe_layer_freq": "([0]*3+[1]*29)", "add_bias_linear": False,
        "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816,
        "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2], "moe_expert_capacity_factor": 1.5,
        "fp8_format": "hybrid", "first_last_layers_bf16": False,
    }  # fmt: skip
    cfg = make_config(8, **(LARGE | experts))
    plan = prepare(cfg, ["ep2", "tp2ep4", "pp2ep2", "tp2ep2etp1", "cp2ep2"], steps=1)
    small = plan.model.fields
    # Two chosen experts out of each of three groups, of which there are eight.
    assert (small["num_experts"], small["moe_router_topk"]) == (16, 6)
    assert small["moe_ffn_hidden_size"] % 32 == 0
    assert small["moe_layer_freq"] == "[0, 1]"
    assert small["moe_expert_capacity_factor"] == 1.5
    # What all replicas balance together depends on their number.
    assert auxiliary_losses(make_config(1, **plan.fields(None, "fp32"))) == {
        "seq_aux_loss": 0.2,
        "aux_loss": 0.1,
    }


def test_what_the_large_model_cannot_do_is_refused():
    cfg = make_config(1, num_layers=6, hidden_size=48, num_attention_heads=3, seq_length=6)
    full = neutral(cfg)
    fits(cfg, full, parse_layout("pp3"))
    fits(cfg, full, parse_layout("pp4"))  # stages may be placed by hand: 2, 2, 1, 1
    for text in ("tp2", "cp2", "pp8"):
        with pytest.raises(ConfigError):
            fits(cfg, full, parse_layout(text))
    plan = prepare(cfg, None, steps=1)
    assert [layout.text for layout in plan.layouts] == ["dp2", "pp2"]
    with pytest.raises(Exception, match="'tp2'. This configuration cannot run there"):
        prepare(cfg, ["tp2"], steps=1)


def test_all_layouts_that_cannot_run_are_refused_at_once():
    cfg = make_config(1, num_layers=6, hidden_size=48, num_attention_heads=3, seq_length=6)
    with pytest.raises(MegatronError) as caught:
        prepare(cfg, ["tp2", "pp2", "zb", "cp2"], steps=1)
    said = [line for line in str(caught.value).splitlines() if line.startswith("--layouts: got")]
    assert [line.split("'")[1] for line in said] == ["tp2", "zb", "cp2"]


def test_usual_layouts_follow_the_model():
    assert usual_layouts(make_config(8, **LARGE))[-1] == "tp2pp2"
    experts = {"num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 256}
    whole = {**LARGE, **experts, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}
    assert usual_layouts(make_config(8, **whole))[-3:] == ["ep2", "tp2ep2etp1", "tp2pp2ep2etp1"]
    odd = make_config(1, num_layers=2, hidden_size=9, num_attention_heads=3, seq_length=7)
    assert usual_layouts(odd) == ["dp2", "pp2"]


def test_precisions():
    fields = {"bf16": True, "fp8_format": "hybrid", "fp8_margin": 1, "num_layers": 2}
    assert own_precision(fields) == "bf16+fp8 delayed"
    assert (
        own_precision({"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}) == "fp32+fp8 tensorwise"
    )
    assert own_precision({"fp4_format": "e2m1", "bf16": True}) == "bf16+fp4 nvfp4"
    assert own_precision({"grad_reduce_in_bf16": True}) != own_precision({}) == ""
    assert in_fp32(fields) == {"num_layers": 2}


def test_batches_fill_every_layout():
    cfg = make_config(1, **{**LARGE, "tensor_model_parallel_size": 1,
                            "pipeline_model_parallel_size": 1, "micro_batch_size": 3})  # fmt: skip
    layouts = [parse_layout(text) for text in ("dp4", "pp4vpp2", "dp2pp2vpp2")]
    batch = with_batch(cfg, neutral(cfg), layouts, 1).fields["global_batch_size"]
    assert batch == 3 * 8
    assert batch % (3 * 4) == 0


def test_samples_of_a_pattern_keep_every_kind():
    assert sampled([0, 1, 1, 1, 1, 1], 2) == [0, 1]
    assert sampled([1] * 9 + [0], 3) == [1, 1, 0]
    assert sampled(list("aabb"), 4) == list("aabb")
    assert sampled([1, 0], 1) == [1]


def test_every_setting_that_is_dropped_exists():
    cfg = make_config(1, num_layers=2, hidden_size=8, num_attention_heads=2)
    assert neutral(cfg).fields.keys() <= SPECS.keys()


def test_a_failed_rank_says_what_is_wrong_without_its_stack():
    head = "--- rank 1 of 2 ---\nTraceback (most recent call last):\n  File x, line 1\n"
    own = "megatron.core.errors.MeshError: world size: got 3. Why. Fix."
    assert failure_of(RankError([(1, head + own)])) == "rank 1 of 2: world size: got 3. Why. Fix."
    other = head + "ValueError: broken"
    assert failure_of(RankError([(1, other), (0, head + own)])) == other
