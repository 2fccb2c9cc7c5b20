"""`get_forward_backward_func`: the pipeline for people with a training loop of their own.

Megatron's calling convention on this project's schedules. The function that it returns runs every
microbatch of a step forward and backward through this rank's part of the model. Gradients are then
in `main_grad` (or `grad`), summed over the microbatches; what happens to them is the caller's
business, or that of `finalize_model_grads_func`.

A facade: it finds the mesh in `parallel_state`. The project's own loop does without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.errors import MegatronError, complaint
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import ParallelState
from megatron.core.pipeline_parallel.p2p import Pipes
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedule import Action, Op, Schedule, generate, lower
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.core.tensor_parallel.mappings import all_reduce_

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any]]]
Finalize = Callable[[list[nn.Module], "torch.Tensor | None"], Any]


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Return the function that runs a step, for any pipeline; see `forward_backward`."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    finalize_model_grads_func: Finalize | None = None,
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    weight_grads: WeightGradQueue | None = None,
) -> list[Any]:
    """Run the microbatches of a step through the pipeline. Collective over its ranks.

    Args:
        forward_step_func: Called with an iterator and a part of the model; returns the part's
            output and a loss function. In the last stage that is called with the output and returns
            `(loss, report)`: the loss is averaged over the microbatches; or
            `(loss, num_tokens, report)`: a sum over tokens, so that gradients are those of the sum
            over all of them, and the number of tokens goes to `finalize_model_grads_func`.
        data_iterator: Given to `forward_step_func`; a list of one for each part with several parts.
        model: This rank's part of the model, or a list of its virtual stages. A part has `config`
            (`hidden_size`, a type of parameters, the schedule) and, with a pipeline,
            `set_input_tensor`, which is called with the output of the stage before.
        num_microbatches: Microbatches of the step.
        seq_length: Of the whole sequence, before it is cut for context or sequence parallelism.
        micro_batch_size: Samples of a microbatch.
        decoder_seq_length: As Megatron has it; equal to `seq_length`.
        forward_only: Run no backward pass.
        collect_non_loss_data: Collect `loss_func(output, non_loss_data=True)` instead of reports;
            with `forward_only`.
        finalize_model_grads_func: Called with the parts and the number of tokens (None if no loss
            function counts them) after the last backward pass. Default the attribute of that name
            of the model's configuration, if any.
        grad_scale_func: Scales the loss before the backward pass; default as above.
        weight_grads: The queue that the model was built with, for the schedule `zb-h1`.

    Returns:
        In the last stage the reports of all microbatches, in order; elsewhere an empty list.

    Raises:
        MegatronError: An argument does not fit the others, the model or the mesh.
        ScheduleError: There is no schedule for these numbers.
    """
    parts = list(model) if isinstance(model, Sequence) else [model]
    iterators = _iterators(data_iterator, len(parts))
    mesh = parallel_state.get_parallel_state()
    if decoder_seq_length not in (None, seq_length):
        raise _refused(
            "decoder_seq_length", decoder_seq_length, "A decoder-only model has one length"
        )
    if collect_non_loss_data and not forward_only:
        raise _refused("collect_non_loss_data", True, "A step with backward passes has a loss")
    config = _unwrapped(parts[0]).config
    schedule = _schedule(config, mesh, len(parts), num_microbatches, not forward_only)
    work = _Work(forward_step_func, parts, iterators, mesh, num_microbatches, collect_non_loss_data)
    finalize = finalize_model_grads_func or getattr(config, "finalize_model_grads_func", None)
    work.finalize = finalize if not forward_only else None
    scale = grad_scale_func or getattr(config, "grad_scale_func", None)
    actions = schedule[mesh.pp.rank]
    runner = Runner(
        work,
        lambda: None if scale is None else scale(torch.ones((), device=work.device)),
        _pipes(config, mesh, seq_length, micro_batch_size, work.device),
        _last_backwards(actions, parts, mesh.pp.size),
        weight_grads,
    )
    with torch.set_grad_enabled(not forward_only):
        runner.run(actions)
    return [work.reports[m] for m in sorted(work.reports)]


@dataclass
class _Work:
    """What the schedule's runner asks for.

    Attributes:
        reports: By microbatch, in the last stage.
        finalize: Makes gradients final; None for nobody.
    """

    forward_step: ForwardStep
    parts: list[nn.Module]
    iterators: list[Any]
    mesh: ParallelState
    num_microbatches: int
    non_loss_data: bool
    reports: dict[int, Any] = field(default_factory=dict)
    finalize: Finalize | None = None
    tokens: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        first = next((p for part in self.parts for p in part.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def forward(self, stage: int, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run a part; in the last stage return the loss."""
        index = stage // self.mesh.pp.size
        part = self.parts[index]
        if received is not None:
            _unwrapped(part).set_input_tensor(received)
        output, loss_func = self.forward_step(self.iterators[index], part)
        if stage != self.mesh.pp.size * len(self.parts) - 1:
            return output
        if self.non_loss_data:
            self.reports[microbatch] = loss_func(output, non_loss_data=True)
            return output
        result = loss_func(output)
        loss: torch.Tensor = result[0]
        counted, self.reports[microbatch] = result[1:-1], result[-1]
        if not counted:
            return loss / self.num_microbatches
        tokens = torch.as_tensor(counted[0], dtype=torch.float32, device=self.device).detach()
        self.tokens = tokens.clone() if self.tokens is None else self.tokens + tokens
        return loss

    def sync_gradients(self) -> None:
        """Hand the gradients over."""
        if self.finalize is None:
            return
        # Only the last stage knows whether anybody counts; -1 says that nobody does.
        last = self.mesh.pp.is_last
        own = -1.0 if last else 0.0
        tokens = torch.full((), own, device=self.device) if self.tokens is None else self.tokens
        tokens = all_reduce_(tokens, self.mesh.pp)
        self.finalize(self.parts, None if tokens.item() < 0 else tokens)

    def sync_amax(self) -> None:
        """Scales are the caller's business too."""


def _iterators(given: Any, count: int) -> list[Any]:
    """One iterator a part."""
    if not isinstance(given, list | tuple):
        if count > 1 and given is not None:
            raise _refused(
                "data_iterator", "one", f"There are {count} virtual stages", "Pass a list of them"
            )
        return [given] * count
    if len(given) != count:
        raise _refused("data_iterator", f"{len(given)} of them", f"The model has {count} part(s)")
    return list(given)


def _schedule(
    config: Any, mesh: ParallelState, virtual_size: int, num_microbatches: int, training: bool
) -> Schedule:
    at_an_end = mesh.pp.size > 1 and (mesh.pp.is_first or mesh.pp.is_last)
    if virtual_size > 1 and at_an_end and mesh.pipe_forward_wrap.size == 1:
        raise _refused(
            "model",
            f"{virtual_size} virtual stages",
            "The mesh has no channel from the last pipeline rank back to the first one",
            "Build it with virtual_pipeline_model_parallel_size",
        )
    schedule = lower(
        generate(
            num_microbatches,
            pipeline_size=mesh.pp.size,
            virtual_size=virtual_size,
            kind=getattr(config, "pipeline_schedule", "1f1b"),
            group_size=getattr(config, "microbatch_group_size_per_virtual_pipeline_stage", None),
            training=training,
        ),
        prefetch=getattr(config, "overlap_p2p_communication", True),
    )
    simulate(schedule)
    return schedule


def _pipes(
    config: Any, mesh: ParallelState, seq_length: int, micro_batch_size: int, device: torch.device
) -> Pipes | None:
    if mesh.pp.size == 1:
        return None
    split = mesh.cp.size
    if getattr(config, "sequence_parallel", False):
        split *= mesh.tp.size
    dtype = getattr(config, "pipeline_dtype", None) or config.params_dtype
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, dtype)
    shape = (seq_length // split, micro_batch_size, config.hidden_size)
    return Pipes(mesh, shape, dtype, device)


def _last_backwards(
    actions: Sequence[Action], parts: Sequence[nn.Module], pipeline_size: int
) -> Callable[[Action], None]:
    """Tell a part's gradient buffers which backward pass completes them."""
    last = {a.stage: a for a in actions if a.op is Op.B}

    def before(action: Action) -> None:
        part = parts[action.stage // pipeline_size]
        if action == last[action.stage] and isinstance(part, DistributedDataParallel):
            part.expect_last_backward()

    return before


def _unwrapped(part: nn.Module) -> Any:
    """The model inside wrappers, which keep it under `module`."""
    found: Any = part
    for wrapper in _wrappers(part):
        found = wrapper.module
    return found


def _wrappers(part: Any) -> Iterator[Any]:
    while not hasattr(part, "config") and isinstance(getattr(part, "module", None), nn.Module):
        yield part
        part = part.module


def _refused(name: str, got: object, why: str, fix: str = "Leave it out") -> MegatronError:
    return MegatronError(complaint(name, got, why, fix))
