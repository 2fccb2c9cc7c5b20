"""The project's layer classes mixed in front of those of a loaded Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron.core.backends.te_calls import Library
from megatron.core.backends.te_grouped import (
    TeColumnParallelGroupedLinear,
    TeRowParallelGroupedLinear,
)
from megatron.core.backends.te_layers import (
    TeColumnParallelLinear,
    TeCoreAttention,
    TeLayerNormColumnParallelLinear,
    TeNormModule,
    TeRowParallelLinear,
)
from megatron.core.transformer.core_attention import NativeCoreAttention

if TYPE_CHECKING:
    from megatron.core.build import Build


@dataclass(frozen=True)
class LayerClasses:
    """The classes that a loaded Transformer Engine supplies."""

    column: Any
    row: Any
    layernorm_column: Any
    column_grouped: Any
    row_grouped: Any
    norm: Any
    attention: Any


def layer_classes(library: Library) -> LayerClasses:
    """Put the contract in front of the library's modules.

    Args:
        library: Transformer Engine, real or a stand-in.
    """
    te = library.pytorch

    def mixed(mixin: type, base: type, name: str) -> type:
        return type(name, (mixin, base), {"library": library, "__module__": mixin.__module__})

    norms = {
        "LayerNorm": mixed(TeNormModule, te.LayerNorm, "TELayerNorm"),
        "RMSNorm": mixed(TeNormModule, te.RMSNorm, "TERMSNorm"),
    }

    def norm(size: int, *, build: Build, partial_gradient: bool | None = None) -> nn.Module:
        kind: Any = norms[build.config.normalization]
        layer: nn.Module = kind(size, build=build, partial_gradient=partial_gradient)
        return layer

    te_attention: Any = mixed(TeCoreAttention, te.DotProductAttention, "TEDotProductAttention")

    def attention(*, build: Build, layer_number: int) -> nn.Module:
        # Transformer Engine would take packed documents in a layout of their own.
        kind = NativeCoreAttention if build.config.reset_attention_mask else te_attention
        layer: nn.Module = kind(build=build, layer_number=layer_number)
        return layer

    return LayerClasses(
        column=mixed(TeColumnParallelLinear, te.Linear, "TEColumnParallelLinear"),
        row=mixed(TeRowParallelLinear, te.Linear, "TERowParallelLinear"),
        layernorm_column=mixed(
            TeLayerNormColumnParallelLinear,
            te.LayerNormLinear,
            "TELayerNormColumnParallelLinear",
        ),
        column_grouped=mixed(
            TeColumnParallelGroupedLinear, te.GroupedLinear, "TEColumnParallelGroupedLinear"
        ),
        row_grouped=mixed(
            TeRowParallelGroupedLinear, te.GroupedLinear, "TERowParallelGroupedLinear"
        ),
        norm=norm,
        attention=attention,
    )
