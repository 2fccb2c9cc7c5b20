"""Every call into Transformer Engine, as keyword arguments chosen by the installed release.

Transformer Engine renames entry points and arguments between releases. Nothing else in the project
knows those spellings: each function here takes plain values and a `Library`, and makes one call.
The names used are bound in the tests against the signatures that the releases really have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.errors import PrecisionError, complaint
from megatron.core.mesh import Axis

OLDEST = (2, 2)
NEWEST_CHECKED = (2, 20)
AUTOCAST_RENAMED = (2, 9)  # fp8_autocast(fp8_recipe=, fp8_group=) became autocast(recipe=, ...)
MODULES_NAMED = (2, 9)  # modules take `name`, used in debug output
UB_MODES = (2, 8)  # initialize_ub(use_fp8=) became initialize_ub(quantization_modes=)
EXTERNAL_BUFFERS = (2, 7)  # userbuffers for the weight gradients of row-parallel layers
GROUPED_CURRENT_SCALING = (2, 3)  # GroupedLinear takes this recipe
ATTENTION_CURRENT_SCALING = (2, 8)  # FP8 attention takes this recipe


@dataclass(frozen=True)
class Library:
    """One release of Transformer Engine, real or a stand-in for it.

    Attributes:
        version: Release as (major, minor).
        pytorch: The module `transformer_engine.pytorch`.
        recipe: The module `transformer_engine.common.recipe`.
        manager: The class `FP8GlobalStateManager`.
        recipes: Recipe objects already made, by the project's recipe.
        userbuffers: What the userbuffers were set up with; empty before.
    """

    version: tuple[int, int]
    pytorch: Any
    recipe: Any
    manager: Any
    recipes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    userbuffers: list[str] = field(default_factory=list, compare=False, repr=False)


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number of a release such as `2.9.0.post1+cu13`; (0, 0) if there is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def quantization_module(version: tuple[int, int]) -> str:
    """Dotted name of the module that holds `FP8GlobalStateManager` in a release."""
    leaf = "quantization" if version >= AUTOCAST_RENAMED else "fp8"
    return f"transformer_engine.pytorch.{leaf}"


def leave_uninitialised(weight: torch.Tensor) -> torch.Tensor:
    """Initialisation function handed to Transformer Engine: the layer fills its weights itself.

    The values must not depend on the tensor-parallel size, which only the layer can ensure.
    """
    return weight


def linear_arguments(
    library: Library,
    *,
    parallel_mode: str | None,
    tp_size: int,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    fuse_wgrad_accumulation: bool,
    bias: bool,
    return_bias: bool,
    params_dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> dict[str, Any]:
    """Keyword arguments that `te.Linear` and `te.LayerNormLinear` share."""
    arguments: dict[str, Any] = {
        "sequence_parallel": sequence_parallel,
        "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        "tp_group": tp_group,
        "tp_size": tp_size,
        "get_rng_state_tracker": None,
        "init_method": leave_uninitialised,
        "bias": bias,
        "return_bias": return_bias,
        "params_dtype": params_dtype,
        "parallel_mode": parallel_mode,
        "device": device,
    }
    if library.version >= MODULES_NAMED:
        arguments["name"] = name
    return arguments


def grouped_linear_arguments(*, params_dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of `te.GroupedLinear`, as a layer that does not communicate."""
    return {
        "fuse_wgrad_accumulation": False,
        "get_rng_state_tracker": None,
        "init_method": leave_uninitialised,
        "bias": False,
        "params_dtype": params_dtype,
        "parallel_mode": None,
        "device": device,
    }


def grouped_columns(module: Any, role: str) -> list[int]:
    """Where a `te.GroupedLinear` keeps the quantizers of one tensor role, expert by expert.

    Release 2.2 sorts them by role, later ones by expert.

    Args:
        module: The layer.
        role: `input`, `weight`, `output`, `grad_output` or `grad_input`.
    """
    direction = "bwd" if role.startswith("grad") else "fwd"
    stride = getattr(module, "_num_fp8_tensors_per_gemm", {direction: 1})[direction]
    count = module.num_gemms
    # Release 2.2 has no entry for the last role, which is behind the first one.
    start = module._offsets.get(role, count)
    return [start + i * stride for i in range(count)]


def norm_linear_arguments(
    *, epsilon: float, normalization: str, zero_centered_gamma: bool
) -> dict[str, Any]:
    """Keyword arguments that `te.LayerNormLinear` takes on top of `te.Linear`'s."""
    return {
        "eps": epsilon,
        "normalization": normalization,
        "zero_centered_gamma": zero_centered_gamma,
        "return_layernorm_output": False,
    }


def norm_arguments(
    *, epsilon: float, zero_centered_gamma: bool, params_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Keyword arguments of `te.LayerNorm` and `te.RMSNorm`."""
    return {
        "eps": epsilon,
        "zero_centered_gamma": zero_centered_gamma,
        "dtype": params_dtype,
        "device": device,
    }


def attention_arguments(
    *,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    dropout: float,
    tp_size: int,
    tp_group: ProcessGroup | None,
    get_rng_state_tracker: Callable[[], Any] | None,
    layer_number: int,
    softmax_scale: float | None,
    cp: Axis | None = None,
    cp_comm_type: str = "p2p",
    cp_stream: Any = None,
    cp_levels: tuple[Axis, Axis] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `te.DotProductAttention`; head counts are those of the whole model.

    Its context-parallel ranks hold the same chunks of a sequence as the project's. With `a2a+p2p`
    it takes the process groups of both levels, the inner one first.

    `sequence_parallel` is left out: with it Transformer Engine draws dropout from the device's
    default generator and ignores the tracker.
    """
    context = {}
    if cp is not None and cp.size > 1:
        context = {
            "cp_group": [a.group for a in cp_levels] if cp_levels else cp.group,
            "cp_global_ranks": list(cp.ranks),
            "cp_stream": cp_stream,
            "cp_comm_type": cp_comm_type,
        }
    return {
        **context,
        "num_attention_heads": num_heads,
        "kv_channels": head_dim,
        "num_gqa_groups": num_groups,
        "attention_dropout": dropout,
        "qkv_format": "sbhd",
        "attn_mask_type": "causal",
        "attention_type": "self",
        "tp_size": tp_size,
        "tp_group": tp_group,
        "get_rng_state_tracker": get_rng_state_tracker,
        "layer_number": layer_number,
        "softmax_scale": softmax_scale,
    }


def delayed_recipe(
    library: Library,
    *,
    fp8_format: str,
    margin: int,
    amax_history_len: int,
    amax_compute_algo: str | Callable[..., torch.Tensor],
    reduce_amax: bool,
    attention: bool = False,
) -> Any:
    """Build Transformer Engine's `DelayedScaling`, for the products of attention or of layers."""
    return library.recipe.DelayedScaling(
        margin=margin,
        fp8_format=_format(library, fp8_format),
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        reduce_amax=reduce_amax,
        **_in_attention(attention),
    )


def _in_attention(attention: bool) -> dict[str, Any]:
    """What makes a recipe hold inside attention."""
    return {"fp8_dpa": True} if attention else {}


def current_recipe(
    library: Library,
    *,
    fp8_format: str,
    power_2_scale: bool,
    amax_epsilon: float,
    attention: bool = False,
) -> Any:
    """Build Transformer Engine's `Float8CurrentScaling`.

    The scale options are class attributes there, read when a quantizer is made; as constructor
    arguments they would be ignored without a word, so they are assigned on the instance.
    """
    recipe = library.recipe.Float8CurrentScaling(
        fp8_format=_format(library, fp8_format), **_in_attention(attention)
    )
    options = library.recipe.QParams(power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, role, options)
    return recipe


def block_recipe(library: Library, *, fp8_format: str, power_of_two: bool, weight_dim: int) -> Any:
    """Build Transformer Engine's `Float8BlockScaling`.

    Whether scales are powers of two is a class attribute there, like the scale options of
    `current_recipe`, and is assigned on the instance for the same reason.
    """
    recipe = library.recipe.Float8BlockScaling(
        fp8_format=_format(library, fp8_format), w_block_scaling_dim=weight_dim
    )
    options = library.recipe.QParams(power_2_scale=power_of_two, amax_epsilon=0.0)
    for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, role, options)
    return recipe


def mx_recipe(library: Library, *, fp8_format: str) -> Any:
    """Build Transformer Engine's `MXFP8BlockScaling`."""
    return library.recipe.MXFP8BlockScaling(fp8_format=_format(library, fp8_format))


def nvfp4_recipe(
    library: Library,
    *,
    disable_rht: bool,
    disable_stochastic_rounding: bool,
    disable_2d_quantization: bool,
) -> Any:
    """Build Transformer Engine's `NVFP4BlockScaling`.

    Every choice is passed: left out, it would follow the environment of the process.
    """
    return library.recipe.NVFP4BlockScaling(
        disable_rht=disable_rht,
        disable_stochastic_rounding=disable_stochastic_rounding,
        disable_2d_quantization=disable_2d_quantization,
    )


def _format(library: Library, name: str) -> Any:
    known = {"hybrid": library.recipe.Format.HYBRID, "e4m3": library.recipe.Format.E4M3}
    if name not in known:
        raise PrecisionError(
            complaint(
                "--fp8-format",
                name,
                "Transformer Engine trains in hybrid (E4M3 forward, E5M2 gradients) or e4m3",
                "Choose hybrid or e4m3",
            )
        )
    return known[name]


def autocast(
    library: Library, *, enabled: bool, recipe: Any = None, group: ProcessGroup | None = None
) -> AbstractContextManager[Any]:
    """The context in which Transformer Engine's modules run in FP8."""
    te = library.pytorch
    context: AbstractContextManager[Any]
    if library.version >= AUTOCAST_RENAMED:
        context = te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    else:
        context = te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)
    return context


# By the recipe's name: the library's class for it, and the question whether a device has it.
_BLOCK_SUPPORT = {
    "blockwise": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}


def recipe_support(library: Library, name: str) -> tuple[bool, str]:
    """Whether a recipe runs on this device, and why not.

    Args:
        library: Transformer Engine.
        name: The recipe's name in `--fp8-recipe`.
    """
    if name not in _BLOCK_SUPPORT:
        return fp8_support(library)
    kind, question = _BLOCK_SUPPORT[name]
    if not hasattr(library.recipe, kind):
        return False, f"release {library.version[0]}.{library.version[1]} has no {kind}"
    able, reason = getattr(library.manager, question)()
    return bool(able), str(reason)


def attention_support(
    library: Library, name: str, capability: tuple[int, int] | None
) -> tuple[bool, str]:
    """Whether Transformer Engine has FP8 attention with a recipe here, and why not.

    Args:
        library: Transformer Engine.
        name: The recipe's name in `--fp8-recipe`.
        capability: Compute capability of the device; None where there is none.
    """
    if name == "tensorwise" and library.version < ATTENTION_CURRENT_SCALING:
        wanted = ".".join(str(number) for number in ATTENTION_CURRENT_SCALING)
        installed = ".".join(str(number) for number in library.version)
        return (
            False,
            f"its FP8 attention takes this recipe from release {wanted} on, and"
            f" {installed} is installed",
        )
    if capability is None:
        return True, ""
    here = f"this device has {capability[0]}.{capability[1]}"
    if capability < (9, 0) or capability == (12, 0):
        return False, f"its FP8 attention is for compute capability 9.0 and 10.x, and {here}"
    if name == "tensorwise" and capability < (10, 0):
        return False, (
            f"its FP8 attention takes this recipe from compute capability 10.0 on, and {here};"
            " --fp8-recipe delayed works here"
        )
    return True, ""


def fp8_support(library: Library) -> tuple[bool, str]:
    """Whether this device runs Transformer Engine's FP8 GEMMs, and why not."""
    able, reason = library.manager.is_fp8_available()
    return bool(able), str(reason)


def userbuffer_arguments(
    library: Library,
    *,
    shape: list[int],
    tp_size: int,
    modes: tuple[bool, ...],
    dtype: torch.dtype,
    settings: dict[str, dict[str, Any]],
    bootstrap_backend: str,
) -> dict[str, Any]:
    """Keyword arguments of `initialize_ub`.

    Args:
        library: Transformer Engine.
        shape: `[rows, hidden]` of a layer's input, over all tensor-parallel ranks.
        tp_size: Tensor-parallel ranks.
        modes: For each set of buffers, whether FP8 bytes travel in it.
        dtype: What travels otherwise.
        settings: By buffer, the same for every set.
        bootstrap_backend: How ranks meet.
    """
    arguments: dict[str, Any] = {
        "shape": shape,
        "tp_size": tp_size,
        "dtype": dtype,
        "ub_cfgs": settings or None,
        "bootstrap_backend": bootstrap_backend,
    }
    if library.version < UB_MODES:
        return {**arguments, "use_fp8": modes[0]}
    kinds = library.pytorch.UserBufferQuantizationMode
    return {**arguments, "quantization_modes": [kinds.FP8 if m else kinds.NONE for m in modes]}


def initialize_userbuffers(library: Library, arguments: dict[str, Any]) -> None:
    """Set userbuffers up; layers that use them are built after it."""
    library.pytorch.initialize_ub(**arguments)


def destroy_userbuffers(library: Library) -> None:
    """Free all userbuffers."""
    library.pytorch.destroy_ub()
