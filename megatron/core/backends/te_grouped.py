"""The linear layers of a rank's experts on Transformer Engine's `GroupedLinear`.

Left alone, that module lets experts of the same local number share scales over all ranks that its
recipe reduces over, although expert-parallel ranks hold different experts. Here its quantizers
work on columns of the `AmaxBook` of the experts, which is reduced over the ranks that hold the same
expert; Transformer Engine reduces nothing.

Shape legend: T tokens sent to this rank's experts, sorted by expert; t expert tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.backends import te_calls
from megatron.core.backends.te_layers import TeModule
from megatron.core.backends.te_recipes import (
    TePrecision,
    check_widths,
    row_alignment,
    te_precision,
    te_recipe,
)
from megatron.core.backends.te_scaling import GroupBinding, fp8_region
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8.grouped import NOTHING, Arrivals, check_counts, grouped_linear
from megatron.core.fp8.recipe import Float8CurrentScaling
from megatron.core.mesh import Axis
from megatron.core.shards import InitMethod
from megatron.core.tensor_parallel.grouped import expert_numbers, prepare_expert_weight
from megatron.core.tensor_parallel.layers import equal_share

if TYPE_CHECKING:
    from megatron.core.build import Build


class _TeGroupedLinear(TeModule):
    """What both kinds share: precision, weight cache, gradient accumulation, padding."""

    num_gemms: int
    fuse_wgrad_accumulation: bool
    init_fp8_metadata: Any
    _fp8_workspaces: Any

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
        arguments = te_calls.grouped_linear_arguments(
            params_dtype=build.params_dtype, device=build.device
        )
        rows, columns = shape
        super().__init__(num_local_experts, columns, rows, **arguments)
        self.num_local_experts, self.path = num_local_experts, build.path
        self.axis = build.mesh.etp
        numbers = expert_numbers(num_local_experts, build)
        self.precisions = [self._precision(build.at(str(number))) for number in numbers]
        check_widths(self.precisions[0], self.weights[0])
        for number, weight in zip(numbers, self.weights, strict=True):
            prepare_expert_weight(
                weight, number, build=build, init_method=init_method, dim=dim, stride=stride
            )
            # Should the library hand autograd a dummy gradient after all, let it be zero.
            weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        self._weight_key: tuple[Any, ...] = ()
        slots = tuple(p.slots for p in self.precisions if p.slots is not None)
        self._binding = GroupBinding(slots) if slots else None

    def _precision(self, build: Build) -> TePrecision:
        precision = te_precision(build, self.library, is_expert=True)
        version, oldest = self.library.version, te_calls.GROUPED_CURRENT_SCALING
        if isinstance(precision.decision.recipe, Float8CurrentScaling) and version < oldest:
            raise PrecisionError(
                complaint(
                    precision.decision.rule or "--fp8-recipe",
                    "tensorwise with experts",
                    f"Transformer Engine {version[0]}.{version[1]} is installed, whose grouped"
                    " layers take delayed scaling only",
                    f"Install release {oldest[0]}.{oldest[1]} or later, or use --fp8-recipe"
                    " delayed or --transformer-impl native",
                )
            )
        return precision

    @property
    def weights(self) -> list[nn.Parameter]:
        """The experts' matrices, in order."""
        return [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]

    def forward(
        self, x: torch.Tensor, tokens_per_expert: Sequence[int], arrivals: Arrivals = NOTHING
    ) -> torch.Tensor:
        """Apply each expert to its rows.

        Args:
            x: `[T, in]` (`[T, in/t]` in a row layer), rows sorted by local expert.
            tokens_per_expert: Rows of each local expert; T and any count may be 0.
            arrivals: Not used: the library quantizes the values, which gives the same.

        Returns:
            `[T, out/t]`, or in a row layer `[T, out]`, a partial sum over expert tensor-parallel
            ranks.

        Raises:
            MegatronError: The counts do not fit the experts or the rows.
        """
        del arrivals
        counts = [int(count) for count in tokens_per_expert]
        check_counts(counts, self.num_gemms, x)
        weights: list[Any] = self.weights
        if not x.shape[0]:
            # Nothing to multiply; every weight still takes part in the backward pass.
            return grouped_linear(x, weights, self.precisions, counts)
        self.fuse_wgrad_accumulation = all(
            getattr(weight, "main_grad", None) is not None for weight in weights
        )
        for weight in weights:
            # With this attribute the library hands autograd a dummy gradient of arbitrary
            # contents, which the data-parallel hook would add. Without it autograd gets none.
            if hasattr(weight, "grad_added_to_main_grad"):
                del weight.grad_added_to_main_grad
        x = x.to(weights[0].dtype)
        active = self.precisions[0].active
        multiple = row_alignment(self.precisions[0], grouped=True)
        places = row_places(counts, multiple) if active else None
        if places is not None:
            places = places.to(x.device)
            padded = [_rounded_up(count, multiple) for count in counts]
            x = x.new_zeros(sum(padded), x.shape[1]).index_copy(0, places, x)
        with self._fp8(counts):
            # As in the dense layers: the cached FP8 weights serve until _drop_stale_weights.
            y: torch.Tensor = super().forward(
                x, counts if places is None else padded, is_first_microbatch=False
            )
        return y if places is None else y.index_select(0, places)

    @contextmanager
    def _fp8(self, counts: list[int]) -> Iterator[None]:
        precision = self.precisions[0]
        recipe = precision.decision.recipe
        if recipe is None or not precision.active:
            yield
            return
        with fp8_region(
            self.library, te_recipe(self.library, recipe, Axis.single("expert amax")), None
        ):
            if self._binding is None:
                self._drop_stale_weights()
                yield
                return
            self.init_fp8_metadata(num_gemms=self.num_gemms)
            recording = precision.state.recording
            self._binding.refresh(self, recording)
            if self._drop_stale_weights():
                self._binding.forget_weights()
            yield
            if recording:
                self._binding.record_weights([count > 0 for count in counts])

    def _drop_stale_weights(self) -> bool:
        """Forget cached FP8 weights if weights or scales changed since; returns whether it did."""
        precision = self.precisions[0]
        generation = precision.slots.book.generation_in_use if precision.slots else 0
        versions = [(weight.data_ptr(), weight._version) for weight in self.weights]
        key = (precision.state.generation, generation, *versions)
        if self._weight_key == key:
            return False
        self._fp8_workspaces.clear()
        self._weight_key = key
        return True

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        rows, columns = self.get_parameter("weight0").shape
        return f"{self.num_gemms} x ({columns}, {rows}), etp={self.axis.size}"


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def row_places(counts: Sequence[int], multiple: int) -> torch.Tensor | None:
    """Where each row goes when every expert's rows are padded at their end.

    Args:
        counts: Rows of each expert.
        multiple: What their number has to be a multiple of.

    Returns:
        int64 `[T]`, or None if nothing has to be padded.
    """
    paddings = [-count % multiple for count in counts]
    if not any(paddings):
        return None
    rows = torch.tensor(list(counts))
    shifts = torch.tensor([0, *paddings[:-1]]).cumsum(0)
    return torch.arange(sum(counts)) + shifts.repeat_interleave(rows)


class TeColumnParallelGroupedLinear(_TeGroupedLinear):
    """`y = x W^T` for each expert, with the output features split over the ranks.

    Arguments are those of the native layer: `ColumnParallelGroupedLinear` in
    `tensor_parallel.grouped`.
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


class TeRowParallelGroupedLinear(_TeGroupedLinear):
    """`y = x W^T` for each expert, with the input features split over the ranks.

    Arguments are those of the native layer: `RowParallelGroupedLinear` in
    `tensor_parallel.grouped`.
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
