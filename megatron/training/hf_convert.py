"""Conversion between HuggingFace directories and checkpoints, one tensor at a time.

A source yields the tensors of a model in this project's layout without vocabulary padding; a sink
writes them. Either end may be of either format. Nothing needs a process group or a GPU, and no
step holds more than a shard of the model in memory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import RunConfig, make_config
from megatron.config.schema import SPECS
from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, plain, schema
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import Axis
from megatron.training import hf_files, hf_fp8, hf_kept, hf_map, hf_tokenizer
from megatron.training.checkpoint_config import TOKENIZER_DIRECTORY, stacking_of
from megatron.training.hf_config import hf_from_fields
from megatron.training.hf_rows import Place, Row, every_tensor
from megatron.training.hf_sources import (
    SPECIAL_TOKENS,
    HfSource,
    MegatronSource,
    Say,
    Source,
    check_vocabulary,
)
from megatron.training.safetensors_file import Planned, in_type

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = "fp8"  # only as an export: codes and scales
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Check = Callable[[Path], None]


# ------------------------------------------------------------------------------------------- out


def write_huggingface(
    source: Source,
    save: Path,
    dtype: str,
    check: Check | None = None,
    fp8: hf_fp8.Exporter | None = None,
) -> Path:
    """Write a directory in HuggingFace format.

    It appears under its final name only when it is complete.

    Args:
        source: The model.
        save: The directory to make; it must not hold anything yet.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        check: Called with the finished directory before it gets its name; raises to prevent that.
        fp8: Quantizes the linear layers, if they are to be; ``dtype`` is that of the rest.

    Raises:
        CheckpointError: The directory is in use or not writable.
    """
    config = hf_from_fields(source.fields, _DTYPE_NAMES[dtype])
    tokenizer = hf_tokenizer.of_run(source)
    special_tokens = hf_tokenizer.special_tokens(tokenizer) | source.special_tokens
    config.update({n: special_tokens.get(n) for n in SPECIAL_TOKENS})
    config = hf_kept.restore(config, source.kept)
    with hf_files.new_directory(save) as tmp:
        planned = list(planned_tensors(source, config["model_type"], fp8))
        hf_files.write_weights(tmp, planned, DTYPES[dtype])
        if fp8 is not None:
            config["quantization_config"] = fp8.config()
        for name, path in source.tokenizer.items():
            (tmp / name).write_bytes(path.read_bytes())
        if tokenizer is not None:
            hf_tokenizer.describe(tmp, tokenizer)
        hf_files.write_json(tmp / "config.json", config)
        if not (tmp / "generation_config.json").exists():
            special = {n: config[n] for n in SPECIAL_TOKENS if config.get(n) is not None}
            hf_files.write_json(
                tmp / "generation_config.json", {"_from_model_config": True, **special}
            )
        if check is not None:
            check(tmp)
    return save


def planned_tensors(
    source: Source, model_type: str, fp8: hf_fp8.Exporter | None = None
) -> Iterator[Planned]:
    """List the HuggingFace tensors of a model; each is made when it is asked for.

    Args:
        source: The model.
        model_type: Its family.
        fp8: Quantizes its linear layers, if they are to be.
    """
    last: dict[tuple[str, Place], Sequence[Tensor]] = {}

    def parts(row: Row, at: Place) -> Sequence[Tensor]:
        if (row.name, at) not in last:
            last.clear()  # the parts of a fused weight follow one another: read it once
            last[row.name, at] = row.split(source.read(row, at))
        return last[row.name, at]

    rows = hf_map.rows_for(source.fields, model_type)
    for row, at in every_tensor(rows, source.fields["num_layers"]):
        made = partial(parts, row, at)
        covered = [
            fp8 is not None and fp8.covers(at.of(name), shape)
            for name, shape in zip(row.names, row.shapes, strict=True)
        ]
        if fp8 is not None and all(covered):
            yield from fp8.planned(row, at, made)
            continue
        for number, (name, shape) in enumerate(zip(row.names, row.shapes, strict=True)):
            yield Planned(at.of(name), shape, partial(_part, made, number), row.dtype)


def _part(made: Callable[[], Sequence[Tensor]], number: int) -> Tensor:
    return made()[number]


def write_megatron(source: Source, save: Path, dtype: str, check: Check | None = None) -> Path:
    """Write the weights as a ``release`` checkpoint: no optimizer, no iteration.

    A run that loads it starts at iteration 0 with these weights, at any layout.

    Args:
        source: The model.
        save: The save directory.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        check: Called with the finished directory before it gets its name; raises to prevent that.

    Raises:
        CheckpointError: It cannot be written, or holds checkpoints already.
        ConfigError: The model's settings contradict each other.
    """
    there = [str(i) for i, _ in place.committed(save)]
    if place.is_committed(save / place.RELEASE):
        there.append(place.RELEASE)
    if there:
        raise CheckpointError(
            complaint(
                "--save-dir",
                save,
                f"It holds checkpoints already ({', '.join(there)}), and a run that loads from it "
                "would no longer continue them",
                "Name a new directory",
            )
        )
    cfg = config_of(source.fields, dtype)
    if "tokenizer.json" in source.tokenizer:
        cfg = cfg.replace(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=TOKENIZER_DIRECTORY
        )
    stacking = stacking_of(cfg)
    made = _Made()
    pieces: dict[str, list[Piece]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for row, at in every_tensor(source.rows(), source.fields["num_layers"]):
        key, index, extents = row.stored(at, stacking)
        shapes[key] = (*extents, *row.shape)
        pieces.setdefault(key, []).append(_lazy(source, row, at, index, DTYPES[dtype], made))
    tensors = {key: Sharded(shapes[key], blocks) for key, blocks in pieces.items()}
    common = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "args": argparse.Namespace(**cfg.to_dict()),
        "given": cfg.given_dict(),
        "special_tokens": source.special_tokens,
    }
    assets: dict[str, Path | bytes] = {
        f"{TOKENIZER_DIRECTORY}/{n}": p for n, p in source.tokenizer.items()
    }
    if source.kept:
        text = json.dumps(hf_kept.without_quantization(source.kept), indent=2)
        assets[f"{TOKENIZER_DIRECTORY}/{hf_files.KEPT_CONFIG}"] = text.encode()
    scales = source.scales()
    if scales:
        assets[f"{hf_fp8.FOLDER}/{hf_fp8.FILE}"] = hf_fp8.dump(scales)
    assets[schema.COMMON_FILE] = plain.dump(common)
    blobs = dict.fromkeys(schema.extra_state_keys(tensors), plain.dump_nothing())
    saved = io.save(
        save,
        place.RELEASE,
        tensors,
        {schema.COMMON_KEY: plain.dump(common), **blobs},
        Peers(Axis.single("world")),
        assets,
        check,
    )
    return saved.directory


class _Made:
    """Frees a tensor when the next one is made.

    The checkpoint library keeps every tensor that it has written until the file is complete: the
    whole model, where layers are not stacked.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def keep(self, tensor: Tensor) -> Tensor:
        if self._last is not None and self._last.untyped_storage().resizable():
            self._last.untyped_storage().resize_(0)
        self._last = tensor
        return tensor


def _lazy(
    source: Source,
    row: Row,
    at: Place,
    index: tuple[int, ...],
    dtype: torch.dtype,
    made: _Made,
) -> Piece:
    shape = (*(1,) * len(index), *row.shape)
    offset = (*index, *(0,) * len(row.shape))
    own = row.dtype or dtype

    def make() -> Tensor:
        read = in_type(source.read(row, at), own, at.of(row.name))
        return made.keep(read.reshape(shape).contiguous())

    return Piece(torch.empty(shape, dtype=own, device="meta"), offset, make)


def config_of(fields: Mapping[str, Any], dtype: str) -> RunConfig:
    """Return a configuration that builds a model with these settings, on one process.

    Raises:
        ConfigError: The settings contradict each other.
    """
    known = {n: v for n, v in fields.items() if n in SPECS and v is not None}
    if not known.get("group_query_attention"):
        known.pop("num_query_groups", None)
    precision = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {}}[dtype]
    return make_config(
        **known, **precision, seq_length=known["max_position_embeddings"],
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One conversion, as asked for on the command line."""

    loader: str
    saver: str
    load: Path
    save: Path
    dtype: str | None = None
    vocab_size: int | None = None
    fp8_weights: str | None = None
    fp8_activations: str | None = None


def open_source(request: Request, say: Say = print) -> HfSource | MegatronSource:
    """Open the model to convert; everything about it that cannot be converted is refused here."""
    if not request.load.is_dir():
        raise CheckpointError(
            complaint("--load-dir", request.load, "There is no such directory", "Check the path")
        )
    if request.loader == "huggingface":
        source = HfSource(request.load)
        check_vocabulary(request.vocab_size, source.fields["vocab_size"])
        for note in source.notes():
            say(note)
        return source
    return MegatronSource.find(request.load, request.vocab_size, say)


def target_dtype(request: Request, source: HfSource | MegatronSource) -> str:
    """Return the short name of the type to write: what was asked for, else the source's.

    In an FP8 export it is the type of what stays out of FP8, fp16 or bf16.
    """
    short = {v: k for k, v in DTYPES.items()}
    if request.dtype == FP8:
        return "fp16" if source.dtype == torch.float16 else "bf16"
    return request.dtype or short.get(source.dtype, "fp32")


def exporter(request: Request, source: HfSource | MegatronSource) -> hf_fp8.Exporter | None:
    """Return what quantizes an FP8 export, None if that was not asked for.

    Raises:
        CheckpointError: FP8 was asked for where there is none.
    """
    asked = {"--fp8-weights": request.fp8_weights, "--fp8-activations": request.fp8_activations}
    if request.dtype != FP8:
        for flag, value in asked.items():
            if value is not None:
                why = "It is about the export with --target-dtype fp8"
                raise CheckpointError(complaint(flag, value, why, "Add that, or remove it"))
        return None
    if request.saver != "huggingface" or source.model_type == "gpt2":
        why = "Checkpoints of this project hold weights in bf16, fp16 or fp32"
        if request.saver == "huggingface":
            why = "GPT-2's matrices are no linear layers to the libraries that read this layout"
        raise CheckpointError(complaint("--target-dtype", FP8, why, "Use bf16"))
    return hf_fp8.exporter(
        source.scales(),
        request.fp8_weights,
        request.fp8_activations,
        source.reader if isinstance(source, MegatronSource) else None,
    )


def convert(
    request: Request, source: HfSource | MegatronSource, check: Check | None = None
) -> Path:
    """Convert.

    Args:
        request: What was asked for.
        source: What ``open_source`` returned for it.
        check: Called with the finished files before they get their name; raises to prevent that.

    Returns:
        Where the result lies.
    """
    dtype, fp8 = target_dtype(request, source), exporter(request, source)
    if request.saver == "huggingface":
        return write_huggingface(source, request.save, dtype, check=check, fp8=fp8)
    return write_megatron(source, request.save, dtype, check)


def count_elements(source: Source) -> int:
    """Return the number of parameters, without vocabulary padding."""
    layers = source.fields["num_layers"]
    return sum(math.prod(row.shape) for row, _ in every_tensor(source.rows(), layers))
