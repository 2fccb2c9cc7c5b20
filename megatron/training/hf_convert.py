"""Conversion between HuggingFace directories and checkpoints, one tensor at a time.

A source yields the tensors of a model in this project's layout without vocabulary padding; a sink
writes them. Either end may be of either format. Nothing needs a process group or a GPU, and no
step holds more than a shard of the model in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.config import RunConfig, make_config
from megatron.config.schema import SPECS
from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, plain, schema
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import Axis
from megatron.training import hf_files, hf_kept, hf_map, hf_moe
from megatron.training.checkpoint_config import (
    ARCHITECTURE,
    TOKENIZER_DIRECTORY,
    read_common,
    saved_settings,
    stacking_of,
)
from megatron.training.hf_config import fields_from_hf, hf_from_fields, read_config
from megatron.training.hf_rows import OUTSIDE, Place, Row, every_tensor
from megatron.training.safetensors_file import Planned

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_IGNORED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
Say = Callable[[str], None]
Check = Callable[[Path], None]


class Source(Protocol):
    """A model whose tensors can be read one at a time."""

    fields: dict[str, Any]
    tokenizer: dict[str, Path]
    special_tokens: dict[str, Any]
    kept: dict[str, Any]
    dtype: torch.dtype

    def rows(self) -> list[Row]:
        """The table that says which tensors there are."""

    def read(self, row: Row, at: Place) -> Tensor:
        """One tensor in this project's layout, without vocabulary padding."""


# ---------------------------------------------------------------------------- HuggingFace in


class HfSource:
    """A directory in HuggingFace format.

    Raises:
        CheckpointError: The architecture, an option or the set of tensors does not fit; all
            reasons are listed.
    """

    def __init__(self, directory: Path) -> None:
        """Read the configuration and check names and shapes of all tensors."""
        self.directory = directory
        config = read_config(directory)
        self.fields = fields_from_hf(config, directory)
        self.kept = config
        self.model_type: str = config["model_type"]
        self.weights = hf_files.HfWeights(directory)
        self.tokenizer = hf_files.tokenizer_files(directory)
        self.special_tokens = {n: config[n] for n in _SPECIAL_TOKENS if n in config}
        self._prefix = ""
        if self.model_type == "gpt2" and "wte.weight" in self.weights:
            self._prefix = "transformer."  # files of the bare model leave it out
        self._check()
        self.dtype = self.weights.get(self._name(self.rows()[0].names[0], OUTSIDE)).dtype

    def rows(self) -> list[Row]:
        """The table for this architecture."""
        return hf_map.rows_for(self.fields, self.model_type)

    def read(self, row: Row, at: Place) -> Tensor:
        """Join the HuggingFace tensors of a row."""
        return row.join([self.weights.get(self._name(n, at)) for n in row.names])

    def _name(self, template: str, at: Place) -> str:
        return at.of(template).removeprefix(self._prefix)

    def _check(self) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for row, at in every_tensor(self.rows(), self.fields["num_layers"]):
            for template, shape in zip(row.names, row.shapes, strict=True):
                expected[self._name(template, at)] = shape
        stored = {n for n in self.weights if not n.endswith(_IGNORED)}
        if self.model_type in hf_moe.PREDICTING:
            stored -= {n for n in stored if n.startswith(self._beyond())}
        problems = [f"missing tensors: {_some(sorted(set(expected) - stored))}"]
        if not set(expected) - stored:
            problems.clear()
        unexpected = sorted(stored - set(expected))
        if "lm_head.weight" in unexpected:
            unexpected.remove("lm_head.weight")
            problems += self._check_tied()
        if unexpected:
            problems.append(f"tensors without a place in the model: {_some(unexpected)}")
        for name in sorted(set(expected) & stored):
            got = self.weights.shape(name)
            if got != expected[name]:
                problems.append(f"{name} has shape {got}, config.json implies {expected[name]}")
        if problems:
            raise CheckpointError(
                complaint(
                    "--load-dir",
                    self.directory,
                    "; ".join(problems[:8]),
                    "config.json and the weight files must describe the same model",
                )
            )

    def _beyond(self) -> str:
        """Names of layers behind the last one: they predict further tokens and are left out."""
        return f"model.layers.{self.fields['num_layers']}."

    def notes(self) -> list[str]:
        """Say what of the source is left out."""
        if self.model_type in hf_moe.PREDICTING and any(
            n.startswith(self._beyond()) for n in self.weights
        ):
            return ["NOTE: layers that predict further tokens (MTP) are left out"]
        return []

    def _check_tied(self) -> list[str]:
        """config.json says tied, yet there is an output layer: fine if it is a copy."""
        words = self.weights.get(self._name(self.rows()[0].names[0], OUTSIDE))
        if torch.equal(self.weights.get("lm_head.weight"), words):
            return []
        return [
            "tie_word_embeddings is true, but lm_head.weight differs from the word embeddings "
            "(set it to false to convert an untied model)"
        ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


# ------------------------------------------------------------------------------- Megatron in


class MegatronSource:
    """A checkpoint of this project or of Megatron-Core (``torch_dist``)."""

    def __init__(self, reader: Reader, vocab_size: int | None = None) -> None:
        """Check keys and shapes of all tensors.

        Args:
            reader: The opened checkpoint.
            vocab_size: Vocabulary without padding; default from the checkpoint.

        Raises:
            CheckpointError: Its architecture has no HuggingFace counterpart, or its tensors do not
                fit its configuration.
        """
        self.reader, self.directory = reader, reader.directory
        common = read_common(reader)
        settings = saved_settings(common)
        self.fields = {n: settings[n] for n in ARCHITECTURE if n in settings}
        if not self.fields.get("num_experts"):
            self.fields = {n: v for n, v in self.fields.items() if not n.startswith("moe_")}
        elif "sinkhorn" in (settings.get(hf_moe.BALANCING) or ()):
            self.fields[hf_moe.BALANCING] = ["sinkhorn"]  # says how scores become weights
        if vocab_size is not None:
            self.fields["vocab_size"] = vocab_size
        self._zero_centered = bool(self.fields.get("apply_layernorm_1p"))
        self.fields["apply_layernorm_1p"] = False
        # Settings that no such architecture has are refused before anything is written.
        self.model_type: str = hf_from_fields(self.fields, "float32", self.directory)["model_type"]
        self.tokenizer = _tokenizer_of(self.directory, settings)
        kept = self.tokenizer.pop(hf_files.KEPT_CONFIG, None)
        self.kept = {} if kept is None else hf_kept.read(kept)
        self.special_tokens = dict(common.get("special_tokens") or _generation(self.tokenizer))
        count = (self.fields["num_layers"], self.fields.get("num_experts") or 0)
        self._stacking = schema.Stacking(*count).as_in(reader.tensors)
        self._check()
        self.dtype = self.reader.tensors[hf_map.WORD_EMBEDDINGS].dtype

    @classmethod
    def find(cls, load: Path, vocab_size: int | None = None, say: Say = print) -> MegatronSource:
        """Open a checkpoint after verifying its files.

        Args:
            load: A save directory or one checkpoint's directory.
            vocab_size: Vocabulary without padding; default from the checkpoint.
            say: Receives lines to show.

        Raises:
            CheckpointError: There is none, it is damaged, or it cannot be converted.
        """
        found = place.find(load)
        if found is None:
            raise CheckpointError(
                complaint(
                    "--load-dir",
                    load,
                    f"It is no checkpoint and has no {place.TRACKER_FILE}",
                    "Name a save directory or an iter_XXXXXXX directory",
                )
            )
        for note in found.notes:
            say(note)
        return cls(io.open_checkpoint(found.directory, Peers(Axis.single("world"))), vocab_size)

    def rows(self) -> list[Row]:
        """The table for this architecture."""
        return hf_map.rows_for(self.fields, self.model_type)

    def read(self, row: Row, at: Place) -> Tensor:
        """Read a tensor and cut the vocabulary's padding off."""
        key, index, _ = row.stored(at, self._stacking)
        tensor = self.reader.read_row(key, *index)
        if schema.padded_dim(row.key) == 0:
            tensor = tensor[: self.fields["vocab_size"]]
        if self._zero_centered and row.key.endswith(("layer_norm_weight", "layernorm.weight")):
            tensor = (tensor.float() + 1.0).to(tensor.dtype)
        return tensor

    def _check(self) -> None:
        wanted: dict[str, tuple[tuple[int, ...], int | None]] = {}
        for row, at in every_tensor(self.rows(), self.fields["num_layers"]):
            key, _, extents = row.stored(at, self._stacking)
            wanted[key] = ((*extents, *row.shape), schema.padded_dim(key))
        stored = {k: e.shape for k, e in self.reader.tensors.items() if schema.is_model_key(k)}
        problem = schema.compare(wanted, stored).describe()
        vocabulary = self.fields["vocab_size"]
        rows = stored.get(hf_map.WORD_EMBEDDINGS, (vocabulary,))[0]
        if rows < vocabulary:
            problem = problem or (
                f"the word embeddings have {rows} rows, less than the vocabulary of {vocabulary}"
            )
        if problem:
            raise CheckpointError(
                complaint(
                    "--load-dir",
                    self.directory,
                    f"Its tensors do not fit its configuration: {problem}",
                    "The checkpoint cannot be converted",
                )
            )


def _tokenizer_of(directory: Path, settings: Mapping[str, Any]) -> dict[str, Path]:
    """Tokenizer files: those in the checkpoint, else those that the run used, if still there."""
    inside = directory / TOKENIZER_DIRECTORY
    if inside.is_dir():
        return {path.name: path for path in sorted(inside.iterdir()) if path.is_file()}
    found: dict[str, Path] = {}
    model = settings.get("tokenizer_model")
    if model and Path(model).is_dir():
        found.update(hf_files.tokenizer_files(Path(model)))
    elif model and Path(model).is_file():
        name = "tokenizer.json" if str(model).endswith(".json") else "tokenizer.model"
        found[name] = Path(model)
    for field, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        path = settings.get(field)
        if path and Path(path).is_file():
            found[name] = Path(path)
    return found


def _generation(files: Mapping[str, Path]) -> dict[str, Any]:
    """Special tokens from ``generation_config.json``, for runs that started from a conversion."""
    path = files.get("generation_config.json")
    values = json.loads(path.read_text(encoding="utf-8")) if path else {}
    return {n: values[n] for n in _SPECIAL_TOKENS if n in values}


# ------------------------------------------------------------------------------------------- out


def write_huggingface(
    source: Source,
    save: Path,
    dtype: str,
    max_shard_bytes: int = hf_files.MAX_SHARD_BYTES,
    check: Check | None = None,
) -> Path:
    """Write a directory in HuggingFace format.

    It appears under its final name only when it is complete.

    Args:
        source: The model.
        save: The directory to make; it must not hold anything yet.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        max_shard_bytes: Bound on the bytes of one weight file.
        check: Called with the finished directory before it gets its name; raises to prevent that.

    Raises:
        CheckpointError: The directory is in use or not writable.
    """
    config = hf_from_fields(source.fields, _DTYPE_NAMES[dtype])
    config.update({n: source.special_tokens.get(n) for n in _SPECIAL_TOKENS})
    config = hf_kept.restore(config, source.kept)
    tmp = save.with_name(save.name + ".tmp")
    try:
        if save.exists() and any(save.iterdir()):
            raise CheckpointError(
                complaint("--save-dir", save, "It is not empty", "Name a new directory")
            )
        if tmp.exists():
            shutil.rmtree(tmp)
        tmp.mkdir(parents=True)
        hf_files.write_weights(
            tmp, planned_tensors(source, config["model_type"]), DTYPES[dtype], max_shard_bytes
        )
        for name, path in source.tokenizer.items():
            shutil.copyfile(path, tmp / name)
        _write_json(tmp / "config.json", config)
        if not (tmp / "generation_config.json").exists():
            special = {n: config[n] for n in _SPECIAL_TOKENS if config.get(n) is not None}
            _write_json(tmp / "generation_config.json", {"_from_model_config": True, **special})
        if check is not None:
            check(tmp)
        if save.exists():
            save.rmdir()
        tmp.rename(save)
    except OSError as error:
        raise CheckpointError(
            complaint(
                "--save-dir",
                save,
                f"It cannot be written ({place.describe(error)})",
                "Choose a writable directory with enough space",
            )
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return save


def planned_tensors(source: Source, model_type: str) -> Iterator[Planned]:
    """List the HuggingFace tensors of a model; each is made when it is asked for."""
    last: dict[tuple[str, Place], Any] = {}

    def part(row: Row, at: Place, number: int) -> Tensor:
        if (row.name, at) not in last:
            last.clear()  # the parts of a fused weight follow one another: read it once
            last[row.name, at] = row.split(source.read(row, at))
        parts: Any = last[row.name, at]
        return torch.as_tensor(parts[number])

    rows = hf_map.rows_for(source.fields, model_type)
    for row, at in every_tensor(rows, source.fields["num_layers"]):
        for number, (name, shape) in enumerate(zip(row.names, row.shapes, strict=True)):
            make = partial(part, row, at, number)
            yield Planned(at.of(name), shape, make, row.dtype)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


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
        return made.keep(source.read(row, at).to(own).reshape(shape).contiguous())

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


def open_source(request: Request, say: Say = print) -> HfSource | MegatronSource:
    """Open the model to convert; everything about it that cannot be converted is refused here."""
    if not request.load.is_dir():
        raise CheckpointError(
            complaint("--load-dir", request.load, "There is no such directory", "Check the path")
        )
    if request.loader == "huggingface":
        source = HfSource(request.load)
        for note in source.notes():
            say(note)
        return source
    return MegatronSource.find(request.load, request.vocab_size, say)


def target_dtype(request: Request, source: HfSource | MegatronSource) -> str:
    """Return the short name of the type to write: what was asked for, else the source's."""
    short = {v: k for k, v in DTYPES.items()}
    return request.dtype or short.get(source.dtype, "fp32")


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
    dtype = target_dtype(request, source)
    if request.saver == "huggingface":
        return write_huggingface(source, request.save, dtype, check=check)
    return write_megatron(source, request.save, dtype, check)


def count_elements(source: Source) -> int:
    """Return the number of parameters, without vocabulary padding."""
    layers = source.fields["num_layers"]
    return sum(math.prod(row.shape) for row, _ in every_tensor(source.rows(), layers))
