"""A bucket: a range of a gradient buffer, and of its parameters, that travels in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.comm_log import PARAMETER_GATHER, Packing
from megatron.core.distributed.fp8_reduction import Fp8Reduction
from megatron.core.distributed.reduction import PlainReduction, Ranks, Reduction
from megatron.core.errors import MegatronError, complaint
from megatron.core.tensor_parallel.mappings import start_all_gather
from megatron.core.wire import FP8_DTYPES, Pending


@dataclass(frozen=True)
class Wire:
    """How gradients travel.

    Attributes:
        dtype: Their type; an FP8 one for `Fp8Reduction`.
        feedback: In FP8: whether what rounding takes away is sent with the next step.
    """

    dtype: torch.dtype = torch.float32
    feedback: bool = True

    @property
    def is_fp8(self) -> bool:
        """Whether they travel in FP8."""
        return self.dtype in FP8_DTYPES

    def reduction(self, grads: torch.Tensor, ranks: Ranks) -> Reduction:
        """The sum of a bucket."""
        if self.is_fp8:
            return Fp8Reduction(grads, ranks, self.feedback)
        return PlainReduction(grads, ranks, self.dtype)


class Bucket:
    """A range of a buffer that travels in one collective.

    Args:
        grads: The bucket's gradients, fp32 `[elements]`.
        values: The bucket's parameters `[elements]` when they are sharded, else None.
        params: The parameters in it.
        ranks: Who shares it.
        wire: How gradients travel.

    Attributes:
        reduction: Sums the gradients.
    """

    def __init__(
        self,
        grads: torch.Tensor,
        values: torch.Tensor | None,
        params: Sequence[nn.Parameter],
        ranks: Ranks,
        wire: Wire,
    ) -> None:
        self.params = list(params)
        self._grads, self._values, self._ranks = grads, values, ranks
        self._own = ranks.own(grads.numel())
        self._itemsize = self.params[0].element_size() if self.params else 1
        self.reduction = wire.reduction(grads, ranks)
        self._gathering: Pending | None = None
        self.missing = len(self.params)
        self.is_launched = False

    @property
    def is_gathering(self) -> bool:
        """Whether parameters are on their way, so that nobody may read them yet."""
        return self._gathering is not None

    def expect_gradients(self) -> None:
        """Count again how many parameters' gradients are not there yet."""
        self.missing, self.is_launched = len(self.params), False

    def arrive(self) -> bool:
        """Note that one more gradient is complete; return whether all are.

        Raises:
            MegatronError: The bucket is on its way already, so the gradient came too late.
        """
        if self.is_launched or self.missing == 0:
            raise MegatronError(
                complaint(
                    "--overlap-grad-reduce",
                    "a gradient after its bucket was reduced",
                    "Gradients must be complete with the backward pass of the last microbatch",
                    "Run no second backward pass after it, or leave the flag out",
                )
            )
        self.missing -= 1
        return self.missing == 0

    def start_reduce(self) -> None:
        """Start to sum the gradients over the ranks."""
        self.is_launched = True
        if not self._ranks.alone:
            self.reduction.start()

    def continue_reduce(self) -> None:
        """Start what follows on the first exchange, when that is over."""
        self.reduction.proceed()

    def finish_reduce(self) -> None:
        """Wait for the sums; they are then in this rank's range."""
        self.reduction.finish()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients of this rank's range."""
        self._grads[self._own].mul_(factor)

    def start_gather(self) -> None:
        """Start to fetch the other ranks' ranges of the parameters."""
        if not self._ranks.sharded:
            return
        inner = self._ranks.inner
        if inner.size > 1:
            whole = self._travelling()
            packed = inner.packed(Packing(whole.itemsize, 0, self._itemsize))
            own = whole[self._own]
            self._gathering = start_all_gather(whole, own, packed, PARAMETER_GATHER)
        else:
            self._announce()

    def finish_gather(self) -> None:
        """Wait for the parameters."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._announce()

    def _travelling(self) -> torch.Tensor:
        """The tensor that is gathered."""
        if self._values is None:
            raise TypeError("a bucket whose parameters are not sharded")
        return self._values

    def _announce(self) -> None:
        # The collective wrote behind the parameters' back; caches of a weight's quantized form
        # notice a change by the version alone.
        for param in self.params:
            torch.autograd.graph.increment_version(param)
