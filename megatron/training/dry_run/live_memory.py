"""How much memory the tensors of a piece of code take, by watching them come and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Span:
    """What happened to memory while one thing was going on.

    Attributes:
        kept_bytes: What it added (or, below 0, freed) for good.
        peak_bytes: The most that there was at a time, more than at its beginning.
    """

    kept_bytes: int = 0
    peak_bytes: int = 0


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations inside the context make, until they are freed.

    Works on any device, `meta` included. A storage counts once, whatever views there are of it.

    Args:
        device: Only tensors there count.
        place: Asked what is going on; each answer has a span of its own.

    Attributes:
        live_bytes: What there is now.
        spans: What each answer of `place` did to memory, in order of appearance.
    """

    def __init__(self, device: torch.device, place: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.spans: dict[str, Span] = {}
        self._kind, self._place = device.type, place
        self._known: dict[int, Any] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out storages that were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Kept alive, so that its identity is not given to another one.
            self._known[id(storage)] = storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._kind:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()
        # The object outlives its last tensor, and only it: it dies with the memory.
        self._known[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self._add(size)

    def _free(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self._add(-size)

    def _add(self, size: int) -> None:
        span = self.spans.setdefault(self._place(), Span())
        self.live_bytes += size
        span.kept_bytes += size
        span.peak_bytes = max(span.peak_bytes, span.kept_bytes)
