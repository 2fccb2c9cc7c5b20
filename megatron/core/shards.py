"""Which part of a global tensor a rank holds, and how to initialise that part.

A parameter says so itself, with Megatron's attribute names:

* `tensor_model_parallel`: it is split over the ranks of its tensor-parallel axis,
* `partition_dim`: along this dimension,
* `partition_stride`: as so many equal sections stacked along it, each split on its own. The first
  MLP layer with gate and up projections has 2: a rank holds `[gate_r; up_r]` of `[gate; up]`.
* `sequence_parallel`: every rank holds all of it, but sees only a part of the sequence, so that its
  gradient is a partial sum.
* `allreduce` false: it belongs to an expert. Its copies are on the `edp` ranks instead of the
  data-parallel ones, and what splits it is the `etp` axis; see `shard_axis`.
* `expert_index`: the number of that expert among all experts of the layer.
* `shared`: another parameter stands for this copy (a tied embedding on a second pipeline stage).

A parameter without attributes is replicated, gradient included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron.core.errors import MeshError, complaint
from megatron.core.mesh import Axis, ParallelState
from megatron.core.tensor_parallel.mappings import all_gather
from megatron.core.tensor_parallel.random import derive_seed

InitMethod = Callable[[torch.Tensor], torch.Tensor]

_LOCAL_NUMBER = re.compile(r"\d+$")
_BLOCK_ELEMENTS = 1 << 20  # rows are drawn in blocks of about this many elements


@dataclass(frozen=True)
class Rectangle:
    """One block that a rank's local tensor and the global tensor have in common.

    Attributes:
        local: Slices of the local tensor.
        offset: Where the block starts in the global tensor.
        shape: Its extents.
    """

    local: tuple[slice, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def window(self) -> tuple[slice, ...]:
        """Slices of the global tensor."""
        return tuple(
            slice(start, start + extent)
            for start, extent in zip(self.offset, self.shape, strict=True)
        )


@dataclass(frozen=True)
class FlatRange:
    """Elements `start` to `stop` of a rank's local tensor, counted row by row."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements."""
        return self.stop - self.start

    def rectangles(self, shape: tuple[int, ...]) -> list[Rectangle]:
        """Cut the range into blocks of a tensor of `shape`.

        A range may begin and end in the middle of a row: of a matrix it is at most the end of one
        row, whole rows, and the beginning of another.

        Returns:
            Blocks in order. `local` is a slice of the range itself, whose elements have the block's
            shape when viewed so; `offset` is the place in the tensor of `shape`.
        """
        return [
            Rectangle((slice(begin, begin + math.prod(extents)),), offset, extents)
            for begin, offset, extents in _blocks(self.start, self.stop, shape, 0)
        ]


def _blocks(
    start: int, stop: int, shape: tuple[int, ...], begin: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (position in the range, offset, extents) of the blocks of a flat range."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield begin, (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # inside one row
        edges = [(last_whole, start, stop)]
    else:
        edges = [(first_whole - 1, start, first_whole * row), (last_whole, last_whole * row, stop)]
    for number, (index, low, high) in enumerate(edges):
        if number == 1 and last_whole > first_whole:
            extents = (last_whole - first_whole, *shape[1:])
            yield begin + first_whole * row - start, (first_whole, *(0,) * len(shape[1:])), extents
        base = index * row
        for place, offset, extents in _blocks(
            low - base, high - base, shape[1:], begin + low - start
        ):
            yield place, (index, *offset), (1, *extents)


def mark_sharded(param: torch.Tensor, dim: int, stride: int = 1) -> None:
    """Declare that `param` is this rank's part of a tensor split along `dim`."""
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    param.partition_dim = dim  # type: ignore[attr-defined]
    param.partition_stride = stride  # type: ignore[attr-defined]


def is_sharded(param: torch.Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of this parameter."""
    return bool(getattr(param, "tensor_model_parallel", False))


def is_expert(param: torch.Tensor) -> bool:
    """Whether this parameter belongs to one expert of a mixture-of-experts layer."""
    return not getattr(param, "allreduce", True)


def mark_expert(param: torch.Tensor, expert_index: int) -> None:
    """Declare that `param` belongs to expert `expert_index`, counted over all ranks."""
    param.allreduce = False  # type: ignore[attr-defined]
    param.expert_index = expert_index  # type: ignore[attr-defined]


def shard_axis(param: torch.Tensor, mesh: ParallelState) -> Axis:
    """The ranks that share one copy of `param`, and among which it is split if it is sharded."""
    return mesh.etp if is_expert(param) else mesh.tp


def replica_axis(param: torch.Tensor, mesh: ParallelState) -> Axis:
    """The ranks that hold copies of this rank's part of `param` and see other tokens."""
    return mesh.edp if is_expert(param) else mesh.dp_cp


def global_name(name: str, param: torch.Tensor) -> str:
    """The name of `param` that does not depend on which rank holds it.

    Experts are numbered on each rank from 0: `...experts.linear_fc1.weight1` is expert 5 of the
    layer if its `expert_index` says so, and is then called `...experts.linear_fc1.weight5`.

    Raises:
        MeshError: The name of an expert's parameter does not end in a number.
    """
    index = getattr(param, "expert_index", None)
    if index is None:
        return name
    if not _LOCAL_NUMBER.search(name):
        raise MeshError(
            complaint(
                "expert_index",
                f"{index} on {name}",
                "The name of an expert's parameter ends in the expert's number on its rank",
                "Call it weight0, weight1, ...",
            )
        )
    return _LOCAL_NUMBER.sub(str(index), name)


def is_counted_here(param: torch.Tensor, axis: Axis) -> bool:
    """Whether this rank counts `param` in a sum over all parameters (gradient norm, zeros).

    Each global element must be counted once: a replicated parameter on the first rank of the axis,
    a tied copy (attribute `shared`) nowhere.

    Args:
        param: The parameter.
        axis: Its `shard_axis`.
    """
    if getattr(param, "shared", False):
        return False
    return is_sharded(param) or axis.rank == 0


def global_shape(param: torch.Tensor, tp_size: int) -> tuple[int, ...]:
    """Shape of the whole parameter."""
    shape = list(param.shape)
    if is_sharded(param):
        shape[_dim_of(param)] *= tp_size
    return tuple(shape)


def local_rectangles(param: torch.Tensor, tp_axis: Axis) -> list[Rectangle]:
    """Where the parts of this rank's `param` lie in the global tensor.

    One rectangle, or `partition_stride` of them; together they cover the local tensor.
    """
    return _rectangles(param, tp_axis.rank, tp_axis.size)


def gather_full(tensor: torch.Tensor, param: torch.Tensor, tp_axis: Axis) -> torch.Tensor:
    """The whole of a tensor shaped like a parameter (its value, gradient or optimizer state).

    Collective along `tp_axis` if the parameter is sharded; `tensor` itself otherwise.

    Args:
        tensor: This rank's part, with the shape of `param`.
        param: The parameter whose attributes describe the layout.
        tp_axis: The axis it is sharded along.
    """
    if not is_sharded(param) or tp_axis.size == 1:
        return tensor
    parts = all_gather(tensor.detach().unsqueeze(0), tp_axis)
    shape = global_shape(param, tp_axis.size)
    full = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    for rank in range(tp_axis.size):
        for rectangle in _rectangles(param, rank, tp_axis.size):
            full[rectangle.window] = parts[rank][rectangle.local]
    return full


def take_local(full: torch.Tensor, param: torch.Tensor, tp_rank: int, tp_size: int) -> torch.Tensor:
    """The part of a whole tensor that rank `tp_rank` of `tp_size` holds. The inverse of gathering.

    Raises:
        MeshError: If `full` has not the global shape of `param`.
    """
    expected = global_shape(param, tp_size)
    if tuple(full.shape) != expected:
        raise MeshError(
            complaint(
                "tensor to split",
                tuple(full.shape),
                f"The parameter's global shape is {expected}",
                "Pass the whole tensor, with the vocabulary padded as in this run",
            )
        )
    if not is_sharded(param):
        return full
    local = torch.empty(tuple(param.shape), dtype=full.dtype, device=full.device)
    for rectangle in _rectangles(param, tp_rank, tp_size):
        local[rectangle.local] = full[rectangle.window]
    return local


def init_parameter(
    param: torch.Tensor,
    tp_axis: Axis,
    init_method: InitMethod,
    seed: int,
    path: str,
    real_rows: int | None = None,
) -> None:
    """Fill `param` with this rank's part of a global tensor that depends on (seed, path) only.

    The global tensor is drawn on the CPU in fp32, in blocks of rows with a seed each, so every
    tensor-parallel size and every device starts from the same weights, and no rank holds all of it.

    Args:
        param: The parameter, on any device but `meta`, in any floating type.
        tp_axis: The axis it is sharded along.
        init_method: Fills a tensor in place, element by element independently of position. It draws
            from torch's default CPU generator, which is left as it was.
        seed: The run's seed.
        path: The parameter's unique name.
        real_rows: Number of leading global rows to draw; later ones (padding of the vocabulary,
            which varies with the layout) become zero. Default: all.
    """
    if param.device.type == "meta":
        return
    rectangles = local_rectangles(param, tp_axis)
    rows = global_shape(param, tp_axis.size)[0]
    drawn = rows if real_rows is None else min(real_rows, rows)
    row_shape = global_shape(param, tp_axis.size)[1:]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if drawn < rows:
            param.zero_()
        for index, block_rows in _row_blocks(drawn, row_shape):
            overlaps = [r for r in rectangles if _overlap(r, block_rows)]
            if not overlaps:
                continue
            torch.default_generator.manual_seed(derive_seed("init", seed, path, index))
            block = torch.empty((len(block_rows), *row_shape), dtype=torch.float32)
            init_method(block)
            for rectangle in overlaps:
                common = _overlap(rectangle, block_rows)
                to_local = rectangle.local[0].start - rectangle.offset[0]
                target = param[common.start + to_local : common.stop + to_local]
                source = block[common.start - block_rows.start : common.stop - block_rows.start]
                every_row = slice(None)
                target[(every_row, *rectangle.local[1:])] = source[
                    (every_row, *rectangle.window[1:])
                ].to(device=param.device, dtype=param.dtype)


def _row_blocks(rows: int, row_shape: tuple[int, ...]) -> Iterator[tuple[int, range]]:
    row_elements = 1
    for extent in row_shape:
        row_elements *= extent
    step = max(1, _BLOCK_ELEMENTS // row_elements)
    for index, start in enumerate(range(0, rows, step)):
        yield index, range(start, min(start + step, rows))


def _overlap(rectangle: Rectangle, rows: range) -> range:
    first = max(rectangle.offset[0], rows.start)
    return range(first, max(first, min(rectangle.offset[0] + rectangle.shape[0], rows.stop)))


def _dim_of(param: torch.Tensor) -> int:
    dim: int = param.partition_dim  # type: ignore[attr-defined]
    return dim % param.dim()


def _rectangles(param: torch.Tensor, tp_rank: int, tp_size: int) -> list[Rectangle]:
    shape = tuple(param.shape)
    if not is_sharded(param) or tp_size == 1:
        return [Rectangle(tuple(slice(0, n) for n in shape), (0,) * len(shape), shape)]
    dim, stride = _dim_of(param), getattr(param, "partition_stride", 1)
    if shape[dim] % stride:
        raise MeshError(
            complaint(
                "partition_stride",
                stride,
                f"Dimension {dim} of the local shape {shape} is not that many equal sections",
                "Choose sizes whose sections split evenly over tensor-parallel ranks",
            )
        )
    section = shape[dim] // stride
    rectangles = []
    for index in range(stride):
        local = [slice(0, n) for n in shape]
        local[dim] = slice(index * section, (index + 1) * section)
        offset = [0] * len(shape)
        offset[dim] = (index * tp_size + tp_rank) * section
        extents = (*shape[:dim], section, *shape[dim + 1 :])
        rectangles.append(Rectangle(tuple(local), tuple(offset), extents))
    return rectangles
