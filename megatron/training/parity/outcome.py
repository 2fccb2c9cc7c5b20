"""What a training at some layout did, in terms that no layout may change."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core.datasets.source import Source
from megatron.core.errors import MegatronError, complaint
from megatron.core.mesh import Axis, ParallelState
from megatron.core.shards import gather_full, global_name, shard_axis
from megatron.core.tensor_parallel.mappings import all_reduce_, gather_objects
from megatron.training.initialize import Launch, Runtime, start
from megatron.training.parity.source import SyntheticSource
from megatron.training.providers import Parts, setup_model
from megatron.training.step import TrainStep

Tensors = dict[str, torch.Tensor]
_NO_SCALE = 1e-12  # below this magnitude a tensor counts as zero


@dataclass
class Outcome:
    """What a layout did, as one rank sees it; the same on every rank.

    Attributes:
        losses: Mean loss of every step.
        grad_norms: Norm of the global gradient of every step.
        balance: Balancing losses of every step, by name, and figures of the experts' loads.
        grads: Global gradient of every parameter in the first step, by name, in model order.
        last_grads: The same in the last step, where it was asked for.
        initial: Global initial weights, by name.
        final: Global weights after the last step, by name.
        fp8: FP8 state after the first step: `fp8[path][key]`.
        final_fp8: The same after the last step.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    balance: list[dict[str, float]] = field(default_factory=list)
    grads: Tensors = field(default_factory=dict)
    last_grads: Tensors = field(default_factory=dict)
    initial: Tensors = field(default_factory=dict)
    final: Tensors = field(default_factory=dict)
    fp8: dict[str, Tensors] = field(default_factory=dict)
    final_fp8: dict[str, Tensors] = field(default_factory=dict)


def train(
    cfg: RunConfig, launch: Launch, *, steps: int | None = None, last_grads: bool = False
) -> Outcome:
    """Train on synthetic data and gather what came out. Collective: every rank calls it.

    Gradients are those the optimizer left behind, so set `clip_grad` to 0 where they matter.

    Args:
        cfg: A configuration with a vocabulary size.
        launch: This process's place.
        steps: Iterations; default `--train-iters`.
        last_grads: Whether to gather the gradients of the last step too.

    Raises:
        MegatronError: Two ranks that hold copies of one tensor disagree about it.
    """
    runtime = start(cfg, launch)
    parts = setup_model(cfg, runtime)
    source = SyntheticSource(cfg, runtime.mesh.dp.size)
    return observe(cfg, runtime, parts, source, steps or cfg.train_iters, last_grads)


def observe(
    cfg: RunConfig,
    runtime: Runtime,
    parts: Parts,
    source: Source,
    steps: int,
    last_grads: bool = False,
) -> Outcome:
    """Train `parts` for some steps and gather what came out. Collective; see `train`."""
    step, mesh, outcome = TrainStep(cfg, runtime, parts, source), runtime.mesh, Outcome()
    outcome.initial = global_weights(parts, mesh)
    for iteration in range(1, steps + 1):
        done = step.run(iteration, (iteration - 1) * cfg.global_batch_size)
        outcome.losses.append(done.loss)
        outcome.grad_norms.append(done.update.grad_norm)
        outcome.balance.append({**done.moe.losses, **done.moe.figures})
        if iteration == 1:
            outcome.grads, outcome.fp8 = global_gradients(parts, mesh), global_fp8(parts, mesh)
    if last_grads:
        outcome.last_grads = global_gradients(parts, mesh)
    outcome.final, outcome.final_fp8 = global_weights(parts, mesh), global_fp8(parts, mesh)
    return outcome


# -- gathering ----------------------------------------------------------------------------------


def global_weights(parts: Parts, mesh: ParallelState) -> Tensors:
    """Return every parameter of the whole model, by global name. Collective."""
    parts.ddp.finish_param_sync()
    from_masters = _whole_fp8_weights(parts)
    return _global(parts, mesh, lambda param: from_masters.get(param, param.detach()))


def global_gradients(parts: Parts, mesh: ParallelState) -> Tensors:
    """Return the gradient of every parameter after a step, by global name. Collective.

    With the distributed optimizer each replica has kept its own range of every gradient.
    """
    whole = _whole_gradients(parts)
    return _global(parts, mesh, lambda param: whole[param])


def global_fp8(parts: Parts, mesh: ParallelState) -> dict[str, Tensors]:
    """Return scales and histories of every FP8 layer of the whole model, by path. Collective."""
    own: dict[str, Tensors] = {}
    for book in parts.fp8.books:
        own |= book.state_dict()
    # With --fp8-amax-reduction tp replicas have scales of their own; the first one's are returned.
    return join(join(own, mesh.ep, must_agree=False), mesh.pp)


def _whole_gradients(parts: Parts) -> dict[torch.Tensor, torch.Tensor]:
    params, ddp = parts.ddp.trained_params, parts.ddp
    if not ddp.sharded:
        return {param: param.main_grad for param in params}  # type: ignore[attr-defined]
    whole: dict[torch.Tensor, torch.Tensor] = {}
    for axis in ddp.shard_axes:
        ours = [param for param in params if ddp.shard_axis(param) == axis]
        flat = torch.zeros(sum(p.numel() for p in ours), device=ours[0].device)
        places = torch.split(flat, [p.numel() for p in ours])
        for param, place in zip(ours, places, strict=True):
            own = ddp.owned_range(param)
            place[own.start : own.stop] = ddp.summed_grad(param)
            whole[param] = place.view(param.shape)
        all_reduce_(flat, axis)  # every element has one owner: nothing is added but zeros
    return whole


def _whole_fp8_weights(parts: Parts) -> dict[torch.Tensor, torch.Tensor]:
    """Return weights that rest in FP8 in the parameters' type, from the masters. Collective."""
    ddp = parts.ddp
    whole: dict[torch.Tensor, torch.Tensor] = {}
    masters = {slot.param: slot for slot in parts.optimizer.slots}
    for param in ddp.trained_params:
        if not ddp.is_in_fp8(param):
            continue
        flat = torch.zeros(param.numel(), dtype=param.dtype, device=param.device)
        if param in masters:
            slot = masters[param]
            slot.part(flat).copy_(slot.master)
        all_reduce_(flat, ddp.shard_axis(param))  # every element has one owner
        whole[param] = flat.view(param.shape)
    return whole


def _global(
    parts: Parts, mesh: ParallelState, pick: Callable[[torch.nn.Parameter], torch.Tensor]
) -> Tensors:
    own = {
        global_name(name, param): gather_full(pick(param), param, shard_axis(param, mesh)).clone()
        for name, param in parts.model.named_parameters()
    }
    return join(join(own, mesh.ep), mesh.pp)


def join(own: Mapping[str, Any], axis: Axis, must_agree: bool = True) -> dict[str, Any]:
    """Join what the ranks of an axis hold by name. Collective.

    Args:
        own: Tensors, or dicts of tensors, by name.
        axis: The ranks.
        must_agree: Whether copies of one entry have to be equal bit by bit; otherwise the first
            rank's counts.

    Raises:
        MegatronError: They have to and are not.
    """
    joined: dict[str, Any] = {}
    for rank, held in enumerate(gather_objects(dict(own), axis)):
        for name, value in held.items():
            if name not in joined:
                joined[name] = value
            elif must_agree and not same_bits(value, joined[name]):
                raise MegatronError(
                    complaint(
                        name,
                        f"another value on {axis.name} rank {rank}",
                        f"It is one tensor that ranks along {axis.name} hold copies of",
                        "The layout is broken: a reduction or a broadcast of it is missing",
                    )
                )
    return joined


def same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors, or dicts of them, are the same bit by bit, NaN included."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (one, other)))


def fingerprints(outcome: Outcome) -> dict[str, str]:
    """Return a digest of every final weight and of the losses; ranks that agree have the same."""
    held = {"loss": repr(outcome.losses)}
    for name, tensor in outcome.final.items():
        held[name] = hashlib.blake2b(tensor.float().numpy().tobytes(), digest_size=16).hexdigest()
    return held


# -- comparison ---------------------------------------------------------------------------------


def without_padding(tensor: torch.Tensor, name: str, vocab_size: int) -> torch.Tensor:
    """Return a vocabulary-sized tensor without the rows that only make it divisible.

    How many there are depends on the layout. Every other tensor is returned as it is.
    """
    padded = "word_embeddings" in name or name.startswith("output_layer")
    return tensor[:vocab_size] if padded else tensor


def errors(ours: Tensors, reference: Tensors, vocab_size: int) -> dict[str, float]:
    """Return the largest error of every tensor, relative to its largest magnitude.

    Raises:
        MegatronError: The two have other names or shapes.
    """
    if ours.keys() != reference.keys():
        raise MegatronError(
            complaint(
                "parameters",
                ", ".join(sorted(ours.keys() ^ reference.keys())),
                "They exist at one of the two layouts only",
                "Compare trainings of one model",
            )
        )
    found = {}
    for name, expected in reference.items():
        exact = without_padding(expected, name, vocab_size).double()
        value = without_padding(ours[name], name, vocab_size).double()
        scale = exact.abs().max().clamp(min=_NO_SCALE)
        error = ((value - exact).abs().max() / scale).item()
        found[name] = math.inf if math.isnan(error) else error
    return found
