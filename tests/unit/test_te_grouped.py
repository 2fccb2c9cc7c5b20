"""Experts on the Transformer Engine backend, driven on a stand-in whose signatures are real."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.backends import te_calls
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.backends.te_grouped import row_places
from megatron.core.errors import MegatronError, PrecisionError
from megatron.core.mesh import Axis, ParallelState
from megatron.core.tensor_parallel.random import checkpoint
from tests.contract.fake_te import FakeTransformerEngine
from tests.unit.test_te_backend import FP8, NEWEST, OLDEST, build_for, fake_build, normal

PATH = "decoder.layers.0.mlp.experts.linear_fc1"
EXPERTS, IN, OUT = 3, 32, 64


@pytest.fixture(params=[OLDEST, NEWEST])
def fake(request):
    return FakeTransformerEngine(request.param)


@pytest.fixture
def newest():
    return FakeTransformerEngine(NEWEST)


def grouped(build, kind="column", **options):
    make = getattr(build.backend, f"{kind}_parallel_grouped_linear")
    return make(EXPERTS, IN, OUT, build=build, init_method=normal, **options)


def tokens(counts, seed=0, width=IN, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(sum(counts), width, generator=generator) * factor).to(torch.bfloat16)


def experts(fake, **settings):
    build = fake_build(fake, path=PATH, **settings)
    return grouped(build), build


def step(build, layer, counts, seed=0):
    layer(tokens(counts, seed), counts).float().sum().backward()
    build.fp8.sync(build.mesh.amax)


class TestForward:
    @pytest.mark.parametrize("counts", [[16, 16, 16], [3, 0, 17], [0, 0, 0]])
    def test_outputs_and_gradients_are_the_native_ones(self, fake, counts):
        results = []
        for backend in (TransformerEngineBackend(fake.library), NativeBackend()):
            layer = grouped(build_for(backend, path=PATH, bf16=True))
            x = tokens(counts).requires_grad_()
            y = layer(x, counts)
            y.float().square().sum().backward()
            # A bf16 product may be summed in another order.
            results.append([y, x.grad, *(w.grad for w in layer.weights)])
        for ours, native in zip(*results, strict=True):
            torch.testing.assert_close(ours, native, rtol=2**-7, atol=2**-7)

    @pytest.mark.parametrize("counts", [[1, 7, 16], [16, 0, 17], [32, 0, 0]])
    def test_any_number_of_tokens_runs_in_fp8(self, fake, counts):
        layer, build = experts(fake, **FP8)
        x = tokens(counts).requires_grad_()
        y = layer(x, counts)
        build.fp8.enabled = False
        assert torch.equal(y, layer(x, counts))
        (grad,) = torch.autograd.grad(y.float().square().sum(), x)
        assert grad.isfinite().all()
        given = fake.called("pytorch.GroupedLinear.forward")[0]
        assert [split % 16 for split in given["m_splits"]] == [0, 0, 0]
        assert [-(-count // 16) * 16 for count in counts] == given["m_splits"]

    def test_rows_are_padded_at_the_end_of_each_expert(self):
        assert row_places([2, 0, 5], 4).tolist() == [0, 1, 4, 5, 6, 7, 8]
        assert row_places([8, 0, 4], 4) is None

    def test_counts_that_do_not_fit(self, newest):
        layer, _ = experts(newest, bf16=True)
        for counts in ([3, 4], [3, 4, 5]):
            with pytest.raises(MegatronError, match="There are 3 experts and 7 rows"):
                layer(tokens([3, 4, 0]), counts)


class TestConstruction:
    @pytest.mark.parametrize("kind", ["column", "glu", "row"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_parameters_are_those_of_the_native_layer(self, newest, kind, rank):
        etp = Axis("etp", 2, rank, (0, 1), "etp group")
        ep = Axis("ep", 4, 2, (0, 2, 4, 6), "ep group")
        mesh = dataclasses.replace(ParallelState.single(), etp=etp, ep=ep)
        options = {"partition_stride": 2} if kind == "glu" else {}
        made = [
            grouped(build_for(b, mesh, path=PATH), "row" if kind == "row" else "column", **options)
            for b in (TransformerEngineBackend(newest.library), NativeBackend())
        ]
        for ours, native in zip(*(layer.named_parameters() for layer in made), strict=True):
            assert ours[0] == native[0]
            assert torch.equal(ours[1], native[1])
            for name in ("allreduce", "expert_index", "partition_dim", "partition_stride"):
                assert getattr(ours[1], name) == getattr(native[1], name)
        assert [w.expert_index for w in made[0].weights] == [6, 7, 8]
        (given,) = newest.called("pytorch.GroupedLinear.__init__")
        assert (given["parallel_mode"], given.get("tp_group"), given["bias"]) == (None, None, False)

    def test_current_scaling_needs_a_release_that_has_it(self):
        settings = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "bf16": True}
        with pytest.raises(PrecisionError, match="release 2.3 or later"):
            experts(FakeTransformerEngine(OLDEST), **settings)
        layer, build = experts(FakeTransformerEngine(NEWEST), **settings)
        step(build, layer, [5, 0, 3])
        assert layer.precisions[0].slots is None

    def test_nvfp4_pads_every_expert_to_what_its_kernels_take(self):
        fake = FakeTransformerEngine(NEWEST)
        layer, build = experts(fake, fp4_format="e2m1", bf16=True)
        step(build, layer, [5, 0, 130])
        given = fake.called("pytorch.GroupedLinear.forward")[-1]
        assert list(given["m_splits"]) == [128, 0, 256]


class TestScaling:
    def test_each_expert_has_columns_of_its_own(self, fake):
        layer, build = experts(fake, **FP8)
        counts = [4, 5, 6]
        x = tokens(counts)
        x[4:9] *= 3
        layer(x, counts).float().sum().backward()
        book = build.fp8.expert_book
        forward = book.history[0, :9].view(3, 3)
        assert forward[:, 0].tolist() == [float(p.abs().max()) for p in x.split(counts)]
        assert forward[:, 1].tolist() == [float(w.detach().abs().max()) for w in layer.weights]
        assert forward[:, 2].tolist() == [0, 0, 0]
        assert book.history[0, 9:].tolist() == [1, 0] * 3
        build.fp8.sync(build.mesh.amax)
        layer(x, counts)
        expected = [448 / float(p.abs().max()) for p in x.split(counts)]
        assert layer.scales_used["input"] == pytest.approx(expected)
        meta = layer.fp8_meta["scaling_fwd"]
        assert meta.amax_history.shape == (4, 9)
        assert sorted(meta.scale.tolist()) == sorted(book.scale[:9].tolist())
        assert fake.state.updates == []

    def test_an_expert_without_tokens_keeps_scale_and_history(self, fake):
        layer, build = experts(fake, **FP8)
        step(build, layer, [4, 5, 6])
        book = build.fp8.expert_book
        columns = [book.columns(p.path, d) for p in layer.precisions[1:2] for d in DIRECTIONS]
        before = [(book.history[:, c].clone(), book.scale[c].clone()) for c in columns]
        with torch.no_grad():
            layer.weight1.mul_(2)
        step(build, layer, [4, 0, 6], seed=1)
        for column, (history, scale) in zip(columns, before, strict=True):
            assert torch.equal(book.history[:, column], history)
            assert torch.equal(book.scale[column], scale)

    def test_a_weight_is_recorded_once_its_expert_has_tokens(self, fake):
        layer, build = experts(fake, **FP8)
        with torch.no_grad(), build.fp8.not_recording():
            layer(tokens([4, 4, 4]), [4, 4, 4])
        layer(tokens([4, 0, 4]), [4, 0, 4])
        largest = [float(w.detach().abs().max()) for w in layer.weights]
        weights = build.fp8.expert_book.history[0, 1:9:3]
        assert weights.tolist() == [largest[0], 0, largest[2]]
        layer(tokens([0, 1, 0]), [0, 1, 0])
        assert weights.tolist() == largest
        assert layer.weight_casts == [1, 1, 1]

    def test_evaluation_leaves_no_trace(self, fake):
        layer, build = experts(fake, **FP8)
        step(build, layer, [4, 5, 6])
        before = build.fp8.expert_book.history.clone()
        with torch.no_grad(), build.fp8.not_recording():
            layer(tokens([4, 5, 6], factor=100), [4, 5, 6])
        assert torch.equal(build.fp8.expert_book.history, before)

    def test_recompute_quantizes_alike_and_records_once(self, fake):
        histories, counts = [], [4, 0, 6]
        for recompute in (False, True):
            layer, build = experts(fake, **FP8)
            step(build, layer, [4, 5, 6])
            x = tokens(counts, seed=5).requires_grad_()
            if recompute:
                run = lambda x, m=layer: m(x, counts)  # noqa: E731
                y = checkpoint(run, x, rng=build.rng, fp8=build.fp8)
            else:
                y = layer(x, counts)
            y.float().square().sum().backward()
            histories.append(build.fp8.expert_book.history.clone())
        assert torch.equal(*histories)

    def test_state_moves_between_backends(self, fake):
        layer, build = experts(fake, **FP8)
        step(build, layer, [4, 5, 6])
        native = build_for(NativeBackend(), path=PATH, **FP8)
        grouped(native)
        native.fp8.load_state_dict(build.fp8.state_dict())
        assert torch.equal(native.fp8.expert_book.scale, build.fp8.expert_book.scale)

    def test_the_library_reduces_nothing(self, newest):
        layer, _ = experts(newest, **FP8)
        layer(tokens([4, 5, 6]), [4, 5, 6])
        groups = {given["amax_reduction_group"] for given in newest.called("pytorch.autocast")}
        assert groups == {None}
        assert layer.fp8_meta["recipe"].reduce_amax is False


class TestGradients:
    def test_weight_gradients_accumulate_in_main_grad(self, fake):
        layer, _ = experts(fake, **FP8)
        for weight in layer.weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        counts = [4, 0, 6]
        for _ in range(2):
            layer(tokens(counts), counts).float().sum().backward()
        totals = [float(w.main_grad.abs().sum()) for w in layer.weights]
        assert totals[0] > 0
        assert totals[1] == 0
        assert all(w.grad is None for w in layer.weights)
        once = layer.weight0.main_grad / 2
        expected = tokens(counts)[:4].float().sum(0).expand(OUT, IN)
        torch.testing.assert_close(once, expected, rtol=2**-7, atol=2**-7)


def test_layouts_of_quantizers():
    by_role, by_expert = (grouped(fake_build(FakeTransformerEngine(v))) for v in (OLDEST, NEWEST))
    assert te_calls.grouped_columns(by_role, "weight") == [3, 4, 5]
    assert te_calls.grouped_columns(by_role, "grad_output") == [0, 1, 2]
    assert te_calls.grouped_columns(by_role, "grad_input") == [3, 4, 5]
    assert te_calls.grouped_columns(by_expert, "weight") == [1, 4, 7]
    assert te_calls.grouped_columns(by_expert, "grad_input") == [1, 3, 5]


DIRECTIONS = ("forward", "backward")
