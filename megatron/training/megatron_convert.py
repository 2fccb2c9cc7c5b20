"""Conversion between Megatron's own formats: ``torch_dist`` and one file for each rank (``torch``).

Either is read in any layout; what is written holds the weights, the settings and the counters, not
the optimizer's state. The iteration stays, as in Megatron-LM's converter.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.config import ConfigError
from megatron.config.moe import layer_pattern
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import foreign, io, mp_writer, plain, schema
from megatron.core.dist_checkpointing.mp_ranks import Layout, layout_of
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, MegatronError, complaint
from megatron.core.mesh import Axis, ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import foreign_state, hf_convert
from megatron.training.checkpoint_config import (
    ARCHITECTURE,
    read_common,
    saved_settings,
    stacking_of,
)
from megatron.training.hf_convert import DTYPES, config_of
from megatron.training.hf_sources import check_vocabulary
from megatron.training.safetensors_file import in_type

_COUNTERS = ("num_floating_point_operations_so_far",)
_RANDOM_PREFIX = schema.RNG_KEY.partition("/")[0]
_VOCABULARY_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by


@dataclass(frozen=True)
class Target:
    """What to write.

    Attributes:
        saver: ``megatron`` (``torch_dist``) or ``torch``.
        save: The save directory.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None for the source's.
        tp: Tensor-parallel size, for ``torch``; so are the others.
        pp: Pipeline-parallel size.
        vpp: Interleaved stages of a pipeline rank.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of experts; None for that of the rest.
        local: Whether the reading model is of Megatron-LM's own modules.
        grouped: Whether it holds a rank's experts in one module.
        vocab_size: Vocabulary without padding, if unknown to the source.
        first_layers: Layers of the first pipeline rank, if not as many as others have.
        last_layers: The same of the last one.
    """

    saver: str
    save: Path
    dtype: str | None = None
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    local: bool = False
    grouped: bool = False
    vocab_size: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None


def convert(load: Path, target: Target) -> Path:
    """Convert a checkpoint.

    Args:
        load: A save directory, or one checkpoint's directory, in either format.
        target: What to write.

    Returns:
        The directory of the checkpoint that was written.

    Raises:
        CheckpointError: It cannot be read, is of a model that is not known here, cannot be cut so,
            or cannot be written; says which.
    """
    found = place.find(load)
    if found is None:
        raise CheckpointError(
            complaint("--load-dir", load, f"It is no checkpoint and has no {place.TRACKER_FILE}",
                      "Name a save directory or an iter_XXXXXXX directory")
        )  # fmt: skip
    reader = io.open_checkpoint(found.directory, Peers(Axis.single("world")))
    common = read_common(reader)
    foreign_state.check_known_model(common, reader.directory)
    settings = saved_settings(common)
    if target.vocab_size is not None:
        check_vocabulary(target.vocab_size, settings.get("vocab_size"))
        settings["vocab_size"] = target.vocab_size
    _check_model(reader, settings, load)
    if target.saver == "torch":
        return _write_ranks(reader, common, settings, found.iteration, target)
    return _write_whole(reader, common, settings, found.iteration, target)


def _check_model(reader: Reader, settings: Mapping[str, Any], load: Path) -> None:
    """Refuse tensors that are missing, unknown or of other shapes than the settings imply."""
    fields = {n: settings[n] for n in ARCHITECTURE if n in settings}
    rows = reader.tensors.get("embedding.word_embeddings.weight")
    fields.setdefault("vocab_size", rows.shape[0] if rows else 1)
    cfg = config_of(fields, "fp32")
    mesh = ParallelState.single()
    model = GPTModel(Build.root(cfg, mesh, NativeBackend(), torch.device("meta")))
    state = schema.model_state(model, mesh, stacking_of(cfg).as_in(reader.tensors))
    wanted = {k: (tuple(s.size()), s.padded_dim) for k, s in state.items()}
    stored = {k: e.shape for k, e in reader.tensors.items() if schema.is_model_key(k)}
    problem = schema.compare(wanted, stored)
    if problem:
        raise CheckpointError(
            complaint("--load-dir", load, f"Its tensors do not fit its arguments: "
                      f"{problem.describe()}", "The checkpoint cannot be converted")
        )  # fmt: skip


def megatron_args(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names and in the types that Megatron-LM looks for in a checkpoint."""
    args = dict(settings)
    if "norm_epsilon" in args:
        args["layernorm_epsilon"] = args["norm_epsilon"]
    args.setdefault("add_position_embedding", True)
    frequency = args.get("moe_layer_freq")
    if frequency is not None:
        pattern = [int(on) for on in layer_pattern(str(frequency), args["num_layers"])]
        args["moe_layer_freq"] = 1 if str(frequency) == "1" else pattern
    return args


def _write_ranks(
    reader: Reader,
    common: Mapping[str, Any],
    settings: Mapping[str, Any],
    iteration: int | str,
    target: Target,
) -> Path:
    args = megatron_args({**_vars(common), **settings})
    rows = reader.tensors["embedding.word_embeddings.weight"].shape[0]
    real = int(settings.get("vocab_size") or rows)
    multiple = int(settings.get("make_vocab_size_divisible_by") or _VOCABULARY_MULTIPLE) * target.tp
    args["padded_vocab_size"] = -(-real // multiple) * multiple
    asked = {
        "tensor_model_parallel_size": target.tp,
        "pipeline_model_parallel_size": target.pp,
        "virtual_pipeline_model_parallel_size": target.vpp,
        "expert_model_parallel_size": target.ep,
        "expert_tensor_parallel_size": target.etp,
        "decoder_first_pipeline_num_layers": target.first_layers,
        "decoder_last_pipeline_num_layers": target.last_layers,
    }
    layout: Layout = layout_of({**args, **asked}, target.save)
    more = {n: common[n] for n in _COUNTERS if n in common}
    more["iteration"] = iteration if isinstance(iteration, int) else 0
    return mp_writer.write(
        reader,
        args,
        more,
        target.save,
        iteration,
        replace(layout, padded_vocab=args["padded_vocab_size"]),
        mp_writer.Style(target.local, target.grouped),
        DTYPES[target.dtype] if target.dtype else None,
    )


def _vars(common: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values among the stored arguments; placeholders are left out."""
    args = common.get("args")
    values = vars(args) if isinstance(args, argparse.Namespace) else {}
    plain_types = (bool, int, float, str, list, tuple, type(None), torch.dtype)
    return {n: v for n, v in values.items() if isinstance(v, plain_types)}


def _write_whole(
    reader: Reader,
    common: Mapping[str, Any],
    settings: Mapping[str, Any],
    iteration: int | str,
    target: Target,
) -> Path:
    """Write ``torch_dist``, with the names of Megatron-LM's own modules if asked."""
    there = [i for i, _ in place.committed(target.save)]
    if there or place.is_committed(target.save / place.RELEASE):
        raise CheckpointError(
            complaint("--save-dir", target.save, "It holds checkpoints already",
                      "Name a new directory")
        )  # fmt: skip
    dtype = DTYPES[target.dtype] if target.dtype else None
    tensors: dict[str, Sharded] = {}
    for key, entry in reader.tensors.items():
        if schema.is_model_key(key):
            name = foreign.local_name(key) if target.local else key
            tensors[name] = _lazy(reader, key, entry.dtype, dtype)
    args = {**_vars(common), **settings}
    values = {
        "checkpoint_version": 3.0,
        "iteration": iteration if isinstance(iteration, int) else 0,
        "args": argparse.Namespace(**{**megatron_args(args), **settings}),
        "given": {},
        **{n: common[n] for n in _COUNTERS if n in common},
    }
    content = plain.dump(values)
    blobs = dict.fromkeys(schema.extra_state_keys(tensors), plain.dump_nothing())
    blobs[schema.COMMON_KEY] = content
    saved = io.save(
        target.save, iteration, tensors, blobs, Peers(Axis.single("world")),
        {schema.COMMON_FILE: content},
    )  # fmt: skip
    return saved.directory


def _lazy(reader: Reader, key: str, stored: torch.dtype, dtype: torch.dtype | None) -> Sharded:
    """Describe a stored tensor, whose layers and experts are read one at a time."""
    shape = reader.tensors[key].shape
    own = stored if dtype is None or key.endswith(".expert_bias") else dtype
    axes = max(len(shape) - 2, 0)
    rows = [()] if axes == 0 else [tuple(r) for r in torch.cartesian_prod(
        *[torch.arange(n) for n in shape[:axes]]).view(-1, axes).tolist()]  # fmt: skip
    pieces = []
    for row in rows:
        extents = (*(1,) * len(row), *shape[len(row) :])

        def make(row: tuple[int, ...] = row, extents: tuple[int, ...] = extents) -> torch.Tensor:
            return in_type(reader.read_row(key, *row), own, key).reshape(extents).contiguous()

        offset = (*row, *(0,) * (len(shape) - len(row)))
        pieces.append(Piece(torch.empty(extents, dtype=own, device="meta"), offset, make))
    return Sharded(shape, pieces)


# ----------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only Megatron's own formats have."""
    parser.add_argument(
        "--target-virtual-pipeline-parallel-size",
        type=int,
        default=1,
        help="interleaved stages of a pipeline rank, with --saver torch",
    )
    for end in ("first", "last"):
        parser.add_argument(
            f"--target-decoder-{end}-pipeline-num-layers",
            type=int,
            help=f"layers of the {end} pipeline rank, with --saver torch (default: as others)",
        )
    parser.add_argument(
        "--target-expert-tensor-parallel-size",
        type=int,
        help="tensor-parallel size of experts, with --saver torch (default: that of the rest)",
    )
    parser.add_argument(
        "--saver-transformer-impl",
        choices=("local", "transformer_engine"),
        default="transformer_engine",
        help="whose module names to write, for Megatron-LM (--transformer-impl there)",
    )
    parser.add_argument(
        "--saver-moe-grouped-gemm",
        action="store_true",
        help="write a rank's experts as one module, for Megatron-LM with --moe-grouped-gemm",
    )


def run(args: argparse.Namespace) -> int:
    """Convert as asked for on the command line; return the exit status."""
    target = Target(
        saver=args.saver,
        save=args.save_dir,
        dtype=args.target_dtype,
        tp=args.target_tensor_parallel_size or 1,
        pp=args.target_pipeline_parallel_size or 1,
        vpp=args.target_virtual_pipeline_parallel_size,
        ep=args.target_expert_parallel_size or 1,
        etp=args.target_expert_tensor_parallel_size,
        local=args.saver_transformer_impl == "local",
        grouped=args.saver_moe_grouped_gemm,
        vocab_size=args.true_vocab_size,
        first_layers=args.target_decoder_first_pipeline_num_layers,
        last_layers=args.target_decoder_last_pipeline_num_layers,
    )
    try:
        if args.loader == "huggingface":
            result = _through_whole(args.load_dir, target)
        else:
            result = convert(args.load_dir, target)
    except (MegatronError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"done: {result}\n")
    lacking = _left_out(args.load_dir) if args.loader != "huggingface" else ""
    if lacking:
        sys.stdout.write(f"NOTE: left out: {lacking}; the result holds weights and settings\n")
    return 0


def _left_out(load: Path) -> str:
    """Name what a checkpoint holds beside weights and settings."""
    found = place.find(load)
    if found is None:
        return ""
    reader = io.open_checkpoint(found.directory, Peers(Axis.single("world")))
    keys = [*reader.tensors, *reader.blobs]
    parts = {
        "the optimizer's state (give --no-load-optim to train on)": schema.OPTIMIZER_PREFIX,
        "the FP8 state": schema.FP8_PREFIX,
        "the random state": _RANDOM_PREFIX,
    }
    there = [name for name, prefix in parts.items() if any(k.startswith(prefix) for k in keys)]
    return ", ".join(there)


def _through_whole(load: Path, target: Target) -> Path:
    """Convert a HuggingFace directory by way of a checkpoint that is removed again."""
    target.save.parent.mkdir(parents=True, exist_ok=True)
    between = Path(tempfile.mkdtemp(dir=target.save.parent, prefix=f".{target.save.name}-"))
    request = hf_convert.Request(
        "huggingface", "megatron", load, between, target.dtype, target.vocab_size
    )
    try:
        hf_convert.convert(request, hf_convert.open_source(request))
        return convert(between, target)
    finally:
        shutil.rmtree(between, ignore_errors=True)
