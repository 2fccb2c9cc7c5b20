"""`--fp8-policy`: what a file may say, which rule decides, and what a checkpoint makes of it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
import torch

from megatron.config import ConfigError, fp8_policy
from megatron.core.fp8 import DelayedScaling, Float8CurrentScaling, Format, Fp8State
from tests.small_models import LLAMA, build_model, small_config

FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 4,
       "fp8_amax_compute_algo": "max"}  # fmt: skip
EXPERTS = {"num_experts": 4, "add_bias_linear": False, "moe_layer_freq": "[1,0,1]",
           "moe_shared_expert_intermediate_size": 32}  # fmt: skip
FC2 = "decoder.layers.{}.mlp.linear_fc2"


def rules(*lines):
    return "rules:\n" + "".join(f"  - {{{line}}}\n" for line in lines)


def config(*lines, **fields):
    fields = {"num_layers": 3, **FP8, **fields}
    return small_config(fp8_policy=rules(*lines) if lines else None, **fields)


def state_of(*lines, paths=None, **fields):
    cfg = config(*lines, **fields)
    state = Fp8State.from_config(cfg)
    for path in paths or fp8_policy.fp8_paths(cfg):
        state.for_linear(path)
    return state


def decided(state):
    return {path: layer.decision.summary for path, layer in state.layers.items()}


# -- the file -------------------------------------------------------------------------------------


def test_the_paths_are_those_of_the_model():
    attention = {**FP8, "fp8_dot_product_attention": True}
    for settings in ({}, LLAMA, EXPERTS, attention):
        cfg = small_config(num_layers=3, **settings)
        model, build = build_model(cfg)
        fp8 = build.fp8
        built = [re.sub(r"(experts\.linear_fc[12])\.\d+$", r"\1", p) for p in fp8.layers]
        built += fp8.attention_layers if settings is attention else []
        assert set(built) == {*fp8_policy.fp8_paths(cfg), "output_layer"}


@pytest.mark.parametrize(
    ("text", "got", "advice"),
    [
        ("- 1\n", "got a list in the rules given as text", "`rules`"),
        ("\n", "got nothing", "`rules`"),
        ("rules:\n  x: 1\n", "rules: {'x': 1}", "list of rules"),
        ("rules: []\n", "rules: []", "list of rules"),
        ("rules: [{layers: 0, recipe: bf16}]\nmore: 1\n", "got more", "Keep `rules` alone"),
        ("rules:\n- {layers: 0, recipe: bf16}\nrules:\n- 1\n", "", "stands there twice"),
        ("rules:\n- {module: *.fc2, recipe: bf16}\n", "", "stands in quotes"),
        (rules("layers: 0, recipe: mxpf8"), "rule 1: recipe: mxpf8", "mxfp8?"),
        (rules("layers: 0, recipe: mxfp8, format: e5m2"), "rule 1: format: e5m2", "e4m3, hybrid"),
        (rules("layers: 0, recip: bf16"), "rule 1: recip: bf16", "recipe?"),
        (rules("layers: 0, wgrad: mxfp8"), "rule 1: wgrad: mxfp8", "fp8, bf16"),
        (rules("layers: 0"), "rule 1: no recipe", "`recipe: bf16`"),
        (rules("recipe: bf16"), "rule 1: neither module nor layers", "module"),
        (rules("module: 3, recipe: bf16"), "rule 1: module: 3", "pattern"),
        (rules("layers: 2-1, recipe: bf16"), "rule 1: layers: 2-1", "`layers: 0-3,10`"),
        (rules("layers: true, recipe: bf16"), "rule 1: layers: True", "`layers: 0-3,10`"),
        (rules("layers: 0, recipe: bf16, reason: 7"), "rule 1: reason: 7", "text"),
        (rules("layers: 0, recipe: bf16, format: e4m3"), "format: e4m3", "Remove format: e4m3"),
        (rules("layers: 0, fprop: bf16, dgrad: bf16, wgrad: bf16"), "all products", "recipe: bf16"),
        (rules("layers: 3-9, recipe: bf16"), "got rule 1 in", "layers of this model are 0 to 2"),
        (rules("module: '*.linear_fc3', recipe: bf16"), "module: *.linear_fc3", "*.mlp.linear_fc"),
        (
            rules("module: decoder.layer.1.mlp.linear_fc1, recipe: bf16"),
            "module: decoder.layer.1.mlp.linear_fc1",
            "decoder.layers.*.mlp.linear_fc1?",
        ),
        (
            rules("module: [decoder.layers.7.mlp.linear_fc1], recipe: bf16"),
            "module: decoder.layers.7.mlp.linear_fc1",
            "decoder.layers.2.mlp.linear_fc1?",
        ),
        (rules("module: output_layer, recipe: bf16"), "output_layer", "always kept out"),
        (
            rules("layers: 0-1, recipe: bf16", "module: '*', wgrad: bf16", "layers: 1, wgrad: fp8"),
            "got rule 3 in",
            "in front of rule 1",
        ),
    ],
)  # fmt: skip
def test_mistakes_name_the_rule_and_the_way_out(text, got, advice):
    with pytest.raises(ConfigError) as error:
        small_config(num_layers=3, **FP8, fp8_policy=text)
    (problem,) = error.value.problems
    assert problem.flags == ("--fp8-policy",)
    assert got in str(problem)
    assert advice in str(problem)


def test_rules_for_layers_that_are_kept_out_anyway():
    with pytest.raises(ConfigError, match="--first-last-layers-bf16 keeps all of its layers"):
        config("layers: 0, recipe: mxfp8", first_last_layers_bf16=True)


def test_a_file_and_its_text_are_the_same(tmp_path):
    text = rules(
        "layers: '0,2', recipe: tensorwise, reason: 'it''s loud'", "layers: 1, wgrad: bf16"
    )
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    by_path = small_config(num_layers=3, **FP8, fp8_policy=str(path))
    by_text = small_config(num_layers=3, **FP8, fp8_policy=text)
    assert by_path.fp8_policy_text.strip() == by_text.fp8_policy_text.strip()
    assert by_path.given_dict()["fp8_policy"] == str(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no text"):
        small_config(num_layers=3, **FP8, fp8_policy=str(path))


def test_written_rules_are_read_back():
    text = rules(
        "module: '*.linear_fc2', layers: '0-1,2', recipe: mxfp8, format: e4m3, reason: 'a: b # c'",
        "module: [a*, 'b'], wgrad: bf16, fprop: fp8", "layers: 3, recipe: bf16",
    )  # fmt: skip
    before = fp8_policy.read(text)
    assert fp8_policy.read(fp8_policy.write(before.rules, "two\nlines")) == before


# -- who decides ----------------------------------------------------------------------------------


def test_the_first_rule_that_fits_decides():
    state = state_of(
        "module: '*.linear_fc2', layers: 1-2, recipe: bf16",
        "module: '*.mlp.*', recipe: mxfp8, format: e4m3",
        "layers: 2, wgrad: bf16",
    )
    found = decided(state)
    assert found[FC2.format(0)] == "mxfp8 e4m3"
    assert found[FC2.format(1)] == "bf16"
    assert found["decoder.layers.1.self_attention.linear_qkv"] == "delayed hybrid"
    assert found["decoder.layers.2.self_attention.linear_qkv"] == "delayed hybrid without wgrad"


def test_edges_and_output_layer_come_before_the_rules():
    state = state_of("module: '*', recipe: tensorwise", first_last_layers_bf16=True)
    assert decided(state)[FC2.format(0)] == decided(state)[FC2.format(2)] == "bf16"
    assert decided(state)[FC2.format(1)] == "tensorwise hybrid"
    assert state.for_linear("output_layer").decision.recipe is None


def test_no_fp8_wgrad_holds_until_a_rule_says_something_else():
    state = state_of("layers: 0, wgrad: fp8", "layers: 1, dgrad: bf16", fp8_wgrad=False)
    found = decided(state)
    assert found[FC2.format(0)] == "delayed hybrid"
    assert found[FC2.format(1)] == "delayed hybrid without dgrad and wgrad"
    assert found[FC2.format(2)] == "delayed hybrid without wgrad"
    nothing_left = state_of("layers: 0, dgrad: bf16, fprop: bf16", fp8_wgrad=False)
    assert decided(nothing_left)[FC2.format(0)] == "bf16"


def test_experts_of_a_matrix_are_decided_together():
    cfg = config("module: '*.experts.linear_fc1', recipe: tensorwise", **EXPERTS)
    _, build = build_model(cfg)
    found = decided(build.fp8)
    group = "decoder.layers.0.mlp.experts.linear_fc1"
    assert {found[f"{group}.{number}"] for number in range(4)} == {"tensorwise hybrid"}
    assert found["decoder.layers.0.mlp.experts.linear_fc2.3"] == "delayed hybrid"
    assert found["decoder.layers.0.mlp.shared_experts.linear_fc1"] == "delayed hybrid"
    assert group not in {p.rpartition(".")[0] for p in build.fp8.expert_book.paths()}


def test_edges_of_every_recipe_go_by_the_number_in_the_whole_model():
    """Also those of experts, and whatever part of the model a pipeline stage holds."""
    for recipe in fp8_policy.recipes():
        chosen = {"fp8_recipe": recipe}
        if recipe == "nvfp4":
            chosen = {"fp8_format": None, "fp4_format": "e2m1"}
        cfg = config(
            **chosen, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2,
            num_layers_at_end_in_bf16=0, **EXPERTS,
            **{name: 1 if "len" in name else "most_recent" for name in
               ("fp8_amax_history_len", "fp8_amax_compute_algo")},
        )  # fmt: skip
        _, build = build_model(cfg)
        plain = {p for p, layer in build.fp8.layers.items() if layer.decision.recipe is None}
        assert plain == {p for p in build.fp8.layers if not fnmatchcase(p, "decoder.layers.2.*")}


def test_rules_choose_for_attention_too():
    cfg = config(
        "module: '*.core_attention', layers: 0, recipe: bf16",
        "layers: 1, recipe: tensorwise, wgrad: bf16",
        "module: '*.mlp.*', recipe: mxfp8",
        fp8_dot_product_attention=True,
    )
    model, build = build_model(cfg)
    name = "decoder.layers.{}.self_attention.core_attention"
    found = [build.fp8.attention_layers[name.format(i)].decision.summary for i in range(3)]
    assert found == ["bf16", "tensorwise hybrid", "delayed hybrid"]
    reasons = {row.path: row.reason for row in model.named_precision_rows()}
    assert reasons[name.format(0)].startswith("--fp8-policy rule 1")
    assert reasons[name.format(1)] == "--fp8-policy rule 2: layers 1"
    asked = {"fp8_dot_product_attention": True}
    with pytest.raises(ConfigError, match=r"got mxfp8.*module: '\*\.core_attention'"):
        config("layers: 1, recipe: mxfp8", **asked)
    with pytest.raises(ConfigError, match="Only linear layers have these products"):
        config("module: '*.core_attention', wgrad: bf16", **asked)
    with pytest.raises(ConfigError, match="no linear layer of this path"):
        config("module: '*.core_attention', recipe: bf16")


def test_fp4_and_fp8_in_one_run():
    defaults = {"fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}
    fp4 = {"fp8_format": None, "fp4_format": "e2m1", **defaults}
    found = decided(state_of("layers: 0, recipe: mxfp8", "layers: 1, wgrad: bf16", **fp4))
    assert [found[FC2.format(n)] for n in range(3)] == [
        "mxfp8 e4m3", "nvfp4 e2m1 without wgrad", "nvfp4 e2m1"
    ]  # fmt: skip
    found = decided(state_of("layers: 1, recipe: nvfp4"))
    assert [found[FC2.format(n)] for n in (0, 1)] == ["delayed hybrid", "nvfp4 e2m1"]
    state = state_of("layers: 0, recipe: delayed", **{**fp4, "fp8_amax_history_len": 4})
    assert state.book.history.shape == (4, 4 * 5)
    for entry, settings in (("recipe: nvfp4, format: e4m3", {}), ("format: hybrid", fp4)):
        with pytest.raises(ConfigError, match="nvfp4 is a recipe of FP4. Remove the format"):
            config(f"layers: 0, {entry}", **settings)


def test_the_table_names_the_rule():
    state = state_of("module: '*.linear_fc2', wgrad: bf16, reason: loud", "layers: 0, recipe: bf16")
    rows = {(row.path, row.gemm): row for row in state.rows()}
    for gemm in ("fprop", "wgrad"):
        row = rows[FC2.format(1), gemm]
        assert row.reason == "--fp8-policy rule 1: *.linear_fc2; loud"
        assert not row.is_fallback
    assert rows[FC2.format(1), "wgrad"].delivered == "bf16"
    qkv = rows["decoder.layers.0.self_attention.linear_qkv", "fprop"]
    assert (qkv.requested, qkv.reason) == ("bf16", "--fp8-policy rule 2: layers 0")


def test_which_recipes_are_in_use():
    cfg = config("module: '*', recipe: mxfp8", fp8_amax_history_len=1,
                 fp8_amax_compute_algo="most_recent")  # fmt: skip
    assert fp8_policy.recipes_in_use(cfg) == {"mxfp8"}
    assert any("hybrid with --fp8-recipe mxfp8" in notice for notice in cfg.notices)
    assert not fp8_policy.some_layers_plain(cfg)
    assert fp8_policy.some_layers_plain(config("layers: 1, recipe: bf16"))
    assert fp8_policy.some_layers_plain(config(fp8_warmup_iters=1, train_iters=2))
    assert not fp8_policy.some_layers_plain(config())


# -- state ----------------------------------------------------------------------------------------


def test_delayed_layers_of_several_formats_share_a_book():
    state = state_of("layers: 1, format: e4m3", "layers: 2, recipe: tensorwise",
                     paths=[f"decoder.layers.{i}.a" for i in range(3)])  # fmt: skip
    assert state.book.paths() == ["decoder.layers.0.a", "decoder.layers.1.a"]
    state.book.history[0] = 8.0
    state.sync()
    scales = [state.book.scale[state.book.columns(p, "backward")][0] for p in state.book.paths()]
    assert scales == [57344 / 8, 448 / 8]


def test_a_book_is_there_for_delayed_layers_of_another_run_recipe():
    state = state_of("layers: 1, recipe: delayed", fp8_recipe="mxfp8")
    assert len(state.book.paths()) == 4
    assert state.recipe.name == "mxfp8"
    assert state.policy.delayed == DelayedScaling(amax_history_len=4, fp8_format=Format.HYBRID)


def trained(*lines, **fields):
    state = state_of(*lines, **fields)
    for amax in (2.0, 8.0, 4.0):
        state.book.history[0] = amax
        state.sync()
    return state


def scales(state, path):
    book = state.layers[path].slots.book
    return [book.scale[book.columns(path, d)][0].item() for d in ("forward", "backward")]


def test_a_resumed_run_changes_the_layers_whose_recipe_changed():
    saved = trained("layers: 2, recipe: mxfp8, format: e4m3").state_dict()
    state = trained(
        "layers: 0, format: e4m3", "module: '*.linear_fc1', recipe: bf16", "layers: 2, wgrad: bf16"
    )
    messages = state.load_state_dict(saved)
    kept, fresh = [448 / 8, 57344 / 8], [1.0, 1.0]
    assert scales(state, FC2.format(0)) == [448 / 8, 448 / 8]  # converted
    assert scales(state, FC2.format(1)) == kept
    assert scales(state, FC2.format(2)) == fresh  # it was in mxfp8
    layer = state.layers[FC2.format(2)].slots
    assert not layer.forward.amax_history.any()
    text = "\n".join(messages)
    qkv = "decoder.layers.0.self_attention.linear_qkv"
    assert f"FP8 state: {qkv}, " in text
    assert "saved with delayed hybrid, this run uses delayed e4m3; scales were converted." in text
    assert ("decoder.layers.1.mlp.linear_fc1: saved with delayed hybrid, this run uses bf16; "
            "scales are dropped." in text)  # fmt: skip
    assert "saved with mxfp8 e4m3, this run uses delayed hybrid without wgrad; scales start" in text
    assert len(messages) == 4
    assert state.load_state_dict(trained(
        "layers: 0, format: e4m3", "module: '*.linear_fc1', recipe: bf16", "layers: 2, wgrad: bf16"
    ).state_dict()) == []  # fmt: skip


def test_layers_that_were_kept_out_start_fresh():
    saved = trained(first_last_layers_bf16=True).state_dict()
    state = state_of()
    (message,) = state.load_state_dict(saved)
    assert "decoder.layers.0,2.self_attention.linear_qkv" in message
    assert scales(state, FC2.format(1)) == [448 / 8, 57344 / 8]
    assert scales(state, FC2.format(0)) == [1.0, 1.0]
    other = state_of(fp8_recipe="tensorwise", fp8_amax_history_len=1,
                     fp8_amax_compute_algo="most_recent")  # fmt: skip
    assert len(other.load_state_dict(saved)) == 2  # some had scales, some were in bf16
    assert isinstance(other.recipe, Float8CurrentScaling)


def test_experts_are_told_and_kept_by_matrix():
    def made(*lines):
        _, build = build_model(config(*lines, **EXPERTS))
        return build.fp8

    before = made("layers: 2, recipe: bf16")
    before.expert_book.history[0] = 8.0
    before.sync()
    after = made("module: '*.experts.linear_fc2', layers: 0, recipe: mxfp8")
    messages = after.load_state_dict(before.state_dict())
    group = "decoder.layers.0.mlp.experts.linear_fc1"
    assert scales(after, f"{group}.3") == [448 / 8, 57344 / 8]
    assert scales(after, "decoder.layers.2.mlp.experts.linear_fc1.3") == [1.0, 1.0]
    assert any("decoder.layers.0.mlp.experts.linear_fc2: saved with delayed" in m for m in messages)
    assert torch.equal(after.book.scale, torch.ones_like(after.book.scale))
