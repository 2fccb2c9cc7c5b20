"""How weights start: normal, with a smaller spread for matrices that write to the residual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from megatron.core.shards import InitMethod

if TYPE_CHECKING:
    from megatron.config import RunConfig


@dataclass(frozen=True)
class InitMethods:
    """Functions that fill a tensor in place.

    Attributes:
        hidden: For matrices that read the residual stream, and for embeddings.
        output: For matrices that write to it. Each of the 2L writes adds variance, so the spread
            is divided by sqrt(2L) (Radford et al., GPT-2, 2019).
    """

    hidden: InitMethod
    output: InitMethod


def init_methods(config: RunConfig) -> InitMethods:
    """The initialization that a configuration asks for."""
    std = config.init_method_std
    return InitMethods(
        hidden=partial(nn.init.normal_, mean=0.0, std=std),
        output=partial(nn.init.normal_, mean=0.0, std=std / math.sqrt(2.0 * config.num_layers)),
    )
