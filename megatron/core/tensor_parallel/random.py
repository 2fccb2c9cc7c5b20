"""Random streams for dropout, and activation recompute that replays them.

A stream has no state to save: the numbers are a function of (seed, module path, step, microbatch,
rank coordinates), as in counter-based generators (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011). Resume and recompute therefore need the position only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.core.errors import MeshError, complaint
from megatron.core.mesh import ParallelState

_SEED_BITS = 63  # the widest that every torch generator accepts as a non-negative seed


def derive_seed(*key: object) -> int:
    """Hash a key of strings and integers to a generator seed, the same on every machine."""
    text = "\x1f".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _SEED_BITS) - 1)


class RngStreams:
    """Random generators addressed by module path and position in training.

    Data- and context-parallel ranks hold different tokens, so they always draw different numbers.
    Tensor-parallel ranks draw the same numbers for a replicated tensor and different ones for a
    sharded tensor.

    Attributes:
        position: `(step, microbatch)`; the training loop sets it before every forward.
    """

    def __init__(
        self,
        seed: int,
        mesh: ParallelState | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        mesh = mesh or ParallelState.single()
        self.seed = seed
        # On paper nothing is drawn, and there are no generators.
        on_paper = torch.device(device).type == "meta"
        self.device = torch.device("cpu" if on_paper else device)
        self.position: tuple[int, int] = (0, 0)
        self._replica = (mesh.dp.rank, mesh.cp.rank)
        self._shard = mesh.tp.rank

    def generator(self, path: str, axis: str = "replicated") -> torch.Generator:
        """A fresh generator for `path` at the current position; arguments as for `seed_of`."""
        return torch.Generator(device=self.device).manual_seed(self.seed_of(path, axis))

    def seed_of(self, path: str, axis: str = "replicated") -> int:
        """A seed for `path` at the current position, 0 to 2**63 - 1.

        Args:
            path: Unique name of the consumer, e.g. `decoder.layers.3.mlp.hidden_dropout`.
            axis: `replicated` (the same on every tensor-parallel rank) or `tp` (different on each).

        Raises:
            MeshError: If `axis` is neither.
        """
        if axis not in ("replicated", "tp"):
            raise MeshError(
                complaint(
                    f"random stream of {path}",
                    axis,
                    "A stream is shared by the tensor-parallel ranks or it is not",
                    "Use replicated or tp",
                )
            )
        shard = self._shard if axis == "tp" else "replicated"
        return derive_seed(self.seed, path, *self.position, *self._replica, shard)

    def dropout(
        self, x: torch.Tensor, p: float, path: str, sharded: bool, training: bool = True
    ) -> torch.Tensor:
        """Zero each element with probability `p` and scale the others by `1 / (1 - p)`.

        Args:
            x: Any shape.
            p: Probability of zero, in [0, 1).
            path: Unique name of this dropout.
            sharded: Whether `x` differs between tensor-parallel ranks (heads, or sequence shards).
            training: If false, `x` is returned as it is.
        """
        if p == 0.0 or not training:
            return x
        generator = self.generator(path, "tp" if sharded else "replicated")
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        keep.bernoulli_(1.0 - p, generator=generator)
        return _masked_scale(x, keep, 1.0 / (1.0 - p))

    @contextmanager
    def at(self, position: tuple[int, int]) -> Iterator[None]:
        """Draw at another position inside the block."""
        before, self.position = self.position, position
        try:
            yield
        finally:
            self.position = before


class _Dropout(torch.autograd.Function):
    """Masked scaling that keeps one byte an element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


_masked_scale: Callable[..., torch.Tensor] = _Dropout.apply


class Recomputable(Protocol):
    """State that a recomputed forward must see as the first forward did."""

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts for the first forward and for its replay."""
        ...


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    rng: RngStreams | None = None,
    fp8: Recomputable | None = None,
    also: Sequence[Recomputable] = (),
) -> Any:
    """Run `fn(*args)` without keeping its activations; recompute them in backward.

    The replay draws the random numbers of the first forward and quantizes with its scales, without
    recording amax values a second time, so gradients are bitwise those of a plain call.

    Args:
        fn: A function of tensors (other arguments pass through).
        args: Its arguments.
        rng: Streams that `fn` draws from.
        fp8: FP8 state of the layers that `fn` runs.
        also: Other state that must not notice the replay.

    Returns:
        What `fn` returns.
    """
    if not torch.is_grad_enabled():
        return fn(*args)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        states = [*also] if fp8 is None else [fp8, *also]
        pairs = [state.recompute_contexts() for state in states]
        here = rng.at(rng.position) if rng else nullcontext()
        return _all_of([first for first, _ in pairs]), _all_of([here, *(pair[1] for pair in pairs)])

    return torch_checkpoint(
        fn, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
