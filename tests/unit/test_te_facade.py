"""The `TE*` names on a machine without Transformer Engine, and on a stand-in for it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.build import Build
from megatron.core.errors import BackendUnavailable, MegatronError
from megatron.core.extensions import transformer_engine as facade
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
    te_checkpoint,
)
from megatron.core.mesh import Axis, ParallelState
from megatron.core.models.gpt.gpt_layer_specs import gpt_decoder_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, describe
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from tests.contract.fake_te import FakeTransformerEngine
from tests.small_models import batch, small_config

CPU = torch.device("cpu")
FP8 = {"fp8_format": "hybrid", "bf16": True, "fp8_amax_history_len": 4}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these tests say what runs on a CPU"
)


def build_on(backend, path="decoder.layers.0", **settings):
    return Build.root(small_config(**settings), ParallelState.single(), backend, CPU, path)


@pytest.fixture(params=["native", "transformer_engine"])
def backend(request):
    if request.param == "native":
        return NativeBackend()
    return TransformerEngineBackend(FakeTransformerEngine("2.20.2").library)


def tutorial_specs():
    """The specification that tutorials show, letter for letter."""
    mlp_spec = MLPSubmodules(
        linear_fc1=TEColumnParallelLinear,  # TP column-parallel + FP8
        linear_fc2=TERowParallelLinear,  # TP row-parallel + FP8
    )

    attn_spec = SelfAttentionSubmodules(
        linear_qkv=TEColumnParallelLinear,
        core_attention=TEDotProductAttention,
        linear_proj=TERowParallelLinear,
    )
    return mlp_spec, attn_spec


def layer_spec(mlp_spec, attn_spec):
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(SelfAttention, submodules=attn_spec),
            mlp=ModuleSpec(MLP, submodules=mlp_spec),
        ),
    )


class TestTutorial:
    def test_its_specification_builds_a_layer_that_trains_in_fp8(self, backend):
        build = build_on(backend, **FP8)
        layer = build_module(layer_spec(*tutorial_specs()), build=build, layer_number=1)
        hidden = torch.randn(16, 2, 32, dtype=torch.bfloat16, requires_grad=True)
        layer(hidden).float().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
        assert {row.delivered[:3] for row in build.fp8.rows()} == {"fp8"}
        assert isinstance(layer.mlp.linear_fc1, TEColumnParallelLinear)
        assert isinstance(layer.self_attention.core_attention, TEDotProductAttention)

    def test_its_inspection_of_fp8_meta(self, backend):
        build = build_on(backend, **FP8)
        model = build_module(layer_spec(*tutorial_specs()), build=build, layer_number=1)
        hidden = torch.randn(16, 2, 32, dtype=torch.bfloat16)
        for _ in range(2):  # the numbers are those of the last finished step
            model(hidden).float().sum().backward()
            build.fp8.sync(build.mesh.amax)
        model(hidden)

        seen = []
        for name, mod in model.named_modules():
            if hasattr(mod, "fp8_meta"):
                seen.append(
                    (
                        name,
                        mod.fp8_meta["scaling_fwd"].amax_history,
                        mod.fp8_meta["scaling_fwd"].scale,
                    )
                )
                break

        ((name, history, scale),) = seen
        assert name == "self_attention.linear_qkv"
        # One row a remembered step, the newest last; columns input, weight, output.
        assert history.shape == (4, 3)
        assert float(history[-1, 0]) == float(hidden.abs().max())
        # The scale multiplies: largest value of the format over the maximum.
        assert float(scale[0]) == pytest.approx(448.0 / float(hidden.abs().max()))

    def test_a_fused_norm_is_asked_for_by_its_name(self, backend):
        mlp = MLPSubmodules(
            linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear
        )
        build = build_on(backend, "decoder.layers.0.mlp")
        module = build_module(ModuleSpec(MLP, submodules=mlp), build=build)
        names = dict(module.named_parameters())
        assert "linear_fc1.layer_norm_weight" in names
        assert module(torch.randn(16, 2, 32)).shape == (16, 2, 32)

    def test_the_names_give_the_model_that_the_backend_gives(self, backend):
        build = build_on(backend, "")
        spec = gpt_decoder_spec(build.config, facade_leaves())
        named = GPTModel(build, spec)
        plain = GPTModel(build_on(backend, ""))
        given = batch(build.config)
        assert torch.equal(named(*given), plain(*given))
        assert "TELayerNormColumnParallelLinear" in describe(spec)


def facade_leaves():
    class Leaves:
        column_parallel_linear = TEColumnParallelLinear
        row_parallel_linear = TERowParallelLinear
        layernorm_column_parallel_linear = TELayerNormColumnParallelLinear
        norm = TENorm
        core_attention = TEDotProductAttention

    return Leaves


class TestDirectConstruction:
    @pytest.fixture
    def config(self):
        return TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)

    def test_megatron_style(self, config):
        fc1 = TEColumnParallelLinear(
            32,
            64,
            config=config,
            init_method=torch.nn.init.zeros_,
            gather_output=False,
            bias=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc1",
        )
        assert isinstance(fc1, layers.ColumnParallelLinear)
        assert float(fc1.weight.detach().abs().max()) == 0.0
        _, bias = fc1(torch.randn(4, 1, 32))
        assert bias is fc1.bias
        fc2 = TERowParallelLinear(
            64, 32, config=config, input_is_parallel=True, bias=False, is_expert=False
        )
        assert fc2(torch.randn(4, 1, 64))[1] is None
        norm = TENorm(config=config, hidden_size=32, eps=1e-5)
        assert norm(torch.randn(4, 1, 32)).shape == (4, 1, 32)
        attention = TEDotProductAttention(
            config=config, layer_number=1, attn_mask_type="causal", attention_type="self"
        )
        q = torch.randn(4, 1, 4, 8)
        assert attention(q, q, q).shape == (4, 1, 32)

    def test_experts(self):
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_moe_experts=4, add_bias_linear=False
        )
        options = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": True}
        fc1 = TEColumnParallelGroupedLinear(4, 32, 64, init_method=torch.nn.init.ones_, **options)
        fc2 = TERowParallelGroupedLinear(4, 64, 32, tp_comm_buffer_name="fc2", **options)
        x = torch.randn(5, 32)
        counts = [2, 0, 3, 0]
        assert fc2(fc1(x, counts), counts).shape == (5, 32)
        assert float(fc1.weight3.detach().min()) == 1.0
        assert isinstance(fc1, TEColumnParallelGroupedLinear)
        assert not isinstance(fc1, TERowParallelGroupedLinear)
        with pytest.raises(MegatronError, match="experts have no bias"):
            TERowParallelGroupedLinear(4, 64, 32, config=config, bias=True)

    def test_userbuffers_of_the_library(self, monkeypatch):
        """They are set up before the first layer, which may name its own."""
        fake = FakeTransformerEngine("2.20.2")
        backend = TransformerEngineBackend(fake.library)
        monkeypatch.setattr(facade, "resolve", lambda *_: (backend, "a stand-in"))
        tp = Axis("tp", 2, 0, (0, 1), "tp group")
        mesh = dataclasses.replace(ParallelState.single(), tp=tp, etp=tp)
        monkeypatch.setattr(facade.parallel_state, "is_initialized", lambda: True)
        monkeypatch.setattr(facade.parallel_state, "get_parallel_state", lambda: mesh)
        overlap = {"sequence_parallel": True, "tp_comm_overlap": True}
        config = small_config(world_size=2, tensor_model_parallel_size=2, bf16=True, **overlap)
        TERowParallelLinear(64, 32, config=config, tp_comm_buffer_name="fc2")
        assert [call.symbol for call in fake.calls] == [
            "pytorch.initialize_ub",
            "pytorch.Linear.__init__",
        ]
        assert fake.calls[-1].arguments["ub_name"] == "fc2"

    def test_two_layers_of_one_configuration_start_differently(self, config):
        first = TEColumnParallelLinear(32, 64, config=config)
        second = TEColumnParallelLinear(32, 64, config=config)
        assert not torch.equal(first.weight, second.weight)

    def test_they_share_one_fp8_state(self):
        config = TransformerConfig(num_layers=1, hidden_size=32, fp8="hybrid", bf16=True)
        layer = TELayerNormColumnParallelLinear(32, 64, config=config)
        row = TERowParallelLinear(64, 32, config=config)
        x = torch.randn(16, 1, 32, dtype=torch.bfloat16)
        row(layer(x)[0])[0].float().sum().backward()
        state = facade.fp8_state(config)
        assert len(state.rows()) == 6
        state.sync()
        assert all(m.fp8_meta["scaling_fwd"].scale[0] != 1.0 for m in (layer, row))

    def test_random_roundings_do_not_repeat(self):
        config = TransformerConfig(num_layers=1, hidden_size=64, fp4="e2m1", bf16=True)
        layer = TEColumnParallelLinear(64, 64, config=config, bias=False)
        x = torch.randn(16, 2, 64, dtype=torch.bfloat16)
        found = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            layer.zero_grad()
            layer(x)[0].float().sin().sum().backward()
            found.append(layer.weight.grad.clone())
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0], found[1])

    def test_the_installed_mesh_is_used(self, config):
        mesh = ParallelState.single()
        parallel_state.install(mesh)
        try:
            assert TEColumnParallelLinear(32, 64, config=config).axis is mesh.tp
            with pytest.raises(MegatronError, match="tp_group"):
                TEColumnParallelLinear(32, 64, config=config, tp_group="another group")
        finally:
            parallel_state.destroy_model_parallel()

    @pytest.mark.parametrize("given", [{}, {"build": "b", "config": "c"}])
    def test_it_takes_a_build_or_a_configuration(self, given):
        with pytest.raises(TypeError, match=r"build.*config"):
            TEColumnParallelLinear(32, 64, **given)

    def test_another_object_as_configuration_is_refused(self):
        with pytest.raises(TypeError, match="TransformerConfig"):
            TERowParallelLinear(32, 64, config={"hidden_size": 32})

    def test_unknown_options_are_refused(self, config):
        with pytest.raises(TypeError, match="nonsense"):
            TEColumnParallelLinear(32, 64, config=config, nonsense=1)

    def test_a_second_epsilon_is_refused(self, config):
        with pytest.raises(MegatronError, match="eps.*1e-06"):
            TENorm(config, 32, eps=1e-6)

    def test_only_causal_self_attention(self, config):
        with pytest.raises(MegatronError, match="padding"):
            TEDotProductAttention(config, 1, "padding")
        with pytest.raises(MegatronError, match="cross"):
            TEDotProductAttention(config, 1, None, "cross")

    def test_a_backend_named_in_the_configuration_must_run(self):
        config = TransformerConfig(
            num_layers=1, hidden_size=32, transformer_impl="transformer_engine"
        )
        with pytest.raises(BackendUnavailable, match="transformer_engine: cannot run"):
            TEColumnParallelLinear(32, 64, config=config)


class TestNames:
    def test_what_ran_is_said_once(self, caplog, monkeypatch):
        monkeypatch.setattr(facade, "_said", set())
        config = TransformerConfig(num_layers=1, hidden_size=32)
        with caplog.at_level(logging.WARNING):
            TEColumnParallelLinear(32, 64, config=config)
            TERowParallelLinear(32, 64, config=config)
        (record,) = caplog.records
        assert "native backend" in record.getMessage()
        assert "transformer_engine" in record.getMessage()

    def test_the_choice_can_be_asked(self):
        name, reason = facade.chosen_backend()
        assert name == "native"
        assert "not installed" in reason or "CUDA" in reason

    def test_instances_of_either_backend_are_instances_of_the_name(self, backend):
        build = build_on(backend, "layer")
        layer = backend.column_parallel_linear(
            32, 64, build=build, init_method=torch.nn.init.zeros_, bias=False
        )
        assert isinstance(layer, TEColumnParallelLinear)
        assert not isinstance(layer, TERowParallelLinear)
        assert not isinstance(torch.nn.Linear(2, 2), TEColumnParallelLinear)

    def test_a_name_cannot_be_derived_from(self):
        with pytest.raises(TypeError, match="ColumnParallelLinear of megatron"):

            class Mine(TEColumnParallelLinear):
                pass

    def test_every_exported_name_exists(self):
        assert all(hasattr(facade, name) for name in facade.__all__)


class TestCheckpoint:
    def test_it_recomputes(self):
        calls = []

        def double(x):
            calls.append(1)
            return x * 2 * x

        x = torch.tensor([3.0], requires_grad=True)
        te_checkpoint(double, False, None, None, x).sum().backward()
        assert float(x.grad) == 12.0
        assert len(calls) == 2

    def test_layers_of_either_backend(self, backend):
        gradients = []
        for recompute in (False, True):
            build = build_on(backend, "layer", **FP8)
            layer = TEColumnParallelLinear(32, 64, build=build)
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(16, 1, 32, generator=generator).to(torch.bfloat16).requires_grad_()
            if recompute:
                y = te_checkpoint(
                    lambda x, m=layer: m(x)[0], False, None, None, x, rng=build.rng, fp8=build.fp8
                )
            else:
                y = layer(x)[0]
            y.float().square().sum().backward()
            gradients.append((x.grad, layer.weight.grad, build.fp8.book.history))
        for plain, recomputed in zip(*gradients, strict=True):
            assert torch.equal(plain, recomputed)

    def test_saved_inputs_cannot_be_split(self):
        with pytest.raises(MegatronError, match="distribute_saved_activations"):
            te_checkpoint(torch.sin, True, None, None, torch.ones(1))
