"""The compiled kernels are optional and survive a fork."""

from __future__ import annotations

import importlib
import sys

import torch
from distpool import run_ranks

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3


def without_numba(rank, size, x):
    """In a process of its own: forget the compiled kernels and import again without numba."""
    sys.modules["numba"] = None
    del sys.modules["megatron.core.fp8.kernels.compiled"], kernels.compiled
    fresh = importlib.reload(kernels)
    held, amax = fresh.round_to_grid(x, torch.tensor(3.0), E4M3, want_amax=True)
    return fresh.implementation(), held.float().numpy(), amax.item()


def test_plain_kernels_take_over_where_numba_is_missing():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    ((implementation, held, amax),) = run_ranks(without_numba, 1, x)
    assert implementation == "plain"
    want, want_amax = kernels.round_to_grid(x, torch.tensor(3.0), E4M3, want_amax=True)
    assert (held == want.float().numpy()).all()
    assert amax == want_amax.item()


def in_threads(x):
    previous = kernels.set_threads(2)
    try:
        return kernels.round_to_grid(x, torch.tensor(3.0), E4M3)[0]
    finally:
        kernels.set_threads(previous)


def test_threads_of_a_parent_do_not_hang_its_children():
    x = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    want = in_threads(x).float().sum().item()  # starts this process's threads
    assert run_ranks(lambda rank, size: in_threads(x).float().sum().item(), 2) == [want, want]
