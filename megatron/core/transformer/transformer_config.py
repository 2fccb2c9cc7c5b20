"""`TransformerConfig`: the constructor that Megatron-Core users write, for this project's settings.

The result is an ordinary `RunConfig`; nothing else in the project uses these spellings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.config import ConfigError, Problem, RunConfig, make_config
from megatron.core.transformer.mlp import squared_relu

_RENAMED = {
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
}
# What these ask for is what happens anyway.
_WITHOUT_EFFECT = {
    "pipeline_dtype",  # stages exchange the parameters' dtype
    "use_cpu_initialization",  # weights never depend on the layout or the device
    "perform_initialization",
    "attention_softmax_in_fp32",  # it always is
    "apply_query_key_layer_scaling",  # cancels in an fp32 softmax
    "deallocate_pipeline_outputs",
    "autocast_dtype",
}


def TransformerConfig(world_size: int = 1, **fields: Any) -> RunConfig:  # noqa: N802 - their name
    """Build a finished configuration from Megatron-Core's field names.

    Besides this project's own names it takes `fp8`, `fp4`, `layernorm_epsilon`,
    `layernorm_zero_centered_gamma`, `gated_linear_unit`, `activation_func` (a torch function),
    `params_dtype` (a torch dtype), `num_moe_experts`, a number or list for `moe_layer_freq`, and
    `num_query_groups` on its own. A field whose effect is always there is accepted.

    Args:
        world_size: Number of processes of the run.
        **fields: Settings. Without `num_attention_heads`, heads are 64 wide, or there is one.

    Returns:
        The finished configuration.

    Raises:
        ConfigError: Lists every problem: unknown names, impossible values.
    """
    settings = {
        _RENAMED.get(name, name): value
        for name, value in fields.items()
        if name not in _WITHOUT_EFFECT
    }
    problems: list[Problem] = []
    settings.update(_activation(settings, problems))
    settings.update(_dtype(settings, problems))
    freq = settings.get("moe_layer_freq")
    if isinstance(freq, int | list):  # they also take a number or a list here
        settings["moe_layer_freq"] = str(freq)
    groups = settings.get("num_query_groups")
    if groups is not None:
        settings.setdefault("group_query_attention", True)
    if settings.get("num_attention_heads") is None and settings.get("hidden_size"):
        hidden = settings["hidden_size"]
        settings["num_attention_heads"] = hidden // 64 if hidden % 64 == 0 else 1
    if problems:
        raise ConfigError(problems)
    return make_config(world_size, **settings)


def _activation(settings: dict[str, Any], problems: list[Problem]) -> dict[str, bool]:
    function: Callable[..., Any] = settings.pop("activation_func", None) or F.gelu
    gated = settings.pop("gated_linear_unit", False)
    known: dict[tuple[Any, bool], dict[str, bool]] = {
        (F.gelu, False): {},
        (F.silu, True): {"swiglu": True},
        (squared_relu, False): {"squared_relu": True},
    }
    if (function, gated) in known:
        return known[function, gated]
    problems.append(
        Problem(
            ("activation_func", "gated_linear_unit"),
            (getattr(function, "__name__", function), gated),
            "The MLP knows GELU, squared ReLU and gated SiLU",
            "Use F.gelu, squared_relu, or F.silu with gated_linear_unit=True",
        )
    )
    return {}


def _dtype(settings: dict[str, Any], problems: list[Problem]) -> dict[str, bool]:
    dtype = settings.pop("params_dtype", None)
    flags: dict[Any, dict[str, bool]] = {
        None: {},
        torch.float32: {},
        torch.bfloat16: {"bf16": True},
        torch.float16: {"fp16": True},
    }
    if dtype in flags:
        return flags[dtype]
    problems.append(
        Problem(
            ("params_dtype",),
            dtype,
            "Parameters are float32, bfloat16 or float16",
            "Use torch.bfloat16, or leave it out and set bf16=True",
        )
    )
    return {}
