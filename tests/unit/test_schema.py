from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing import schema
from megatron.core.mesh import Axis
from megatron.core.shards import mark_sharded

SINGLE = Axis.single("tp")


def tp(rank, size):
    return Axis("tp", size, rank, tuple(range(size)))


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
    assert schema.address(name) == schema.Address(key, layer)


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
    one = schema.model_state(Model(), SINGLE, 2)
    two = schema.model_state(Model(2), tp(1, 2), 2)
    assert {k: tuple(v.size()) for k, v in one.items()} == {
        "embedding.word_embeddings.weight": (8, 4),
        "layers.fc1.weight": (2, 12, 4),
        "layers.fc1.bias": (2, 12),
        "layers.fc2.weight": (2, 4, 6),
        "layers.fc2.bias": (2, 4),
    }
    assert {k: v.size() for k, v in one.items()} == {k: v.size() for k, v in two.items()}


def test_gated_weights_are_two_blocks_a_layer():
    shard = schema.model_state(Model(2), tp(1, 2), 2)["layers.fc1.weight"]
    assert [p.offset for p in shard.pieces] == [(0, 3, 0), (0, 9, 0), (1, 3, 0), (1, 9, 0)]


def test_only_the_vocabulary_may_be_padded():
    state = schema.model_state(Model(), SINGLE, 2)
    assert {k for k, v in state.items() if v.padded_dim is not None} == {
        "embedding.word_embeddings.weight"
    }


def test_optimizer_state_has_the_shape_of_its_parameter():
    model = Model(2)
    state = [(n, {"exp_avg": torch.zeros_like(p)}) for n, p in model.named_parameters()]
    described = schema.optimizer_state(state, model, tp(0, 2), 2)
    params = schema.model_state(model, tp(0, 2), 2)
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
