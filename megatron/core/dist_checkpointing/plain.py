"""Plain values as bytes, and back without running anything that the bytes ask for.

The container is ``torch.save`` of dictionaries, lists, numbers, strings and tensors, which every
version of torch can read with ``weights_only=True``. ``argparse.Namespace`` is allowed too, because
Megatron-Core keeps its arguments in one.
"""

from __future__ import annotations

import argparse
import importlib
import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

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

    Objects of other types (enums, types of other libraries) become ``Opaque`` placeholders.

    Args:
        data: The bytes.
        name: What they are, for the message.

    Raises:
        CheckpointError: They are no such container.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        values = _load_opaque(data, name)
    except (RuntimeError, EOFError, ValueError) as error:
        raise UnusableCheckpointError(f"{name}: it is damaged ({error}).") from error
    if not isinstance(values, dict):
        raise UnusableCheckpointError(f"{name}: it holds no dictionary.")
    return values


class Opaque:
    """Stands for an object whose type is not built here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept and forget everything."""

    def __setstate__(self, state: object) -> None:
        """Forget the state too."""

    def __call__(self, *args: object, **kwargs: object) -> Opaque:
        """Stand for whatever the call would have made."""
        return self

    def append(self, item: object) -> None:
        """Forget list items."""

    def __setitem__(self, key: object, item: object) -> None:
        """Forget dictionary items."""


_HARMLESS = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "complex"),
}


class _OpaqueUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return getattr(importlib.import_module(module), name)
        return Opaque

    def persistent_load(self, pid: object) -> Opaque:
        return Opaque()


def _load_opaque(data: bytes, name: str) -> Any:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (entry,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            content = archive.read(entry)
        return _OpaqueUnpickler(io.BytesIO(content)).load()
    except (zipfile.BadZipFile, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise UnusableCheckpointError(f"{name}: it is damaged ({error}).") from error
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise UnusableCheckpointError(
            f"{name}: its content is not understood ({error!r})."
        ) from error
