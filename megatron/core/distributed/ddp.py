"""Data parallelism: gradients accumulate in fp32 buffers and are summed once per step.

What is summed when:

* without overlap, `finish_grad_sync` reduces every bucket after the last microbatch;
* with overlap, a bucket's reduction starts when backward of the last microbatch (see
  `expect_last_backward`) has completed the bucket's last gradient, and `finish_grad_sync` waits.

Dense and expert parameters are copied on different ranks and have buckets of their own. Buckets of
both kinds start in one order, that in which backward completes them, which is the same on every
rank, whatever happens on it. They are the same with and without overlap, so that the sums are too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.buffers import GradBuffer
from megatron.core.distributed.fp8_reduction import Fp8Reduction
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import Axis
from megatron.core.shards import FlatRange, is_expert
from megatron.core.wire import FP8_DTYPES


class DistributedDataParallel(nn.Module):
    """A module whose gradients accumulate in `param.main_grad`.

    Layers may add to `main_grad` themselves and give autograd nothing; an ordinary gradient is
    added when autograd has accumulated it, and freed. A tied parameter occurs once. Nothing is
    averaged here: `finalize_gradients` divides by the number of tokens.

    With `sharded`, a rank ends up with the summed gradient of its own range of each bucket only
    (the rest of `main_grad` is then of no use), and after an update of these ranges
    `gather_params` makes the parameters whole again.

    Attributes:
        keeps_residual: Whether FP8 reductions keep something for the next step.
        loss_scale: Factor on the loss of the last step, and so on what is kept of it.

    Args:
        module: The model; its parameters exist and stay the same objects.
        dp_axis: Ranks that hold copies of the dense parameters and see other tokens: data- and
            context-parallel ones.
        expert_dp_axis: The same for expert parameters (attribute `allreduce` false).
        outer_axis: With `sharded`: if `dp_axis` is one of several groups of replicas, each of which
            shares all ranges, the ranks of all groups that own the same ranges.
        expert_outer_axis: The same for expert parameters.
        reduce_dtype: Type of gradients on the wire; an FP8 one for `Fp8Reduction`.
        error_feedback: In FP8: send what rounding takes away with the next step.
        sharded: Whether each rank owns a range of every bucket (the distributed optimizer).
        bucket_size: Elements of one bucket; None for the default or for `num_buckets`.
        num_buckets: About how many buckets to make, of dense and expert parameters together.
        overlap_reduce: Reduce buckets during the last backward pass.
        overlap_gather: Gather parameters during the next forward pass; each module waits for its
            own.
        weight_grads: Where the module's linear layers put off their weight gradients: a gradient is
            complete when nothing of it is put off.
        fp8_weights: With `sharded`: weights that are to rest in FP8 (see `Fp8Weight`), with the
            precision of their layers. They do from the first `store_masters` on.
    """

    def __init__(
        self,
        module: nn.Module,
        dp_axis: Axis,
        *,
        expert_dp_axis: Axis | None = None,
        outer_axis: Axis | None = None,
        expert_outer_axis: Axis | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        error_feedback: bool = True,
        sharded: bool = False,
        bucket_size: int | None = None,
        num_buckets: int | None = None,
        overlap_reduce: bool = False,
        overlap_gather: bool = False,
        weight_grads: WeightGradQueue | None = None,
        fp8_weights: Mapping[nn.Parameter, LinearPrecision] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.sharded = sharded
        self._overlap_reduce, self._overlap_gather = overlap_reduce, overlap_gather
        self.keeps_residual = reduce_dtype in FP8_DTYPES and error_feedback
        trained = [p for p in module.parameters() if p.requires_grad]
        if num_buckets is not None and bucket_size is None:
            bucket_size = max(1, -(-sum(p.numel() for p in trained) // num_buckets))
        self._fp8_weights = frozenset(fp8_weights or ())
        dense, expert = (dp_axis, outer_axis), (expert_dp_axis or dp_axis, expert_outer_axis)
        self.buffers_by_axis = [
            GradBuffer(
                params,
                axis,
                reduce_dtype,
                outer=outer,
                bucket_size=bucket_size,
                sharded=sharded,
                feedback=error_feedback,
                fp8_weights=fp8_weights if params[0] in self._fp8_weights else None,
            )
            for (axis, outer), params in _by_kind(trained, dense, expert, self._fp8_weights)
        ]
        place = {param: number for number, param in enumerate(trained)}
        self._buckets = sorted(
            (b for buffer in self.buffers_by_axis for b in buffer.buckets),
            key=lambda bucket: -min(place[p] for p in bucket.params),
        )
        self._buffer_of = {p: buffer for buffer in self.buffers_by_axis for p in buffer.params}
        self._bucket_of: dict[torch.Tensor, Bucket] = {
            p: bucket for bucket in self._buckets for p in bucket.params
        }
        self._is_last_backward = False
        self._next_bucket = 0
        self.loss_scale = 1.0
        self._accumulators: list[Any] = []
        self._weight_grads = weight_grads
        if weight_grads is not None and overlap_reduce:
            weight_grads.when_complete = self._arrived
        for param in trained:
            hooked: Any = param
            hooked.register_post_accumulate_grad_hook(_into_main_grad)
            if overlap_reduce:
                self._watch(param)
        if overlap_gather:
            self._wait_before_use()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    @property
    def trained_params(self) -> list[nn.Parameter]:
        """Parameters with a `main_grad`, each once."""
        return [p for buffer in self.buffers_by_axis for p in buffer.params]

    # -- gradients ------------------------------------------------------------------------------

    def zero_grad_buffer(self, loss_scale: float = 1.0) -> None:
        """Forget all gradients; call it before the first microbatch of a step.

        Args:
            loss_scale: Factor with which the step's backward passes start.
        """
        factor, self.loss_scale = loss_scale / self.loss_scale, loss_scale
        for buffer in self.buffers_by_axis:
            buffer.zero(factor)
        for param in self.trained_params:
            param.grad = None
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._is_last_backward = False
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.expect_gradients()

    def expect_last_backward(self) -> None:
        """Say that the next backward pass completes the gradients of this step.

        With weight gradients that are put off, the weight passes after it do.
        """
        self._is_last_backward = self._overlap_reduce

    def finish_grad_sync(self) -> None:
        """Sum gradients over the data-parallel ranks; call it after the last microbatch."""
        self._is_last_backward = False
        self._start_reduce(len(self._buckets))
        for bucket in self._buckets:
            bucket.continue_reduce()
        for bucket in self._buckets:
            bucket.finish_reduce()
        self._next_bucket = 0

    def summed_grad(self, param: nn.Parameter) -> torch.Tensor:
        """Return the elements of a parameter's gradient that this rank keeps; flat, maybe empty."""
        own = self.owned_range(param)
        flat: torch.Tensor = param.main_grad.view(-1)  # type: ignore[attr-defined]
        return flat[own.start : own.stop]

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients that this rank keeps."""
        for buffer in self.buffers_by_axis:
            buffer.scale(factor)

    # -- what FP8 reductions keep for the next step ------------------------------------------------

    def drop_residual(self) -> None:
        """Say that the step is not taken, so that nothing of its gradients is to be sent later."""
        for reduction in self._fp8_reductions():
            reduction.drop()

    def residuals(self, *, fresh: bool = False) -> dict[nn.Parameter, torch.Tensor]:
        """What this rank keeps of each parameter's gradient, flat; without those it keeps none of.

        Args:
            fresh: To be written into instead of read: zeros, which the next step takes over.
        """
        kept: dict[Bucket, torch.Tensor | None] = {}
        for bucket in self._buckets:
            reduction = bucket.reduction
            if isinstance(reduction, Fp8Reduction):
                kept[bucket] = reduction.expect() if fresh else reduction.expose()
        found = {}
        for param in self.trained_params:
            bucket, place = self._buffer_of[param].place(param)
            tensor = kept.get(bucket)
            if tensor is not None:
                found[param] = tensor[place]
        return found

    def add_up_residuals(self) -> None:
        """Let what all ranks keep of an element be with its owner. Collective.

        Owners in several groups have the same, so that all but the first must clear it.
        """
        for reduction in self._fp8_reductions():
            reduction.add_up()

    def residual_owner(self, param: nn.Parameter) -> tuple[FlatRange, Axis]:
        """Elements of a parameter whose sums this rank makes, and ranks that make the same ones."""
        bucket, place = self._buffer_of[param].place(param)
        reduction = bucket.reduction
        if not isinstance(reduction, Fp8Reduction):
            return FlatRange(0, 0), Axis.single("outer")
        low = max(reduction.owned.start, place.start)
        high = max(min(reduction.owned.stop, place.stop), low)
        if low >= place.stop:
            return FlatRange(0, 0), reduction.copies
        return FlatRange(low - place.start, high - place.start), reduction.copies

    def residual_tensors(self) -> list[torch.Tensor]:
        """Return the memory that residuals take beside the gradient buffers."""
        found = (reduction.residual for reduction in self._fp8_reductions())
        return [residual for residual in found if residual is not None]

    def _fp8_reductions(self) -> list[Fp8Reduction]:
        found = (bucket.reduction for bucket in self._buckets)
        return [reduction for reduction in found if isinstance(reduction, Fp8Reduction)]

    # -- arrival of gradients ----------------------------------------------------------------------

    def _watch(self, param: nn.Parameter) -> None:
        """Notice when backward is done with a parameter.

        Layers that accumulate for themselves hand autograd no gradient, so hooks on the parameter
        stay silent; the node that would accumulate it runs all the same, once for each backward.
        """
        node = torch.autograd.graph.get_gradient_edge(param).node
        node.register_hook(lambda *_: self._passed(param))
        self._accumulators.append(node)  # or it would be made anew without the hook

    def _passed(self, param: nn.Parameter) -> None:
        if self._weight_grads is None or not self._weight_grads.owes(param):
            self._arrived(param)

    def _arrived(self, param: torch.Tensor) -> None:
        if not self._is_last_backward or not self._bucket_of[param].arrive():
            return
        ready = self._next_bucket
        while ready < len(self._buckets) and self._buckets[ready].missing == 0:
            ready += 1
        self._start_reduce(ready)

    def _start_reduce(self, end: int) -> None:
        """Start the buckets up to `end`; without overlap wait for each, to need less memory.

        Groups add up a bucket when the next one is on its way, so that neither has to be waited
        for.
        """
        while self._next_bucket < end:
            number = self._next_bucket
            self._next_bucket += 1
            self._buckets[number].start_reduce()
            if not self._overlap_reduce:
                self._buckets[number].finish_reduce()
            elif number:
                self._buckets[number - 1].continue_reduce()

    # -- sharded parameters ---------------------------------------------------------------------

    def owned_range(self, param: nn.Parameter) -> FlatRange:
        """Return which elements of a parameter this rank updates: all of them if not sharded."""
        return self._buffer_of[param].owned(param)

    def shard_axis(self, param: nn.Parameter) -> Axis:
        """Return the ranks that own the ranges of a parameter between them."""
        return self._buffer_of[param].axis

    @property
    def shard_axes(self) -> list[Axis]:
        """Every axis that `shard_axis` returns, in the same order on all ranks."""
        return list(dict.fromkeys(buffer.axis for buffer in self.buffers_by_axis))

    def copies_axis(self, param: nn.Parameter) -> Axis:
        """Return the ranks that update the same elements of a parameter as this one."""
        buffer = self._buffer_of[param]
        return buffer.outer if self.sharded else buffer.axis

    def store_masters(self, masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Make new FP8 weights of their masters; `gather_params` follows. Collective.

        Args:
            masters: Of the elements that this rank owns, flat fp32; others are left out.
        """
        if self._fp8_weights:
            self.finish_param_sync()
        for buffer in self.buffers_by_axis:
            buffer.store_masters(masters)

    def is_in_fp8(self, param: nn.Parameter) -> bool:
        """Whether a parameter is a weight that may rest in FP8: `store_masters` writes it."""
        return param in self._fp8_weights

    @property
    def keeps_fp8_weights(self) -> bool:
        """Whether there are weights that may rest in FP8."""
        return bool(self._fp8_weights)

    @property
    def is_stale(self) -> bool:
        """Whether FP8 weights have to be made anew: a scale, or what layers run in, has changed."""
        return not all(w.is_current for b in self.buffers_by_axis for w in b.fp8_weights)

    def fp8_tensors(self) -> list[torch.Tensor]:
        """Return the memory of weights that may rest in FP8, beside the parameters themselves."""
        found = [b.codes for b in self.buffers_by_axis if b.codes is not None]
        return found + [t for b in self.buffers_by_axis for w in b.fp8_weights for t in w.tensors]

    def gather_params(self) -> None:
        """Fetch what other ranks updated; with overlap, modules wait for it when they run."""
        for bucket in reversed(self._buckets):  # forward order
            bucket.start_gather()
            if not self._overlap_gather:
                bucket.finish_gather()

    def finish_param_sync(self) -> None:
        """Wait for all parameters; needed before they are read outside of a forward pass."""
        for bucket in reversed(self._buckets):
            bucket.finish_gather()

    def _wait_before_use(self) -> None:
        for module in self.module.modules():
            own = (p for p in module.parameters(recurse=False) if p in self._bucket_of)
            buckets = list(dict.fromkeys(self._bucket_of[p] for p in own))
            if buckets:
                module.register_forward_pre_hook(_waiter(buckets))


def _waiter(buckets: list[Bucket]) -> Any:
    def wait(*_: Any) -> None:
        for bucket in buckets:
            if bucket.is_gathering:
                bucket.finish_gather()

    return wait


_Kind = TypeVar("_Kind")


def _by_kind(
    trained: Sequence[nn.Parameter], dense: _Kind, expert: _Kind, in_fp8: Collection[nn.Parameter]
) -> list[tuple[_Kind, list[nn.Parameter]]]:
    """Group parameters by the ranks that share them and by type; one flat tensor has one type."""
    kinds: dict[tuple[bool, torch.dtype, bool], list[nn.Parameter]] = {}
    for param in trained:
        kind = (is_expert(param), param.dtype, param in in_fp8)
        kinds.setdefault(kind, []).append(param)
    order = sorted(kinds, key=lambda kind: kind[0])  # dense first
    return [(expert if kind[0] else dense, kinds[kind]) for kind in order]


def as_chunks(
    model: DistributedDataParallel | Sequence[DistributedDataParallel],
) -> list[DistributedDataParallel]:
    """A model's chunks, whether it came as one or as several."""
    return [model] if isinstance(model, DistributedDataParallel) else list(model)


def _into_main_grad(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
