"""Compare a layout with one process, and say whether what differs is rounding.

In single precision the two do the same additions in another order, so fixed bands hold. In BF16 or
FP8 every operation rounds so coarsely that no fixed band fits all models. There the yardstick is
the model's own rounding: how far one process in this precision is from one process in single
precision. A layout may differ from one process by as much, but not by several times as much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from megatron.training.parity.outcome import Outcome, Tensors, without_padding

EXACT_LOSS = 1e-6
EXACT_TENSOR = 1e-5
# Two independent roundings are sqrt(2) apart, partial sums of ranks are rounded once more, and
# single tensors scatter.
_ROUNDED = 3.0
# Of a mean over tokens, where roundings cancel.
_ROUNDED_LOSS = {"fp4": 2.0**-6, "fp8": 2.0**-8, "": 2.0**-10}
_ROUNDED_SCALE = 0.25  # a maximum is one element, which carries a gradient's whole noise
# A token with two nearly equal scores may go to another expert when they round otherwise, and an
# expert of a small model sees a few dozen tokens. A sum that is missing or done twice costs more.
_REROUTED = 0.4
_ROUTED = (".mlp.experts.", ".mlp.router.", ".pre_mlp_layernorm.")
_SMALL = 1e-2  # of the largest magnitude of all tensors: what counts as large in a small one

BANDS = {
    "loss": "of every step. fp32: sums in another order; 16 and 8 bits: roundings of a mean, or"
    " three times what this precision costs one process",
    "grad norm": "of every step. As the loss",
    "gradients": "fp32, first step: each element; sums in another order. 16 and 8 bits, last step:"
    " root mean square; three times what this precision costs one process, and where tokens choose"
    " experts what a few that choose otherwise cost",
    "weights": "after the last step, fp32 only. As the gradients that they were made of",
    "scales": "after the first step. Of weights bit by bit; of others the noise of one element",
    "start": "(shown if wrong) initial weights depend on the seed alone: bit by bit",
    "copies": "(shown if wrong) ranks that hold the same tensor hold the same bits",
}


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference, and how far it may be.

    Attributes:
        name: The tensor.
        error: Relative difference.
        band: The accepted one.
    """

    name: str
    error: float
    band: float

    @property
    def inside(self) -> bool:
        """Whether it is accepted."""
        return self.error <= self.band

    @property
    def excess(self) -> float:
        """Error in units of the band."""
        return self.error / self.band if self.band else math.inf if self.error else 0.0


@dataclass
class Comparison:
    """One layout in one precision against one process.

    Attributes:
        precision: `fp32` or the model's own.
        measures: Worst difference of each kind, by kind (see `BANDS`).
        parameters: Difference of each parameter's gradient, in forward order.
    """

    precision: str
    measures: dict[str, Difference] = field(default_factory=dict)
    parameters: list[Difference] = field(default_factory=list)

    @property
    def inside(self) -> bool:
        """Whether every difference is accepted."""
        return all(measure.inside for measure in self.measures.values())

    @property
    def diverging(self) -> list[Difference]:
        """Parameters whose gradients are not accepted, in forward order."""
        return [one for one in self.parameters if not one.inside]

    def add(self, kind: str, differences: Iterable[Difference]) -> None:
        """Keep the worst of some differences."""
        worst = max(differences, key=lambda one: one.excess, default=None)
        if worst is not None:
            self.measures[kind] = worst


def compare_exactly(ours: Outcome, reference: Outcome, vocab_size: int) -> Comparison:
    """Compare two trainings in single precision."""
    found = Comparison("fp32")
    _add_numbers(found, ours, reference, EXACT_LOSS, EXACT_TENSOR)
    _add_start(found, ours, reference, vocab_size)
    gradients = _differences(ours.grads, reference.grads, vocab_size, _largest)
    found.parameters = [Difference(n, error, EXACT_TENSOR) for n, error in gradients.items()]
    found.add("gradients", found.parameters)
    weights = _differences(ours.final, reference.final, vocab_size, _largest)
    found.add("weights", (Difference(n, error, EXACT_TENSOR) for n, error in weights.items()))
    return found


def compare_rounded(
    ours: Outcome, reference: Outcome, exact: Outcome, vocab_size: int, precision: str
) -> Comparison:
    """Compare two trainings in a precision that rounds coarsely.

    Args:
        ours: The layout.
        reference: One process.
        exact: One process in single precision, with the same data.
        vocab_size: Rows of the embedding that are no padding.
        precision: Its name.
    """
    found = Comparison(precision)
    unit = next(size for kind, size in _ROUNDED_LOSS.items() if kind in precision)
    loss = max(unit, _ROUNDED * _farthest(reference.losses, exact.losses))
    norm = max(4 * unit, _ROUNDED * _farthest(reference.grad_norms, exact.grad_norms))
    _add_numbers(found, ours, reference, loss, norm)
    _add_start(found, ours, reference, vocab_size)
    noise = _differences(reference.last_grads, exact.last_grads, vocab_size, _length)
    gradients = _differences(ours.last_grads, reference.last_grads, vocab_size, _length)
    usual = median(noise.values())
    found.parameters = [
        Difference(name, error, max(_ROUNDED * max(noise[name], usual), _rerouted(name)))
        for name, error in gradients.items()
    ]
    found.add("gradients", found.parameters)
    found.add("scales", _scales(ours.fp8, reference.fp8))
    return found


def _rerouted(name: str) -> float:
    return _REROUTED if any(part in name for part in _ROUTED) else 0.0


def _add_numbers(
    found: Comparison, ours: Outcome, reference: Outcome, loss: float, norm: float
) -> None:
    error = _farthest(ours.losses, reference.losses)
    found.add("loss", [Difference("loss", error, loss)])
    error = _farthest(ours.grad_norms, reference.grad_norms)
    found.add("grad norm", [Difference("grad norm", error, norm)])


def _add_start(found: Comparison, ours: Outcome, reference: Outcome, vocab_size: int) -> None:
    start = _differences(ours.initial, reference.initial, vocab_size, _largest)
    found.add("start", (Difference(name, error, 0.0) for name, error in start.items()))


def _farthest(ours: list[float], reference: list[float]) -> float:
    """Largest relative difference of two lists of numbers; infinite where one is not finite."""
    errors = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, reference, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _length(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _differences(
    ours: Tensors, reference: Tensors, vocab_size: int, size: Callable[[torch.Tensor], float]
) -> dict[str, float]:
    """Relative difference of every tensor, in forward order.

    A gradient that is zero by cancellation consists of rounding errors. So a tensor is measured
    against its own size or a hundredth of the largest tensor's, whichever is larger.
    """
    pairs = {
        name: (
            without_padding(ours[name], name, vocab_size).double(),
            without_padding(reference[name], name, vocab_size).double(),
        )
        for name in sorted(reference, key=forward_order)
    }
    sizes = {name: size(expected) for name, (_, expected) in pairs.items()}
    floor = max(_SMALL * max(sizes.values(), default=0.0), 1e-30)
    found = {}
    for name, (value, expected) in pairs.items():
        error = size(value - expected) / max(sizes[name], floor)
        found[name] = error if math.isfinite(error) else math.inf
    return found


_PLACES = (
    "input_layernorm", "linear_qkv.layer_norm", "linear_qkv", "q_layernorm", "k_layernorm",
    "core_attention", "linear_proj", "pre_mlp_layernorm", "router", "shared_experts",
    "linear_fc1.layer_norm", "linear_fc1", "linear_fc2",
)  # fmt: skip


def forward_order(name: str) -> tuple[int, int, int]:
    """Sort key of a parameter by where a forward pass meets it; stable among those of one place."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is not None:
        inner = name[layer.end() :]
        place = next((i for i, part in enumerate(_PLACES) if part in inner), len(_PLACES))
        return 1, int(layer[1]), place
    return 0 if "embedding" in name else 3 if name.startswith("output_layer") else 2, 0, 0


def _scales(ours: Mapping[str, Tensors], reference: Mapping[str, Tensors]) -> list[Difference]:
    """Differences of the scales that were made of the first step."""
    found = []
    for path, state in reference.items():
        for key in (k for k in state if k.startswith("scale_") and "inv" not in k):
            expected = state[key].double()
            error = ((ours[path][key].double() - expected).abs() / expected).tolist()
            for column, one in enumerate(error):
                is_weight = key.endswith("fwd") and column == 1
                band = 0.0 if is_weight else _ROUNDED_SCALE
                found.append(Difference(f"{path} {key}[{column}]", one, band))
    return found
