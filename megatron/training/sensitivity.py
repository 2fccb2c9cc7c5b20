"""How much FP8 harms each part of a model, measured on a short window of its own training data.

On the same batches, with the same weights and the same dropout, the whole model runs in high
precision, and then with one group of layers after the other in FP8. What a group does to the loss
and to the gradient of the whole model is its harm. No parameter changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.config import RunConfig, fp8_policy
from megatron.config.fp8_policy import PLAIN, PolicyRule
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8 import Role
from megatron.core.fp8.attention import AttentionPrecision
from megatron.core.fp8.precision import LinearPrecision
from megatron.training.initialize import Runtime
from megatron.training.providers import Parts
from megatron.training.step import BatchSource, TrainStep

Layer = LinearPrecision | AttentionPrecision
KINDS = ("module", "layer", "kind")
FIGURES = ("gradient", "loss")
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.")
_HELD = "not the layer that is measured"
_CALIBRATIONS = 3  # a scale of 1 may spoil what the next layers see, so one pass is not enough


@dataclass(frozen=True)
class Group:
    """Layers that are judged together.

    Attributes:
        name: What the table calls it.
        rule: What a policy says to keep it out of FP8.
        layers: Its layers; all experts of a matrix.
        share: Its part of the multiplications in everything that FP8 is for.
    """

    name: str
    rule: PolicyRule
    layers: tuple[Layer, ...]
    share: float


@dataclass
class Harm:
    """What a group in FP8 does, summed over the batches.

    Attributes:
        error: Squared error of the gradient.
        norm: Squared gradient in high precision.
        loss: Change of the mean loss, with its sign.
        loss_size: The same without.
        batches: How many there were.
        signal: Squared elements by role.
        noise: Their squared errors.
    """

    error: float = 0.0
    norm: float = 0.0
    loss: float = 0.0
    loss_size: float = 0.0
    batches: int = 0
    signal: dict[Role, float] = field(default_factory=dict)
    noise: dict[Role, float] = field(default_factory=dict)

    @property
    def gradient_error(self) -> float:
        """Error of the gradient relative to it; infinite where something is not finite."""
        if not math.isfinite(self.error):
            return math.inf
        return math.sqrt(self.error / self.norm) if self.norm else 0.0

    @property
    def loss_change(self) -> float:
        """Mean change of the loss."""
        return self.loss / max(self.batches, 1)

    def figure(self, name: str) -> float:
        """What layers are ranked by: `gradient` or `loss`, the larger the worse."""
        if name == "gradient":
            return self.gradient_error
        size = self.loss_size / max(self.batches, 1)
        return size if math.isfinite(size) else math.inf

    def snr(self, role: Role) -> float:
        """Signal-to-noise ratio of a tensor's quantization, in dB; NaN if it was not quantized."""
        signal, noise = self.signal.get(role, 0.0), self.noise.get(role, 0.0)
        if not signal or not math.isfinite(signal + noise):
            return math.nan
        return 10.0 * math.log10(signal / noise) if noise else math.inf


def groups_of(cfg: RunConfig, parts: Parts, kind: str) -> list[Group]:
    """Every group of layers that runs in FP8.

    Args:
        cfg: The configuration.
        parts: The model.
        kind: `module`: each layer by itself; `layer`: those of a transformer layer; `kind`:
            those of the same name in all layers.

    Raises:
        PrecisionError: Nothing runs in FP8.
    """
    found: dict[str, tuple[PolicyRule, list[Layer], float]] = {}
    total = 0.0
    for path, layers, work in _layers(cfg, parts):
        total += work
        if layers[0].decision.recipe is not None:
            name, rule = _named(path, kind)
            _, members, before = found.setdefault(name, (rule, [], 0.0))
            found[name] = (rule, [*members, *layers], before + work)
    if not found:
        fix = "Pass --fp8-format and a recipe, and leave something to FP8"
        raise PrecisionError(complaint("--fp8-format", "no layer in FP8", "Nothing to judge", fix))
    return [
        Group(name, rule, tuple(layers), work / total)
        for name, (rule, layers, work) in found.items()
    ]


def _layers(cfg: RunConfig, parts: Parts) -> Iterator[tuple[str, Sequence[Layer], float]]:
    """Path, precision (of every expert) and multiplications for a token of what FP8 is for."""
    for path, module in parts.model.named_modules():
        if _LAYER.match(path) is None:
            continue
        precision = getattr(module, "precision", None)
        if isinstance(precision, LinearPrecision):
            yield path, [precision], float(module.weight.numel())
        elif isinstance(precision, AttentionPrecision) and cfg.fp8_dot_product_attention:
            # A token sees half of the sequence on average, once for scores and once for values.
            yield (
                path,
                [precision],
                float(cfg.seq_length * cfg.num_attention_heads * cfg.kv_channels),
            )
        elif getattr(module, "precisions", None):
            weights = sum(weight.numel() for weight in module.weights)
            yield path, module.precisions, weights * cfg.moe_router_topk / cfg.num_experts


def _named(path: str, kind: str) -> tuple[str, PolicyRule]:
    """Name of the group of a layer, and the rule that keeps it out of FP8."""
    found = _LAYER.match(path)
    if kind == "module" or found is None:
        return path, PolicyRule(0, (path,), recipe=PLAIN)
    if kind == "layer":
        number = int(found[2])
        return f"layer {number}", PolicyRule(0, layers=((number, number),), recipe=PLAIN)
    pattern = f"{found[1]}.*.{path[found.end() :]}"
    return pattern, PolicyRule(0, (pattern,), recipe=PLAIN)


class Probe:
    """Runs batches with some of the groups in FP8.

    Args:
        cfg: The configuration.
        runtime: Mesh and device; one process.
        parts: The model.
        source: The batches.
        groups: All groups.
    """

    def __init__(
        self,
        cfg: RunConfig,
        runtime: Runtime,
        parts: Parts,
        source: BatchSource,
        groups: Sequence[Group],
    ) -> None:
        self._parts, self._groups = parts, groups
        self._step = TrainStep(cfg, runtime, parts, source)
        self._buffers = [buffer.flat for buffer in parts.ddp.buffers_by_axis]

    def calibrate(self, iteration: int, consumed: int) -> None:
        """Let delayed scaling find its scales, with everything in FP8 on one batch."""
        if any(book.paths() for book in self._parts.fp8.books):
            for _ in range(_CALIBRATIONS):
                self._run(self._groups, iteration, consumed)

    def measure(
        self,
        trials: Sequence[Sequence[Group]],
        batches: Sequence[tuple[int, int]],
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Harm]:
        """Compare each choice of groups in FP8 with none of them.

        Args:
            trials: The choices.
            batches: (number of the iteration, samples read before it).
            progress: Called after each batch with its number.
        """
        harms = [Harm() for _ in trials]
        with self._parts.fp8.not_recording():
            for number, (iteration, consumed) in enumerate(batches, 1):
                loss = self._run((), iteration, consumed)
                reference = [flat.clone() for flat in self._buffers]
                norm = sum(_squares(flat) for flat in reference)
                for trial, harm in zip(trials, harms, strict=True):
                    with _listening(trial, harm):
                        change = self._run(trial, iteration, consumed) - loss
                    pairs = zip(self._buffers, reference, strict=True)
                    harm.error += sum(_squares(flat - plain) for flat, plain in pairs)
                    harm.norm += norm
                    harm.loss += change
                    harm.loss_size += abs(change)
                    harm.batches += 1
                progress(number)
        return harms

    def _run(self, in_fp8: Sequence[Group], iteration: int, consumed: int) -> float:
        """Run a batch; returns the loss and leaves the gradient in the buffers."""
        for group in self._groups:
            for layer in group.layers:
                layer.suspended = _HELD
        for group in in_fp8:
            for layer in group.layers:
                layer.suspended = ""
        return self._step.gradients(iteration, consumed)


def _squares(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


@contextmanager
def _listening(groups: Sequence[Group], harm: Harm) -> Iterator[None]:
    """Compare what the groups' layers quantize with what comes of it."""
    quantizers = [
        layer.quantizer(role)
        for group in groups
        for layer in group.layers
        if isinstance(layer, LinearPrecision)
        for role in Role
    ]
    for quantizer in quantizers:
        quantizer.cast = _heard(quantizer.cast, quantizer.role, harm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for quantizer in quantizers:
            del quantizer.cast


def _heard(cast: Callable[..., Any], role: Role, harm: Harm) -> Callable[..., Any]:
    def wrapped(x: torch.Tensor, **options: Any) -> Any:
        made = cast(x, **options)
        harm.signal[role] = harm.signal.get(role, 0.0) + _squares(x)
        error = _squares(made[0].dequantize() - x.float())
        harm.noise[role] = harm.noise.get(role, 0.0) + error
        return made

    return wrapped


# -- choosing -------------------------------------------------------------------------------------


def ranked(groups: Sequence[Group], harms: Sequence[Harm], by: str) -> list[tuple[Group, Harm]]:
    """Groups with their harm, the worst first; equal ones in the order of the model."""
    pairs = list(zip(groups, harms, strict=True))
    return sorted(pairs, key=lambda pair: -pair[1].figure(by))


def chosen(
    ranking: Sequence[tuple[Group, Harm]], top: int | None, share: float | None
) -> list[Group]:
    """The groups to keep out of FP8.

    Args:
        ranking: The worst first.
        top: That many of them.
        share: As many as fit into this part of the work; one that does not is passed over.

    Raises:
        PrecisionError: None fits.
    """
    groups = [group for group, _ in ranking]
    if top is not None:
        return groups[:top]
    kept, used = [], 0.0
    for group in groups:
        if used + group.share <= (share or 0.0) + 1e-9:
            kept.append(group)
            used += group.share
    if not kept:
        smallest = min(group.share for group in groups)
        raise PrecisionError(
            complaint(
                "--keep-share",
                share,
                f"No group is so small: the smallest has {smallest:.4f} of the multiplications",
                f"Use at least {smallest:.4f}, or --group module",
            )
        )
    return kept


def policy_text(cfg: RunConfig, kept: Sequence[tuple[Group, str]], comment: str) -> str:
    """A policy that keeps some groups in high precision and otherwise says what the run's says.

    Args:
        cfg: The run's configuration, perhaps with rules of its own.
        kept: Groups, and why.
        comment: For the head of the text.
    """
    rules = [
        PolicyRule(0, group.rule.modules, group.rule.layers, PLAIN, note=why) for group, why in kept
    ]
    paths = [path for path in fp8_policy.fp8_paths(cfg) if not fp8_policy.kept_by_edges(cfg, path)]
    for rule in fp8_policy.read(cfg.fp8_policy_text).rules:
        if any(rule.fits(path) and fp8_policy.deciding(rules, path) is None for path in paths):
            rules.append(rule)
    return fp8_policy.write(rules, comment)
