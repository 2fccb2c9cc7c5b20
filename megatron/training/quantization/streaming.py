"""A model that runs layer by layer, so that one layer and the activations are all there is.

Weights come from a source (a HuggingFace directory, a checkpoint, or one of them rounded on the
way) and everything is computed in fp32.

Shape legend: s sequence, b windows of a batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.config.placement import Stage
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.errors import CheckpointError, complaint
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.hf_convert import config_of
from megatron.training.hf_rows import tensors_of
from megatron.training.hf_sources import Source


@dataclass(frozen=True)
class Batch:
    """Some windows of text on their way through the layers.

    Attributes:
        tokens: ``[b, s]`` ids.
        hidden: ``[s, b, h]``, what the last layer that was run made of them.
    """

    tokens: Tensor
    hidden: Tensor


class LayerStream:
    """Runs a model whose parts are built and filled when their turn comes.

    Args:
        source: The model's settings and weights.
        device: Where a part is computed.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        """Read nothing yet."""
        self.source, self.device = source, device
        self.rows = source.rows()
        self.num_layers: int = source.fields["num_layers"]
        self._config = config_of(source.fields, "fp32")

    def layer(self, number: int) -> GPTModel:
        """Build one layer with its weights."""
        return self._part(Stage(0, number, number + 1, embedding=False, loss=False), number)

    def embed(self, windows: Sequence[Tensor]) -> list[Batch]:
        """Look up windows ``[b, s]`` of token ids."""
        model = self._part(Stage(0, 0, 0, embedding=True, loss=False), None)
        empty = torch.empty(0)
        return [replace(b, hidden=run(model, b)) for b in (Batch(w, empty) for w in windows)]

    def total_loss(self, windows: Sequence[Tensor]) -> tuple[float, int]:
        """Predict every token but the first of windows ``[b, s + 1]``.

        Returns:
            (Sum of the losses in nats, number of predicted tokens.)
        """
        batches = self.embed([w[:, :-1] for w in windows])
        for number in range(self.num_layers):
            model = self.layer(number)
            batches = [replace(b, hidden=run(model, b)) for b in batches]
        count = self.num_layers
        model = self._part(Stage(0, count, count, embedding=False, loss=True), None)
        total, predicted = 0.0, 0
        for batch, window in zip(batches, windows, strict=True):
            losses = run(model, batch, window[:, 1:])
            total += float(losses.double().sum())
            predicted += losses.numel()
        return total, predicted

    def _part(self, stage: Stage, layer: int | None) -> GPTModel:
        mesh = ParallelState.single()
        build = Build.root(self._config, mesh, NativeBackend(), self.device)
        model = GPTModel(build, stages=[stage]).eval().requires_grad_(requires_grad=False)
        self._fill(model, layer)
        return model

    @torch.no_grad()
    def _fill(self, model: GPTModel, layer: int | None) -> None:
        """Give every parameter and stored buffer its value; padding of the vocabulary is zero."""
        wanted = stored_tensors(model)
        for row, at in tensors_of(self.rows, layer):
            target = wanted.pop(at.of(row.name), None)
            if target is not None:
                values = self.source.read(row, at)
                target.zero_()
                target[: values.shape[0]].copy_(values)
        if wanted:
            raise CheckpointError(
                complaint(
                    "--load",
                    f"a model without {', '.join(sorted(wanted)[:4])}",
                    "The layers of this project have these tensors",
                    "Convert the model with tools/checkpoint/convert.py, which says what is wrong",
                )
            )


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model and the buffers that checkpoints hold."""
    wanted: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                wanted[name] = buffer
    return wanted


@torch.no_grad()
def run(model: GPTModel, batch: Batch, labels: Tensor | None = None) -> Tensor:
    """Run one part of a model on a batch; the result is on the CPU.

    Args:
        model: What ``LayerStream`` built.
        batch: Its input.
        labels: ``[b, s]``, for the last part.
    """
    device = next(model.parameters()).device
    tokens = batch.tokens.to(device)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    hidden = batch.hidden.to(device) if batch.hidden.numel() else None
    wanted = None if labels is None else labels.to(device)
    result: Tensor = model(tokens, positions, wanted, hidden=hidden)
    return result.cpu()


def watch_inputs(
    model: nn.Module, ends: str, see: Callable[[str, Tensor], None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Show the inputs of the matrix products of some linear layers.

    Args:
        model: What contains the layers.
        ends: How their names end, ``linear_fc1`` say.
        see: Called with the name of a weight and the inputs ``[..., i]`` that it multiplies.

    Returns:
        Handles that end it.
    """

    def grouped(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, Sequence[int]]) -> None:
            for i, part in enumerate(torch.split(args[0], list(args[1]))):
                see(f"{name}.weight{i}", part)

        return hook

    def single(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            normalize = getattr(module, "normalize", None)  # a norm that the layer brings along
            see(f"{name}.weight", args[0] if normalize is None else normalize(args[0]))

        return hook

    return [
        module.register_forward_pre_hook(
            grouped(name) if hasattr(module, "num_local_experts") else single(name)
        )
        for name, module in model.named_modules()
        if name.endswith(ends)
    ]
