"""FP8 in HuggingFace directories: exact dequantization, export, and its way back."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import CheckpointError
from megatron.core.fp8.formats import Format
from megatron.core.fp8.quantizers import CurrentQuantizer
from megatron.core.fp8.recipe import Float8CurrentScaling, Role
from megatron.training import hf_fp8, hf_map, hf_quantization
from megatron.training.hf_config import fields_from_hf
from megatron.training.hf_quantization import Fp8Style
from megatron.training.hf_rows import Place
from tests.unit.test_hf_map import LLAMA

CODES = torch.float8_e4m3fn


class Stored(dict):
    """Tensors by name, as a directory has them."""

    directory = "somewhere"

    def get(self, name, rows=None):
        return self[name] if rows is None else self[name][rows]

    def shape(self, name):
        return tuple(self[name].shape)

    def dtype(self, name):
        return self[name].dtype


def codes(*shape):
    return (torch.randn(shape) * 100).clamp(-448, 448).to(CODES)


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
def test_codes_times_scale(shape):
    q, s = codes(6, 5), torch.rand(shape) + 0.5
    weights = hf_fp8.Dequantized(Stored({"x.weight": q, "x.weight_scale": s}))
    expected = torch.empty(6, 5)
    for i in range(6):
        for j in range(5):
            scale = s.reshape(-1)[i] if s.numel() > 1 else s.reshape(())
            expected[i, j] = q[i, j].float() * scale
    assert torch.equal(weights.get("x.weight"), expected)
    assert torch.equal(weights.get("x.weight", slice(2, 4)), expected[2:4])
    assert list(weights) == ["x.weight"]
    assert weights.dtype("x.weight") is torch.float32


def test_blocks_reach_over_the_edge():
    q, s = codes(6, 5), torch.rand(2, 3) + 0.5
    stored = Stored({"x.weight": q, "x.weight_scale_inv": s})
    weights = hf_fp8.Dequantized(stored, block=(4, 2))
    expected = torch.stack(
        [torch.stack([q[i, j].float() * s[i // 4, j // 2] for j in range(5)]) for i in range(6)]
    )
    assert torch.equal(weights.get("x.weight"), expected)
    assert hf_fp8.to_keep(weights) == {}
    with pytest.raises(CheckpointError, match=r"weight_scale_inv has shape \(2, 3\)"):
        hf_fp8.Dequantized(stored)


def test_codes_without_a_scale_are_refused():
    with pytest.raises(CheckpointError, match="x.weight is in FP8 and has no scale"):
        hf_fp8.Dequantized(Stored({"x.weight": codes(2, 2), "y.weight_scale": torch.ones(1)}))


def row_of(name):
    rows = hf_map.rows_for(fields_from_hf(LLAMA), "llama")
    return next(r for r in rows if r.key == f"decoder.layers.{name}.weight")


def export(row, parts, **style):
    planned = hf_fp8.Exporter(Fp8Style(**style)).planned(row, Place(0), lambda: parts)
    return {p.name: p.make() for p in planned}


def test_a_scale_for_all_that_is_one_matrix_here():
    """The codes are those that training with current scaling multiplies with."""
    row = row_of("self_attention.linear_qkv")
    parts = [torch.randn(s).bfloat16() * (i + 1) for i, s in enumerate(row.shapes)]
    made = export(row, parts, weights="tensor")
    quantizer = CurrentQuantizer(Float8CurrentScaling(fp8_format=Format.E4M3), Role.WEIGHT)
    whole = quantizer.rowwise(row.join(parts)).to_fp8()
    fused = row.join([made[f"model.layers.0.self_attn.{x}_proj.weight"].float() for x in "qkv"])
    assert torch.equal(fused, whole.data.float())
    for x in "qkv":
        scale = made[f"model.layers.0.self_attn.{x}_proj.weight_scale"]
        assert torch.equal(scale, whole.scale_inv.reshape(1))


def test_a_scale_for_every_output():
    row = row_of("mlp.linear_fc2")
    weight = torch.randn(row.shapes[0])
    weight[3] = 0
    made = export(row, [weight], weights="channel")
    scale = made["model.layers.0.mlp.down_proj.weight_scale"]
    q = made["model.layers.0.mlp.down_proj.weight"]
    assert scale.shape == (weight.shape[0], 1)
    assert q.float().abs().amax(1).tolist() == [0.0 if i == 3 else 448.0 for i in range(len(q))]
    # Half a step of three bits of fraction.
    assert ((q.float() * scale - weight).abs() <= weight.abs() / 16 + scale * 2**-10).all()


@pytest.mark.parametrize("weights", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_were_kept_give_the_same_codes(weights, dtype):
    """Whatever the type that the dequantized weights were stored in."""
    row = row_of("mlp.linear_fc1")
    every = torch.arange(256, dtype=torch.uint8).view(CODES).float().nan_to_num(448.0)
    stored = Stored()
    for name, shape in zip(row.names, row.shapes, strict=True):
        index = torch.randint(256, shape)
        module = Place(0).of(name).removesuffix("weight")
        stored[f"{module}weight"] = every[index].to(CODES)
        scale = torch.rand((shape[0], 1) if weights == "channel" else (1,)) * 1e-2
        stored[f"{module}weight_scale"] = scale
    read = hf_fp8.Dequantized(stored)
    kept = hf_fp8.to_keep(read)
    exporter = hf_fp8.exporter(kept, None, None, None)
    assert exporter.style == Fp8Style(weights)
    parts = [read.get(Place(0).of(n)).to(dtype) for n in row.names]
    for planned in exporter.planned(row, Place(0), lambda: parts):
        made, was = planned.make(), stored[planned.name]
        assert made.dtype == was.dtype
        assert torch.equal(made.float(), was.float()), planned.name


def test_weights_that_are_not_finite_are_refused():
    row = row_of("mlp.linear_fc2")
    weight = torch.randn(row.shapes[0])
    weight[0, 0] = torch.inf
    with pytest.raises(CheckpointError, match="down_proj.weight has values that are not finite"):
        export(row, [weight])


def test_static_activations_need_scales():
    with pytest.raises(CheckpointError, match="--fp8-activations: got static"):
        hf_fp8.exporter({}, None, "static", None)


def test_what_is_linear_and_stays_is_listed():
    exporter = hf_fp8.Exporter(Fp8Style())
    layer = "model.layers.0.mlp"
    for name, shape, covered in (
        ("model.embed_tokens.weight", (9, 4), False),
        (f"{layer}.gate.weight", (4, 8), False),
        (f"{layer}.shared_expert_gate.weight", (1, 8), False),
        (f"{layer}.experts.1.gate_proj.weight", (4, 8), True),
        (f"{layer}.experts.1.w2.weight", (4, 8), True),
        ("model.norm.weight", (8,), False),
        ("lm_head.weight", (9, 4), False),
    ):
        assert exporter.covers(name, shape) == covered, name
    assert exporter.config()["ignore"] == [
        "lm_head",
        f"{layer}.gate",
        f"{layer}.shared_expert_gate",
    ]


STYLES = [(w, a) for w in hf_quantization.STRATEGIES for a in hf_quantization.ACTIVATIONS]


@pytest.mark.parametrize(("weights", "activations"), STYLES)
def test_what_is_written_is_read(weights, activations):
    config = hf_quantization.describe(Fp8Style(weights, activations), ["lm_head"])
    assert hf_quantization.unreadable(config) == []
    assert fields_from_hf({**LLAMA, "quantization_config": config}) == fields_from_hf(LLAMA)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'"),
        ({"format": "pack-quantized"}, "quantization_config.format is 'pack-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
            r"weights.num_bits is 4.*weights.type is 'int'.*weights.strategy is None",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(change, name):
    config = {**hf_quantization.describe(Fp8Style(), []), **change}
    with pytest.raises(CheckpointError, match=name):
        fields_from_hf({**LLAMA, "quantization_config": config})


def test_sizes_of_blocks():
    assert hf_quantization.block_of({}) is None
    deepseek = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    assert hf_quantization.block_of({"quantization_config": deepseek}) == (128, 64)
