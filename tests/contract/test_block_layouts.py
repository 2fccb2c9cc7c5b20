"""Block scales under tensor and sequence parallelism: what does not depend on the layout, bitwise.

One operand holds rare values that push their block's other values onto a coarse grid, so a result
tells in which block every element was. All numbers are whole and all sums exact in fp32: results
of two layouts are equal, or an element was in another block.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from tests.contract.sharded import run_whole
from tests.distpool import run_ranks
from tests.small_models import small_config

BLOCK = {"blockwise": 128, "mxfp8": 32}
OPERANDS = ("x", "weight", "d_y")


def whole_numbers(shape, seed, rate):
    """-1, 0 and 1; or up to 15 with a share of `rate` of 2**20."""
    generator = torch.Generator().manual_seed(seed)
    if not rate:
        return torch.randint(-1, 2, shape, generator=generator).float()
    x = torch.randint(-15, 16, shape, generator=generator).float()
    x = torch.where(torch.rand(shape, generator=generator) < rate, 2.0**20, x)
    x.view(-1)[0] = 2.0**20
    return x


def tensors(recipe, sizes, wide):
    """Input, weight and output gradient; about every second block of `wide` has large values."""
    tokens, inner, out = sizes
    shapes = {"x": (tokens, 1, inner), "weight": (out, inner), "d_y": (tokens, 1, out)}
    square = wide == "weight" and recipe == "blockwise"
    rate = 0.7 / BLOCK[recipe] ** (2 if square else 1)
    return [whole_numbers(shapes[n], i, rate if n == wide else 0) for i, n in enumerate(OPERANDS)]


def run_layer(rank, world_size, recipe, kind, sizes, wide, sequence_parallel):
    """One forward and backward; output, input gradient and weight gradient of the whole layer."""
    config = small_config(
        world_size=world_size, tensor_model_parallel_size=world_size, fp8_format="e4m3",
        fp8_recipe=recipe, fp8_emulation="exact", sequence_parallel=sequence_parallel,
    )  # fmt: skip
    mesh = ParallelState.build(config, rank, world_size)
    build = Build.root(config, mesh, NativeBackend(), torch.device("cpu"), "layer")
    layer = getattr(build.backend, f"{kind}_parallel_linear")(
        sizes[1], sizes[2], build=build, init_method=nn.init.zeros_, bias=False
    )
    return run_whole(
        layer, mesh.tp, tensors(recipe, sizes, wide), by_row=kind == "row",
        sequence_parallel=sequence_parallel,
    )  # fmt: skip


@functools.cache
def alone(recipe, kind, sizes, wide):
    return run_layer(0, 1, recipe, kind, sizes, wide, False)


def sizes_in_blocks(recipe, tokens):
    """A layer whose shards at TP 2 are whole blocks; with `tokens`, or whole blocks of them."""
    side = 2 * BLOCK[recipe]
    return (tokens or side, side, side)


@pytest.mark.parametrize("recipe", BLOCK)
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("tokens", [None, 36], ids=["tokens in blocks", "odd tokens"])
def test_shards_of_whole_blocks_compute_what_one_process_computes(recipe, kind, tokens):
    """Tokens need not fit: they are gathered before they are cut into blocks."""
    sizes = sizes_in_blocks(recipe, tokens)
    for sequence_parallel in (False, True):
        for wide in OPERANDS:
            want = alone(recipe, kind, sizes, wide)
            for got in run_ranks(run_layer, 2, recipe, kind, sizes, wide, sequence_parallel):
                for name, ours, theirs in zip(("y", "d_x", "d_w"), got, want, strict=True):
                    assert torch.equal(ours, theirs), (wide, name, sequence_parallel)


@pytest.mark.parametrize("recipe", BLOCK)
def test_a_shard_that_cuts_a_block_has_scales_of_its_own(recipe):
    """So the docs say; and so the test above can tell."""
    side = BLOCK[recipe]
    sizes = (side, side, side)
    for kind, wide, moved in (("row", "x", 0), ("row", "weight", 0), ("column", "d_y", 1)):
        want = alone(recipe, kind, sizes, wide)
        got = run_ranks(run_layer, 2, recipe, kind, sizes, wide, False)[0]
        assert not torch.equal(got[moved], want[moved]), (kind, wide)
