"""``quantization_config``: how a HuggingFace directory says that its weights are in FP8.

Written is the layout of the compressed-tensors package, ``float-quantized``. Read are that one and
the older ``quant_method: fp8`` (DeepSeek's blocks of 128x128, or one scale for a tensor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STRATEGIES = ("channel", "tensor")
ACTIVATIONS = ("dynamic", "static")
_BLOCK = "weight_block_size"


@dataclass(frozen=True)
class Fp8Style:
    """How an export is quantized.

    Attributes:
        weights: ``channel``: a scale for every output; ``tensor``: one for every weight, the same
            for those that are one matrix here (queries, keys and values; gate and up).
        activations: ``dynamic``: whoever runs the model measures them, token by token; ``static``:
            one scale for every layer, from delayed scaling's state in the checkpoint.
    """

    weights: str = "channel"
    activations: str = "dynamic"


def describe(style: Fp8Style, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of an export.

    Args:
        style: How it is quantized.
        ignore: Modules that are linear layers and not quantized.
    """
    dynamic = style.activations == "dynamic"

    def values(strategy: str, dynamic: bool) -> dict[str, Any]:
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": strategy,
            "dynamic": dynamic,
        }

    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": values(style.weights, False),
                "input_activations": values("token" if dynamic else "tensor", dynamic),
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale, None without blocks."""
    quantization = config.get("quantization_config") or {}
    sizes = [quantization.get(_BLOCK)]
    sizes += [group.get("weights", {}).get("block_structure") for group in _groups(quantization)]
    for size in sizes:
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None


def unreadable(quantization: Any) -> list[tuple[str, Any, str]]:
    """Say what in a ``quantization_config`` has no meaning here.

    Returns:
        (name, value, why) for each.
    """
    if not isinstance(quantization, Mapping):
        return [("", quantization, "it is no dictionary")]
    method = quantization.get("quant_method")
    if method == "fp8":
        return []
    if method != "compressed-tensors":
        why = "only FP8 (compressed-tensors, fp8) can be dequantized"
        return [("quant_method", method, why)]
    wrong = []
    if quantization.get("format") not in ("float-quantized", "naive-quantized"):
        wrong.append(("format", quantization.get("format"), "only float-quantized is known"))
    if quantization.get("kv_cache_scheme"):
        wrong.append(("kv_cache_scheme", quantization["kv_cache_scheme"], "caches are not in FP8"))
    for group in _groups(quantization):
        weights = group.get("weights") or {}
        for name, known in (
            ("num_bits", (8,)),
            ("type", ("float",)),
            ("symmetric", (True, None)),
            ("strategy", ("tensor", "channel", "block")),
        ):
            if weights.get(name) not in known:
                why = f"only {' or '.join(str(v) for v in known if v is not None)} is known"
                wrong.append((f"weights.{name}", weights.get(name), why))
    return wrong


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups") or {}
    return [g for g in groups.values() if isinstance(g, Mapping)]
