"""The parity harness: train a small model at any layout, return what must not depend on it.

FP32, dropout 0, plain SGD without clipping, and loss masks that are uneven between samples: scale
errors that Adam, clipping or equal token counts would hide show up here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from distpool import run_ranks

from megatron.config import make_config
from megatron.core.datasets.batch import Batch
from megatron.core.fp8 import DelayedScaling, Fp8Policy, Fp8State, linear
from megatron.core.shards import gather_full
from megatron.core.tensor_parallel.mappings import gather_objects
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 2,  # so that the padding depends on the layout
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "optimizer": "sgd",
    "sgd_momentum": 0.0,
    "lr": 0.1,
    "min_lr": 0.1,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "transformer_impl": "native",
    "device": "cpu",
}


@dataclass
class Outcome:
    """What a layout did, as one rank sees it; the same on every rank.

    Attributes:
        losses: Mean loss of every step.
        grad_norms: Norm of the global gradient of every step.
        grads: Global gradient of every parameter in the first step, by name.
        initial: Global initial weights, by name.
        final: Global weights after the last step, by name.
        fp8: FP8 state after the first step: `fp8[path][key]`.
        final_fp8: The same after the last step.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    fp8: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    final_fp8: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


class SyntheticSource:
    """Batches that depend on the sample's number only.

    Masks are uneven, and one sample in four has no token that counts. Text follows a rule nine
    times in ten, so that a model learns something within a few steps.
    """

    def __init__(self, cfg: Any, dp_size: int) -> None:
        self.seq, self.vocab = cfg.seq_length, cfg.vocab_size
        self.micro, self.dp_size = cfg.micro_batch_size, dp_size
        self.packed, self.restart = cfg.reset_attention_mask, cfg.reset_position_ids

    def batch(self, consumed_samples: int, microbatch: int, dp_rank: int) -> Batch:
        first = consumed_samples + (microbatch * self.dp_size + dp_rank) * self.micro
        return Batch.stack([self.sample(first + i) for i in range(self.micro)])

    def sample(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        window = torch.randint(0, self.vocab, (self.seq + 1,), generator=generator)
        ruled = torch.rand(self.seq, generator=generator) < 0.9
        for i in ruled.nonzero().flatten().tolist():
            window[i + 1] = (5 * window[i] + 7) % self.vocab
        kept = torch.rand(self.seq, generator=generator) < (number % 4) / 3
        if number % 4 == 2:
            kept[: self.seq // 2] = False
        positions = torch.arange(self.seq)
        sample = {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": kept.float(),
            "position_ids": positions,
        }
        if self.packed:  # three documents, others in every sample
            borders = (3 + number % 7, 11 + number % 3)
            starts = sum((positions >= border) * 1 for border in borders)
            starts = torch.tensor((0, *borders))[starts]
            sample["document_starts"] = starts
            if self.restart:
                sample["position_ids"] = positions - starts
        return sample


def run_layout(
    fields: dict[str, Any], world_size: int = 1, steps: int = 1, timeout: float = 120
) -> list[Outcome]:
    """Train `steps` steps of `BASE` changed by `fields` on `world_size` ranks.

    Returns:
        One outcome per rank.
    """
    if fields.get("fp8_format"):
        _compile_kernels()
    return run_ranks(_train, world_size, fields, steps, timeout=timeout, detail=False)


@functools.cache
def _compile_kernels() -> None:
    """Compile in this process what every forked rank would otherwise compile for itself."""
    for dtype in (torch.float32, torch.bfloat16):
        state = Fp8State(Fp8Policy(recipe=DelayedScaling()), params_dtype=dtype)
        x, weight = (torch.ones(16, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        linear(x, weight, None, state.for_linear("layer")).sum().backward()


def _train(rank: int, world_size: int, fields: dict[str, Any], steps: int) -> Outcome:
    cfg = make_config(world_size=world_size, **{**BASE, "train_iters": steps, **fields})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    parts = setup_model(cfg, runtime)
    source = SyntheticSource(cfg, runtime.mesh.dp.size)
    step = TrainStep(cfg, runtime, parts, source)
    outcome, params = Outcome(), dict(parts.model.named_parameters())

    def full(of: str) -> dict[str, torch.Tensor]:
        if of == "grad" and cfg.use_distributed_optimizer:
            return {}  # each replica keeps a part only
        parts.ddp.finish_param_sync()
        own = {
            name: gather_full(
                param.main_grad if of == "grad" else param.detach(), param, runtime.mesh.tp
            ).clone()
            for name, param in params.items()
        }
        return over_stages(own)

    def over_stages(own: dict[str, Any]) -> dict[str, Any]:
        """Join what the pipeline stages hold; copies of one tensor have to be equal bitwise."""
        joined: dict[str, Any] = {}
        for stage in gather_objects(own, runtime.mesh.pp):
            for name in stage.keys() & joined.keys():
                # As bytes, because a NaN equals nothing.
                copies = [x[name].contiguous().view(torch.uint8) for x in (stage, joined)]
                assert torch.equal(*copies), f"{name} differs between stages"
            joined |= stage
        return joined

    def fp8_state() -> dict[str, dict[str, torch.Tensor]]:
        return over_stages(parts.fp8.book.state_dict()) if parts.fp8.book is not None else {}

    outcome.initial = full("value")
    for iteration in range(1, steps + 1):
        done = step.run(iteration, (iteration - 1) * cfg.global_batch_size)
        outcome.losses.append(done.loss)
        outcome.grad_norms.append(done.update.grad_norm)
        if iteration == 1:
            outcome.grads, outcome.fp8 = full("grad"), fp8_state()
    outcome.final, outcome.final_fp8 = full("value"), fp8_state()
    return outcome


def without_padding(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A vocabulary-sized tensor without the rows that only make it divisible."""
    padded = "word_embeddings" in name or name.startswith("output_layer")
    return tensor[: BASE["vocab_size"]] if padded else tensor


def worst(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest error relative to the tensor's largest magnitude, and the name of that tensor."""
    if ours.keys() != reference.keys():
        raise AssertionError(f"different parameters: {ours.keys() ^ reference.keys()}")
    errors = []
    for name, expected in reference.items():
        exact = without_padding(expected, name).double()
        found = without_padding(ours[name], name).double()
        scale = exact.abs().max().clamp(min=1e-12)
        errors.append((((found - exact).abs().max() / scale).item(), name))
    return max(errors)
