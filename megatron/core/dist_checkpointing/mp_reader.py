"""Reads Megatron-LM's format ``torch`` (``mp_rank_XX/model_optim_rng.pt``) as if it were ours.

The tensors of all ranks become blocks of the whole ones, mapped from the files, so that any layout
can load any other. Weights, counters and settings are read; the optimizer's and the random state
depend on the ranks that wrote them and are left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import mp_ranks, safe_pickle
from megatron.core.dist_checkpointing.chunks import misplaced
from megatron.core.dist_checkpointing.storage import INDEX_FILE, Reader
from megatron.core.dist_checkpointing.store import StorePath
from megatron.core.errors import CheckpointError, UnusableCheckpointError, complaint

VERSION = 3.0
_SHOWN = 4
_IGNORED = re.compile(r"(_extra_state\d*|\.inv_freq|\.local_tokens_per_expert)$")
_OF_THE_RUN = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers",
               "hidden_size", "padded_vocab_size")  # fmt: skip
_COUNTERS = ("num_floating_point_operations_so_far", "opt_param_scheduler")
_GROUPED_EXPERTS = re.compile(r"^(?P<layer>.*\.mlp\.experts)\.weight(?P<number>[12])$")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def open_reader(directory: Path) -> Reader:
    """Open one checkpoint's directory, whichever of the formats it is in.

    Raises:
        CheckpointError: It cannot be read; says why.
    """
    if not (directory / INDEX_FILE).is_file() and mp_ranks.is_one(directory):
        if isinstance(directory, StorePath):
            why = "Files of ranks (the older torch format) are mapped into memory from a disk"
            raise CheckpointError(complaint("--load", directory, why, "Copy it to one"))
        return RankFilesReader(directory)
    return Reader(directory)


@dataclass(frozen=True)
class _Part:
    """A block in a rank's file; the names are those of torch's own record of a stored block."""

    tensor: Tensor
    relative_path: str
    offset: int


@dataclass(frozen=True)
class _RankFile:
    """One rank's file: where the rank is, and what it holds."""

    name: str
    tp: int
    pp: int
    ep: int
    content: Mapping[str, Any]


class RankFilesReader(Reader):
    """Random access to the whole tensors that the ranks' files hold parts of.

    Args:
        directory: An ``iter_XXXXXXX`` or ``release`` directory.

    Raises:
        CheckpointError: A file is missing, damaged or asks for what is not allowed; parts do not
            fit together; the version is unknown.
    """

    def __init__(self, directory: Path) -> None:
        """Map all files and find out what their parts are parts of."""
        found = dict(mp_ranks.rank_files(directory))
        self._names = list(found)
        contents = {name: _read(path) for name, path in found.items()}
        args = _same_run(contents, directory)
        self._layout = mp_ranks.layout_of(args, directory)
        self._files = _placed(contents, self._layout, directory)
        self._parts: dict[MetadataIndex, _Part] = {}
        self._extents: dict[str, list[ChunkStorageMetadata]] = {}
        self._sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._copies: dict[tuple[str, tuple[int, ...]], _Part] = {}
        self._by_name(directory, args)
        self._check_complete(directory, args.get("padded_vocab_size"))
        entries: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(size), self._extents[key]
            )
            for key, (size, dtype) in self._sizes.items()
        }
        self._take(directory, Metadata(state_dict_metadata=entries, storage_data=self._parts))
        first = next(iter(contents.values()))
        self.common = {
            "checkpoint_version": first["checkpoint_version"],
            "iteration": first.get("iteration", 0),
            "args": argparse.Namespace(**args),
            **{name: first[name] for name in _COUNTERS if name in first},
        }

    def files(self) -> set[str]:
        """Return the names of the ranks' files."""
        return {f"{name}/{mp_ranks.RANK_FILE}" for name in self._names}

    def _tensor(self, index: MetadataIndex, info: Any) -> Tensor:
        part: Tensor = info.tensor
        return part

    def _by_name(self, directory: Path, args: Mapping[str, Any]) -> None:
        """Give every tensor its place in the whole model."""
        differ = self._layout.num_experts > 0 and str(args.get("moe_layer_freq", 1)) != "1"
        num_layers = int(args.get("num_layers") or 0)
        ranks = sorted({(f.tp, f.ep) for f in self._files})
        tied = not args.get("untie_embeddings_and_output_weights")
        for tp, ep in ranks:
            first_layer = 0
            for vpp, chunk_name in enumerate(self._layout.chunks):
                for file in (f for f in self._files if (f.tp, f.ep) == (tp, ep)):
                    chunk = _chunk(file, chunk_name, directory)
                    count = 1 + max((mp_ranks.layer_of(n) or 0 for n in chunk), default=-1)
                    if not any(mp_ranks.layer_of(n) is not None for n in chunk):
                        count = 0
                    whole = _whole_names(chunk, first_layer, file, self._layout)
                    last = (vpp, file.pp) == (self._layout.vpp - 1, self._layout.pp - 1)
                    for name, tensor in whole.items():
                        copy = tied and last and name == _OUTPUT
                        self._add(_EMBEDDING if copy else name, tensor, file, num_layers, differ)
                    first_layer += count
            if first_layer != num_layers:
                raise UnusableCheckpointError(
                    f"{directory}: the ranks at tp {tp}, ep {ep} hold {first_layer} layers, and "
                    f"the model has {num_layers}"
                )

    def _add(
        self, name: str, tensor: Tensor, file: _RankFile, num_layers: int, differ: bool
    ) -> None:
        layout = self._layout
        key, rows, _ = mp_ranks.stored_at(name, differ)
        stacked = ((num_layers, layout.num_experts) if not differ else (layout.num_experts,))[
            : len(rows)
        ]
        if differ and mp_ranks.expert_of(name) is None:
            stacked = ()
        size = (*stacked, *mp_ranks.whole_shape(name, tuple(tensor.shape), layout))
        known = self._sizes.setdefault(key, (size, tensor.dtype))
        where = f"{file.name}/{mp_ranks.RANK_FILE}"
        if known != (size, tensor.dtype):
            raise UnusableCheckpointError(
                f"{where}: {name} is {tuple(tensor.shape)} {tensor.dtype} here, so the whole is "
                f"{size}, and {known[0]} {known[1]} by other ranks"
            )
        for block in mp_ranks.blocks(name, tuple(tensor.shape), layout, file.tp):
            offset = torch.Size((*rows, *block.whole))
            view = tensor[block.window]
            view = view.reshape(*(1,) * len(rows), *view.shape)
            index = MetadataIndex(key, offset)
            if index not in self._parts:
                self._parts[index] = _Part(view, where, len(self._parts))
                self._extents.setdefault(key, []).append(
                    ChunkStorageMetadata(offset, torch.Size(view.shape))
                )
            elif not torch.equal(self._parts[index].tensor, view):
                raise UnusableCheckpointError(
                    f"{where}: its copy of {name} differs from the one in "
                    f"{self._parts[index].relative_path}"
                )

    def _check_complete(self, directory: Path, padded: int | None) -> None:
        problems = [
            problem
            for key, (size, _) in self._sizes.items()
            for problem in misplaced(key, size, self._extents[key])
        ]
        rows = self._sizes.get(_EMBEDDING, ((0,), None))[0][0]
        if rows and padded and rows != padded:
            problems.append(f"the vocabulary has {rows} rows and padded_vocab_size is {padded}")
        if problems:
            more = len(problems) - _SHOWN
            shown = "; ".join(problems[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise UnusableCheckpointError(f"{directory}: tensors are not complete: {shown}")


def _read(path: Path) -> Mapping[str, Any]:
    content = safe_pickle.load(path)
    if not isinstance(content, dict):
        raise UnusableCheckpointError(f"{path}: it holds no dictionary")
    version = content.get("checkpoint_version")
    if version != VERSION:
        raise UnusableCheckpointError(
            f"{path}: its checkpoint_version is {version}; before {VERSION} the rows of "
            "attention weights lay in another order",
            fix="Load it in Megatron-LM and save it again, which makes it version 3.0",
        )
    args = content.get("args")
    if not isinstance(args, argparse.Namespace):
        raise UnusableCheckpointError(f"{path}: it has no arguments (args), which say its layout")
    for name in ("model", "model0"):
        if isinstance(content.get(name), dict) and "language_model" in content[name]:
            raise UnusableCheckpointError(
                f"{path}: it holds a model of the older classes (language_model)",
                fix="Convert it with Megatron-LM up to 0.12: tools/checkpoint/convert.py --loader "
                "legacy --saver mcore",
            )
    return content


def _same_run(contents: Mapping[str, Mapping[str, Any]], directory: Path) -> dict[str, Any]:
    """Return the arguments, which the ranks must agree about."""
    names = list(contents)
    first = vars(contents[names[0]]["args"])
    for name in names[1:]:
        other = vars(contents[name]["args"])
        pairs = {n: (first.get(n), other.get(n)) for n in _OF_THE_RUN}
        pairs["iteration"] = (contents[names[0]].get("iteration"), contents[name].get("iteration"))
        differ = [f"{n} is {a} and {b}" for n, (a, b) in pairs.items() if a != b]
        if differ:
            raise UnusableCheckpointError(
                f"{directory}: the files of {names[0]} and {name} are not of one checkpoint: "
                f"{'; '.join(differ)}"
            )
    return dict(first)


def _placed(
    contents: Mapping[str, Mapping[str, Any]], layout: mp_ranks.Layout, directory: Path
) -> list[_RankFile]:
    """Say where each file's rank is, and refuse too few and too many files."""
    places = layout.directories()
    missing = [n for n, (tp, _, ep) in places.items()
               if n not in contents and layout.needed(tp, ep)]  # fmt: skip
    unknown = sorted(set(contents) - set(places))
    if missing or unknown:
        kinds = {"missing": missing, "not of this layout": unknown}
        shown = "; ".join(
            f"{kind}: {', '.join(names[:_SHOWN])}"
            + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for kind, names in kinds.items()
            if names
        )
        raise UnusableCheckpointError(
            f"{directory}: it was written with tp {layout.tp}, pp {layout.pp}, ep {layout.ep}, and "
            f"the files of its ranks are not those: {shown}",
            fix="Restore the missing files, or remove those of another run",
        )
    return [_RankFile(n, *places[n], contents[n]) for n in sorted(contents, key=places.__getitem__)]


def _chunk(file: _RankFile, chunk: str, directory: Path) -> dict[str, Tensor]:
    """Return the tensors of one (interleaved) stage."""
    tensors = file.content.get(chunk)
    path = directory / file.name / mp_ranks.RANK_FILE
    if not isinstance(tensors, dict):
        have = ", ".join(str(k) for k in file.content) or "nothing"
        raise UnusableCheckpointError(f"{path}: it has no {chunk}, but {have}")
    kept: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if _IGNORED.search(name):
            continue
        if not isinstance(value, Tensor):
            raise UnusableCheckpointError(f"{path}: {chunk} has {name}, which is no tensor")
        kept[name] = value
    return kept


def _whole_names(
    chunk: Mapping[str, Tensor], first_layer: int, file: _RankFile, layout: mp_ranks.Layout
) -> dict[str, Tensor]:
    with_experts = {
        mp_ranks.layer_of(name) for name in chunk if name.endswith(".mlp.router.weight")
    }
    first_expert = file.ep * layout.local_experts
    whole: dict[str, Tensor] = {}
    for name, tensor in chunk.items():
        for own, part in _single(name, tensor, layout).items():
            experts_here = mp_ranks.layer_of(own) in with_experts
            whole[mp_ranks.to_whole(own, first_layer, experts_here, first_expert)] = part
    return whole


def _single(name: str, tensor: Tensor, layout: mp_ranks.Layout) -> dict[str, Tensor]:
    """Take the experts of a rank apart where one tensor holds them all, transposed."""
    match = _GROUPED_EXPERTS.match(name)
    if match is None:
        return {name: tensor}
    here = layout.local_experts
    if match["number"] == "1":
        experts = tensor.view(here, tensor.shape[0], -1).transpose(1, 2)
    else:
        experts = tensor.view(here, -1, tensor.shape[1]).transpose(1, 2)
    matrix = f"{match['layer']}.linear_fc{match['number']}.weight"
    return {f"{matrix}{number}": expert for number, expert in enumerate(experts.unbind())}
