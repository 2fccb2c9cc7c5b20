"""`Build` names children and types, and layers follow their precision's wish."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.config import make_config
from megatron.core.build import Build
from megatron.core.fp8 import DelayedScaling, Float8CurrentScaling, Fp8Policy, Fp8State
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.layers import LayerNormColumnParallelLinear
from megatron.core.tensor_parallel.random import RngStreams


def make(recipe=None, **fields):
    config = make_config(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=1,
        seq_length=4,
        vocab_size=8,
        micro_batch_size=1,
        mock_data=True,
        train_iters=1,
        normalization="RMSNorm",
        **(fields or {"bf16": True}),
    )
    return Build(
        config=config,
        mesh=ParallelState.single(),
        backend=None,
        fp8=Fp8State(Fp8Policy(recipe=recipe)),
        rng=RngStreams(1),
        device=torch.device("cpu"),
    )


def test_paths_grow_from_the_root():
    build = make()
    assert build.path == ""
    child = build.at("decoder").at("layers.0")
    assert child.path == "decoder.layers.0"
    assert build.path == ""
    assert child.mesh is build.mesh


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"bf16": False}, torch.float32),
    ],
)
def test_params_dtype(fields, dtype):
    assert make(**fields).params_dtype == dtype


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (None, torch.bfloat16),
        (DelayedScaling(), torch.float32),
        (Float8CurrentScaling(), torch.bfloat16),
    ],
)
def test_the_fused_norm_is_rounded_only_where_the_recipe_reads_it_rounded(recipe, dtype):
    layer = LayerNormColumnParallelLinear(
        16, 32, build=make(recipe).at("layer"), init_method=nn.init.normal_, bias=False
    )
    assert layer.normalize(torch.randn(2, 1, 16).bfloat16()).dtype == dtype
    y, _ = layer(torch.randn(2, 1, 16).bfloat16())
    assert y.dtype == torch.bfloat16
    assert layer.path == layer.precision.path == "layer"
    assert layer.fp8_meta["recipe"] == recipe
