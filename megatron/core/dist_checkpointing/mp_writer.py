"""Writes Megatron-LM's format ``torch``: one file for each model-parallel rank, of any layout.

Each rank's file is put together from whole tensors by itself, so no more than one is in memory.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import mp_ranks
from megatron.core.dist_checkpointing.mp_ranks import Layout
from megatron.core.dist_checkpointing.mp_reader import VERSION
from megatron.core.dist_checkpointing.schema import is_model_key
from megatron.core.dist_checkpointing.shard import Piece, Sharded
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError, complaint
from megatron.core.files import sync, sync_directory

_STACK = re.compile(r"^(?P<stack>.*\blayers)\.(?!\d+\.)(?P<rest>.+)$")
_EXPERTS = ".mlp.experts.experts."
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Modules that a state dictionary has an entry for, empty without FP8.
_WITH_EXTRA_STATE = re.compile(
    r"^(?P<module>(.*\.(linear_qkv|linear_proj|linear_fc[12])|output_layer))\.weight$"
)


@dataclass(frozen=True)
class Style:
    """How the modules of the model that is to read the files are called.

    Attributes:
        local: Whether they are Megatron-LM's own instead of Transformer Engine's
            (``--transformer-impl local``).
        grouped: Whether a rank's experts are one module (``--moe-grouped-gemm``).
    """

    local: bool = False
    grouped: bool = False


def write(
    reader: Reader,
    args: Mapping[str, Any],
    more: Mapping[str, Any],
    root: Path,
    iteration: int | str,
    layout: Layout,
    style: Style,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a checkpoint's weights as ranks of another layout have them.

    Args:
        reader: The opened checkpoint, in whichever format.
        args: Arguments to store, by Megatron-LM's names; those of the layout are added.
        more: Further entries of every file (counters).
        root: The save directory.
        iteration: Number of the iteration, or ``"release"``.
        layout: The layout to write for.
        style: How modules are called.
        dtype: Type of the weights; that of the checkpoint by default.

    Returns:
        The directory that holds the ranks' directories.

    Raises:
        CheckpointError: The model cannot be cut so, or the directory cannot be written.
    """
    tensors = dict(_whole_tensors(reader))
    num_layers = 1 + max((mp_ranks.layer_of(n) or 0 for n in tensors), default=-1)
    stages = layout.stages(num_layers)
    final = root / place.directory_name(iteration)
    tmp = final.with_name(final.name + ".tmp")
    try:
        root.mkdir(parents=True, exist_ok=True)
        place.clean(root)
        if final.exists():
            raise CheckpointError(
                complaint("--save-dir", root, f"{final.name} is there already", "Name another one")
            )
        for name, at in layout.directories().items():
            if layout.needed(at[0], at[2]):
                model = _rank_content(reader, tensors, stages, layout, style, at, dtype)
                own = argparse.Namespace(**{**args, **_layout_args(layout, style)})
                content = {"args": own, "checkpoint_version": VERSION, **more, **model}
                _save(content, tmp / name / mp_ranks.RANK_FILE)
        sync_directory(tmp)
        os.rename(tmp, final)
        place.point_to(root, iteration)
    except OSError as error:
        raise CheckpointError(
            complaint("--save-dir", root, f"It cannot be written ({place.describe(error)})",
                      "Choose a writable directory with enough space")
        ) from error  # fmt: skip
    finally:
        place.discard(tmp)
    return final


def _layout_args(layout: Layout, style: Style) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "decoder_first_pipeline_num_layers": layout.first_layers,
        "decoder_last_pipeline_num_layers": layout.last_layers,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "transformer_impl": "local" if style.local else "transformer_engine",
        "moe_grouped_gemm": style.grouped,
    }


def _save(content: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        torch.save(dict(content), file)
        sync(file)


def _whole_tensors(reader: Reader) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield the name of each layer's and expert's tensor, and where it is stored: key and rows."""
    for key, entry in reader.tensors.items():
        if not is_model_key(key):
            continue
        found: list[tuple[str, tuple[int, ...]]] = [(key, ())]
        match = _STACK.match(key)
        if match:
            found = [(f"{match['stack']}.{i}.{match['rest']}", (i,)) for i in range(entry.shape[0])]
        if _EXPERTS in key:
            axis = len(found[0][1])
            found = [
                (name.replace(_EXPERTS, ".mlp.experts.") + str(e), (*rows, e))
                for name, rows in found
                for e in range(entry.shape[axis])
            ]
        for name, rows in found:
            yield name, (key, rows)


def _rank_content(
    reader: Reader,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    stages: list[list[range]],
    layout: Layout,
    style: Style,
    at: tuple[int, int, int],
    dtype: torch.dtype | None,
) -> dict[str, dict[str, Tensor | None]]:
    """Return the state dictionaries of one rank, by their names in its file."""
    tp, pp, ep = at
    experts = range(ep * layout.local_experts, (ep + 1) * layout.local_experts)
    content: dict[str, dict[str, Tensor | None]] = {}
    for vpp, chunk in enumerate(layout.chunks):
        layers = stages[vpp][pp]
        stage = vpp * layout.pp + pp
        last = stage == layout.pp * layout.vpp - 1
        own: dict[str, Tensor | None] = {}
        wanted = dict(tensors)
        if last and stage > 0 and _OUTPUT not in tensors:
            wanted[_OUTPUT] = tensors[_EMBEDDING]  # the copy that the last stage keeps
        for name, (key, rows) in wanted.items():
            layer, expert = mp_ranks.layer_of(name), mp_ranks.expert_of(name)
            if layer is None:
                here = stage == 0 if name.startswith("embedding.") else last
            else:
                here = layer in layers
            if not here or (expert is not None and expert not in experts):
                continue
            tensor = _part(reader, name, key, rows, layout, tp, dtype)
            own[mp_ranks.to_rank(name, layers.start, experts.start, style.local, style.grouped)] = (
                tensor
            )
        content[chunk] = _with_extra_state(own)
    return content


def _part(
    reader: Reader,
    name: str,
    key: str,
    rows: tuple[int, ...],
    layout: Layout,
    tp: int,
    dtype: torch.dtype | None,
) -> Tensor:
    """Read a rank's part of one tensor."""
    entry = reader.tensors[key]
    shape = list(entry.shape[len(rows) :])
    _, _, padded = mp_ranks.stored_at(name, False)
    if padded is not None and layout.padded_vocab:
        shape[padded] = layout.padded_vocab
    # What has its own type (the bias of a router is fp32 in every precision) keeps it.
    kept = entry.dtype if dtype is None or name.endswith(".expert_bias") else dtype
    local = torch.empty(mp_ranks.part_shape(name, shape, layout), dtype=kept)
    pieces = [
        Piece(local[(*(None,) * len(rows), *block.window)], (*rows, *block.whole))
        for block in mp_ranks.blocks(name, tuple(local.shape), layout, tp)
    ]
    whole = (*entry.shape[: len(rows)], *shape)
    reader.load({key: Sharded(whole, pieces, padded)})
    return local


def _with_extra_state(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        match = _WITH_EXTRA_STATE.match(name)
        if match:
            found[f"{match['module']}._extra_state"] = None
    return found
