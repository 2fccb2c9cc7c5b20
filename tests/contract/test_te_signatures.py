"""Every call the backend makes fits the signatures that Transformer Engine's releases have."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from megatron.core.backends import te_calls
from megatron.core.mesh import Axis
from tests.contract import te_sources
from tests.contract.fake_te import FakeTransformerEngine
from tests.contract.te_sources import RELEASES, load_table, signature

DEVICE = torch.device("cpu")


@pytest.fixture(params=RELEASES)
def fake(request):
    return FakeTransformerEngine(request.param)


def linear_arguments(library, mode="column", tp_size=1, tp_group=None):
    return te_calls.linear_arguments(
        library,
        parallel_mode=mode,
        tp_size=tp_size,
        tp_group=tp_group,
        sequence_parallel=tp_size > 1,
        fuse_wgrad_accumulation=False,
        bias=True,
        return_bias=False,
        params_dtype=torch.bfloat16,
        device=DEVICE,
        name="decoder.layers.0.mlp.linear_fc1",
    )


ATTENTION = {
    "num_heads": 4,
    "num_groups": 2,
    "head_dim": 8,
    "dropout": 0.0,
    "tp_size": 1,
    "tp_group": None,
    "get_rng_state_tracker": None,
    "layer_number": 1,
    "softmax_scale": None,
}


class TestTables:
    def test_the_oldest_supported_release_is_among_them(self):
        assert te_calls.parse_version(RELEASES[0]) == te_calls.OLDEST

    def test_the_newest_checked_release_is_among_them(self):
        assert te_calls.parse_version(RELEASES[-1]) == te_calls.NEWEST_CHECKED

    def test_a_release_on_each_side_of_every_rename_is_among_them(self):
        minors = [te_calls.parse_version(v) for v in RELEASES]
        changes = (
            te_calls.AUTOCAST_RENAMED,
            te_calls.MODULES_NAMED,
            te_calls.UB_MODES,
            te_calls.ATTENTION_CURRENT_SCALING,
        )
        for change in changes:
            assert change in minors
            assert (change[0], change[1] - 1) in minors

    @pytest.mark.parametrize("version", RELEASES)
    def test_attributes_the_backend_touches_exist(self, version):
        missing = [
            name for name, present in load_table(version)["attributes"].items() if not present
        ]
        assert missing == []

    def test_autocast_appears_with_the_rename(self):
        has = {v: "pytorch.autocast" in load_table(v)["symbols"] for v in RELEASES}
        assert has == {v: te_calls.parse_version(v) >= te_calls.AUTOCAST_RENAMED for v in RELEASES}

    def test_a_misspelt_keyword_does_not_bind_through_kwargs(self):
        with pytest.raises(TypeError):
            signature(load_table("2.9.0"), "pytorch.LayerNorm.__init__").bind(64, epsilon=1e-5)

    @pytest.mark.network
    @pytest.mark.parametrize("version", RELEASES)
    def test_tables_match_the_published_wheels(self, version, tmp_path):
        fresh = te_sources.extract(te_sources.fetch(version, tmp_path), version)
        assert te_sources.dump_table(fresh) == te_sources.dump_table(load_table(version))


class TestExtraction:
    """The parser on a package small enough to read."""

    @pytest.fixture
    def sources(self, tmp_path):
        files = {
            "pytorch/__init__.py": "from .module import Layer as Linear\n",
            "pytorch/module/__init__.py": "from .deep import *\n",
            "pytorch/module/deep.py": (
                "class Base:\n"
                "    version: int = 1\n"
                "    def __init__(self, size, *, eps=1e-5, dtype=None): self.eps = eps\n"
                "    def setup(self, count=1): pass\n"
                "class Layer(Base):\n"
                "    def __init__(self, size, legacy=None, **kwargs): pass\n"
                "    def forward(self, inp, /, *, first=None): pass\n"
            ),
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return te_sources.Sources(tmp_path)

    def test_names_are_followed_through_imports(self, sources):
        found = sources.find("pytorch", "Linear")
        assert (found.module, found.node.name) == ("pytorch.module.deep", "Layer")

    def test_kwargs_are_resolved_to_the_base_class(self, sources):
        entry = te_sources.describe(sources, sources.find("pytorch", "Linear"), "__init__")
        assert entry["kwargs"] == ["dtype", "eps"]
        assert entry["parameters"][0] == ["size", "positional_or_keyword", False]

    def test_inherited_methods_and_kinds(self, sources):
        found = sources.find("pytorch", "Linear")
        assert te_sources.describe(sources, found, "setup")["parameters"] == [
            ["count", "positional_or_keyword", True]
        ]
        table = {"symbols": {"f": te_sources.describe(sources, found, "forward")}}
        assert str(signature(table, "f")) == "(inp, /, *, first=None)"

    def test_attributes_are_found_in_base_classes(self, sources):
        found = sources.find("pytorch", "Linear")
        assert sources.has_attribute(found, "eps")
        assert sources.has_attribute(found, "version")
        assert not sources.has_attribute(found, "missing")


class TestCalls:
    def test_linear(self, fake):
        layer = fake.library.pytorch.Linear(32, 64, **linear_arguments(fake.library))
        layer(torch.zeros(2, 1, 32, dtype=torch.bfloat16), is_first_microbatch=False)
        assert fake.called("pytorch.Linear.forward")[0]["is_first_microbatch"] is False

    def test_grouped_linear(self, fake):
        given = te_calls.grouped_linear_arguments(params_dtype=torch.bfloat16, device=DEVICE)
        layer = fake.library.pytorch.GroupedLinear(2, 32, 64, **given)
        layer(torch.zeros(48, 32, dtype=torch.bfloat16), [16, 32], is_first_microbatch=False)
        (call,) = fake.called("pytorch.GroupedLinear.forward")
        assert (call["m_splits"], call["is_first_microbatch"]) == ([16, 32], False)
        assert len(te_calls.grouped_columns(layer, "weight")) == 2

    @pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
    def test_layernorm_linear(self, fake, normalization):
        extra = te_calls.norm_linear_arguments(
            epsilon=1e-6, normalization=normalization, zero_centered_gamma=True
        )
        fake.library.pytorch.LayerNormLinear(32, 64, **linear_arguments(fake.library), **extra)
        (given,) = fake.called("pytorch.LayerNormLinear.__init__")
        assert (given["eps"], given["zero_centered_gamma"]) == (1e-6, True)
        assert given["normalization"] == normalization

    def test_module_names_are_passed_where_the_release_takes_them(self, fake):
        given = linear_arguments(fake.library)
        assert ("name" in given) == (fake.version >= te_calls.MODULES_NAMED)

    @pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
    def test_norms(self, fake, name):
        given = te_calls.norm_arguments(
            epsilon=1e-6, zero_centered_gamma=False, params_dtype=torch.float32, device=DEVICE
        )
        layer = getattr(fake.library.pytorch, name)(32, **given)
        assert layer(torch.ones(2, 32)).shape == (2, 32)

    @pytest.mark.parametrize("cp", [Axis.single("cp"), Axis("cp", 2, 0, (0, 2), "cp group")])
    def test_attention(self, fake, cp):
        given = te_calls.attention_arguments(**ATTENTION, cp=cp, cp_comm_type="all_gather")
        assert given.get("cp_global_ranks", [0]) == list(cp.ranks)
        assert given.get("cp_group") == cp.group
        attention = fake.library.pytorch.DotProductAttention(**given)
        q, kv = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 2, 8)
        assert attention(q, kv, kv, attn_mask_type="causal").shape == (5, 2, 32)

    def test_attention_in_two_levels(self, fake):
        inner, outer = Axis("cp-a2a", 2, 0, (0, 1), "inner"), Axis("cp-p2p", 2, 0, (0, 2), "outer")
        given = te_calls.attention_arguments(
            **ATTENTION,
            cp=Axis("cp", 4, 0, (0, 1, 2, 3), "all"),
            cp_comm_type="a2a+p2p",
            cp_levels=(inner, outer),
        )
        assert given["cp_group"] == ["inner", "outer"]
        fake.library.pytorch.DotProductAttention(**given)

    def test_delayed_recipe(self, fake):
        recipe = te_calls.delayed_recipe(
            fake.library,
            fp8_format="hybrid",
            margin=1,
            amax_history_len=16,
            amax_compute_algo="max",
            reduce_amax=False,
        )
        assert recipe.fp8_format.name == "HYBRID"
        (given,) = fake.called("common.recipe.DelayedScaling.__init__")
        assert (given["margin"], given["amax_history_len"], given["reduce_amax"]) == (1, 16, False)

    def test_scale_options_of_current_scaling_are_set_where_quantizers_read_them(self, fake):
        recipe = te_calls.current_recipe(
            fake.library, fp8_format="e4m3", power_2_scale=True, amax_epsilon=1e-4
        )
        assert fake.called("common.recipe.Float8CurrentScaling.__init__") == [
            {"fp8_format": fake.library.recipe.Format.E4M3}
        ]
        for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            options = getattr(recipe, role)
            assert (options.power_2_scale, options.amax_epsilon) == (True, 1e-4)

    def test_recipes_of_attention(self, fake):
        options = {"fp8_format": "hybrid", "attention": True}
        te_calls.delayed_recipe(
            fake.library,
            **options,
            margin=0,
            amax_history_len=1,
            amax_compute_algo="most_recent",
            reduce_amax=True,
        )
        te_calls.current_recipe(fake.library, **options, power_2_scale=False, amax_epsilon=0.0)
        for name in ("DelayedScaling", "Float8CurrentScaling"):
            (given,) = fake.called(f"common.recipe.{name}.__init__")
            assert given["fp8_dpa"] is True
            assert "fp8_mha" not in given

    @pytest.mark.parametrize(
        ("name", "capability", "words"),
        [
            ("delayed", (9, 0), ""),
            ("delayed", (10, 3), ""),
            ("tensorwise", (10, 0), ""),
            ("delayed", (8, 9), "compute capability 9.0 and 10.x, and this device has 8.9"),
            ("delayed", (12, 0), "this device has 12.0"),
            ("tensorwise", (9, 0), "from compute capability 10.0 on.*--fp8-recipe delayed works"),
            ("tensorwise", None, ""),
        ],
    )
    def test_support_of_attention(self, fake, name, capability, words):
        able, reason = te_calls.attention_support(fake.library, name, capability)
        if name == "tensorwise" and fake.version < te_calls.ATTENTION_CURRENT_SCALING:
            able, words = not able, "from release 2.8 on, and 2"
        assert able == (not words or "release" in words)
        assert re.search(words, reason)

    @pytest.mark.parametrize("power_of_two", [True, False])
    def test_block_recipe(self, fake, power_of_two):
        if not hasattr(fake.library.recipe, "Float8BlockScaling"):
            assert fake.version < (2, 3)
            able, reason = te_calls.recipe_support(fake.library, "blockwise")
            assert not able
            assert reason == "release 2.2 has no Float8BlockScaling"
            return
        recipe = te_calls.block_recipe(
            fake.library, fp8_format="hybrid", power_of_two=power_of_two, weight_dim=2
        )
        (given,) = fake.called("common.recipe.Float8BlockScaling.__init__")
        assert (given["fp8_format"].name, given["w_block_scaling_dim"]) == ("HYBRID", 2)
        for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            assert getattr(recipe, role).power_2_scale is power_of_two

    def test_mx_recipe(self, fake):
        te_calls.mx_recipe(fake.library, fp8_format="e4m3")
        (given,) = fake.called("common.recipe.MXFP8BlockScaling.__init__")
        assert given == {"fp8_format": fake.library.recipe.Format.E4M3}

    def test_nvfp4_recipe(self, fake):
        choices = {
            "disable_rht": True,
            "disable_stochastic_rounding": False,
            "disable_2d_quantization": True,
        }
        if not hasattr(fake.library.recipe, "NVFP4BlockScaling"):
            assert fake.version < (2, 8)
            able, reason = te_calls.recipe_support(fake.library, "nvfp4")
            assert not able
            assert reason == f"release 2.{fake.version[1]} has no NVFP4BlockScaling"
            return
        te_calls.nvfp4_recipe(fake.library, **choices)
        assert fake.called("common.recipe.NVFP4BlockScaling.__init__") == [choices]

    @pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
    def test_support_of_a_recipe(self, fake, name):
        able, _ = te_calls.recipe_support(fake.library, name)
        since = {"blockwise": (2, 3), "nvfp4": (2, 8)}.get(name, (2, 2))
        assert able == (fake.version >= since)
        questions = ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4")
        fake.lacking = dict.fromkeys(
            (f"is_{kind}_available" for kind in questions),
            (False, "Device compute capability 10.x required"),
        )
        able, reason = te_calls.recipe_support(fake.library, name)
        assert not able
        assert reason

    def test_precision_of_single_gemms_cannot_be_chosen_in_any_release(self):
        for version in RELEASES:
            taken = signature(load_table(version), "common.recipe.DelayedScaling.__init__")
            assert "override_linear_precision" not in taken.parameters

    def test_autocast_by_its_name_in_the_release(self, fake):
        with te_calls.autocast(fake.library, enabled=True, recipe="r", group="g"):
            assert (fake.state.enabled, fake.state.recipe, fake.state.group) == (True, "r", "g")
        assert not fake.state.enabled
        name = "autocast" if fake.version >= te_calls.AUTOCAST_RENAMED else "fp8_autocast"
        assert len(fake.called(f"pytorch.{name}")) == 1

    def test_support(self, fake):
        assert te_calls.fp8_support(fake.library) == (True, "")

    def test_the_fake_refuses_what_the_release_refuses(self, fake):
        with pytest.raises(TypeError):
            fake.library.pytorch.Linear(32, 64, params_type=torch.float32)


def test_signatures_are_real_signatures():
    linear = signature(load_table("2.20.2"), "pytorch.Linear.__init__")
    assert isinstance(linear, inspect.Signature)
    assert list(linear.parameters)[:2] == ["in_features", "out_features"]
