"""What autograd keeps, measured in a real step by hooks on every tensor it saves."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch


class _Held:
    """A saved tensor; it dies when the graph lets go of it."""

    def __init__(self, tensor):
        self.tensor = tensor


class SavedActivations:
    """Bytes of the storages that autograd keeps, each once, parameters and the like left out.

    Attributes:
        peak_bytes: The most at a time.
    """

    def __init__(self, without):
        self.peak_bytes = self._live = 0
        self._without = {t.untyped_storage().data_ptr(): t for t in without}
        self._holders = {}

    @contextmanager
    def measured(self):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
            yield

    def _pack(self, tensor):
        held, storage = _Held(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._without:
            return held
        self._holders[place] = self._holders.get(place, 0) + 1
        if self._holders[place] == 1:
            self._live += size
            self.peak_bytes = max(self.peak_bytes, self._live)
        weakref.finalize(held, self._drop, place, size)
        return held

    def _drop(self, place, size):
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self._live -= size


def cached_weights(fp8):
    """The quantized weights that an FP8 state keeps from step to step."""
    made = [layer._cached for layer in fp8.layers.values()]
    return [x.data for cached in made if cached is not None for x in (cached.row, cached.col)]
