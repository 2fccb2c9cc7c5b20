"""The linear layers of a rank's experts, each a group of matrices that run together.

The layers do not communicate: the token dispatcher does. Each matrix is split over expert
tensor-parallel ranks, so the input of a column layer is the same on all of them, and the output of
a row layer is a partial sum.

Shape legend: T tokens sent to this rank's experts, sorted by expert; t expert tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.fp8.grouped import NOTHING, Arrivals, grouped_linear
from megatron.core.fp8.precision import LinearPrecision, group_meta
from megatron.core.shards import InitMethod, init_parameter, mark_expert, mark_sharded
from megatron.core.tensor_parallel.layers import equal_share

if TYPE_CHECKING:
    from megatron.core.build import Build


def expert_numbers(num_local_experts: int, build: Build) -> range:
    """Numbers, in the whole model, of the experts that this rank holds."""
    first = build.mesh.ep.rank * num_local_experts
    return range(first, first + num_local_experts)


def expert_precisions(num_local_experts: int, build: Build) -> list[LinearPrecision]:
    """Precision and scales of each expert, under a path that ends in its number."""
    return [
        build.fp8.for_linear(build.at(str(number)).path, is_expert=True)
        for number in expert_numbers(num_local_experts, build)
    ]


def prepare_expert_weight(
    weight: nn.Parameter,
    number: int,
    *,
    build: Build,
    init_method: InitMethod,
    dim: int,
    stride: int = 1,
) -> None:
    """Mark and initialise one expert's part of its matrix.

    Args:
        weight: `[out/t, in]` or `[out, in/t]`.
        number: The expert's number in the whole model.
        build: Configuration, mesh, path of the group.
        init_method: Fills a tensor in place.
        dim: Dimension that is split over expert tensor-parallel ranks.
        stride: Number of equal sections stacked along it, each split on its own.
    """
    mark_expert(weight, number)
    mark_sharded(weight, dim, stride)
    path = f"{build.at(str(number)).path}.weight"
    init_parameter(weight, build.mesh.etp, init_method, build.config.seed, path)


class _GroupedLinear(nn.Module):
    """One matrix for each local expert, in parameters `weight0`, `weight1`, ..."""

    def __init__(
        self,
        num_local_experts: int,
        shape: tuple[int, int],
        *,
        build: Build,
        init_method: InitMethod,
        dim: int,
        stride: int = 1,
    ) -> None:
        super().__init__()
        self.num_local_experts, self.path = num_local_experts, build.path
        self.axis, self._later = build.mesh.etp, build.weight_grads
        self.precisions = expert_precisions(num_local_experts, build)
        for i, number in enumerate(expert_numbers(num_local_experts, build)):
            weight = nn.Parameter(torch.empty(shape, dtype=build.params_dtype, device=build.device))
            prepare_expert_weight(
                weight, number, build=build, init_method=init_method, dim=dim, stride=stride
            )
            self.register_parameter(f"weight{i}", weight)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The experts' matrices, in order."""
        return [self.get_parameter(f"weight{i}") for i in range(self.num_local_experts)]

    @property
    def fp8_meta(self) -> Any:
        """Scales and amax histories of all experts, under Transformer Engine's keys."""
        return group_meta(self.precisions)

    def forward(
        self, x: torch.Tensor, tokens_per_expert: Sequence[int], arrivals: Arrivals = NOTHING
    ) -> torch.Tensor:
        """Apply each expert to its rows.

        Args:
            x: `[T, in]` (`[T, in/t]` in a row layer), rows sorted by local expert.
            tokens_per_expert: Rows of each local expert; T and any count may be 0.
            arrivals: `x`, and later the gradient of the result, as they came in FP8.

        Returns:
            `[T, out/t]`, or in a row layer `[T, out]`, a partial sum over expert tensor-parallel
            ranks.

        Raises:
            MegatronError: The counts do not fit the experts or the rows.
        """
        return grouped_linear(
            x, self.weights, self.precisions, tokens_per_expert, self._later, arrivals
        )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        rows, columns = self.get_parameter("weight0").shape
        return f"{self.num_local_experts} x ({columns}, {rows}), etp={self.axis.size}"


class ColumnParallelGroupedLinear(_GroupedLinear):
    """`y = x W^T` for each expert, with the output features split over the ranks.

    Args:
        num_local_experts: Experts of this rank.
        in_features: Width of the input.
        out_features: Global width of the output.
        build: Configuration, mesh, precision, path.
        init_method: Fills a tensor in place.
        partition_stride: Number of equal sections stacked in the output, each split on its own.

    Raises:
        MeshError: If the output does not split evenly.
    """

    def __init__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        init_method: InitMethod,
        partition_stride: int = 1,
    ) -> None:
        parts = build.mesh.etp.size * partition_stride
        share = equal_share(build.path, "output features", out_features, parts)
        super().__init__(
            num_local_experts,
            (share * partition_stride, in_features),
            build=build,
            init_method=init_method,
            dim=0,
            stride=partition_stride,
        )


class RowParallelGroupedLinear(_GroupedLinear):
    """`y = x W^T` for each expert, with the input features split over the ranks.

    Args:
        num_local_experts: Experts of this rank.
        in_features: Global width of the input.
        out_features: Width of the output.
        build: Configuration, mesh, precision, path.
        init_method: Fills a tensor in place.

    Raises:
        MeshError: If the input does not split evenly.
    """

    def __init__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        init_method: InitMethod,
    ) -> None:
        share = equal_share(build.path, "input features", in_features, build.mesh.etp.size)
        super().__init__(
            num_local_experts, (out_features, share), build=build, init_method=init_method, dim=1
        )
