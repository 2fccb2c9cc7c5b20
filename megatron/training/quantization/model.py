"""Quantizing a model layer by layer into a directory that other programs read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.errors import CheckpointError, DataError, complaint
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import hf_config, hf_files
from megatron.training.hf_rows import tensors_of
from megatron.training.hf_sources import HfSource, MegatronSource, Source
from megatron.training.quantization import packed
from megatron.training.quantization.gptq import (
    Gptq,
    InputProducts,
    output_error,
    weight_error,
)
from megatron.training.quantization.grid import Grid, Quantized
from megatron.training.quantization.streaming import (
    Batch,
    LayerStream,
    run,
    watch_inputs,
)

Say = Callable[[str], None]
# In the order in which a layer runs them: each sees what those before it make after quantization.
_STEPS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_SHOWN = 3


@dataclass(frozen=True)
class WeightReport:
    """What became of one weight.

    Attributes:
        name: The weight, by this project's name.
        elements: Number of its elements.
        rounding: ``gptq`` or ``nearest``.
        weight_error: Mean square of the error over that of the weight.
        output_error: The same for the layer's output on the calibration text; None without one.
        nearest_output_error: What rounding to nearest would have made of it.
        calibration_tokens: How many inputs were seen; None without calibration.
        dead_columns: Inputs that were always zero.
    """

    name: str
    elements: int
    rounding: str
    weight_error: float
    output_error: float | None = None
    nearest_output_error: float | None = None
    calibration_tokens: int | None = None
    dead_columns: int = 0


@dataclass(frozen=True)
class Written:
    """A quantized directory.

    Attributes:
        weights: What became of each weight of a linear layer.
        kept: Linear layers that were not quantized.
        bits_per_weight: Bytes of packed values and scales, in bits for each element.
    """

    weights: list[WeightReport]
    kept: list[str]
    bits_per_weight: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def check_model(source: HfSource | MegatronSource, grid: Grid) -> None:
    """Refuse what the files could not say.

    Raises:
        CheckpointError: The architecture stores its matrices in another way.
        DataError: The group size divides no width; lists the layers.
    """
    if source.model_type == "gpt2":
        raise CheckpointError(
            complaint(
                "--load",
                "model_type 'gpt2'",
                "It stores its matrices transposed (Conv1D), and the packed layout knows only "
                "linear layers",
                "Quantize a model of the Llama family or one of its relatives",
            )
        )
    size = grid.group_size
    wrong = {
        row.shape[1]: row.name
        for row in source.rows()
        if packed.is_quantized(row) and size is not None and row.shape[1] % size
    }
    if wrong:
        layers = ", ".join(f"{name} ({width} inputs)" for width, name in sorted(wrong.items()))
        raise DataError(
            complaint(
                "--group-size",
                size,
                f"Groups are cut from the inputs of a layer, and it does not divide those of "
                f"{layers}",
                "Give a divisor of all of them, or -1 for one scale a row",
            )
        )


def quantize_model(
    source: HfSource,
    save: Path,
    grid: Grid,
    *,
    device: torch.device,
    gptq: Gptq | None = None,
    windows: Sequence[Tensor] = (),
    say: Say = lambda line: None,
) -> Written:
    """Quantize every linear layer, one transformer layer in memory at a time.

    Args:
        source: The bf16 model.
        save: The directory to make; it appears under its name when it is complete.
        grid: Where weights may lie.
        device: Where layers are computed.
        gptq: How GPTQ is done; None to round to nearest.
        windows: Calibration text for it, ``[b, s]`` token ids each.
        say: Receives a line a layer.

    Raises:
        CheckpointError: The directory cannot be written.
        MegatronError: GPTQ failed; names the weight.
    """
    with hf_files.new_directory(save) as tmp:
        return _write(source, tmp, grid, LayerStream(source, device), gptq, windows, say)


def _write(
    source: HfSource,
    directory: Path,
    grid: Grid,
    stream: LayerStream,
    gptq: Gptq | None,
    windows: Sequence[Tensor],
    say: Say,
) -> Written:
    rows, layers = stream.rows, stream.num_layers
    shards = packed.ShardWriter(directory, layers + 1)
    outside = tensors_of(rows, None)
    first = [packed.plain_tensors(row, at, source.read(row, at)) for row, at in outside]
    shards.add({name: tensor for part in first for name, tensor in part.items()})
    batches = stream.embed(windows) if gptq is not None else []
    reports: list[WeightReport] = []
    packed_bytes = 0
    for number in range(layers):
        found: dict[str, tuple[Quantized, WeightReport]] = {}
        if gptq is not None:
            model = stream.layer(number)
            found = quantize_layer(model, batches, gptq)
            batches = [replace(b, hidden=run(model, b)) for b in batches]
        tensors: dict[str, Tensor] = {}
        for row, at in tensors_of(rows, number):
            if not packed.is_quantized(row):
                tensors |= packed.plain_tensors(row, at, source.read(row, at))
                continue
            name = at.of(row.name)
            result, report = found.get(name) or _nearest(source, name, row, at, grid)
            parts = packed.packed_tensors(row, at, result, grid.bits)
            packed_bytes += sum(t.nbytes for n, t in parts.items() if not n.endswith("_shape"))
            tensors |= parts
            reports.append(report)
        shards.add(tensors)
        say(_line(number, layers, reports))
    shards.finish()
    kept = packed.ignored_layers(rows, layers)
    act_order = gptq is not None and gptq.act_order
    config = hf_config.read_config(source.directory)
    config["quantization_config"] = packed.quantization_config(grid, act_order, kept)
    hf_files.write_json(directory / "config.json", config)
    for name, path in source.tokenizer.items():
        shutil.copyfile(path, directory / name)
    return Written(reports, kept, 8 * packed_bytes / sum(r.elements for r in reports))


def _nearest(
    source: Source, name: str, row: Any, at: Any, grid: Grid
) -> tuple[Quantized, WeightReport]:
    weight = source.read(row, at).float()
    result = grid.nearest(weight)
    error = weight_error(weight, result)
    return result, WeightReport(name, weight.numel(), "nearest", error)


def quantize_layer(
    model: GPTModel, batches: Sequence[Batch], gptq: Gptq
) -> dict[str, tuple[Quantized, WeightReport]]:
    """Quantize the linear layers of one transformer layer, in the order in which they run.

    Their weights in ``model`` become the quantized ones, so that what comes later, in this layer
    and behind it, makes up for the errors before it.

    Args:
        model: The layer, from ``LayerStream.layer``.
        batches: What enters it on the calibration text.
        gptq: How it is done.

    Returns:
        Name of the weight -> result and report. An expert that no token reached is rounded to
        nearest.
    """
    found: dict[str, tuple[Quantized, WeightReport]] = {}
    parameters = dict(model.named_parameters())
    for step in _STEPS:
        products: dict[str, InputProducts] = {}

        def see(name: str, inputs: Tensor, into: dict[str, InputProducts] = products) -> None:
            if name not in into:
                into[name] = InputProducts(inputs.shape[-1], inputs.device)
            into[name].add(inputs)

        handles = watch_inputs(model, step, see)
        try:
            for batch in batches:
                run(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        for name, seen in products.items():
            weight = parameters[name].detach()
            result, report = _one_weight(name, weight, seen, gptq)
            found[name] = (result, report)
            weight.copy_(result.dequantize())
    return found


def _one_weight(
    name: str, weight: Tensor, seen: InputProducts, gptq: Gptq
) -> tuple[Quantized, WeightReport]:
    nearest, products = gptq.grid.nearest(weight), seen.mean()
    result = gptq.quantize(weight, products, name) if seen.count else nearest
    report = WeightReport(
        name=name,
        elements=weight.numel(),
        rounding="gptq" if seen.count else "nearest",
        weight_error=weight_error(weight, result),
        output_error=output_error(weight, result, products) if seen.count else None,
        nearest_output_error=output_error(weight, nearest, products) if seen.count else None,
        calibration_tokens=seen.count,
        dead_columns=int((products.diagonal() == 0).sum()),
    )
    return result, report


def _line(number: int, layers: int, reports: Sequence[WeightReport]) -> str:
    """Sum up the layer whose weights came last."""
    own = [r for r in reports if f".layers.{number}." in r.name]
    text = f"layer {number + 1}/{layers}: {len(own)} weights"
    errors = [(r.output_error, r.nearest_output_error) for r in own if r.output_error is not None]
    if errors:
        ours = sum(e or 0.0 for e, _ in errors) / len(errors)
        theirs = sum(e or 0.0 for _, e in errors) / len(errors)
        text += f", error of the outputs {ours:.2%} (rounded to nearest {theirs:.2%})"
    else:
        text += f", error of the weights {sum(r.weight_error for r in own) / len(own):.2%}"
    unseen = [r.name for r in own if r.calibration_tokens == 0]
    if unseen:
        more = f" and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else ""
        text += f"; rounded to nearest, since no token reached them: {', '.join(unseen[:_SHOWN])}"
        text += more
    return text
