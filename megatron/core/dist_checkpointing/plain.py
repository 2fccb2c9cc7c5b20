"""Plain values as bytes, and back without running anything that the bytes ask for.

The container is ``torch.save`` of dictionaries, lists, numbers, strings and tensors, which every
version of torch can read with ``weights_only=True``. ``argparse.Namespace`` is allowed too, because
Megatron-Core keeps its arguments in one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.dist_checkpointing import safe_pickle
from megatron.core.errors import UnusableCheckpointError


def dump(values: Mapping[str, Any]) -> bytes:
    """Turn a dictionary of plain values into bytes."""
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    return buffer.getvalue()


def dump_nothing() -> bytes:
    """Return the bytes by which Megatron-Core says that a module has no state of its own."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()


def load(data: bytes, name: str) -> dict[str, Any]:
    """Read what ``dump``, or Megatron-Core, wrote.

    Objects of the types of such libraries (enumerations and the like) become placeholders.

    Args:
        data: The bytes.
        name: What they are, for the message.

    Raises:
        CheckpointError: They are no such container, or ask for what no checkpoint needs.
    """
    values = safe_pickle.load(data, name)
    if not isinstance(values, dict):
        raise UnusableCheckpointError(f"{name}: it holds no dictionary.")
    return values
