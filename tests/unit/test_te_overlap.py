"""Userbuffers of Transformer Engine, on a stand-in whose signatures are real."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.config import ConfigError
from megatron.core.backends import te_overlap
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.backends.te_calls import EXTERNAL_BUFFERS, UB_MODES
from megatron.core.build import Build
from megatron.core.errors import MegatronError, PrecisionError
from megatron.core.mesh import Axis, ParallelState
from tests.contract.fake_te import FakeTransformerEngine, UserBufferQuantizationMode
from tests.contract.te_sources import RELEASES
from tests.small_models import small_config

CPU = torch.device("cpu")
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}
FP8 = {"fp8_format": "hybrid", "bf16": True}
EDGES = {**FP8, "first_last_layers_bf16": True}
NONE, FP8_MODE = UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8


@pytest.fixture(params=RELEASES)
def fake(request):
    return FakeTransformerEngine(request.param)


@pytest.fixture
def newest():
    return FakeTransformerEngine(RELEASES[-1])


def mesh(size=2):
    if size == 1:
        return ParallelState.single()
    tp = Axis("tp", size, 0, tuple(range(size)), "tp group")
    return dataclasses.replace(ParallelState.single(), tp=tp, etp=tp)


def start(fake, **settings):
    config = small_config(world_size=2, **{**TP2, **settings})
    backend = TransformerEngineBackend(fake.library)
    return backend, config, backend.start_tp_overlap(config, mesh())


def initialized(fake):
    return fake.called("pytorch.initialize_ub")


class TestStart:
    @pytest.mark.parametrize(
        ("settings", "in_fp8", "modes"),
        [({"bf16": True}, False, [NONE]), (FP8, True, [FP8_MODE])],
    )
    def test_the_call_fits_every_release(self, fake, settings, in_fp8, modes):
        _, _, words = start(fake, **settings)
        (given,) = initialized(fake)
        assert given["shape"] == [16 * 2, 32]
        assert given["tp_size"] == 2
        assert given["dtype"] == torch.bfloat16
        assert given["ub_cfgs"] is None
        assert given["bootstrap_backend"] == "nccl"
        if fake.version < UB_MODES:
            assert given["use_fp8"] is in_fp8
        else:
            assert given["quantization_modes"] == modes
        assert words == "ag, rs, bulk-dgrad, bulk-wgrad, in Transformer Engine's userbuffers"

    def test_layers_in_bf16_next_to_fp8_need_two_sets_of_buffers(self, fake):
        if fake.version < UB_MODES:
            with pytest.raises(PrecisionError, match=r"--first-last-layers-bf16.*2\.8"):
                start(fake, **EDGES)
            return
        start(fake, **EDGES)
        assert initialized(fake)[0]["quantization_modes"] == [FP8_MODE, NONE]

    def test_four_bits_do_not_travel_in_them(self, newest):
        with pytest.raises(PrecisionError, match="--tp-comm-overlap: got nvfp4"):
            start(newest, fp4_format="e2m1", bf16=True)
        assert not initialized(newest)

    def test_edges_without_layers_need_one(self, newest):
        none = {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0}
        start(newest, **EDGES, **none)
        assert initialized(newest)[0]["quantization_modes"] == [FP8_MODE]

    def test_settings_by_buffer(self, newest, tmp_path):
        file = tmp_path / "ub.yaml"
        file.write_text("qkv_fprop: {num_sm: 2, aggregate: 0}\nfc1_dgrad: {num_sm: 3}\n")
        start(
            newest,
            bf16=True,
            tp_comm_overlap_cfg=str(file),
            tp_comm_overlap_rs_dgrad=True,
            tp_comm_bootstrap_backend="gloo",
        )
        (given,) = initialized(newest)
        assert given["bootstrap_backend"] == "gloo"
        assert given["ub_cfgs"] == {
            "qkv_fprop": {"num_sm": 2, "aggregate": False},
            "qkv_dgrad": {"method": "ring_exchange"},
            "fc1_dgrad": {"method": "ring_exchange", "num_sm": 3},
        }

    def test_a_wrong_file_is_a_configuration_mistake(self, newest, tmp_path):
        file = tmp_path / "ub.yaml"
        file.write_text("qkv_fprop: {method: bulk}\n")
        with pytest.raises(ConfigError, match="qkv_fprop has no such method"):
            start(newest, bf16=True, tp_comm_overlap_cfg=str(file))
        assert initialized(newest) == []

    def test_buffers_that_a_release_lacks(self, fake, tmp_path):
        file = tmp_path / "ub.yaml"
        file.write_text("proj_wgrad: {method: external}\n")
        if fake.version < EXTERNAL_BUFFERS:
            with pytest.raises(MegatronError, match=r"proj_wgrad.*2\.7.*2\.2 is installed"):
                start(fake, bf16=True, tp_comm_overlap_cfg=str(file))
        else:
            start(fake, bf16=True, tp_comm_overlap_cfg=str(file))

    def test_once_a_process_unless_something_changes(self, newest):
        for _ in range(2):
            start(newest, bf16=True)
        assert len(initialized(newest)) == 1
        start(newest, bf16=True, micro_batch_size=4)
        assert [given["shape"][0] for given in initialized(newest)] == [32, 64]
        assert len(newest.called("pytorch.destroy_ub")) == 1

    def test_what_the_library_says_is_passed_on(self, newest):
        newest.state.userbuffers = True
        with pytest.raises(MegatronError, match="RuntimeError: UB communicators are already"):
            start(newest, bf16=True)
        assert newest.library.userbuffers == []


def construct(fake, kind, path, settings, **options):
    backend, config, _ = start(fake, bf16=True, **settings)
    build = Build.root(config, mesh(), backend, CPU, path)
    getattr(backend, kind)(
        32, 64, build=build, init_method=torch.nn.init.zeros_, bias=False, **options
    )
    name = "LayerNormLinear" if kind.startswith("layernorm") else "Linear"
    given = fake.called(f"pytorch.{name}.__init__")[-1]
    return {key: value for key, value in given.items() if key.startswith("ub_")}


MLP = "decoder.layers.0.mlp"


class TestLayers:
    def test_column(self, fake):
        kind = "layernorm_column_parallel_linear"
        assert construct(fake, kind, f"{MLP}.linear_fc1", {}) == {
            "ub_name": "fc1",
            "ub_overlap_ag": True,
            "ub_overlap_rs_dgrad": False,
            "ub_bulk_dgrad": True,
            "ub_bulk_wgrad": True,
        }

    def test_row(self, fake):
        settings = {"tp_comm_overlap_ag": False}
        assert construct(fake, "row_parallel_linear", f"{MLP}.linear_fc2", settings) == {
            "ub_name": "fc2",
            "ub_overlap_ag": False,
            "ub_overlap_rs": True,
        }

    def test_input_gradients_in_parts_leave_nothing_for_bulk(self, newest):
        settings = {"tp_comm_overlap_rs_dgrad": True}
        given = construct(newest, "column_parallel_linear", "x.linear_qkv", settings)
        assert given["ub_overlap_rs_dgrad"] is True
        assert (given["ub_bulk_dgrad"], given["ub_bulk_wgrad"]) == (False, False)
        assert given["ub_name"] == "qkv"

    def test_a_layer_may_name_its_buffers(self, newest):
        given = construct(
            newest, "row_parallel_linear", "somewhere.0", {}, tp_comm_buffer_name="proj"
        )
        assert given["ub_name"] == "proj"

    def test_layers_without_buffers(self, newest):
        assert construct(newest, "row_parallel_linear", "somewhere.0", {}) == {}
        expert = construct(
            newest, "row_parallel_linear", f"{MLP}.experts.0.linear_fc2", {}, is_expert=True
        )
        assert expert == {}

    def test_no_overlap_no_arguments(self):
        config = small_config(world_size=2, **{**TP2, "tp_comm_overlap": False})
        path, axis = f"{MLP}.linear_fc1", mesh().tp
        found = te_overlap.layer_arguments(config, path, axis, by_column=True, buffer=None)
        assert found == {}

    def test_buffers_come_first(self, newest):
        config = small_config(world_size=2, **TP2)
        backend = TransformerEngineBackend(newest.library)
        build = Build.root(config, mesh(), backend, CPU, f"{MLP}.linear_fc1")
        with pytest.raises(AssertionError, match="before layer construction"):
            backend.column_parallel_linear(
                32, 64, build=build, init_method=torch.nn.init.zeros_, bias=False
            )


class TestNative:
    def test_words(self):
        config = small_config(world_size=2, **TP2, tp_comm_overlap_rs_dgrad=True)
        words = NativeBackend().start_tp_overlap(config, mesh())
        assert words == "ag, rs, rs-dgrad, bulk-dgrad, in messages between each two of 2 ranks"

    def test_put_off_weight_gradients_hide_nothing(self):
        pipeline = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
        config = small_config(world_size=4, **TP2, **pipeline, transformer_impl="native")
        assert NativeBackend().start_tp_overlap(config, mesh()).startswith("ag, rs, in")

    @pytest.mark.parametrize(
        ("settings", "flag"),
        [
            ({"tp_comm_overlap_cfg": "ub.yaml"}, "--tp-comm-overlap-cfg: got ub.yaml"),
            ({"tp_comm_bootstrap_backend": "mpi"}, "--tp-comm-bootstrap-backend: got mpi"),
        ],
    )
    def test_settings_of_userbuffers_are_refused(self, settings, flag):
        config = small_config(world_size=2, **TP2, **settings)
        with pytest.raises(MegatronError, match=f"{flag}.*native backend"):
            NativeBackend().start_tp_overlap(config, mesh())
