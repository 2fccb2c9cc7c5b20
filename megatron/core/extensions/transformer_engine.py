"""The `TE*` names that model code imports, answered by whichever backend runs here.

A tutorial's specification made of these names builds Transformer Engine layers where that library
runs and native ones elsewhere; the log says once which. Two ways to construct a layer:

* In a specification: `build_module` passes `build=`, and the run's own backend supplies the class.
* Directly, as with Megatron-Core: `TEColumnParallelLinear(in, out, config=config, ...)` with a
  finished configuration, e.g. from `TransformerConfig(...)`. The mesh is the one installed in
  `parallel_state`, or this process alone. Layers made from one configuration share one FP8 state,
  `fp8_state(config)`, whose `sync(axis)` is to be called once an optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core import parallel_state
from megatron.core.backends import te_grouped, te_layers
from megatron.core.backends.contract import Backend
from megatron.core.backends.registry import resolve
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.build import Build
from megatron.core.errors import MegatronError, complaint
from megatron.core.fp8 import Fp8State
from megatron.core.mesh import ParallelState
from megatron.core.shards import InitMethod
from megatron.core.tensor_parallel import grouped, layers
from megatron.core.tensor_parallel.random import RngStreams, checkpoint
from megatron.core.transformer.core_attention import NativeCoreAttention
from megatron.core.transformer.initialization import init_methods
from megatron.core.transformer.norms import Norm

__all__ = [
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TELayerNormColumnParallelLinear",
    "TENorm",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
    "chosen_backend",
    "fp8_state",
    "te_checkpoint",
]

_LOG = logging.getLogger(__name__)
_said: set[str] = set()


# -- which backend --------------------------------------------------------------------------------


def chosen_backend(transformer_impl: str = "auto") -> tuple[str, str]:
    """Name of the backend that layers get here, and why.

    Args:
        transformer_impl: What `--transformer-impl` would be.

    Raises:
        BackendUnavailable: A backend was named that cannot run here.
    """
    backend, reason = resolve(transformer_impl, _device())
    return backend.name, reason


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _say(backend: Backend, reason: str) -> None:
    """Log once which backend answers these names."""
    if backend.name in _said:
        return
    _said.add(backend.name)
    # The names promise Transformer Engine, so anything else should be seen without asking.
    level = logging.INFO if isinstance(backend, TransformerEngineBackend) else logging.WARNING
    _LOG.log(level, "TE* layers run on the %s backend (%s)", backend.name, reason)


# -- direct construction --------------------------------------------------------------------------


@dataclass
class _Workshop:
    """What the layers made from one configuration share."""

    build: Build
    reason: str
    made: dict[str, int] = field(default_factory=dict)

    def next_build(self, name: str) -> Build:
        """A build with a path of its own, the same in every process that builds alike."""
        number = self.made.get(name, 0)
        self.made[name] = number + 1
        return self.build.at(f"{name}.{number}")


_workshops: dict[int, _Workshop] = {}


def fp8_state(config: RunConfig) -> Fp8State:
    """The FP8 state shared by the layers that were constructed directly from `config`."""
    return _workshop(config).build.fp8


def _workshop(config: RunConfig) -> _Workshop:
    if not isinstance(config, RunConfig):
        raise TypeError(
            complaint(
                "config",
                type(config).__name__,
                "A layer is built from `build=` or from a finished configuration",
                "Pass config=TransformerConfig(...) of"
                " megatron.core.transformer.transformer_config, or make_config(...)",
            )
        )
    if id(config) not in _workshops:
        mesh = ParallelState.single()
        if parallel_state.is_initialized():
            mesh = parallel_state.get_parallel_state()
        device = _device()
        backend, reason = resolve(config.transformer_impl, device)
        if config.tp_comm_overlap:
            backend.start_tp_overlap(config, mesh)
        build = Build.root(config, mesh, backend, device)
        # Nobody tells such layers where training is: random roundings must not repeat all the same.
        build.fp8.rng = None
        # The build holds the configuration, so its id is not used again.
        _workshops[id(config)] = _Workshop(build, reason)
    return _workshops[id(config)]


def _placed(
    name: str, build: Build | None, config: RunConfig | None, options: dict[str, Any]
) -> Build:
    """The build to construct with: the one given, or a new place in the configuration's workshop.

    Drops from `options` what Megatron-Core passes and what has no meaning here.

    Raises:
        TypeError: Neither or both were given.
    """
    if (build is None) == (config is None):
        raise TypeError(
            complaint(
                name,
                "both build and config" if build is not None else "neither build nor config",
                "A specification passes `build=`, direct construction passes `config=`",
                "Pass one of them",
            )
        )
    if build is not None:
        _say(build.backend, "the run's own choice")
        return build
    workshop = _workshop(config)  # type: ignore[arg-type]
    if not isinstance(workshop.build.backend, TransformerEngineBackend):
        options.pop("tp_comm_buffer_name", None)  # native layers overlap without buffers
    _check_group(name, options.pop("tp_group", None), workshop.build.mesh)
    _say(workshop.build.backend, workshop.reason)
    return workshop.next_build(name)


def _check_group(name: str, group: Any, mesh: ParallelState) -> None:
    if group is not None and group is not mesh.tp.group:
        raise MegatronError(
            complaint(
                f"{name}(tp_group=)",
                group,
                "Layers are split over the mesh installed in parallel_state",
                "Call parallel_state.initialize_model_parallel and leave tp_group out",
            )
        )


class _Facade(type):
    """Metaclass of the names: `isinstance` holds for the layers of every backend."""

    kinds: tuple[type, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        """Whether `instance` is this layer in any backend."""
        return isinstance(instance, cls.kinds)


class _Named(metaclass=_Facade):
    """Base of the names; calling one constructs the backend's layer instead of itself."""

    kinds: tuple[type, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse classes derived from a name: it stands for more than one class."""
        super().__init_subclass__(**kwargs)
        name = cls.__mro__[1].__name__
        if name.startswith("TE"):
            raise TypeError(
                complaint(
                    f"class {cls.__name__}",
                    f"{name} as its base",
                    "That name stands for the class of whichever backend runs",
                    f"Derive from a backend's class, e.g. {cls.kinds[0].__qualname__} of"
                    f" {cls.kinds[0].__module__}",
                )
            )


class TEColumnParallelLinear(_Named):
    """A linear layer with its outputs split over tensor-parallel ranks."""

    kinds = (layers.ColumnParallelLinear, te_layers.TeColumnParallelLinear)

    def __new__(
        cls,
        in_features: int,
        out_features: int,
        *,
        build: Build | None = None,
        config: RunConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        **options: Any,
    ) -> Any:
        """Construct it; arguments as for the native `ColumnParallelLinear`, `build` or `config`."""
        build = _placed("te_column_parallel_linear", build, config, options)
        init = init_method or init_methods(build.config).hidden
        make = build.backend.column_parallel_linear
        return make(in_features, out_features, build=build, init_method=init, bias=bias, **options)


class TELayerNormColumnParallelLinear(_Named):
    """A norm and a linear layer with split outputs, in one module."""

    kinds = (layers.LayerNormColumnParallelLinear, te_layers.TeLayerNormColumnParallelLinear)

    def __new__(
        cls,
        in_features: int,
        out_features: int,
        *,
        build: Build | None = None,
        config: RunConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        **options: Any,
    ) -> Any:
        """Construct it; arguments as for `TEColumnParallelLinear`."""
        build = _placed("te_layernorm_column_parallel_linear", build, config, options)
        init = init_method or init_methods(build.config).hidden
        make = build.backend.layernorm_column_parallel_linear
        return make(in_features, out_features, build=build, init_method=init, bias=bias, **options)


class TERowParallelLinear(_Named):
    """A linear layer with its inputs split over tensor-parallel ranks."""

    kinds = (layers.RowParallelLinear, te_layers.TeRowParallelLinear)

    def __new__(
        cls,
        in_features: int,
        out_features: int,
        *,
        build: Build | None = None,
        config: RunConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        **options: Any,
    ) -> Any:
        """Construct it; arguments as for the native `RowParallelLinear`, `build` or `config`."""
        build = _placed("te_row_parallel_linear", build, config, options)
        init = init_method or init_methods(build.config).output
        make = build.backend.row_parallel_linear
        return make(in_features, out_features, build=build, init_method=init, bias=bias, **options)


class TEColumnParallelGroupedLinear(_Named):
    """The linear layers of a rank's experts, with their outputs split over expert-TP ranks."""

    kinds = (grouped.ColumnParallelGroupedLinear, te_grouped.TeColumnParallelGroupedLinear)

    def __new__(
        cls,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        build: Build | None = None,
        config: RunConfig | None = None,
        init_method: InitMethod | None = None,
        **options: Any,
    ) -> Any:
        """Construct it; `forward(x [T, in], tokens_per_expert)` with rows sorted by expert.

        Raises:
            MegatronError: A bias was asked for.
        """
        _check_grouped("TEColumnParallelGroupedLinear", options)
        build = _placed("te_column_parallel_grouped_linear", build, config, options)
        init = init_method or init_methods(build.config).hidden
        make = build.backend.column_parallel_grouped_linear
        return make(num_gemms, input_size, output_size, build=build, init_method=init, **options)


class TERowParallelGroupedLinear(_Named):
    """The linear layers of a rank's experts, with their inputs split over expert-TP ranks."""

    kinds = (grouped.RowParallelGroupedLinear, te_grouped.TeRowParallelGroupedLinear)

    def __new__(
        cls,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        build: Build | None = None,
        config: RunConfig | None = None,
        init_method: InitMethod | None = None,
        **options: Any,
    ) -> Any:
        """Construct it; arguments as for `TEColumnParallelGroupedLinear`."""
        _check_grouped("TERowParallelGroupedLinear", options)
        build = _placed("te_row_parallel_grouped_linear", build, config, options)
        init = init_method or init_methods(build.config).output
        make = build.backend.row_parallel_grouped_linear
        return make(num_gemms, input_size, output_size, build=build, init_method=init, **options)


def _check_grouped(name: str, options: dict[str, Any]) -> None:
    """Drop options of Megatron-Core's experts that can have one value here; refuse others."""
    options.pop("tp_comm_buffer_name", None)  # their products do not communicate
    for option, only in (("bias", False), ("skip_bias_add", False), ("is_expert", True)):
        got = options.pop(option, only)
        if got != only:
            raise MegatronError(
                complaint(
                    f"{name}({option}=)",
                    got,
                    "The matrices of experts have no bias",
                    f"Pass {option}={only}",
                )
            )


class TENorm(_Named):
    """LayerNorm or RMSNorm, as the configuration says."""

    kinds = (Norm, te_layers.TeNormModule)

    def __new__(
        cls,
        config: RunConfig | int | None = None,
        hidden_size: int | None = None,
        eps: float | None = None,
        *,
        build: Build | None = None,
        **options: Any,
    ) -> Any:
        """Construct it: `TENorm(config, size, eps)`, or `TENorm(size, build=build)`.

        Raises:
            MegatronError: `eps` is not the configuration's.
        """
        if isinstance(config, int):
            config, hidden_size = None, config
        build = _placed("te_norm", build, config, options)
        epsilon = build.config.norm_epsilon
        if eps is not None and eps != epsilon:
            raise MegatronError(
                complaint(
                    "TENorm(eps=)",
                    eps,
                    f"The configuration has norm_epsilon={epsilon}, and norms have one epsilon",
                    f"Set norm_epsilon={eps} in the configuration",
                )
            )
        if hidden_size is None:
            hidden_size = build.config.hidden_size
        return build.backend.norm(hidden_size, build=build, **options)


class TEDotProductAttention(_Named):
    """Causal attention without projections."""

    kinds = (NativeCoreAttention, te_layers.TeCoreAttention)

    def __new__(
        cls,
        config: RunConfig | None = None,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        *,
        build: Build | None = None,
        **options: Any,
    ) -> Any:
        """Construct it; `forward(query, key, value)` takes `[s, b, heads, d]` each.

        Raises:
            MegatronError: Another mask than the causal one, or cross-attention, was asked for.
        """
        mask = getattr(attn_mask_type, "name", attn_mask_type)
        for name, got, only in (
            ("attn_mask_type", mask, "causal"),
            ("attention_type", attention_type, "self"),
        ):
            if got is not None and str(got).lower() != only:
                raise MegatronError(
                    complaint(
                        f"TEDotProductAttention({name}=)",
                        got,
                        "The models here are decoders: causal self-attention",
                        f"Use {only}",
                    )
                )
        build = _placed("te_dot_product_attention", build, config, options)
        return build.backend.core_attention(build=build, layer_number=layer_number, **options)


# -- recompute ------------------------------------------------------------------------------------


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Callable[[], Any] | None,
    tp_group: Any,
    *args: Any,
    rng: RngStreams | None = None,
    fp8: Fp8State | None = None,
) -> Any:
    """Recompute `forward_func(*args)` in the backward pass instead of keeping its activations.

    The project's own recompute, on every backend. Transformer Engine's `checkpoint` is not used:
    the layers enter FP8 themselves, and up to release 2.18 it restores scales only of layers inside
    an FP8 context that was entered outside. Here scales do not move between a forward and its
    recomputation, so nothing has to be restored.

    Args:
        forward_func: Function of tensors.
        distribute_saved_activations: Must be false: inputs are kept whole.
        get_rng_state_tracker: Accepted; random streams are addressed by position.
        tp_group: Accepted; it matters for distributed activations only.
        args: Arguments of `forward_func`.
        rng: The build's random streams. Needed if `forward_func` drops out and another microbatch
            runs before its backward pass.
        fp8: The build's FP8 state. Needed if scales or the FP8 switch may change before the
            backward pass.

    Raises:
        MegatronError: Distributed activations were asked for.
    """
    del get_rng_state_tracker, tp_group
    if distribute_saved_activations:
        raise MegatronError(
            complaint(
                "te_checkpoint(distribute_saved_activations=)",
                True,
                "Recompute keeps its inputs whole",
                "Pass False",
            )
        )
    return checkpoint(forward_func, *args, rng=rng, fp8=fp8)
