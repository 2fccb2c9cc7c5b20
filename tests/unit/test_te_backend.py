"""The Transformer Engine backend, driven on a stand-in whose signatures are real.

What the library computes is not tested here (that needs a GPU); what is tested is everything the
backend does around it.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from megatron.config import make_config
from megatron.core.backends import te
from megatron.core.backends.contract import Backend
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.registry import resolve
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.build import Build
from megatron.core.distributed.ddp import DistributedDataParallel
from megatron.core.errors import BackendUnavailable, MegatronError, MeshError, PrecisionError
from megatron.core.mesh import Axis, ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.core_attention import NativeCoreAttention
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model, setup_sources, with_tokenizer
from megatron.training.step import TrainStep
from tests.contract.fake_te import FakeTransformerEngine
from tests.small_models import GQA, LLAMA, batch, small_config

CPU = torch.device("cpu")
OLDEST, NEWEST = "2.2.0", "2.20.2"
FP8 = {"fp8_format": "hybrid", "bf16": True, "fp8_amax_history_len": 4}


@pytest.fixture(params=[OLDEST, NEWEST])
def fake(request):
    return FakeTransformerEngine(request.param)


@pytest.fixture
def newest():
    return FakeTransformerEngine(NEWEST)


def build_for(backend, mesh=None, path="decoder.layers.0.mlp.linear_fc1", **settings):
    mesh = mesh or ParallelState.single()
    config = small_config(world_size=mesh.tp.size, **settings)
    return Build.root(config, mesh, backend, CPU, path)


def fake_build(fake, **settings):
    return build_for(TransformerEngineBackend(fake.library), **settings)


def tp2(rank):
    """A mesh of two tensor-parallel ranks; the groups are never used."""
    tp = Axis("tp", 2, rank, (0, 1), "tp group")
    amax = Axis("amax", 2, rank, (0, 1), "amax group")
    return dataclasses.replace(ParallelState.single(), tp=tp, etp=tp, amax=amax)


def normal(weight):
    return weight.normal_()


def column(build, size_in=32, size_out=64, kind="column_parallel_linear", **options):
    given = {"init_method": normal, "bias": True, **options}
    return getattr(build.backend, kind)(size_in, size_out, build=build, **given)


def row(build, size_in=32, size_out=64, **options):
    return column(build, size_in, size_out, "row_parallel_linear", **options)


def tokens(rows=16, width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, width, generator=generator).to(torch.bfloat16)


def gpt(backend, **settings):
    build = build_for(backend, path="", **settings)
    return GPTModel(build), build


class TestModel:
    @pytest.mark.parametrize("settings", [{}, {**LLAMA, **GQA}])
    def test_a_gpt_model_is_the_native_one_with_other_leaves(self, fake, settings):
        model, build = gpt(TransformerEngineBackend(fake.library), **settings)
        reference, _ = gpt(NativeBackend(), **settings)
        ours, native = dict(model.named_parameters()), dict(reference.named_parameters())
        assert set(ours) == set(native)
        for name, param in ours.items():
            assert torch.equal(param, native[name]), name
        given = batch(build.config)
        loss, expected = model(*given), reference(*given)
        torch.testing.assert_close(loss, expected)
        loss.sum().backward()
        expected.sum().backward()
        for name, param in ours.items():
            torch.testing.assert_close(param.grad, native[name].grad)

    def test_the_backend_keeps_the_contract(self, fake):
        assert isinstance(TransformerEngineBackend(fake.library), Backend)

    def test_nothing_pickled_enters_the_state_dict(self, fake):
        model, _ = gpt(TransformerEngineBackend(fake.library))
        state = model.state_dict()
        assert list(state) == [name for name, _ in model.named_parameters()]
        model.load_state_dict(state, strict=True)
        hostile = {**state, "decoder.final_layernorm._extra_state": torch.zeros(4)}
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict(hostile, strict=True)

    def test_projection_of_a_whole_model_runs_in_the_library(self, fake):
        model, build = gpt(TransformerEngineBackend(fake.library), **FP8)
        model(*batch(build.config))
        fake_layers = [m for m in model.modules() if getattr(m, "is_fake", False)]
        # Four linear layers and one attention in each of two layers, and the final norm.
        assert len(fake_layers) == 2 * 5 + 1
        kernels = {r.kernel for r in model.named_precision_rows() if r.delivered.startswith("fp8")}
        version = f"{fake.version[0]}.{fake.version[1]}"
        assert kernels
        assert all(k.startswith(f"Transformer Engine {version} fp8") for k in kernels)


class TestSharding:
    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("kind", ["column", "glu", "norm", "row"])
    def test_parameters_are_those_of_the_native_layer(self, newest, rank, sequence_parallel, kind):
        made = []
        for backend in (TransformerEngineBackend(newest.library), NativeBackend()):
            build = build_for(
                backend,
                tp2(rank),
                tensor_model_parallel_size=2,
                sequence_parallel=sequence_parallel,
            )
            if kind == "row":
                made.append(row(build))
            elif kind == "norm":
                made.append(column(build, kind="layernorm_column_parallel_linear"))
            else:
                made.append(column(build, partition_stride=2 if kind == "glu" else 1))
        ours, native = (dict(m.named_parameters()) for m in made)
        assert set(ours) == set(native)
        defaults = {
            "tensor_model_parallel": False,
            "partition_dim": None,
            "partition_stride": None,
            "sequence_parallel": False,
        }
        for name, param in ours.items():
            assert torch.equal(param, native[name]), name
            for attribute, default in defaults.items():
                mine = getattr(param, attribute, default)
                assert mine == getattr(native[name], attribute, default), (name, attribute)

    def test_the_library_is_told_about_the_mesh(self, newest):
        build = build_for(
            TransformerEngineBackend(newest.library),
            tp2(1),
            tensor_model_parallel_size=2,
            sequence_parallel=True,
        )
        column(build)
        (given,) = newest.called("pytorch.Linear.__init__")
        assert (given["tp_size"], given["tp_group"]) == (2, "tp group")
        assert (given["parallel_mode"], given["sequence_parallel"]) == ("column", True)

    def test_one_rank_has_no_group(self, newest):
        column(fake_build(newest))
        (given,) = newest.called("pytorch.Linear.__init__")
        assert (given["tp_size"], given["tp_group"], given["sequence_parallel"]) == (1, None, False)

    @pytest.mark.parametrize("make", [column, row])
    def test_uneven_splits_name_the_layer(self, newest, make):
        build = build_for(
            TransformerEngineBackend(newest.library), tp2(0), tensor_model_parallel_size=2
        )
        with pytest.raises(MeshError, match="decoder.layers.0.mlp.linear_fc1"):
            make(build, 33, 65)

    def test_norms_mark_partial_gradients(self, newest):
        backend = TransformerEngineBackend(newest.library)
        build = build_for(backend, tp2(0), tensor_model_parallel_size=2, sequence_parallel=True)
        marked = backend.norm(32, build=build)
        assert all(p.sequence_parallel for p in marked.parameters())
        plain = backend.norm(32, build=build, partial_gradient=False)
        assert not any(getattr(p, "sequence_parallel", False) for p in plain.parameters())


class TestForward:
    def test_a_skipped_bias_is_returned(self, newest):
        build = fake_build(newest)
        layer = column(build, skip_bias_add=True)
        y, bias = layer(torch.randn(4, 1, 32))
        assert bias is layer.bias
        assert y.shape == (4, 1, 64)

    def test_without_a_bias_nothing_is_returned_for_it(self, newest):
        layer = row(fake_build(newest), bias=False, skip_bias_add=True)
        assert layer(torch.randn(4, 1, 32))[1] is None
        assert "bias" not in dict(layer.named_parameters())

    def test_input_of_another_type_is_cast_to_the_weights(self, newest):
        layer = column(fake_build(newest, bf16=True))
        assert layer(torch.randn(4, 1, 32))[0].dtype == torch.bfloat16

    def test_bf16_layers_do_not_enter_fp8(self, newest):
        settings = {**FP8, "first_last_layers_bf16": True, "num_layers": 3}
        layer = column(fake_build(newest, **settings))
        layer(tokens())
        assert newest.called("pytorch.autocast") == []
        assert "first-last-layers-bf16" in layer.precision.row().reason

    def test_switching_fp8_off_and_on_takes_effect_at_the_next_forward(self, newest):
        build = fake_build(newest, **FP8)
        layer = column(build)
        build.fp8.enabled = False
        layer(tokens())
        assert layer.input_scales == []
        build.fp8.enabled = True
        layer(tokens())
        assert layer.input_scales == [1.0]

    @pytest.mark.parametrize("rows", [1, 7, 16, 17])
    def test_any_number_of_tokens_runs_in_fp8(self, newest, rows):
        build = fake_build(newest, **FP8)
        layer = column(build, kind="layernorm_column_parallel_linear")
        x = tokens(rows).requires_grad_()
        y, _ = layer(x)
        assert y.shape == (rows, 1, 64)
        build.fp8.enabled = False
        expected, _ = layer(x)
        assert torch.equal(y, expected)
        (grad,) = torch.autograd.grad(y.float().square().sum(), x)
        assert grad.isfinite().all()
        (given,) = newest.called("pytorch.LayerNormLinear.forward")[:1]
        assert given["inp"].numel() // 32 % 16 == 0

    def test_padding_changes_no_maximum(self, newest):
        build = fake_build(newest, **FP8)
        x = tokens(17)
        column(build)(x)
        assert float(build.fp8.book.history[0, 0]) == float(x.abs().max())

    def test_attention_inside_documents_is_the_native_one(self, newest):
        """Transformer Engine's would look across: it is never asked to."""
        build = fake_build(newest, reset_attention_mask=True)
        attention = build.backend.core_attention(build=build, layer_number=1)
        assert isinstance(attention, NativeCoreAttention)
        across = fake_build(newest)
        attention = across.backend.core_attention(build=across, layer_number=1)
        q, starts = torch.randn(16, 2, 4, 8), torch.zeros(2, 16, dtype=torch.long)
        with pytest.raises(MegatronError, match="Build the model with --reset-attention-mask"):
            attention(q, q, q, starts)

    def test_attention_dropout_follows_the_position_and_disturbs_nothing(self, newest):
        build = fake_build(newest, attention_dropout=0.5, path="decoder.layers.0.attention")
        attention = build.backend.core_attention(build=build, layer_number=1)
        q = torch.randn(16, 2, 4, 8)
        before = torch.get_rng_state()
        first = attention(q, q, q)
        assert torch.equal(attention(q, q, q), first)
        build.rng.position = (0, 1)
        assert not torch.equal(attention(q, q, q), first)
        assert torch.equal(torch.get_rng_state(), before)
        attention.eval()
        assert torch.equal(attention(q, q, q), attention(q, q, q))


class TestAttention:
    """FP8 inside attention: columns 2, 3 and 8 forward, 0, 3 and 5 backward."""

    ON = {**FP8, "fp8_dot_product_attention": True}
    PATH = "decoder.layers.0.self_attention.core_attention"

    def attention(self, fake, mesh=None, **settings):
        backend = TransformerEngineBackend(fake.library)
        build = build_for(backend, mesh, self.PATH, **{**self.ON, **settings})
        return build.backend.core_attention(build=build, layer_number=1), build

    def run(self, attention, factor, backward=True):
        generator = torch.Generator().manual_seed(1)
        q, k, v = torch.randn(3, 16, 2, 4, 8, generator=generator).unbind()
        q = (q * factor).requires_grad_()
        out = attention(q, k, v)
        if backward:
            out.sum().backward()
        return q

    def test_the_library_runs_it_in_fp8_with_the_books_scales(self, fake):
        attention, build = self.attention(fake)
        for factor in (8.0, 4.0):  # two microbatches: the larger maximum counts
            largest = self.run(attention, factor).detach().abs().max()
            if factor == 8.0:
                first = largest
        meta = attention.precision.fp8_meta
        staged = meta["scaling_fwd"].amax_history[0]
        assert staged[2] == first > largest
        assert staged.nonzero().flatten().tolist() == [2, 3, 8]
        staged = meta["scaling_bwd"].amax_history[0]
        assert staged.tolist() == [0.25, 0.0, 0.0, 1.0, 0.0, 0.5]
        assert set(attention.scales_used) == {1.0}
        build.fp8.sync()
        self.run(attention, 1.0)
        assert attention.scales_used[-6:-4] == [pytest.approx(448.0 / first.item()), 448.0]
        assert attention.scales_used[-3:] == [57344.0, 2 * 57344.0, 4 * 57344.0]
        assert attention.fp8_meta["recipe"].fp8_dpa is True
        assert fake.state.updates == []
        shown = attention.fp8_meta["scaling_fwd"].scale
        assert torch.equal(shown, meta["scaling_fwd"].scale)

    def test_current_scaling_has_delayed_scales_for_two_tensors(self, newest):
        attention, build = self.attention(newest, fp8_recipe="tensorwise", fp8_amax_history_len=1)
        self.run(attention, 1.0)
        meta = attention.precision.fp8_meta
        assert meta["scaling_fwd"].amax_history[0].nonzero().flatten().tolist() == [8]
        assert meta["scaling_bwd"].amax_history[0].nonzero().flatten().tolist() == [5]
        build.fp8.sync()
        self.run(attention, 1.0)
        assert attention.scales_used[-2:] == [448.0, 2 * 57344.0]
        assert attention.fp8_meta["recipe"].kind == "Float8CurrentScaling"

    def test_evaluation_leaves_no_trace(self, newest):
        attention, build = self.attention(newest)
        with torch.no_grad(), build.fp8.not_recording():
            self.run(attention, 1.0, backward=False)
        assert not build.fp8.book.history.any()
        assert attention.scales_used

    def test_recompute_records_once(self, newest):
        histories = []
        for recompute in (False, True):
            attention, build = self.attention(newest)
            q = torch.randn(16, 2, 4, 8, generator=torch.Generator().manual_seed(2))
            q.requires_grad_()
            arguments = (q, q, q)
            if recompute:
                out = checkpoint(attention, *arguments, rng=build.rng, fp8=build.fp8)
            else:
                out = attention(*arguments)
            out.square().sum().backward()
            histories.append(build.fp8.book.history.clone())
        assert torch.equal(*histories)
        assert histories[0][0].count_nonzero() == 6

    def test_layers_kept_in_bf16_and_held_back_stay_outside(self, newest):
        attention, _ = self.attention(newest, first_last_layers_bf16=True)
        self.run(attention, 1.0)
        assert attention.scales_used == []
        assert attention.precision.rows()[0].delivered == "bf16"
        attention, _ = self.attention(newest)
        attention.precision.suspended = "held"
        self.run(attention, 1.0)
        assert attention.scales_used == []
        attention.precision.suspended = ""
        self.run(attention, 1.0)
        assert attention.scales_used

    def test_layers_are_not_told_about_attention(self, newest):
        build = fake_build(newest, **self.ON)
        layer = column(build)
        layer(tokens())
        assert not hasattr(layer.fp8_meta["recipe"], "fp8_dpa")

    def test_rows_name_the_library(self, newest):
        attention, _ = self.attention(newest, fp8_dpa_bwd=False)
        rows = attention.precision.rows()
        assert [row.kernel for row in rows] == [
            *["Transformer Engine 2.20 fp8 e4m3xe4m3 delayed"] * 2,
            "Transformer Engine 2.20 bf16",
        ]
        assert rows[2].reason == "--no-fp8-dpa-bwd"

    def test_what_the_device_or_the_release_lacks_is_refused(self, newest, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        settings = {"fp8_recipe": "tensorwise", "fp8_amax_history_len": 1}
        with pytest.raises(PrecisionError, match="from compute capability 10.0 on.*has 9.0"):
            self.attention(newest, **settings)
        self.attention(newest)
        with pytest.raises(PrecisionError, match="from release 2.8 on, and 2.2 is installed"):
            self.attention(FakeTransformerEngine(OLDEST), **settings)

    def test_it_sends_as_it_sends(self, newest):
        cp = Axis("cp", 2, 0, (0, 1), "cp group")
        mesh = dataclasses.replace(ParallelState.single(), cp=cp)
        with pytest.raises(PrecisionError, match="--no-fp8-cp-exchange.*Remove it"):
            self.attention(newest, mesh, fp8_cp_exchange=False)
        self.attention(newest, mesh)


class TestScaling:
    def step(self, build, layer, microbatches=2, factor=1.0):
        for seed in range(microbatches):
            layer(tokens(seed=seed) * factor)[0].float().sum().backward()
        build.fp8.sync(build.mesh.amax)

    def test_scales_move_once_a_step_and_only_the_book_moves_them(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        self.step(build, layer, microbatches=3)
        self.step(build, layer, microbatches=2)
        assert layer.input_scales[:3] == [1.0] * 3
        largest = max(float(tokens(seed=s).abs().max()) for s in range(3))
        assert layer.input_scales[3:] == [pytest.approx(448.0 / largest)] * 2
        assert fake.state.updates == []
        assert float(build.fp8.book.scale[3]) == 57344.0  # output gradients are ones

    def test_inside_a_users_own_autocast_the_book_still_owns_the_scales(self, newest):
        build = fake_build(newest, **FP8)
        layer = column(build)
        library = newest.library.pytorch
        recipe = newest.library.recipe.DelayedScaling(amax_history_len=4)
        for seed in range(2):
            with library.autocast(enabled=True, recipe=recipe, amax_reduction_group=None):
                y, _ = layer(tokens(seed=seed))
            y.float().sum().backward()
        # The library updated at each exit, on tensors that no quantizer reads.
        assert newest.state.updates == ["scaling_fwd"] * 2
        assert layer.input_scales == [1.0, 1.0]

    def test_histories_are_shown_where_monitoring_code_looks(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        self.step(build, layer)
        layer(tokens())
        meta = layer.fp8_meta["scaling_fwd"]
        assert meta.amax_history.shape == (4, 3)
        view = layer.precision.fp8_meta["scaling_fwd"]
        assert torch.equal(meta.scale, view.scale)
        assert torch.equal(meta.amax_history[1:], view.amax_history[1:])
        assert meta.amax_history[-1, 0] > 0

    def test_evaluation_leaves_no_trace(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        self.step(build, layer)
        before = build.fp8.book.history.clone()
        with torch.no_grad(), build.fp8.not_recording():
            layer(tokens() * 100)
        assert torch.equal(build.fp8.book.history, before)
        layer(tokens())
        assert float(build.fp8.book.history[0, 0]) < 10

    def test_a_weight_first_cast_in_evaluation_is_recorded_in_training(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        with torch.no_grad(), build.fp8.not_recording():
            layer(tokens())
        layer(tokens())
        assert float(build.fp8.book.history[0, 1]) == float(layer.weight.detach().abs().max())
        assert layer.weight_casts == 2

    def test_state_is_saved_and_restored_as_plain_tensors(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        self.step(build, layer, factor=3.0)
        saved = build.fp8.state_dict()
        assert set(saved["layers"][build.path]) == {
            "scale_fwd",
            "amax_history_fwd",
            "scale_bwd",
            "amax_history_bwd",
        }
        again = fake_build(fake, **FP8)
        other = column(again)
        again.fp8.load_state_dict(saved)
        other(tokens())
        layer(tokens())
        assert other.input_scales[-1] == layer.input_scales[-1] != 1.0

    def test_state_moves_between_backends(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        self.step(build, layer)
        native = build_for(NativeBackend(), **FP8)
        column(native)
        native.fp8.load_state_dict(build.fp8.state_dict())
        assert torch.equal(native.fp8.book.scale, build.fp8.book.scale)

    def test_recompute_quantizes_alike_and_records_once(self, fake):
        histories, scales = [], []
        for recompute in (False, True):
            build = fake_build(fake, **FP8)
            layer = column(build)
            self.step(build, layer)
            x = tokens(seed=5).requires_grad_()
            if recompute:
                y = checkpoint(lambda x, m=layer: m(x)[0], x, rng=build.rng, fp8=build.fp8)
            else:
                y = layer(x)[0]
            y.float().square().sum().backward()
            histories.append(build.fp8.book.history.clone())
            scales.append(set(layer.input_scales[2:]))
        assert torch.equal(*histories)
        assert scales[0] == scales[1]
        assert len(scales[1]) == 1

    def test_current_scaling_keeps_no_state(self, fake):
        build = fake_build(fake, fp8_format="e4m3", fp8_recipe="tensorwise", bf16=True)
        layer = column(build)
        self.step(build, layer)
        assert build.fp8.book is None
        assert layer.input_scales == [1.0, 1.0]
        assert layer.fp8_meta["recipe"].kind == "Float8CurrentScaling"

    @pytest.mark.parametrize(
        ("recipe", "kind"),
        [
            ("blockwise", "Float8BlockScaling"),
            ("mxfp8", "MXFP8BlockScaling"),
            ("nvfp4", "NVFP4BlockScaling"),
        ],
    )
    def test_block_scales_keep_no_state(self, newest, recipe, kind):
        settings = {"fp8_format": "e4m3", "fp8_recipe": recipe}
        if recipe == "nvfp4":
            settings = {"fp4_format": "e2m1", "fp4_recipe": recipe}
        build = fake_build(newest, bf16=True, **settings)
        layer = column(build)
        layer(tokens(33))  # padded to what the recipe wants
        assert build.fp8.book is None
        assert layer.fp8_meta["recipe"].kind == kind
        name = "fp4 e2m1xe2m1" if recipe == "nvfp4" else "fp8 e4m3xe4m3"
        assert f"{name} {recipe}" in layer.precision.row().kernel

    def test_a_recipe_that_the_device_lacks_is_refused_with_the_reason(self, newest):
        newest.lacking["is_mxfp8_available"] = (False, "Device compute capability 10.x required")
        settings = {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "bf16": True}
        with pytest.raises(PrecisionError, match="got mxfp8.*10.x required.*native"):
            column(fake_build(newest, **settings))
        build = fake_build(newest, **settings, first_last_layers_bf16=True)
        column(build)  # a layer that is kept in BF16 needs nothing

    def test_what_nvfp4_needs(self, newest):
        with pytest.raises(PrecisionError, match="--fp4-recipe: got nvfp4 with float32.*--bf16"):
            column(fake_build(newest, fp4_format="e2m1"))
        with pytest.raises(PrecisionError, match="got 40 inputs .*FP4 products.*of 16"):
            column(fake_build(newest, fp4_format="e2m1", bf16=True), 40, 64)
        newest.lacking["is_nvfp4_available"] = (False, "Device compute capability 10.0 required")
        with pytest.raises(PrecisionError, match="--fp4-recipe: got nvfp4.*10.0 required"):
            column(fake_build(newest, fp4_format="e2m1", bf16=True))

    def test_a_release_without_the_recipe_is_refused(self):
        oldest = FakeTransformerEngine(OLDEST)
        with pytest.raises(PrecisionError, match="release 2.2 has no Float8BlockScaling"):
            column(fake_build(oldest, fp8_format="e4m3", fp8_recipe="blockwise"))

    @pytest.mark.parametrize(
        ("recipe", "sizes", "words"),
        [
            ("delayed", (40, 64), "linear_fc1: got 40 inputs .* multiples of 16. Make it 32 or 48"),
            ("mxfp8", (32, 48), "got 48 outputs .* multiples of 32. Make it 32 or 64"),
        ],
    )
    def test_widths_that_do_not_fit_are_refused_before_the_first_step(
        self, newest, recipe, sizes, words
    ):
        settings = {"fp8_format": "e4m3", "fp8_recipe": recipe, "bf16": True}
        with pytest.raises(PrecisionError, match=words):
            column(fake_build(newest, **settings), *sizes)
        column(fake_build(newest, bf16=True), *sizes)

    def test_the_amax_group_reaches_the_library(self, newest):
        build = build_for(
            TransformerEngineBackend(newest.library), tp2(0), tensor_model_parallel_size=2, **FP8
        )
        layer = row(build)
        layer(tokens(width=16))
        groups = {given["amax_reduction_group"] for given in newest.called("pytorch.autocast")}
        assert groups == {"amax group"}
        assert layer.fp8_meta["recipe"].reduce_amax is True

    def test_alone_no_reduction_is_asked_for(self, newest):
        # Without a group the library would reduce over all processes, other stages included.
        layer = column(fake_build(newest, **FP8))
        layer(tokens())
        assert layer.fp8_meta["recipe"].reduce_amax is False

    def test_recipe_fields_arrive(self, newest):
        settings = {"fp8_margin": 1, "fp8_amax_compute_algo": "max"}
        layer = column(fake_build(newest, **FP8, **settings))
        layer(tokens())
        recipe = layer.fp8_meta["recipe"]
        assert (recipe.margin, recipe.amax_history_len) == (1, 4)
        assert (recipe.amax_compute_algo, recipe.fp8_format.name) == ("max", "HYBRID")

    def test_single_gemms_cannot_be_kept_out_of_fp8(self, newest):
        with pytest.raises(PrecisionError, match="--no-fp8-wgrad.*--transformer-impl native"):
            column(fake_build(newest, **FP8, fp8_wgrad=False))


class TestGradients:
    def wrapped(self, fake, **settings):
        build = fake_build(fake, **settings)
        layer = column(build, bias=False)
        ddp = DistributedDataParallel(layer, build.mesh.dp)
        ddp.zero_grad_buffer()
        return layer, ddp

    def expected(self, layer, xs):
        y = sum((x @ layer.weight.detach().t()).sum(0, keepdim=True) for x in xs)
        ones = torch.ones(xs[0].shape[0], y.shape[-1])
        return sum(ones.t() @ x.flatten(0, -2).float() for x in xs)

    @pytest.mark.parametrize("settings", [{"bf16": True}, FP8])
    def test_weight_gradients_accumulate_in_main_grad(self, fake, settings):
        layer, _ = self.wrapped(fake, **settings)
        xs = [tokens(seed=s) for s in range(3)]
        for x in xs:
            layer(x)[0].float().sum().backward()
        assert layer.weight.grad is None
        torch.testing.assert_close(
            layer.weight.main_grad, self.expected(layer, xs), rtol=2e-2, atol=2e-1
        )  # the fake's products are bf16, as the weights are

    @pytest.mark.parametrize("settings", [{"bf16": True}, FP8])
    def test_two_forwards_before_one_backward_lose_nothing(self, fake, settings):
        layer, ddp = self.wrapped(fake, **settings)
        xs = [tokens(seed=s) for s in range(2)]
        (layer(xs[0])[0].float().sum() + layer(xs[1])[0].float().sum()).backward()
        both = layer.weight.main_grad.clone()
        ddp.zero_grad_buffer()
        for x in xs:
            layer(x)[0].float().sum().backward()
        assert torch.equal(both, layer.weight.main_grad)

    def test_buffers_may_be_zeroed_between_forward_and_backward(self, fake):
        layer, ddp = self.wrapped(fake, bf16=True)
        x = tokens()
        y, _ = layer(x)
        ddp.zero_grad_buffer()
        y.float().sum().backward()
        expected = self.expected(layer, [x])
        torch.testing.assert_close(layer.weight.main_grad, expected, rtol=2e-2, atol=2e-1)

    def test_without_main_grad_autograd_gets_the_gradient(self, fake):
        layer = column(fake_build(fake))
        layer(torch.randn(4, 1, 32))[0].sum().backward()
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None

    def test_weights_are_cast_once_until_weight_or_scale_changes(self, fake):
        build = fake_build(fake, **FP8)
        layer = column(build)
        for _ in range(3):
            layer(tokens())
        assert layer.weight_casts == 1
        with torch.no_grad():
            layer.weight.add_(1.0)
        layer(tokens())
        assert layer.weight_casts == 2
        build.fp8.sync(build.mesh.amax)
        layer(tokens())
        assert layer.weight_casts == 3


class TestTraining:
    """Whole training steps with the library's stand-in in every layer."""

    def run(self, backend, iterations=3, **fields):
        settings = {
            "mock_data": True, "vocab_size": 64, "num_layers": 2, "hidden_size": 32,
            "num_attention_heads": 2, "seq_length": 16, "micro_batch_size": 2,
            "global_batch_size": 4, "train_iters": 8, "lr": 1e-2, "device": "cpu",
            "hidden_dropout": 0.1, "attention_dropout": 0.0, "num_workers": 0,
        }  # fmt: skip
        runtime = start(make_config(**{**settings, **fields}), Launch())
        runtime, tokenizer = with_tokenizer(dataclasses.replace(runtime, backend=backend))
        parts = setup_model(runtime.config, runtime)
        sources = setup_sources(runtime.config, tokenizer, runtime)
        step = TrainStep(runtime.config, runtime, parts, sources.train)
        outcomes = [step.run(i + 1, 4 * i) for i in range(iterations)]
        return parts, outcomes

    def test_losses_and_gradients_are_the_native_ones(self, fake):
        _, ours = self.run(TransformerEngineBackend(fake.library))
        _, native = self.run(NativeBackend())
        for mine, theirs in zip(ours, native, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert mine.update.grad_norm == pytest.approx(theirs.update.grad_norm, rel=1e-4)

    def test_recompute_changes_nothing(self, fake):
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        plain_parts, plain = self.run(TransformerEngineBackend(fake.library), **FP8)
        parts, recomputed = self.run(TransformerEngineBackend(fake.library), **FP8, **recompute)
        assert plain == recomputed
        assert torch.equal(parts.fp8.book.history, plain_parts.fp8.book.history)

    def test_each_weight_is_cast_once_a_step(self, fake):
        parts, _ = self.run(TransformerEngineBackend(fake.library), iterations=3, **FP8)
        casts = [m.weight_casts for m in parts.model.modules() if hasattr(m, "weight_casts")]
        assert casts == [3] * 8

    def test_histories_hold_one_row_a_step(self, fake):
        parts, _ = self.run(TransformerEngineBackend(fake.library), iterations=3, **FP8)
        history = parts.fp8.book.history
        assert (history[0] == 0).all()
        rows = (history.amax(dim=1) > 0).tolist()
        assert rows == [False, True, True, True]
        assert fake.state.updates == []


class TestAvailability:
    @pytest.fixture
    def machine(self, monkeypatch):
        def pretend(version, cuda=True, library=None, capability=(9, 0)):
            monkeypatch.setattr(te, "installed_version", lambda: version)
            monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
            if library is not None:
                monkeypatch.setattr(te, "load_library", lambda: library)
            return TransformerEngineBackend().availability()

        return pretend

    def test_missing(self, machine):
        able, reason = machine(None)
        assert not able
        assert "not installed" in reason
        assert "pip install" in reason

    def test_too_old(self, machine):
        able, reason = machine("1.13.0")
        assert not able
        assert "1.13.0" in reason
        assert "2.2" in reason

    def test_no_cuda(self, machine):
        able, reason = machine("2.9.0", cuda=False)
        assert not able
        assert "no CUDA device" in reason

    def test_able(self, machine, newest):
        assert machine("2.20.2", library=newest.library) == (
            True,
            "transformer_engine 2.20.2 on a GPU",
        )

    def test_a_device_without_fp8(self, machine, newest):
        refusal = "Device compute capability 8.9 or higher required for FP8 execution."
        newest.library.manager.is_fp8_available = lambda: (False, refusal)
        able, reason = machine("2.20.2", library=newest.library)
        assert not able
        assert refusal in reason

    def test_newer_than_the_newest_checked_is_said(self, machine, newest):
        able, reason = machine("2.99.0", library=newest.library)
        assert able
        assert "2.20" in reason

    def test_a_build_that_does_not_load(self, monkeypatch):
        def broken(name):
            raise OSError("libcudnn.so.9: cannot open shared object file")

        te.load_library.cache_clear()
        monkeypatch.setattr(te, "installed_version", lambda: "2.20.2")
        monkeypatch.setattr(te, "_import", broken)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        able, reason = TransformerEngineBackend().availability()
        assert not able
        assert "libcudnn" in reason
        assert "OSError" in reason
        te.load_library.cache_clear()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine might run it")
    def test_asked_for_by_name_on_this_machine(self):
        with pytest.raises(BackendUnavailable) as raised:
            resolve("transformer_engine", "cpu")
        text = str(raised.value)
        assert text.startswith("--transformer-impl: got transformer_engine.")
        assert "transformer_engine: cannot run, " in text
        assert "native: can run" in text

    @pytest.mark.skipif(te.installed_version() is not None, reason="it is installed here")
    def test_using_a_class_without_the_library_says_how_to_install_it(self):
        te.load_library.cache_clear()
        with pytest.raises(BackendUnavailable, match="pip install"):
            _ = TransformerEngineBackend().column_parallel_linear

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("2.9.0", (2, 9)), ("2.6.0.post1", (2, 6)), ("2.4.0+3cd6870", (2, 4)), ("dev", (0, 0))],
    )
    def test_versions(self, text, expected):
        assert te.te_calls.parse_version(text) == expected


def test_the_fake_says_that_it_is_one(newest):
    layer = column(fake_build(newest))
    assert layer.is_fake
    with contextlib.suppress(TypeError):
        newest.library.pytorch.Linear(1, 2, nonsense=3)
        pytest.fail("an unknown argument was accepted")
