"""Tensor and sequence parallelism: collectives, sharded layers, loss, random streams.

Names are imported on first use, because lower layers import `mappings` and `random` from here while
the sharded layers import those lower layers.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ColumnParallelLinear": "layers",
    "LayerNormColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "layers",
    "vocab_parallel_cross_entropy": "cross_entropy",
    "RngStreams": "random",
    "checkpoint": "random",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
