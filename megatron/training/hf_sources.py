"""Models whose tensors are read one at a time: HuggingFace directories and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.config.data import TOKENIZER_FIELDS
from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io, schema
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import Axis
from megatron.training import hf_files, hf_fp8, hf_kept, hf_map, hf_moe, hf_quantization
from megatron.training.checkpoint_config import (
    ARCHITECTURE,
    TOKENIZER_DIRECTORY,
    read_common,
    saved_settings,
)
from megatron.training.hf_config import fields_from_hf, hf_from_fields, read_config
from megatron.training.hf_rows import OUTSIDE, Place, Row, every_tensor

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_IGNORED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
Say = Callable[[str], None]


class Source(Protocol):
    """A model whose tensors can be read one at a time."""

    fields: dict[str, Any]
    tokenizer: dict[str, Path]
    tokenizer_settings: dict[str, Any]
    special_tokens: dict[str, Any]
    kept: dict[str, Any]
    dtype: torch.dtype

    def rows(self) -> list[Row]:
        """The table that says which tensors there are."""

    def read(self, row: Row, at: Place) -> Tensor:
        """One tensor in this project's layout, without vocabulary padding."""

    def scales(self) -> dict[str, Tensor]:
        """The scales that FP8 weights in HuggingFace format have or had, by name."""


def check_vocabulary(asked: int | None, known: int | None) -> None:
    """Refuse a --true-vocab-size that contradicts what the source says.

    Raises:
        CheckpointError: It does, or is no size.
    """
    if asked is None or (asked > 0 and known in (None, asked)):
        return
    why = "A vocabulary has at least one token" if known is None else f"The source says {known}"
    raise CheckpointError(complaint("--true-vocab-size", asked, why, "Remove it, or correct it"))


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
        self.weights = hf_fp8.Dequantized(
            hf_files.HfWeights(directory), hf_quantization.block_of(config)
        )
        self.tokenizer = hf_files.tokenizer_files(directory)
        self.tokenizer_settings: dict[str, Any] = {}
        self.special_tokens = {n: config[n] for n in SPECIAL_TOKENS if n in config}
        self._prefix = ""
        if self.model_type == "gpt2" and "wte.weight" in self.weights:
            self._prefix = "transformer."  # files of the bare model leave it out
        self._check()
        self.dtype = self._own_dtype()

    def _own_dtype(self) -> torch.dtype:
        """The type of the word embeddings; that of bf16 if they are in FP8 themselves."""
        words = self.name_of(self.rows()[0].names[0], OUTSIDE)
        stored = self.weights.dtype(words) or torch.float32
        return torch.bfloat16 if self.weights.is_code(words) else stored

    def rows(self) -> list[Row]:
        """The table for this architecture."""
        return hf_map.rows_for(self.fields, self.model_type)

    def read(self, row: Row, at: Place) -> Tensor:
        """Join the HuggingFace tensors of a row."""
        return row.join([self.weights.get(self.name_of(n, at)) for n in row.names])

    def scales(self) -> dict[str, Tensor]:
        """The scales of weights in FP8."""
        return hf_fp8.to_keep(self.weights)

    def name_of(self, template: str, at: Place) -> str:
        """Return what a tensor is called in this directory."""
        return at.of(template).removeprefix(self._prefix)

    def _check(self) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for row, at in every_tensor(self.rows(), self.fields["num_layers"]):
            for template, shape in zip(row.names, row.shapes, strict=True):
                expected[self.name_of(template, at)] = shape
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
        vocabulary = self._vocabulary()
        for name in sorted(set(expected) & stored):
            got, implied = self.weights.shape(name), expected[name]
            dtype = self.weights.dtype(name)
            if dtype is not None and not dtype.is_floating_point:
                problems.append(f"{name} holds {str(dtype).removeprefix('torch.')}, not weights")
            if got == implied:
                continue
            if (
                name in vocabulary
                and len(got) == 2
                and got[1] == implied[1]
                and got[0] > implied[0]
            ):
                problems.append(
                    f"{name} has {got[0]} rows and vocab_size is {implied[0]} (a padded "
                    "vocabulary: cut the rows off, or set vocab_size to keep them)"
                )
            else:
                problems.append(f"{name} has shape {got}, config.json implies {implied}")
        if problems:
            raise CheckpointError(
                complaint(
                    "--load-dir",
                    self.directory,
                    "; ".join(problems[:8]),
                    "config.json and the weight files must describe the same model",
                )
            )

    def _vocabulary(self) -> set[str]:
        ours = (hf_map.WORD_EMBEDDINGS, hf_map.OUTPUT)
        names = [row.names[0] for row in self.rows() if row.name in ours]
        return {self.name_of(name, OUTSIDE) for name in names}

    def _beyond(self) -> str:
        """Names of layers behind the last one: they predict further tokens and are left out."""
        return f"model.layers.{self.fields['num_layers']}."

    def notes(self) -> list[str]:
        """Say what of the source is left out or changed."""
        notes = []
        if len(self.weights):
            notes.append(
                f"NOTE: {len(self.weights)} weights are in FP8 and are dequantized; "
                "--target-dtype fp32 keeps their values unrounded"
            )
        if self.model_type in hf_moe.PREDICTING and any(
            n.startswith(self._beyond()) for n in self.weights
        ):
            notes.append("NOTE: layers that predict further tokens (MTP) are left out")
        return notes

    def _check_tied(self) -> list[str]:
        """config.json says tied, yet there is an output layer: fine if it is a copy."""
        words = self.weights.get(self.name_of(self.rows()[0].names[0], OUTSIDE))
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
            check_vocabulary(vocab_size, settings.get("vocab_size"))
            self.fields["vocab_size"] = vocab_size
        self._zero_centered = bool(self.fields.get("apply_layernorm_1p"))
        self.fields["apply_layernorm_1p"] = False
        # Settings that no such architecture has are refused before anything is written.
        self.model_type: str = hf_from_fields(self.fields, "float32", self.directory)["model_type"]
        self.tokenizer = _tokenizer_of(self.directory, settings)
        self.tokenizer_settings = {n: settings.get(n) for n in TOKENIZER_FIELDS}
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

    def scales(self) -> dict[str, Tensor]:
        """The scales of the directory that these weights were imported from."""
        return hf_fp8.kept_scales(self.directory)

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
        found.update(hf_files.tokenizer_at(Path(model)))
    for field, name in (("vocab_file", "vocab.json"), ("merge_file", "merges.txt")):
        path = settings.get(field)
        if path and Path(path).is_file():
            found[name] = Path(path)
    return found


def _generation(files: Mapping[str, Path]) -> dict[str, Any]:
    """Special tokens from ``generation_config.json``, for runs that started from a conversion."""
    path = files.get("generation_config.json")
    values = json.loads(path.read_text(encoding="utf-8")) if path else {}
    return {n: values[n] for n in SPECIAL_TOKENS if n in values}
