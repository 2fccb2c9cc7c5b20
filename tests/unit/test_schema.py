from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.schema import Address, Stacking
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.shards import mark_expert, mark_sharded

SINGLE = ParallelState.single()
TWO = Stacking(2)


def tp(rank, size):
    return mesh(rank, size, tp=size)


def mesh(rank, size, **sizes):
    return ParallelState.build(MeshSizes(size, **sizes), rank, size, make_group=lambda _: None)


@pytest.mark.parametrize(
    ("name", "key", "layer"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight", None),
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            3,
        ),
        ("decoder.layers.11.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc1.weight", 11),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", None),
        ("output_layer.weight", "output_layer.weight", None),
    ],
)
def test_address(name, key, layer):
    assert schema.address(name) == Address(key, layer)


@pytest.mark.parametrize(
    ("name", "differ", "expected"),
    [
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight12",
            False,
            Address("decoder.layers.mlp.experts.experts.linear_fc1.weight", 3, 12),
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc2.weight0",
            True,
            Address("decoder.layers.3.mlp.experts.experts.linear_fc2.weight", None, 0),
        ),
        (
            "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
            False,
            Address("decoder.layers.mlp.shared_experts.linear_fc1.weight", 0),
        ),
        (
            "decoder.layers.2.mlp.router.expert_bias",
            True,
            Address("decoder.layers.2.mlp.router.expert_bias"),
        ),
    ],
)  # fmt: skip
def test_address_with_experts(name, differ, expected):
    assert schema.address(name, differ) == expected


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc1 = nn.Linear(4, 12 // size)
        self.fc2 = nn.Linear(6 // size, 4)
        for parameter in self.fc1.parameters():
            mark_sharded(parameter, 0, stride=2)
        mark_sharded(self.fc2.weight, 1)


class Model(nn.Module):
    def __init__(self, size=1):
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(8 // size, 4)
        mark_sharded(self.embedding.word_embeddings.weight, 0)
        self.layers = nn.ModuleList(Layer(size) for _ in range(2))


def test_global_shapes_do_not_depend_on_the_layout():
    one = schema.model_state(Model(), SINGLE, TWO)
    two = schema.model_state(Model(2), tp(1, 2), TWO)
    assert {k: tuple(v.size()) for k, v in one.items()} == {
        "embedding.word_embeddings.weight": (8, 4),
        "layers.fc1.weight": (2, 12, 4),
        "layers.fc1.bias": (2, 12),
        "layers.fc2.weight": (2, 4, 6),
        "layers.fc2.bias": (2, 4),
    }
    assert {k: v.size() for k, v in one.items()} == {k: v.size() for k, v in two.items()}


def test_gated_weights_are_two_blocks_a_layer():
    shard = schema.model_state(Model(2), tp(1, 2), TWO)["layers.fc1.weight"]
    assert [p.offset for p in shard.pieces] == [(0, 3, 0), (0, 9, 0), (1, 3, 0), (1, 9, 0)]


class Experts(nn.Module):
    """Three layers of four experts, of which a rank holds `4 / ep`; split over `etp`."""

    def __init__(self, own):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(3):
            layer = nn.Module()
            layer.router = nn.Module()
            layer.router.register_buffer("expert_bias", torch.zeros(4))
            layer.router.register_buffer("load", torch.zeros(4), persistent=False)
            layer.experts = nn.Module()
            layer.experts.linear_fc1 = nn.Module()
            count = 4 // own.ep.size
            for i in range(count):
                weight = nn.Parameter(torch.zeros(12 // own.etp.size, 5))
                mark_expert(weight, own.ep.rank * count + i)
                mark_sharded(weight, 0, stride=2)
                layer.experts.linear_fc1.register_parameter(f"weight{i}", weight)
            self.layers.append(layer)


def test_experts_are_rows_of_one_tensor_on_their_own_axes():
    own = mesh(7, 8, tp=1, ep=2, etp=2)
    assert (own.etp.rank, own.ep.rank) == (1, 1)
    stacked = schema.model_state(Experts(own), own, Stacking(3, 4))
    key = "layers.experts.experts.linear_fc1.weight"
    assert {k: tuple(v.size()) for k, v in stacked.items()} == {
        "layers.router.expert_bias": (3, 4), key: (3, 4, 12, 5)
    }  # fmt: skip
    offsets = [(layer, e, row, 0) for layer in range(3) for e in (2, 3) for row in (3, 9)]
    assert [p.offset for p in stacked[key].pieces] == offsets
    apart = schema.model_state(Experts(own), own, Stacking(3, 4, layers_differ=True))
    assert {k: tuple(v.size()) for k, v in apart.items()} == {
        f"layers.{i}.{rest}": shape
        for i in range(3)
        for rest, shape in (
            ("router.expert_bias", (4,)),
            ("experts.experts.linear_fc1.weight", (4, 12, 5)),
        )
    }


def test_stacking_follows_what_is_stored():
    apart = ["decoder.layers.0.mlp.router.weight", "output_layer.weight"]
    scales = ["fp8_state.layers.decoder.layers.0.mlp.linear_fc1.scale_fwd"]
    assert Stacking(2, 4).as_in(apart) == Stacking(2, 4, layers_differ=True)
    together = ["decoder.layers.mlp.router.weight", *scales]
    assert Stacking(2, 4, layers_differ=True).as_in(together) == Stacking(2, 4)


def test_state_of_transformer_engine_that_megatron_core_looks_up():
    named = {
        "decoder.layers.self_attention.linear_qkv.weight": ((2, 6, 4), [(0, 0, 0), (0, 3, 0)]),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (
            (2, 4, 6, 4), [(1, 2, 0, 0), (1, 3, 0, 0)]
        ),
        "decoder.layers.5.mlp.shared_experts.linear_fc2.weight": ((6, 4), [(0, 0)]),
        "decoder.layers.5.mlp.experts.experts.linear_fc2.weight": ((4, 6, 4), [(1, 0, 0)]),
        "decoder.layers.5.mlp.router.weight": ((4, 4), [(0, 0)]),
    }  # fmt: skip
    state = {
        key: Sharded(shape, [Piece(torch.zeros((1,) * len(shape)), place) for place in places])
        for key, (shape, places) in named.items()
    }
    assert schema.extra_state_keys(state) == [
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2",
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_2",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.2_2.4",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4",
        "decoder.layers.5.mlp.shared_experts.linear_fc2._extra_state/shard_0_1",
        "decoder.layers.5.mlp.experts.experts.linear_fc2._extra_state/shard_1_4",
    ]


def test_only_the_vocabulary_may_be_padded():
    state = schema.model_state(Model(), SINGLE, TWO)
    assert {k for k, v in state.items() if v.padded_dim is not None} == {
        "embedding.word_embeddings.weight"
    }


def test_optimizer_state_has_the_shape_of_its_parameter():
    model = Model(2)
    state = [(n, {"exp_avg": torch.zeros_like(p)}) for n, p in model.named_parameters()]
    described = schema.optimizer_state(state, model, tp(0, 2), TWO)
    params = schema.model_state(model, tp(0, 2), TWO)
    assert set(described) == {f"optimizer.state.exp_avg.{k}" for k in params}
    for key, shard in params.items():
        other = described[f"optimizer.state.exp_avg.{key}"]
        assert (other.size(), other.padded_dim) == (shard.size(), shard.padded_dim)


def test_model_keys():
    assert schema.is_model_key("decoder.layers.mlp.linear_fc1.weight")
    assert not schema.is_model_key("optimizer.state.exp_avg.output_layer.weight")
    assert not schema.is_model_key("rng_state/shard_0_1")
    assert not schema.is_model_key("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2")


def test_compare_lists_every_difference():
    wanted = {
        "a": ((2,), None),
        "b": ((2,), None),
        "v": ((5, 2), 0),
    }
    found = schema.compare(wanted, {"b": (3,), "c": (1,), "v": (9, 2)})
    assert (found.missing, found.unexpected) == (("a",), ("c",))
    assert found.shapes == ("b is (3,) there and (2,) here",)
    assert "missing from the checkpoint: a; in the checkpoint but not in this model: c" in (
        found.describe()
    )
    assert not schema.compare(wanted, {"a": (2,), "b": (2,), "v": (7, 2)})
    assert schema.compare(wanted, {"a": (2,), "b": (2,), "v": (7, 3)}).shapes


@pytest.mark.parametrize(
    "key",
    ["optimizer.state.param.decoder.final_layernorm.weight", "fp8_state.x", "rng_state/shard_0_1",
     "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_d.bucket_idx_0.exp_avg",
     "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_d.bucket_idx_0.param"],
)  # fmt: skip
def test_what_belongs_to_no_model(key):
    assert not schema.is_model_key(key)
    assert schema.is_model_key("decoder.layers.mlp.linear_fc1.weight")
