"""The layer contract on top of Transformer Engine's modules.

The classes here are mixed in front of the library's own when a layer is first built
(`te_classes.layer_classes`), so that parameters keep their names and no file needs the library to
be imported.

Shape legend: s local sequence, b microbatch, n local heads, g local key/value groups, d head
dimension, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.backends import te_calls, te_overlap
from megatron.core.backends.te_calls import Library
from megatron.core.backends.te_recipes import (
    check_widths,
    row_alignment,
    te_attention_precision,
    te_precision,
    te_recipe,
)
from megatron.core.backends.te_scaling import AttentionBinding, BookBinding, fp8_region
from megatron.core.errors import MegatronError, complaint
from megatron.core.fp8.attention import AttentionTensor
from megatron.core.mesh import Axis
from megatron.core.shards import InitMethod, init_parameter, mark_sharded
from megatron.core.tensor_parallel.layers import equal_share
from megatron.core.tensor_parallel.mappings import gather_from_region, scatter_to_region
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.context_parallel import comm_type

if TYPE_CHECKING:
    from megatron.core.build import Build

    _Mixin = nn.Module
else:
    _Mixin = object


class TeModule(_Mixin):
    """What every module on Transformer Engine has.

    The library pickles its FP8 state into an `_extra_state` entry of the state dict. The project
    keeps that state in the `AmaxBook` as plain tensors, so the entry is neither written nor read.
    """

    library: Library
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class _TeLinear(TeModule):
    """What the linear layers share: mesh axis, precision, weight cache, gradient accumulation.

    Expert layers are split over `etp` and do not communicate: their dispatcher does.
    """

    weight: nn.Parameter
    fuse_wgrad_accumulation: bool
    sequence_parallel: bool
    init_fp8_metadata: Any
    _fp8_workspaces: Any
    _parallel_mode: str

    def _arguments(
        self,
        build: Build,
        *,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        buffer: str | None,
    ) -> Any:
        """Keyword arguments of the library's constructor, for `super().__init__`."""
        axis = Axis.single("etp") if is_expert else build.mesh.tp
        overlap = te_overlap.layer_arguments(
            build.config, build.path, axis, by_column=self._parallel_mode == "column", buffer=buffer
        )
        return overlap | te_calls.linear_arguments(
            self.library,
            parallel_mode=None if is_expert else self._parallel_mode,
            tp_size=axis.size,
            tp_group=axis.group,
            sequence_parallel=build.config.sequence_parallel and axis.size > 1,
            fuse_wgrad_accumulation=False,
            bias=bias,
            return_bias=bias and skip_bias_add,
            params_dtype=build.params_dtype,
            device=build.device,
            name=build.path,
        )

    def _finish(
        self,
        build: Build,
        *,
        init_method: InitMethod,
        skip_bias_add: bool,
        is_expert: bool,
        partition_stride: int = 1,
    ) -> None:
        """The part of construction that needs the library's constructor to have run."""
        shard_axis = build.mesh.etp if is_expert else build.mesh.tp
        self.path, self.skip_bias_add = build.path, skip_bias_add
        self.axis = Axis.single("etp") if is_expert else build.mesh.tp
        sequence_parallel = build.config.sequence_parallel and self.axis.size > 1
        self.precision = te_precision(build, self.library, is_expert=is_expert)
        check_widths(self.precision, self.weight)
        self._amax_axis = build.mesh.amax
        self._weight_key: tuple[Any, ...] = ()
        slots = self.precision.slots
        self._binding = BookBinding(slots) if slots is not None else None
        by_column = self._parallel_mode == "column"
        mark_sharded(self.weight, 0 if by_column else 1, partition_stride)
        seed = build.config.seed
        init_parameter(self.weight, shard_axis, init_method, seed, f"{build.path}.weight")
        # Should the library hand autograd a dummy gradient after all (see _run), let it be zero.
        self.weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        bias = self._parameters.get("bias")
        if bias is not None and by_column:
            mark_sharded(bias, 0, partition_stride)
        for name in ("layer_norm_weight", "layer_norm_bias", *(() if by_column else ("bias",))):
            param: Any = self._parameters.get(name)
            if param is not None:
                param.sequence_parallel = sequence_parallel
        if is_expert:
            for param in self.parameters():
                param.allreduce = False

    def _run(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The library's forward in this layer's precision; `(y, bias or None)`."""
        weight: Any = self.weight
        self.fuse_wgrad_accumulation = getattr(weight, "main_grad", None) is not None
        if hasattr(weight, "grad_added_to_main_grad"):
            # With this attribute the library hands autograd a dummy gradient of arbitrary
            # contents, which the data-parallel hook would add. Without it autograd gets none.
            del weight.grad_added_to_main_grad
        x = x.to(weight.dtype)
        rows = x.numel() // x.shape[-1]
        pad = 0 if self.sequence_parallel else -rows % row_alignment(self.precision)
        lead = x.shape[:-1]
        if pad:
            # The last token again: it changes no maximum, and its gradient is zero.
            x = x.reshape(rows, -1)
            x = torch.cat([x, x[-1:].expand(pad, -1)])
        with self._fp8():
            # False means "use the cached FP8 weight, or make one". True would also overwrite
            # main_grad, and so lose gradients when a layer runs twice before a backward pass;
            # _drop_stale_weight does the refreshing instead.
            result = super().forward(x, is_first_microbatch=False)
        y, bias = result if isinstance(result, tuple) else (result, None)
        if pad:
            y = y[:rows].view(*lead, -1)
        return y, bias if self.skip_bias_add else None

    @contextmanager
    def _fp8(self) -> Iterator[None]:
        precision = self.precision
        recipe = precision.decision.recipe
        if recipe is None or not precision.active:
            yield
            return
        te_version = te_recipe(self.library, recipe, self._amax_axis)
        with fp8_region(self.library, te_version, self._amax_axis.group):
            recording = precision.state.recording
            if self._binding is not None:
                self.init_fp8_metadata(num_gemms=1)
                self._binding.refresh(self, recording)
            self._drop_stale_weight(recording)
            yield

    def _drop_stale_weight(self, recording: bool) -> None:
        """Forget the cached FP8 weight if the weight or the scales changed since it was made.

        A weight that was cast in an evaluation is cast again in training, where its maximum
        counts.
        """
        weight, state, slots = self.weight, self.precision.state, self.precision.slots
        generation = slots.book.generation_in_use if slots is not None else 0
        key = (weight.data_ptr(), weight._version, state.generation, generation)
        if self._weight_key[:-1] == key and (self._weight_key[-1] or not recording):
            return
        self._fp8_workspaces.clear()
        self._weight_key = (*key, recording)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        rows, columns = self.weight.shape
        return f"{columns}, {rows}, {self._parallel_mode}, {self.axis.name}={self.axis.size}"


class TeColumnParallelLinear(_TeLinear):
    """`y = x W^T + b` with the output features split over the ranks.

    Arguments are those of the native layer, `ColumnParallelLinear` in `tensor_parallel.layers`, and
    `tp_comm_buffer_name` (qkv or fc1): which userbuffers the layer uses with `--tp-comm-overlap`,
    by default those that its path names.
    """

    _parallel_mode = "column"

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
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        parts = (build.mesh.etp if is_expert else build.mesh.tp).size * partition_stride
        share = equal_share(build.path, "output features", out_features, parts)
        arguments = self._arguments(
            build,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            buffer=tp_comm_buffer_name,
        )
        arguments |= self._norm_arguments(build)
        local = share * partition_stride
        super().__init__(in_features, local if is_expert else out_features, **arguments)
        self.gather_output = gather_output
        self._finish(
            build,
            init_method=init_method,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            partition_stride=partition_stride,
        )

    def _norm_arguments(self, build: Build) -> dict[str, Any]:
        return {}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer.

        Args:
            x: `[s, b, in]`, or `[s/t, b, in]` with sequence parallelism.

        Returns:
            `[s, b, out/t]` (`[s, b, out]` with `gather_output`), and the bias if it was skipped.
        """
        y, bias = self._run(x)
        return gather_from_region(y, self.axis) if self.gather_output else y, bias


class TeLayerNormColumnParallelLinear(TeColumnParallelLinear):
    """A norm and a column-parallel linear layer in one module, the cast to FP8 fused with both."""

    def _norm_arguments(self, build: Build) -> dict[str, Any]:
        config = build.config
        return te_calls.norm_linear_arguments(
            epsilon=config.norm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.apply_layernorm_1p,
        )


class TeRowParallelLinear(_TeLinear):
    """`y = x W^T + b` with the input features split over the ranks.

    Arguments are those of the native layer, `RowParallelLinear` in `tensor_parallel.layers`, and
    `tp_comm_buffer_name` (proj or fc2), as in `TeColumnParallelLinear`.
    """

    _parallel_mode = "row"

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
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        parts = (build.mesh.etp if is_expert else build.mesh.tp).size
        share = equal_share(build.path, "input features", in_features, parts)
        arguments = self._arguments(
            build,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            buffer=tp_comm_buffer_name,
        )
        super().__init__(share if is_expert else in_features, out_features, **arguments)
        self.input_is_parallel = input_is_parallel
        self._finish(
            build, init_method=init_method, skip_bias_add=skip_bias_add, is_expert=is_expert
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer.

        Args:
            x: `[s, b, in/t]` (`[s, b, in]` unless `input_is_parallel`).

        Returns:
            `[s, b, out]`, or `[s/t, b, out]` with sequence parallelism, and the bias if it was
            skipped.
        """
        return self._run(x if self.input_is_parallel else scatter_to_region(x, self.axis))


class TeNormModule(TeModule):
    """LayerNorm or RMSNorm over the last dimension.

    Arguments are those of the native `Norm` in `transformer.norms`.
    """

    def __init__(self, size: int, *, build: Build, partial_gradient: bool | None = None) -> None:
        config = build.config
        arguments = te_calls.norm_arguments(
            epsilon=config.norm_epsilon,
            zero_centered_gamma=config.apply_layernorm_1p,
            params_dtype=build.params_dtype,
            device=build.device,
        )
        super().__init__(size, **arguments)
        if config.sequence_parallel if partial_gradient is None else partial_gradient:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x [..., size]`."""
        normalized: torch.Tensor = super().forward(x)
        return normalized


class AttentionDropoutRng:
    """The random stream of one layer's attention dropout, as the object the library asks for.

    Args:
        rng: The run's streams.
        path: The attention's path.
    """

    def __init__(self, rng: RngStreams, path: str) -> None:
        self.rng, self.path = rng, path

    def get_states(self) -> dict[str, torch.Tensor]:
        """No state: the numbers depend on position and path only."""
        return {}

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        """Draw from this layer's stream at the current position, inside the block.

        Args:
            name: Ignored; the library may name a stream.
        """
        # Heads are split over tensor-parallel ranks, so each rank draws its own masks.
        seed = self.rng.generator(self.path, axis="tp").initial_seed()
        device = self.rng.device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            with torch.random.fork_rng(devices=[index]):
                torch.cuda.default_generators[index].manual_seed(seed)
                yield
        else:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                yield


class TeCoreAttention(TeModule):
    """Causal attention of one layer's local heads.

    Args:
        build: Supplies head sizes, mesh, dropout and its random stream, and decides the precision.
        layer_number: 1-based number of the layer in the whole model.
    """

    init_fp8_metadata: Any

    def __init__(self, *, build: Build, layer_number: int) -> None:
        config, tp = build.config, build.mesh.tp
        comm = comm_type(config, layer_number)
        levels = (build.mesh.cp_a2a, build.mesh.cp_p2p) if comm == "a2a+p2p" else None
        rng = AttentionDropoutRng(build.rng, build.path)
        arguments = te_calls.attention_arguments(
            num_heads=config.num_attention_heads,
            num_groups=config.num_query_groups,
            head_dim=config.kv_channels,
            dropout=config.attention_dropout,
            tp_size=tp.size,
            tp_group=tp.group,
            get_rng_state_tracker=lambda: rng,
            layer_number=layer_number,
            softmax_scale=None,
            cp=build.mesh.cp,
            cp_comm_type=comm,
            cp_levels=levels,
            cp_stream=_second_stream() if build.mesh.cp.size > 1 else None,
        )
        super().__init__(**arguments)
        self.precision = te_attention_precision(build, self.library)
        self._amax_axis = build.mesh.amax
        slots = self.precision.slots
        self._binding: AttentionBinding | None = None
        if slots is not None:
            scaled = [tensor for tensor in AttentionTensor if self.precision.is_delayed(tensor)]
            self._binding = AttentionBinding(slots, scaled)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: `[s, b, n, d]`.
            key: `[s, b, g, d]`.
            value: `[s, b, g, d]`.
            document_starts: None; a model that needs them is built with the native attention.

        Returns:
            `[s, b, n * d]`.

        Raises:
            MegatronError: Documents were given.
        """
        if document_starts is not None:
            raise MegatronError(
                complaint(
                    "document_starts",
                    tuple(document_starts.shape),
                    "This attention was built to look across documents",
                    "Build the model with --reset-attention-mask",
                )
            )
        recipe, binding = self.precision.decision.recipe, self._binding
        context: torch.Tensor
        if recipe is None or binding is None or not self.precision.active:
            context = super().forward(query, key, value)
            return context
        te_version = te_recipe(self.library, recipe, self._amax_axis, attention=True)
        with fp8_region(self.library, te_version, self._amax_axis.group):
            self.init_fp8_metadata(num_gemms=3)
            binding.begin(self)
            if query.requires_grad:
                # Runs when the library has made the gradients, whose maxima it has found by then.
                query = query.view_as(query)
                hooked: Any = query
                hooked.register_hook(lambda _: binding.record("backward"))
            context = super().forward(query, key, value)
        if self.precision.state.recording:
            binding.record("forward")
        return context


@lru_cache(maxsize=1)
def _second_stream() -> Any:
    """The stream of every other step of the ring, one for all layers."""
    stream: Any = torch.cuda.Stream
    return stream() if torch.cuda.is_available() else None
