"""Names and cuts of Megatron-LM's format ``torch``: one file for each model-parallel rank.

``iter_XXXXXXX/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` holds a module's state dictionary as the
rank ``TT`` along tp, ``PPP`` along pp (if there is more than one) and ``EEE`` along ep (likewise)
has it: layers are numbered from 0 in each stage (``model``) or interleaved stage (``model0``,
``model1``, ...), experts from 0 on each rank, the vocabulary is padded for its tp size.

Here these names become the ones that the layer and the expert have in the whole model, which are
this project's, and back.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.schema import address, padded_dim
from megatron.core.errors import CheckpointError, complaint

RANK_FILE = "model_optim_rng.pt"
_RANK_DIRECTORY = re.compile(r"^mp_rank_\d{2,}(_\d{3,}){0,2}$")
_LAYER = re.compile(r"^(?P<stack>.*\blayers)\.(?P<index>\d+)\.(?P<rest>.+)$")
_SEQUENTIAL = re.compile(
    r"^mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<matrix>linear_fc[12])\.(?P<kind>\w+)$"
)
_GROUPED = re.compile(
    r"^mlp\.experts\.(?P<matrix>linear_fc[12])\.(?P<kind>weight|bias)(?P<number>\d+)$"
)
# Along which axis tensor-parallel ranks cut a tensor; others they all have.
_CUT = (
    (re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)\d*$"), 0),
    (re.compile(r"(linear_proj|linear_fc2)\.weight\d*$"), 1),
)


@dataclass(frozen=True)
class Layout:
    """How the ranks of a run share a model.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        vpp: Interleaved stages of a pipeline rank.
        ep: Expert-parallel size.
        etp: Tensor-parallel size of experts, a divisor of ``tp``.
        num_experts: Experts of a layer, 0 without any.
        gated: Whether the first matrix of an MLP is a gate above a projection.
        padded_vocab: Rows of the vocabulary to write; 0 for as many as there are.
        first_layers: Layers of the first pipeline rank; None for as many as others have.
        last_layers: The same of the last one.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    num_experts: int = 0
    gated: bool = False
    padded_vocab: int = 0
    first_layers: int | None = None
    last_layers: int | None = None

    def stages(self, num_layers: int) -> list[list[range]]:
        """Return which layers the stages ``[interleaved stage][pipeline rank]`` hold.

        Raises:
            CheckpointError: They cannot be shared out so.
        """
        ends = ((0, self.first_layers), (self.pp - 1, self.last_layers))
        fixed = {rank: own for rank, own in ends if own is not None}
        rest, others = num_layers - sum(fixed.values()), self.pp - len(fixed)
        counts = [fixed.get(rank, rest // max(others, 1)) for rank in range(self.pp)]
        if sum(counts) != num_layers or any(n < 1 or n % self.vpp for n in counts):
            ranks = f"{self.pp}" if self.vpp == 1 else f"{self.pp} with {self.vpp} virtual stages"
            given = "".join(f", {own} on rank {rank}," for rank, own in fixed.items())
            raise CheckpointError(
                complaint(
                    "--target-pipeline-parallel-size",
                    ranks,
                    f"The {num_layers} layers{given} cannot be shared out equally",
                    "Choose a divisor of the number of layers, or say what the first and the last "
                    "rank have with --target-decoder-first-pipeline-num-layers and -last-",
                )
            )
        found: list[list[range]] = []
        at = 0
        for _ in range(self.vpp):
            found.append([])
            for count in counts:
                found[-1].append(range(at, at + count // self.vpp))
                at += count // self.vpp
        return found

    def directories(self) -> dict[str, tuple[int, int, int]]:
        """Return the name of every rank's directory -> its place along tp, pp and ep.

        Ranks along tp and etp are the same ones, tp fastest: with ``etp < tp`` not every pair of
        places along tp and ep has a rank in the smallest world, and any may have in a larger one.
        """
        found = {}
        for place in itertools.product(range(self.tp), range(self.pp), range(self.ep)):
            tp, pp, ep = place
            name = f"mp_rank_{tp:02d}"
            name += f"_{pp:03d}" if self.pp > 1 else ""
            found[name + (f"_{ep:03d}" if self.ep > 1 else "")] = place
        return found

    def needed(self, tp: int, ep: int) -> bool:
        """Whether every run of this layout has a rank at this place."""
        if self.etp == self.tp:
            return True
        # The smallest world: rank r is at r % tp, and its experts at r // etp % ep.
        world = max(self.tp, self.etp * self.ep)
        return any(r % self.tp == tp and r // self.etp % self.ep == ep for r in range(world))

    @property
    def local_experts(self) -> int:
        """Experts of a layer on one rank."""
        return self.num_experts // self.ep

    @property
    def chunks(self) -> list[str]:
        """Names of the state dictionaries in a file."""
        return ["model"] if self.vpp == 1 else [f"model{i}" for i in range(self.vpp)]


def is_one(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of this format."""
    return any(rank_files(directory))


def rank_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and file of each rank that has one."""
    if directory.is_dir():
        for child in sorted(directory.iterdir()):
            file = child / RANK_FILE
            if _RANK_DIRECTORY.match(child.name) and file.is_file():
                yield child.name, file


def layout_of(args: Mapping[str, Any], directory: Path) -> Layout:
    """Read the layout from a checkpoint's arguments.

    Raises:
        CheckpointError: They are not understood.
    """
    tp = int(args.get("tensor_model_parallel_size") or 1)
    pp = int(args.get("pipeline_model_parallel_size") or 1)
    ep = int(args.get("expert_model_parallel_size") or 1)
    etp = int(args.get("expert_tensor_parallel_size") or tp)
    vpp = int(args.get("virtual_pipeline_model_parallel_size") or 1)
    experts = int(args.get("num_experts") or 0)
    groups = int(args.get("num_query_groups") or args.get("num_attention_heads") or tp)
    if not args.get("group_query_attention"):
        groups = int(args.get("num_attention_heads") or tp)
    tensor = "--tensor-model-parallel-size"
    for name, size, of, what in (
        ("--expert-tensor-parallel-size", etp, tp, f"A divisor of {tensor}"),
        (tensor, tp, groups, "A divisor or a multiple of --num-query-groups"),
        ("--expert-model-parallel-size", ep, experts or ep, "A divisor of --num-experts"),
    ):
        # Ranks beyond the query groups share the rows of one (Megatron-Core from 0.16 on).
        if of % size and (name != tensor or size % of):
            raise CheckpointError(
                complaint(
                    "--load",
                    directory,
                    f"It was written with {name} {size}, which cannot be read: {what} can, "
                    f"and that is {of}",
                    "Load it in Megatron-LM and save it at another layout, or as torch_dist",
                )
            )
    ends = [args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    return Layout(tp, pp, vpp, ep, etp, experts, bool(args.get("swiglu")), 0, *ends)


@dataclass(frozen=True)
class Block:
    """What a rank's tensor and the whole one have in common.

    Attributes:
        local: Where it starts in the rank's tensor.
        whole: Where it starts in the whole one.
        shape: Its extents.
    """

    local: tuple[int, ...]
    whole: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def window(self) -> tuple[slice, ...]:
        """Slices of the rank's tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.local, self.shape, strict=True))


def is_expert(name: str) -> bool:
    """Whether a tensor of this name in the whole model belongs to one expert."""
    return ".mlp.experts." in name


def cut_dim(name: str) -> int | None:
    """Return the axis along which tensor-parallel ranks share a tensor, None if all have it."""
    return next((dim for pattern, dim in _CUT if pattern.search(name)), None)


def blocks(name: str, shape: Sequence[int], layout: Layout, tp: int) -> list[Block]:
    """Return which parts of a tensor a rank holds.

    Args:
        name: The tensor in the whole model.
        shape: Of the rank's part.
        layout: How ranks share the model.
        tp: The rank's place along tp.
    """
    size, rank = (layout.etp, tp % layout.etp) if is_expert(name) else (layout.tp, tp)
    dim, zero = cut_dim(name), (0,) * len(shape)
    if dim is None or size == 1:
        return [Block(zero, zero, tuple(shape))]
    sections = 2 if layout.gated and ".linear_fc1." in name else 1
    extent = shape[dim] // sections
    found = []
    for section in range(sections):
        local, whole, extents = list(zero), list(zero), list(shape)
        local[dim], whole[dim] = section * extent, (section * size + rank) * extent
        extents[dim] = extent
        found.append(Block(tuple(local), tuple(whole), tuple(extents)))
    return found


def whole_shape(name: str, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the shape of the tensor that a rank has a part of."""
    dim, found = cut_dim(name), list(shape)
    if dim is not None:
        found[dim] *= layout.etp if is_expert(name) else layout.tp
    return tuple(found)


def part_shape(name: str, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the shape of a rank's part of a tensor; the inverse of ``whole_shape``.

    Raises:
        CheckpointError: The tensor does not divide.
    """
    dim, found = cut_dim(name), list(shape)
    if dim is None:
        return tuple(found)
    size = layout.etp if is_expert(name) else layout.tp
    if found[dim] % (size * (2 if layout.gated and ".linear_fc1." in name else 1)):
        raise CheckpointError(
            complaint(
                "--target-tensor-parallel-size",
                size,
                f"{name} {tuple(shape)} cannot be cut into that many equal parts",
                "Choose a smaller size",
            )
        )
    found[dim] //= size
    return tuple(found)


# ------------------------------------------------------------------------------------------ names


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a name is about, None if of no layer."""
    match = _LAYER.match(name)
    return int(match["index"]) if match else None


def to_whole(name: str, first_layer: int, experts_here: bool, first_expert: int) -> str:
    """Return the name in the whole model of a name in a rank's state dictionary.

    Args:
        name: In the file.
        first_layer: Number of the chunk's first layer in the whole model.
        experts_here: Whether the tensor's layer has experts.
        first_expert: Number of the rank's first expert.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    rest = match["rest"].replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if experts_here:
        rest = rest.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        expert = _SEQUENTIAL.match(rest) or _GROUPED.match(rest)
        if expert:
            number = first_expert + int(expert["number"])
            rest = f"mlp.experts.{expert['matrix']}.{expert['kind']}{number}"
    else:
        rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return f"{match['stack']}.{first_layer + int(match['index'])}.{rest}"


def to_rank(name: str, first_layer: int, first_expert: int, local: bool, grouped: bool) -> str:
    """Return the name in a rank's state dictionary; the inverse of ``to_whole``.

    Args:
        name: In the whole model.
        first_layer: Number of the chunk's first layer.
        first_expert: Number of the rank's first expert.
        local: Whether to write the names of Megatron-LM's own modules instead of Transformer
            Engine's.
        grouped: Whether the experts of a rank are one module.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    rest = match["rest"]
    if local:
        rest = rest.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        rest = rest.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    expert = _GROUPED.match(rest)
    if expert:
        number = int(expert["number"]) - first_expert
        parts = (expert["matrix"], expert["kind"])
        rest = f"mlp.experts.local_experts.{number}.{parts[0]}.{parts[1]}"
        if grouped:
            rest = f"mlp.experts.{parts[0]}.{parts[1]}{number}"
    return f"{match['stack']}.{int(match['index']) - first_layer}.{rest}"


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a name in the whole model is about."""
    match = _LAYER.match(name)
    expert = _GROUPED.match(match["rest"]) if match else None
    return int(expert["number"]) if expert else None


def stored_at(name: str, layers_differ: bool) -> tuple[str, tuple[int, ...], int | None]:
    """Return key, rows of the stacked axes and padded axis of a tensor in our own format."""
    place = address(name, layers_differ)
    rows = tuple(row for row in (place.layer, place.expert) if row is not None)
    return place.key, rows, padded_dim(place.key)
