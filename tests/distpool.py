"""Run a function on several gloo ranks: `run_ranks(fn, world_size, *args)`.

The pool of the parity command serves every test of several ranks.
"""

from __future__ import annotations

from megatron.training.parity.ranks import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
