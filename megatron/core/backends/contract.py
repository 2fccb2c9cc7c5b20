"""What a backend supplies: the leaf classes of a model, and whether they can run here.

Everything above the leaves is the same for every backend. A leaf takes its sizes, `build` (all that
it needs from outside) and keyword options, and works on tensors of layout `[s, b, h]`.

Shape legend: s local sequence, b microbatch, h hidden, n local heads, g local key/value groups,
d head dimension, T tokens sent to this rank's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import nn

from megatron.core.shards import InitMethod

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.build import Build
    from megatron.core.mesh import ParallelState


class ColumnLinear(Protocol):
    """A linear layer whose output features are split over tensor-parallel ranks.

    `partition_stride=2` says that the output is two equal parts stacked on each other (gate and
    up of a gated MLP), each split over the ranks: a rank holds `[gate_r; up_r]` of the global
    `[gate; up]`.
    """

    def __call__(
        self,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        init_method: InitMethod,
        bias: bool,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        gather_output: bool = False,
        partition_stride: int = 1,
    ) -> nn.Module:
        """Construct it; `forward(x [s or s/tp, b, in]) -> (y [s, b, out/tp], bias or None)`."""


class RowLinear(Protocol):
    """A linear layer whose input features are split over tensor-parallel ranks."""

    def __call__(
        self,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        init_method: InitMethod,
        bias: bool,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        input_is_parallel: bool = True,
    ) -> nn.Module:
        """Construct it; `forward(x [s, b, in/tp]) -> (y [s or s/tp, b, out], bias or None)`."""


class ColumnGroupedLinear(Protocol):
    """One linear layer for each local expert, output features split over expert-TP ranks.

    Parameters are `weight0`, `weight1`, ..., each with the attributes `allreduce` (False) and
    `expert_index` (its number in the whole model). The layer does not communicate.
    """

    def __call__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        init_method: InitMethod,
        partition_stride: int = 1,
    ) -> nn.Module:
        """Construct it; `forward(x [T, in], tokens_per_expert, arrivals) -> y [T, out/etp]`.

        The rows of `x` are sorted by expert; T and every count may be 0. `arrivals`, optional, has
        `x` as it came in FP8. The module has `precisions`, one for each local expert.
        """


class RowGroupedLinear(Protocol):
    """As `ColumnGroupedLinear`, with the input features split over expert-TP ranks."""

    def __call__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        init_method: InitMethod,
    ) -> nn.Module:
        """Construct it; `forward(x [T, in/etp], tokens_per_expert, arrivals) -> y [T, out]`."""


class NormFactory(Protocol):
    """A LayerNorm or RMSNorm, as `build.config.normalization` says."""

    def __call__(
        self, size: int, *, build: Build, partial_gradient: bool | None = None
    ) -> nn.Module:
        """Construct it; `forward(x [..., size]) -> [..., size]`.

        Args:
            size: Length of the last dimension.
            build: Configuration, device, path.
            partial_gradient: Whether each tensor-parallel rank sees only a part of the input, so
                that the weight's gradient has to be summed over the ranks. None: under sequence
                parallelism.
        """


class CoreAttention(Protocol):
    """Causal softmax attention of one layer's local heads, without projections."""

    def __call__(self, *, build: Build, layer_number: int) -> nn.Module:
        """Construct it.

        `forward(query [s, b, n, d], key [s, b, g, d], value [s, b, g, d],
        document_starts [b, S] or None) -> [s, b, n * d]`.
        Position i of the whole sequence (S = s * cp) sees keys 0..i, or from
        `document_starts[b, i]` on. Head j reads group `j // (n // g)`. A context-parallel rank
        holds chunks r and 2 * cp - 1 - r of the 2 * cp of a sequence.

        Args:
            build: Configuration, mesh, RNG streams, path.
            layer_number: 1-based number of the layer in the whole model.
        """


@runtime_checkable
class Backend(Protocol):
    """The leaf classes of one implementation."""

    @property
    def name(self) -> str:
        """The name that `--transformer-impl` takes."""

    @property
    def column_parallel_linear(self) -> ColumnLinear:
        """Linear layer with split outputs."""

    @property
    def row_parallel_linear(self) -> RowLinear:
        """Linear layer with split inputs."""

    @property
    def layernorm_column_parallel_linear(self) -> ColumnLinear:
        """A norm followed by a linear layer with split outputs, in one module."""

    @property
    def column_parallel_grouped_linear(self) -> ColumnGroupedLinear:
        """Linear layers of a rank's experts with split outputs."""

    @property
    def row_parallel_grouped_linear(self) -> RowGroupedLinear:
        """Linear layers of a rank's experts with split inputs."""

    @property
    def norm(self) -> NormFactory:
        """Norm that stands alone."""

    @property
    def core_attention(self) -> CoreAttention:
        """Attention without its projections."""

    def start_tp_overlap(self, config: RunConfig, mesh: ParallelState) -> str:
        """Prepare for `--tp-comm-overlap`, before the first layer is built. Collective.

        Args:
            config: A configuration in which it is on.
            mesh: The process mesh.

        Returns:
            What is overlapped and how, in words.

        Raises:
            MegatronError: This backend cannot do what the configuration asks for.
        """

    def availability(self) -> tuple[bool, str]:
        """Whether the classes can run in this process, and the reason in words."""
