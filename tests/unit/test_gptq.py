"""GPTQ against a slow version of its definition, and the packed form of its results."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import MegatronError
from megatron.training.quantization.gptq import Gptq, InputProducts, output_error
from megatron.training.quantization.grid import Grid, Quantized, pack, unpack


def scale_of(columns):
    """The scale of each row of some columns: the largest value lies half a step beyond 7."""
    scales = (columns.abs().amax(dim=1) / 7.5).to(torch.bfloat16).double()
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def oracle(weight, products, group, damping, act_order):
    """Optimal brain quantization, a column at a time, with the inverse updated in full."""
    w = weight.double().clone()
    columns = w.shape[1]
    group = group or columns
    h = products.double().clone()
    mean = h.diagonal().mean()
    for i in range(columns):
        if h[i, i] == 0:
            h[i, i] = 1.0
        h[i, i] += damping * mean
    inverse = torch.linalg.inv(h)
    order = list(range(columns))
    if act_order:
        order.sort(key=lambda i: -float(products[i, i]))
    fixed = [scale_of(weight.double()[:, g : g + group]) for g in range(0, columns, group)]
    scales = list(fixed)
    values = torch.empty_like(w)
    left = set(order)
    for i in order:
        if group < columns and not act_order and i % group == 0:
            scales[i // group] = scale_of(w[:, i : i + group])
        scale = scales[i // group]
        values[:, i] = (w[:, i] / scale).round().clamp(-8, 7)
        error = (w[:, i] - values[:, i] * scale) / inverse[i, i]
        left.discard(i)
        for j in left:
            w[:, j] -= error * inverse[i, j]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return values.to(torch.int8), torch.stack(scales, dim=1)


def layer(outputs=12, inputs=48, tokens=300, dead=(), seed=0):
    """A weight, and products of inputs that depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64) @ mix
    x[:, list(dead)] = 0
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight, x.t() @ x / tokens


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [None, 16, 8])
@pytest.mark.parametrize("dead", [(), (3, 17, 40)])
def test_equals_the_definition(group, act_order, dead):
    weight, products = layer(dead=dead)
    got = Gptq(Grid(4, group), 0.01, act_order).quantize(weight, products, "w")
    values, scales = oracle(weight, products, group, 0.01, act_order)
    assert torch.equal(got.values, values)
    assert torch.equal(got.scales.double(), scales)


def test_blocks_of_columns_change_nothing():
    weight, products = layer(outputs=4, inputs=288, tokens=900)
    for group, act_order in ((32, False), (None, False), (96, True)):
        got = Gptq(Grid(4, group), 0.01, act_order).quantize(weight, products, "w")
        values, _ = oracle(weight, products, group, 0.01, act_order)
        assert torch.equal(got.values, values)


@pytest.mark.parametrize("act_order", [False, True])
def test_outputs_are_nearer_than_with_rounding(act_order):
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(400, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    x = (common + 0.1 * torch.randn(400, 64, generator=generator)).double()
    weight, products, grid = torch.randn(32, 64, generator=generator), x.t() @ x, Grid(4, 32)
    nearest = output_error(weight, grid.nearest(weight), products)
    result = Gptq(grid, act_order=act_order).quantize(weight, products, "w")
    assert output_error(weight, result, products) < 0.3 * nearest


def test_inputs_that_say_nothing_mean_rounding_to_nearest():
    weight, products = layer()
    grid = Grid(4, 16)
    for alike in (torch.zeros_like(products), torch.eye(48).double()):
        got, nearest = Gptq(grid).quantize(weight, alike, "w"), grid.nearest(weight.double())
        assert torch.equal(got.values, nearest.values)
        assert torch.equal(got.scales, nearest.scales)


def test_a_matrix_that_is_not_positive_definite_is_refused():
    weight, _ = layer(inputs=8)
    one = torch.ones(8, 8).double()  # all inputs alike
    with pytest.raises(MegatronError, match=r"--damping: got 0\.0.*of proj.*larger --damping"):
        Gptq(Grid(4), damping=0.0).quantize(weight, one, "proj")
    Gptq(Grid(4), damping=0.01).quantize(weight, one, "proj")
    one[2, 3] = float("nan")
    with pytest.raises(MegatronError, match=r"proj: got inputs that are not finite"):
        Gptq(Grid(4)).quantize(weight, one, "proj")


def test_products_are_the_mean_over_all_inputs():
    x = torch.randn(3, 5, 4)
    seen = InputProducts(4, torch.device("cpu"))
    seen.add(x[:1])
    seen.add(x[1:])
    rows = x.reshape(-1, 4).double()
    # fp32 sums of 15 products
    torch.testing.assert_close(seen.mean(), rows.t() @ rows / 15, rtol=1e-5, atol=1e-6)
    assert seen.count == 15


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 13, 1])
def test_packing_loses_nothing(bits, columns):
    low, high = Grid(bits).lowest, Grid(bits).highest
    values = torch.arange(low, high + 1).repeat(columns)[: columns * 7].view(7, columns)
    values = values.to(torch.int8)
    packed = pack(values, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (7, -(-columns * bits // 32))
    assert torch.equal(unpack(packed, bits, columns), values)


def test_packed_words_by_hand():
    values = torch.tensor([[-8, -7, 0, 7, -8, -8, -8, 7]], dtype=torch.int8)
    assert pack(values, 4).item() == 0xF000_F810 - (1 << 32)
    assert pack(torch.tensor([[-128, 0, 127, 1]], dtype=torch.int8), 8).item() == 0x81FF8000 - (
        1 << 32
    )


@pytest.mark.parametrize("grid", [Grid(8), Grid(4), Grid(4, 16)])
def test_compressed_tensors_reads_the_same(grid):
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight, _ = layer(outputs=8, inputs=32)
    result = grid.nearest(weight)
    group = grid.group_size
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(
            num_bits=grid.bits, symmetric=True, group_size=group,
            strategy="channel" if group is None else "group",
        ),
    )  # fmt: skip
    files = {
        "weight_packed": pack(result.values, grid.bits),
        "weight_scale": result.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    read = pack_quantized.PackedQuantizationCompressor.decompress(files, scheme)["weight"]
    assert torch.equal(read, result.dequantize())


def test_rounding_to_nearest():
    grid = Grid(4, 2)
    weight = torch.tensor([[7.5, -7.5, 0.0, 0.0], [0.3, -1.0, 1e-42, 0.0]])
    got = grid.nearest(weight)
    assert got.values[0].tolist() == [7, -8, 0, 0]
    assert got.scales[0].tolist() == [1.0, 1.0]
    error = (weight - got.dequantize().float()).abs()
    # half a step, and what rounding the scale and the product to bf16 adds
    assert bool((error <= 0.52 * got.scales.float().repeat_interleave(2, 1)).all())
    same = Quantized(got.values, got.scales).dequantize()
    assert same.dtype == torch.bfloat16
