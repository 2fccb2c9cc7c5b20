"""FP8: formats, recipes, quantizers, products, scaling state and the linear layer built of them."""

from __future__ import annotations

from megatron.core.fp8.amax import AmaxBook
from megatron.core.fp8.autocast import (
    autocast,
    checkpoint,
    get_fp8_recipe,
    is_fp8_available,
    is_fp8_enabled,
)
from megatron.core.fp8.formats import E2M1, E4M3, E5M2, Format, Fp8Format
from megatron.core.fp8.gemm import gemm_nt
from megatron.core.fp8.linear import linear
from megatron.core.fp8.modules import LayerNormLinear, Linear
from megatron.core.fp8.nvfp4 import NVFP4BlockScaling
from megatron.core.fp8.policy import Fp8Policy
from megatron.core.fp8.precision import LinearPrecision, PrecisionRow
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    Role,
)
from megatron.core.fp8.state import Fp8State, recipe_from_config
from megatron.core.fp8.tensor import QuantizedTensor

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "AmaxBook",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Fp8Format",
    "Fp8Policy",
    "Fp8State",
    "LayerNormLinear",
    "Linear",
    "LinearPrecision",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "PrecisionRow",
    "QuantizedTensor",
    "Recipe",
    "Role",
    "autocast",
    "checkpoint",
    "gemm_nt",
    "get_fp8_recipe",
    "is_fp8_available",
    "is_fp8_enabled",
    "linear",
    "recipe_from_config",
]
