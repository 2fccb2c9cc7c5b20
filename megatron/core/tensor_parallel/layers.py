"""Linear layers and the embedding, sharded over tensor-parallel ranks.

A linear layer multiplies through `core.fp8.linear`, which knows precisions and no mesh; the layers
here know the mesh and no number format. Every rank holds its part of the same global weights,
whatever the tensor-parallel size.

Shape legend: s sequence, b microbatch, h hidden, v padded vocabulary, t tensor-parallel size.
With sequence parallelism the input of a column-parallel layer and the output of a row-parallel
layer are sequence shards, [s/t, b, h].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.errors import DataError, MeshError, complaint
from megatron.core.fp8.linear import linear
from megatron.core.fp8.norm_cast import norm_and_cast
from megatron.core.fp8.tensor import QuantizedTensor
from megatron.core.mesh import Axis
from megatron.core.shards import InitMethod, init_parameter, mark_sharded
from megatron.core.tensor_parallel.mappings import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_along_first_dim,
    scatter_to_region,
)
from megatron.core.tensor_parallel.norm_functions import layer_norm, rms_norm
from megatron.core.tensor_parallel.overlap import transfers_of

if TYPE_CHECKING:
    from megatron.core.build import Build


class _ShardedLinear(nn.Module):
    """What the linear layers share: mesh axis, precision, parameters.

    Expert layers are split over `etp` and do not communicate: their dispatcher does.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        build: Build,
        skip_bias_add: bool,
        is_expert: bool,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.skip_bias_add, self.is_expert = skip_bias_add, is_expert
        self.path = build.path
        self.axis = Axis.single("etp") if is_expert else build.mesh.tp
        self.sequence_parallel = build.config.sequence_parallel and self.axis.size > 1
        self.precision = build.fp8.for_linear(build.path, is_expert=is_expert)
        self._transfers, self._later = transfers_of(build.config), build.weight_grads

    @property
    def fp8_meta(self) -> Any:
        """Scales and amax histories of this layer, under Transformer Engine's keys."""
        return self.precision.fp8_meta

    def _multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        gather: Axis | None = None,
        scatter: Axis | None = None,
        row: QuantizedTensor | None = None,
    ) -> torch.Tensor:
        return linear(
            x,
            self.weight,
            bias,
            self.precision,
            gather=gather,
            scatter=scatter,
            transfers=self._transfers,
            later=self._later,
            row=row,
        )

    def _parameter(self, shape: tuple[int, ...], build: Build) -> nn.Parameter:
        param = nn.Parameter(torch.empty(shape, dtype=build.params_dtype, device=build.device))
        if self.is_expert:
            param.allreduce = False  # type: ignore[attr-defined]
        return param

    def _zeros(self, size: int, build: Build) -> nn.Parameter:
        param = self._parameter((size,), build)
        with torch.no_grad():
            param.zero_()
        return param

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        text = f"{self.in_features}, {self.out_features}, {self.axis.name}={self.axis.size}"
        return text + (", sequence_parallel" if self.sequence_parallel else "")


class ColumnParallelLinear(_ShardedLinear):
    """`y = x W^T + b` with the output features split over the ranks.

    Args:
        in_features: Width of the input.
        out_features: Global width of the output.
        build: Configuration, mesh, precision, path.
        init_method: Fills a tensor in place.
        bias: Whether there is a bias.
        skip_bias_add: Return the bias instead of adding it, for a consumer that fuses it.
        is_expert: Whether the layer belongs to one expert.
        gather_output: Return all features on every rank.
        partition_stride: Number of equal sections stacked in the output, each split on its own.

    Raises:
        MeshError: If the output does not split evenly.
    """

    bias: nn.Parameter | None

    def __init__(
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
    ) -> None:
        shard_axis = build.mesh.etp if is_expert else build.mesh.tp
        sections = shard_axis.size * partition_stride
        local_out = equal_share(build.path, "output features", out_features, sections)
        local_out *= partition_stride
        super().__init__(
            in_features,
            out_features,
            build=build,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
        )
        self.gather_output = gather_output
        self.precision.gradients_differ = True
        self.weight = self._parameter((local_out, in_features), build)
        mark_sharded(self.weight, 0, partition_stride)
        init_parameter(
            self.weight, shard_axis, init_method, build.config.seed, f"{build.path}.weight"
        )
        self.bias = self._zeros(local_out, build) if bias else None
        if self.bias is not None:
            mark_sharded(self.bias, 0, partition_stride)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer.

        Args:
            x: `[s, b, in]`, or `[s/t, b, in]` with sequence parallelism.

        Returns:
            `[s, b, out/t]` (`[s, b, out]` with `gather_output`), and the bias if it was skipped.
        """
        return self._apply_linear(x, None)

    def _apply_linear(
        self, x: torch.Tensor, row: QuantizedTensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The linear layer; `row` stands for the values of `x` if they are quantized already."""
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel:
            y = self._multiply(x, bias, gather=self.axis, row=row)
        else:
            y = self._multiply(copy_to_region(x, self.axis), bias, row=row)
        if self.gather_output:
            y = gather_from_region(y, self.axis)
        return y, self.bias if self.skip_bias_add else None


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm, then a column-parallel linear layer, in one module.

    With delayed scaling the norm's fp32 result is quantized directly, as a fused norm-and-cast
    kernel does; otherwise it is rounded to the parameters' type first.

    Arguments are those of `ColumnParallelLinear`.
    """

    layer_norm_bias: nn.Parameter | None

    def __init__(
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
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            build=build,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            gather_output=gather_output,
            partition_stride=partition_stride,
        )
        config = build.config
        self.eps, self.zero_centered = config.norm_epsilon, config.apply_layernorm_1p
        self.layer_norm_weight = self._zeros(in_features, build)
        if not self.zero_centered:
            with torch.no_grad():
                self.layer_norm_weight.fill_(1.0)
        with_shift = config.normalization == "LayerNorm"
        self.layer_norm_bias = self._zeros(in_features, build) if with_shift else None
        if self.sequence_parallel:
            _mark_partial_gradient(self.layer_norm_weight, self.layer_norm_bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply norm and layer; shapes as in `ColumnParallelLinear.forward`."""
        at_once = norm_and_cast(
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            zero_centered=self.zero_centered,
            precision=self.precision,
            axis=self.axis if self.sequence_parallel else None,
        )
        if at_once is not None:
            return self._apply_linear(at_once.stand_in, at_once.row)
        return super().forward(self.normalize(x))

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm alone, in the type in which the linear layer wants its input."""
        out_dtype = torch.float32 if self.precision.wants_fp32_norm else x.dtype
        if self.layer_norm_bias is None:
            return rms_norm(
                x,
                self.layer_norm_weight,
                self.eps,
                zero_centered=self.zero_centered,
                out_dtype=out_dtype,
            )
        return layer_norm(
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            zero_centered=self.zero_centered,
            out_dtype=out_dtype,
        )


class RowParallelLinear(_ShardedLinear):
    """`y = x W^T + b` with the input features split over the ranks.

    Args:
        in_features: Global width of the input.
        out_features: Width of the output.
        build: Configuration, mesh, precision, path.
        init_method: Fills a tensor in place.
        bias: Whether there is a bias; it is added after the ranks' products are summed.
        skip_bias_add: Return the bias instead of adding it.
        is_expert: Whether the layer belongs to one expert.
        input_is_parallel: Whether each rank passes its own features; if not, the layer takes
            them out of an input that all ranks share.

    Raises:
        MeshError: If the input does not split evenly.
    """

    bias: nn.Parameter | None

    def __init__(
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
    ) -> None:
        shard_axis = build.mesh.etp if is_expert else build.mesh.tp
        local_in = equal_share(build.path, "input features", in_features, shard_axis.size)
        super().__init__(
            in_features,
            out_features,
            build=build,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
        )
        self.input_is_parallel = input_is_parallel
        self.weight = self._parameter((out_features, local_in), build)
        mark_sharded(self.weight, 1)
        init_parameter(
            self.weight, shard_axis, init_method, build.config.seed, f"{build.path}.weight"
        )
        self.bias = self._zeros(out_features, build) if bias else None
        if self.sequence_parallel:
            _mark_partial_gradient(self.bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer.

        Args:
            x: `[s, b, in/t]` (`[s, b, in]` unless `input_is_parallel`).

        Returns:
            `[s, b, out]`, or `[s/t, b, out]` with sequence parallelism, and the bias if it was
            skipped.
        """
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.axis)
        alone = self.axis.size == 1 and not self.skip_bias_add
        bias = self.bias if alone else None
        y = self._multiply(x, bias, scatter=self.axis if self.sequence_parallel else None)
        if not self.sequence_parallel:
            y = reduce_from_region(y, self.axis)
        if self.bias is not None and not alone and not self.skip_bias_add:
            y = y + self.bias
        return y, self.bias if self.skip_bias_add else None


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary split over the ranks.

    Args:
        num_embeddings: Padded vocabulary size. Rows beyond `config.vocab_size` start at zero, so
            padding, which depends on the layout, changes no other row.
        embedding_dim: Width of the model.
        build: Configuration, mesh, path.
        init_method: Fills a tensor in place.
        reduce_scatter_embeddings: Return sequence-first, and with sequence parallelism only this
            rank's part of the sequence.

    Raises:
        MeshError: If the vocabulary does not split evenly.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        build: Build,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.axis = build.mesh.tp
        self.sequence_first = reduce_scatter_embeddings
        self.sequence_parallel = build.config.sequence_parallel and self.axis.size > 1
        local_v = equal_share(build.path, "vocabulary", num_embeddings, self.axis.size)
        self.first_row = self.axis.rank * local_v
        self.weight = nn.Parameter(
            torch.empty((local_v, embedding_dim), dtype=build.params_dtype, device=build.device)
        )
        mark_sharded(self.weight, 0)
        init_parameter(
            self.weight,
            self.axis,
            init_method,
            build.config.seed,
            f"{build.path}.weight",
            build.config.vocab_size,
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up `tokens [b, s]`.

        Returns:
            `[b, s, h]`; with `reduce_scatter_embeddings` `[s, b, h]`, or `[s/t, b, h]` with
            sequence parallelism.
        """
        if self.sequence_first:
            tokens = tokens.transpose(0, 1)
        _check_tokens(tokens, self.num_embeddings)
        rows = _find_rows(tokens, self.weight, self.first_row, self.axis.size > 1)
        if self.sequence_first and self.sequence_parallel:
            return reduce_scatter_along_first_dim(rows, self.axis)
        return reduce_from_region(rows, self.axis)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.axis.name}={self.axis.size}"


class _Lookup(torch.autograd.Function):
    """Rows of a table; zero where another rank holds the row.

    The gradient is summed in fp32, straight into `weight.main_grad` where there is one: torch's own
    adds repeated tokens in bf16 and makes a dense table for every microbatch.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, first_row: int, sharded: bool
    ) -> torch.Tensor:
        here = None
        index = tokens
        if sharded:
            local = tokens - first_row
            here = ((local >= 0) & (local < weight.shape[0])).unsqueeze(-1)
            index = local * here.squeeze(-1)
        ctx.save_for_backward(index, here)
        ctx.weight = weight
        rows = torch.nn.functional.embedding(index, weight)
        return rows if here is None else rows.masked_fill_(~here, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        index, here = ctx.saved_tensors
        weight = ctx.weight
        main_grad = getattr(weight, "main_grad", None)
        total = main_grad
        if total is None:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        addend = grad.to(total.dtype) if here is None else grad.to(total.dtype) * here
        total.index_add_(0, index.reshape(-1), addend.reshape(-1, grad.shape[-1]))
        if main_grad is None:
            return None, total.to(weight.dtype), None, None
        weight.grad_added_to_main_grad = True
        return None, None, None, None


_find_rows: Callable[..., torch.Tensor] = _Lookup.apply


def _check_tokens(tokens: torch.Tensor, count: int) -> None:
    """Refuse ids outside the table; only on a CPU, since looking would stall an accelerator."""
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= count:
        raise DataError(
            complaint(
                "tokens",
                f"ids from {low} to {high}",
                f"The embedding has rows 0 to {count - 1}",
                "Check that the data was tokenized with this run's tokenizer",
            )
        )


def equal_share(path: str, what: str, extent: int, parts: int) -> int:
    """`extent / parts`.

    Raises:
        MeshError: It is not whole; names the layer.
    """
    if extent % parts:
        raise MeshError(
            complaint(
                f"{path} {what}",
                extent,
                f"They are split into {parts} equal parts over tensor-parallel ranks",
                f"Choose a --tensor-model-parallel-size or a width so that {parts} divides it",
            )
        )
    return extent // parts


def _mark_partial_gradient(*params: torch.Tensor | None) -> None:
    """Declare that each rank's gradient of a replicated parameter is a partial sum."""
    for param in params:
        if param is not None:
            param.sequence_parallel = True  # type: ignore[attr-defined]
