"""From module names to stored keys: the naming of Megatron-Core's ``torch_dist`` format.

* Keys are module names without the index of the layer; the layers of a stack are one tensor with a
  leading layer axis: ``decoder.layers.3.mlp.linear_fc2.weight [h, f]`` is row 3 of
  ``decoder.layers.mlp.linear_fc2.weight [L, h, f]``. Where layers differ (not every one has
  experts) nothing is stacked and the index stays.
* The experts of a layer are one tensor with a leading expert axis: expert 5 of layer 3,
  ``decoder.layers.3.mlp.experts.linear_fc2.weight5``, is row [3, 5] of
  ``decoder.layers.mlp.experts.experts.linear_fc2.weight [L, E, h, f]``.
* Tensor-parallel shards are blocks of the global tensor, so no key and no shape depends on the
  layout. A gated MLP's first weight is ``[gate; up]`` globally.
* Optimizer state lies under ``optimizer.state.{kind}.{key}`` with the shape of the parameter.
* The vocabulary axis may end in padding whose length depends on the layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron.core.dist_checkpointing.shard import Piece, Sharded, merge, overlap, stack
from megatron.core.mesh import Axis, ParallelState
from megatron.core.shards import (
    FlatRange,
    Rectangle,
    global_name,
    global_shape,
    local_rectangles,
    shard_axis,
)

OPTIMIZER_PREFIX = "optimizer.state."
COMMON_KEY = "common_state/shard_0_1"
COMMON_FILE = "common.pt"
RNG_KEY = "rng_state/shard_{rank}_{size}"
FP8_PREFIX = "fp8_state."

# Tensors whose first axis is the padded vocabulary.
_VOCABULARY = {"embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"}
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.")  # Megatron-Core has further forms of it
_SHOWN = 6  # names of one kind in a message
_LAYER = re.compile(r"^(?P<stack>.*\blayers)\.(?P<index>\d+)\.(?P<rest>.+)$")
_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<rest>.+?)(?P<number>\d+)$")


@dataclass(frozen=True)
class Stacking:
    """Which tensors of a model are stored together.

    Attributes:
        num_layers: Layers of the whole model, the extent of the layer axis.
        num_experts: Experts of a layer, the extent of the expert axis; 0 without any.
        layers_differ: Whether every layer is stored by itself.
    """

    num_layers: int
    num_experts: int = 0
    layers_differ: bool = False

    def as_in(self, keys: Iterable[str]) -> Stacking:
        """Return the same with layers stored as they are under ``keys``."""
        differ = any(is_model_key(key) and _LAYER.match(key) for key in keys)
        return replace(self, layers_differ=differ)


@dataclass(frozen=True)
class Address:
    """Where a module's tensor is stored.

    Attributes:
        key: The stored key.
        layer: Row of the tensor that is stacked over layers, or None when it is not.
        expert: Row on the expert axis, or None when there is no such axis.
    """

    key: str
    layer: int | None = None
    expert: int | None = None


def address(name: str, layers_differ: bool = False) -> Address:
    """Return the stored key and rows of a parameter.

    Args:
        name: Its name; an expert's ends in the number that the expert has in its layer.
        layers_differ: Whether layers are not stacked.
    """
    layer = expert = None
    match = _LAYER.match(name)
    if match is not None and not layers_differ:
        name, layer = f"{match['stack']}.{match['rest']}", int(match["index"])
    match = _EXPERT.match(name)
    if match is not None:
        # Megatron-Core's module of that name holds another one.
        name, expert = f"{match['experts']}.experts.{match['rest']}", int(match["number"])
    return Address(name, layer, expert)


def optimizer_key(kind: str, key: str) -> str:
    """Return the key of one kind of optimizer state (``param``, ``exp_avg``, ...)."""
    return f"{OPTIMIZER_PREFIX}{kind}.{key}"


def padded_dim(key: str) -> int | None:
    """Return the axis of ``key`` that ends in layout-dependent padding, or None."""
    return 0 if key in _VOCABULARY else None


def shard_like(
    tensor: Tensor, param: Tensor, key: str, axis: Axis, owned: FlatRange | None = None
) -> Sharded:
    """Describe ``tensor``, laid out like the parameter ``param``, as part of the global tensor.

    Args:
        tensor: The local values: the parameter itself, its master copy or a moment.
        param: The parameter, whose attributes say how it is split.
        key: The stored key, which tells whether the first axis is a padded vocabulary.
        axis: The ranks that it is split among.
        owned: Which elements of the local parameter the flat ``tensor`` holds; None for all.
    """
    places = local_rectangles(param, axis)
    if owned is None:
        pieces = [Piece(tensor.detach()[r.local], r.offset) for r in places]
    else:
        pieces = list(_range_pieces(tensor.detach(), tuple(param.shape), owned, places))
    return Sharded(global_shape(param, axis.size), pieces, padded_dim(key))


def _range_pieces(
    flat: Tensor, shape: tuple[int, ...], owned: FlatRange, places: Sequence[Rectangle]
) -> Iterator[Piece]:
    """Cut a flat range of a local tensor into blocks of the global one."""
    for block in owned.rectangles(shape):
        values = flat[block.local].view(block.shape)
        for place in places:
            origin = [s.start for s in place.local]
            common = overlap(block.offset, block.shape, origin, place.shape)
            if common is not None:
                start, extents = common
                inside = zip(start, extents, block.offset, strict=True)
                window = tuple(slice(s - o, s - o + n) for s, n, o in inside)
                moved = zip(start, origin, place.offset, strict=True)
                yield Piece(values[window], tuple(s - a + b for s, a, b in moved))


def stored_key(name: str, param: Tensor, stacking: Stacking) -> str:
    """Return the key under which a parameter of the model is stored."""
    return address(global_name(name, param), stacking.layers_differ).key


def sharded_state(
    tensors: Iterable[tuple[str, Tensor, Tensor]],
    mesh: ParallelState,
    stacking: Stacking,
    owned: Mapping[str, FlatRange] | None = None,
) -> dict[str, Sharded]:
    """Describe a set of per-parameter tensors under their stored keys.

    Args:
        tensors: (module name, values, parameter that says how they are split).
        mesh: The process mesh.
        stacking: Which tensors are stored together.
        owned: Which elements a flat tensor holds, by module name.

    Returns:
        Stored key -> blocks, the layers of a stack and the experts of a layer joined.

    Raises:
        CheckpointError: Layers of one stack have different shapes.
    """
    parts: dict[str, list[Sharded]] = {}
    for name, tensor, param in tensors:
        place = address(global_name(name, param), stacking.layers_differ)
        axis = shard_axis(param, mesh)
        shard = shard_like(tensor, param, place.key, axis, (owned or {}).get(name))
        if place.expert is not None:
            shard = stack(shard, place.expert, stacking.num_experts)
        if place.layer is not None:
            shard = stack(shard, place.layer, stacking.num_layers)
        parts.setdefault(place.key, []).append(shard)
    return {key: merge(key, shards) for key, shards in parts.items()}


def model_state(
    model: nn.Module,
    mesh: ParallelState,
    stacking: Stacking,
    in_fp8: Mapping[str, tuple[Tensor, FlatRange]] | None = None,
) -> dict[str, Sharded]:
    """Describe the parameters and persistent buffers of a bare model. Tied parameters occur once.

    A buffer is the same on every rank that has it.

    Args:
        model: The model.
        mesh: The process mesh.
        stacking: Which tensors are stored together.
        in_fp8: Of weights that rest in FP8, so that their parameters have no numbers: what this
            rank owns of each, flat, and which elements that is. Other ranks have the rest.
    """
    owned = {name: own for name, (_, own) in (in_fp8 or {}).items()}
    named: list[tuple[str, Tensor, Tensor]] = []
    for name, param in model.named_parameters():
        if in_fp8 is not None and name in in_fp8:
            named.append((name, in_fp8[name][0], param))
        elif in_fp8 is None or not hasattr(param, "fp8_weight"):
            named.append((name, param, param))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                named.append((name, buffer, buffer))
    return sharded_state(named, mesh, stacking, owned)


def optimizer_state(
    named_state: Iterable[tuple[str, Mapping[str, Tensor]]],
    model: nn.Module,
    mesh: ParallelState,
    stacking: Stacking,
    owned: Mapping[str, FlatRange] | None = None,
) -> dict[str, Sharded]:
    """Describe the optimizer's tensors.

    Args:
        named_state: (parameter name, kind -> tensor shaped like the local parameter).
        model: The bare model, for the layout of each parameter.
        mesh: The process mesh.
        stacking: Which tensors are stored together.
        owned: Which elements of a parameter its tensors hold, by name; they are flat then.
    """
    params = dict(model.named_parameters())
    by_kind: dict[str, list[tuple[str, Tensor, Tensor]]] = {}
    for name, tensors in named_state:
        for kind, tensor in tensors.items():
            by_kind.setdefault(kind, []).append((name, tensor, params[name]))
    return {
        optimizer_key(kind, key): shard
        for kind, tensors_of_kind in by_kind.items()
        for key, shard in sharded_state(tensors_of_kind, mesh, stacking, owned).items()
    }


# Modules for which Megatron-Core looks up Transformer Engine's state, empty or not.
_WITH_EXTRA_STATE = re.compile(
    r"^(?P<module>.*\.layers\.(\d+\.)?(self_attention\.linear_(qkv|proj)|"
    r"mlp\.(shared_experts\.|experts\.experts\.)?linear_fc[12]))\.weight$"
)


def extra_state_keys(model: Mapping[str, Sharded]) -> list[str]:
    """List the entries without content that Megatron-Core expects beside a model's tensors.

    Args:
        model: What ``model_state`` returned.

    Returns:
        One key for each linear layer and attention core among the blocks of ``model``.
    """
    keys = []
    for key, shard in model.items():
        match = _WITH_EXTRA_STATE.match(key)
        if match is None:
            continue
        modules = [match["module"]]
        if modules[0].endswith("linear_qkv"):
            modules.append(modules[0].replace("linear_qkv", "core_attention"))
        stacked = len(shard.size()) - 2  # a weight alone is a matrix
        rows = sorted({piece.offset[:stacked] or (0,) for piece in shard.pieces})
        extents = tuple(shard.size())[:stacked] or (1,)
        keys += [f"{m}._extra_state/shard_{_dotted(r)}_{_dotted(extents)}" for m in modules
                 for r in rows]  # fmt: skip
    return keys


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(str(n) for n in numbers)


def is_model_key(key: str) -> bool:
    """Whether a stored tensor belongs to the model rather than to the optimizer or to FP8."""
    return not (_NOT_MODEL.match(key) or key.startswith(FP8_PREFIX) or "/" in key)


def is_expert_key(key: str) -> bool:
    """Whether a stored tensor, or optimizer state of one, belongs to experts."""
    return ".experts.experts." in key


@dataclass(frozen=True)
class Mismatch:
    """How the tensors a run needs differ from those a checkpoint holds."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def describe(self) -> str:
        """List the differences, one kind after the other, the first few of each."""
        kinds = {
            "missing from the checkpoint": self.missing,
            "in the checkpoint but not in this model": self.unexpected,
            "of another shape": self.shapes,
        }
        return "; ".join(f"{kind}: {_first(names)}" for kind, names in kinds.items() if names)


def _first(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def compare(
    wanted: Mapping[str, tuple[tuple[int, ...], int | None]],
    stored: Mapping[str, tuple[int, ...]],
) -> Mismatch:
    """Compare keys and global shapes.

    Args:
        wanted: Key -> (shape, padded axis or None) of what the run needs, over all its ranks.
        stored: Key -> shape of the tensors of the same kind in the checkpoint.
    """
    shapes = []
    for key in sorted(set(wanted) & set(stored)):
        need, axis = list(wanted[key][0]), wanted[key][1]
        have = list(stored[key])
        if axis is not None and len(need) == len(have):
            need[axis] = have[axis]
        if need != have:
            shapes.append(f"{key} is {tuple(have)} there and {tuple(wanted[key][0])} here")
    return Mismatch(
        tuple(sorted(set(wanted) - set(stored))),
        tuple(sorted(set(stored) - set(wanted))),
        tuple(shapes),
    )
