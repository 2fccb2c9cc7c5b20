"""Sharded layers against the same layer on one rank: outputs, all gradients, initial weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from distpool import run_ranks
from torch import nn

from megatron.config import make_config
from megatron.core.build import Build
from megatron.core.distributed import DistributedDataParallel, finalize_gradients
from megatron.core.errors import DataError, MeshError
from megatron.core.fp8 import Fp8State
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.shards import gather_full, global_shape, mark_sharded, take_local
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import all_gather
from megatron.core.tensor_parallel.random import RngStreams

SEQ, BATCH, IN, OUT = 8, 2, 16, 24


def normal(tensor):
    return nn.init.normal_(tensor, std=0.5)


def make_build(mesh: ParallelState, dtype=torch.float32, sequence_parallel=False, **fields):
    config = make_config(
        world_size=mesh.world.size,
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=4,
        seq_length=SEQ,
        max_position_embeddings=SEQ,
        micro_batch_size=1,
        tensor_model_parallel_size=mesh.tp.size,
        sequence_parallel=sequence_parallel,
        bf16=dtype == torch.bfloat16,
        **fields,
    )
    return Build(
        config=config,
        mesh=mesh,
        backend=None,
        fp8=Fp8State.disabled(params_dtype=dtype),
        rng=RngStreams(1, mesh),
        device=torch.device("cpu"),
        path="layer",
    )


def fixed(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and how its input and output are laid out."""

    kind: str
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    bias: bool = True
    skip_bias_add: bool = False
    stride: int = 1
    whole: bool = False  # gather_output, or not input_is_parallel
    norm: str = "LayerNorm"
    one_p: bool = False

    def layer(self, mesh):
        fields = {"normalization": self.norm, "apply_layernorm_1p": self.one_p}
        build = make_build(mesh, self.dtype, self.sequence_parallel, **fields)
        common = {"build": build, "init_method": normal, "bias": self.bias}
        common["skip_bias_add"] = self.skip_bias_add
        if self.kind == "row":
            layer = RowParallelLinear(IN, OUT, input_is_parallel=not self.whole, **common)
        elif self.kind == "column":
            layer = ColumnParallelLinear(
                IN, OUT, gather_output=self.whole, partition_stride=self.stride, **common
            )
        else:
            layer = LayerNormColumnParallelLinear(IN, OUT, partition_stride=self.stride, **common)
        for seed, (name, param) in enumerate(sorted(layer.named_parameters())):
            if param.dim() == 1:  # nothing is tested with biases of zero
                full = fixed(*global_shape(param, mesh.tp.size), seed=100 + seed) * 0.5
                with torch.no_grad():
                    param.copy_(take_local(full, param, mesh.tp.rank, mesh.tp.size))
            assert name in ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
        return layer


def run(case: Case, mesh: ParallelState):
    """Output, input gradient and parameter gradients, all in global form."""
    tp = mesh.tp
    layer = case.layer(mesh)
    ddp = DistributedDataParallel(layer, mesh.dp_cp)
    column = case.kind != "row"
    shard_rows = case.sequence_parallel and tp.size > 1
    x = fixed(SEQ, BATCH, IN, seed=1).to(case.dtype)
    upstream = fixed(SEQ, BATCH, OUT, seed=2).to(case.dtype)
    columns = nn.Parameter(torch.empty(OUT // tp.size))
    mark_sharded(columns, 0, case.stride)

    def mine_of(full):  # output columns with the layer's layout, in the last dimension
        moved = full.movedim(-1, 0)
        local = nn.Parameter(torch.empty(OUT // tp.size, SEQ, BATCH, dtype=full.dtype))
        mark_sharded(local, 0, case.stride)
        return take_local(moved, local, tp.rank, tp.size).movedim(0, -1), local

    if column:
        local_x = x.chunk(tp.size)[tp.rank] if shard_rows else x
        upstream_here = upstream if case.whole else mine_of(upstream)[0]
    else:
        local_x = x if case.whole else x.chunk(tp.size, -1)[tp.rank]
        upstream_here = upstream.chunk(tp.size)[tp.rank] if shard_rows else upstream
    local_x = local_x.clone().requires_grad_()
    y, skipped = ddp(local_x)
    assert (skipped is not None) == (case.skip_bias_add and case.bias)
    out = y if skipped is None else y + skipped
    (out * upstream_here).sum().backward()
    finalize_gradients(ddp, mesh, 1)

    if column:
        full_y = (
            out
            if case.whole
            else gather_full(
                out.detach().movedim(-1, 0).contiguous(), mine_of(upstream)[1], tp
            ).movedim(0, -1)
        )
        full_dx = all_gather(local_x.grad, tp) if shard_rows else local_x.grad
    else:
        full_y = all_gather(out.detach(), tp) if shard_rows else out
        full_dx = local_x.grad if case.whole else all_gather(local_x.grad, tp, -1)
    results = {"y": full_y.detach(), "dx": full_dx}
    for name, param in layer.named_parameters():
        results[name] = gather_full(param.detach(), param, tp)
        results[f"d_{name}"] = gather_full(param.main_grad, param, tp)
    return results


def on_rank(rank, world, case):
    return run(case, ParallelState.build(MeshSizes(world, tp=world), rank, world))


CASES = [
    Case("column"),
    Case("column", sequence_parallel=True),
    Case("column", bias=False, stride=2),
    Case("column", sequence_parallel=True, stride=2),
    Case("column", skip_bias_add=True),
    Case("column", whole=True),
    Case("row"),
    Case("row", sequence_parallel=True),
    Case("row", sequence_parallel=True, skip_bias_add=True),
    Case("row", bias=False, whole=True),
    Case("norm"),
    Case("norm", sequence_parallel=True, stride=2),
    Case("norm", sequence_parallel=True, bias=False, norm="RMSNorm"),
    Case("norm", norm="RMSNorm", one_p=True),
    Case("norm", sequence_parallel=True, one_p=True),
]


def name_of(case: Case) -> str:
    marks = ("sequence_parallel", "skip_bias_add", "whole", "one_p")
    parts = [case.kind, *(m for m in marks if getattr(case, m))]
    parts += [case.norm] if case.kind == "norm" else []
    return "-".join([*parts, f"stride{case.stride}", "bias" if case.bias else "nobias"])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_layer_equals_one_rank(case, world):
    alone = run(case, ParallelState.single())
    for results in run_ranks(on_rank, world, case):
        assert results.keys() == alone.keys()
        for name, expected in alone.items():
            scale = expected.abs().max().clamp(min=1e-30)
            error = ((results[name] - expected).abs().max() / scale).item()
            exact = name in ("weight", "bias", "layer_norm_weight", "layer_norm_bias")
            # Sums over ranks are associated differently; nothing else differs.
            assert error == 0 if exact else error < 2e-6, (name, error)


@pytest.mark.parametrize(
    "case",
    [dataclasses.replace(CASES[i], dtype=torch.bfloat16) for i in (3, 7, 12)],
    ids=name_of,
)
def test_layer_in_bf16(case):
    """Against fp32 on one rank with the same bf16 weights and inputs."""
    alone = run(case, ParallelState.single())
    (results, _) = run_ranks(on_rank, 2, case)
    for name, expected in alone.items():
        scale = expected.float().abs().max().clamp(min=1e-30)
        error = ((results[name].float() - expected.float()).abs().max() / scale).item()
        # Each side rounds products, partial sums and results to 8 bits a few times.
        assert error < 2**-6, (name, error)
        assert results[name].dtype == expected.dtype


def replicas(rank, world, case):
    mesh = ParallelState.build(MeshSizes(world, tp=world), rank, world)
    layer = case.layer(mesh)
    return {
        name: (
            getattr(p, "tensor_model_parallel", False),
            getattr(p, "partition_dim", None),
            getattr(p, "partition_stride", None),
            getattr(p, "sequence_parallel", False),
            tuple(p.shape),
        )
        for name, p in layer.named_parameters()
    }


def test_attributes_say_how_parameters_are_laid_out():
    column = run_ranks(replicas, 2, Case("norm", sequence_parallel=True, stride=2))[0]
    assert column == {
        "layer_norm_weight": (False, None, None, True, (IN,)),
        "layer_norm_bias": (False, None, None, True, (IN,)),
        "weight": (True, 0, 2, False, (OUT // 2, IN)),
        "bias": (True, 0, 2, False, (OUT // 2,)),
    }
    row = run_ranks(replicas, 2, Case("row", sequence_parallel=True))[0]
    assert row == {
        "weight": (True, 1, 1, False, (OUT, IN // 2)),
        "bias": (False, None, None, True, (OUT,)),
    }
    assert not run_ranks(replicas, 2, Case("row"))[0]["bias"][3]


def embed(mesh, sequence_parallel, reduce_scatter, main_grad=True):
    tokens = torch.tensor([[0, 9, 4, 9, 1, 2, 9, 8], [3, 3, 7, 0, 5, 6, 1, 0]])
    build = make_build(mesh, sequence_parallel=sequence_parallel, vocab_size=10)
    padded = 12
    layer = VocabParallelEmbedding(
        padded, IN, build=build, init_method=normal, reduce_scatter_embeddings=reduce_scatter
    )
    ddp = DistributedDataParallel(layer, mesh.dp_cp) if main_grad else None
    y = layer(tokens)
    upstream = fixed(2, SEQ, IN, seed=5)
    if reduce_scatter:
        upstream = upstream.transpose(0, 1)
        if sequence_parallel:
            upstream = upstream.chunk(mesh.tp.size)[mesh.tp.rank]
    assert y.shape == upstream.shape
    (y * upstream).sum().backward()
    if ddp is not None:
        finalize_gradients(ddp, mesh, 1)
    grad = layer.weight.main_grad if main_grad else layer.weight.grad
    y = all_gather(y.detach(), mesh.tp) if sequence_parallel and reduce_scatter else y.detach()
    y = y.transpose(0, 1) if reduce_scatter else y
    full = [gather_full(t, layer.weight, mesh.tp) for t in (layer.weight.detach(), grad)]
    return tokens, y, *full


def embed_on_rank(rank, world, *args):
    return embed(ParallelState.build(MeshSizes(world, tp=world), rank, world), *args)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("sequence_parallel", "reduce_scatter", "main_grad"),
    [(False, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_embedding(world, sequence_parallel, reduce_scatter, main_grad):
    args = (sequence_parallel, reduce_scatter, main_grad)
    results = (
        [embed(ParallelState.single(), *args)]
        if world == 1
        else run_ranks(embed_on_rank, world, *args)
    )
    reference = nn.Embedding(12, IN)
    for tokens, y, weight, grad in results:
        assert weight[10:].count_nonzero() == 0
        with torch.no_grad():
            reference.weight.copy_(weight)
        reference.weight.grad = None
        expected = reference(tokens)
        (expected * fixed(2, SEQ, IN, seed=5)).sum().backward()
        assert torch.equal(y, expected)
        torch.testing.assert_close(grad, reference.weight.grad, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(r[2], results[0][2]) for r in results)


def test_embedding_gradient_does_not_lose_repeated_tokens_in_bf16():
    build = make_build(ParallelState.single(), torch.bfloat16, vocab_size=4)
    layer = VocabParallelEmbedding(4, IN, build=build, init_method=normal)
    DistributedDataParallel(layer, build.mesh.dp)
    layer(torch.zeros(1, 1000, dtype=torch.long)).sum().backward()
    assert torch.equal(layer.weight.main_grad[0], torch.full((IN,), 1000.0))


def test_tokens_out_of_range():
    build = make_build(ParallelState.single(), vocab_size=10)
    layer = VocabParallelEmbedding(12, IN, build=build, init_method=normal)
    with pytest.raises(DataError, match="tokens: got ids from 3 to 12"):
        layer(torch.tensor([[3, 12]]))


def uneven(rank, world):
    mesh = ParallelState.build(MeshSizes(world, tp=world), rank, world)
    build = make_build(mesh)
    messages = []
    for make in (
        lambda: ColumnParallelLinear(IN, 9, build=build, init_method=normal, bias=False),
        lambda: ColumnParallelLinear(
            IN, 10, build=build, init_method=normal, bias=False, partition_stride=2
        ),
        lambda: RowParallelLinear(9, IN, build=build, init_method=normal, bias=False),
        lambda: VocabParallelEmbedding(9, IN, build=build, init_method=normal),
    ):
        with pytest.raises(MeshError, match="layer ") as error:
            make()
        messages.append(str(error.value))
    return messages


def test_sizes_that_do_not_split_are_named():
    messages = run_ranks(uneven, 2)[0]
    assert messages[0].startswith("layer output features: got 9. They are split into 2")
    assert "split into 4" in messages[1]
    assert messages[2].startswith("layer input features: got 9.")
    assert messages[3].startswith("layer vocabulary: got 9.")
