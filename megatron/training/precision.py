"""The precision table: what every GEMM of the model was asked to run in, and what it runs in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from megatron.config import RunConfig
from megatron.config.alignment import padding
from megatron.core.distributed.ddp import DistributedDataParallel
from megatron.core.errors import PrecisionError, complaint
from megatron.core.fp8 import Fp8State, PrecisionRow, kernels
from megatron.core.fp8.recipe import BlockRecipe
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.mappings import gather_objects
from megatron.observe.events import PrecisionLine, PrecisionTable
from megatron.training.flops import CORE, Shape, forward_per_token

# How much of a layer's FLOPs a product is, in forward passes.
_PASSES = {"fprop": 1.0, "dgrad": 1.0, "wgrad": 1.0, "qk": 0.5, "pv": 0.5, "backward": 2.0}
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def summarize(
    rows: Iterable[PrecisionRow], changed: bool = False, cfg: RunConfig | None = None
) -> PrecisionTable:
    """Return one line a group of equal rows.

    Layers that differ by their number only share a line, and so do the GEMMs of a layer that run
    alike.

    Args:
        rows: Of the whole model.
        changed: Whether the run has shown a table before; layers that do not run as requested are
            then named one by one.
        cfg: The complete configuration, if the table is to say what share of the FLOPs it is.
    """
    rows = list(rows)
    by_layer: dict[str, list[PrecisionRow]] = {}
    for row in rows:
        by_layer.setdefault(row.path, []).append(row)
    counts: dict[tuple[str, str, str, str, str, str], int] = {}
    for path, own in by_layer.items():
        alike = len({(r.requested, r.delivered, r.kernel, r.reason) for r in own}) == 1
        for row in own[:1] if alike else own:
            gemm = "all" if alike else row.gemm
            named = changed and row.requested != row.delivered
            module = path if named else _LAYER_NUMBER.sub("*", path)
            key = (module, gemm, row.requested, row.delivered, row.kernel, row.reason)
            counts[key] = counts.get(key, 0) + 1
    lines = (PrecisionLine(*key, count) for key, count in counts.items())
    return PrecisionTable(tuple(lines), changed, () if cfg is None else flop_shares(rows, cfg))


def flop_shares(rows: Iterable[PrecisionRow], cfg: RunConfig) -> tuple[float, ...]:
    """How much of a step's FLOPs runs in FP8 or FP4.

    Args:
        rows: Of the whole model, or of its linear layers.
        cfg: The complete configuration.

    Returns:
        The share of what linear layers compute, and where there is attention in the rows, of that
        and attention's products together. Model FLOPs, see `flops`: routers do not count, nor what
        is recomputed.
    """
    forward = forward_per_token(Shape.of(cfg))
    low, every = dict.fromkeys((True, False), 0.0), dict.fromkeys((True, False), 0.0)
    for row in rows:
        name = ".".join(row.path.split(".")[-2:])
        flops = forward.get(name, 0.0) * _PASSES.get(row.gemm, 3.0)
        every[name == CORE] += flops
        if row.delivered.startswith(("fp8", "fp4")):
            low[name == CORE] += flops
    linear = low[False] / max(every[False], 1.0)
    if not every[True]:
        return (linear,)
    return linear, sum(low.values()) / sum(every.values())


def of_all_stages(rows: Iterable[PrecisionRow], axis: Axis) -> list[PrecisionRow]:
    """Return the rows of the whole model, in its order, on every rank. Collective.

    Args:
        rows: Those of this rank's pipeline stages.
        axis: The pipeline axis.
    """
    gathered = [row for part in gather_objects(list(rows), axis) for row in part]
    if axis.size == 1:
        return gathered

    def place(row: PrecisionRow) -> int:
        number = _LAYER_NUMBER.search(row.path)
        if number is not None:
            return int(number[0])
        return -1 if row.path.startswith("embedding") else sys.maxsize

    # A tied embedding is on two stages.
    return sorted(dict.fromkeys(gathered), key=place)


def padding_note(cfg: RunConfig, fp8: Fp8State, backend: str) -> str:
    """What FP8 hardware makes the native backend pad, in one line; empty if nothing.

    Emulated products take any size as it is. Transformer Engine refuses other sizes.
    """
    if backend != "native" or not fp8.hardware:
        return ""
    return padding(cfg) if any(fp8.products(r).hardware for r in fp8.policy.recipes) else ""


def resting_note(cfg: RunConfig, ddp: DistributedDataParallel) -> str:
    """How many of this rank's weights rest in FP8, in one line; empty without the flag."""
    if not cfg.fp8_param_gather:
        return ""
    held = [p for p in ddp.trained_params if ddp.is_in_fp8(p)]
    resting, every = (sum(p.numel() for p in some) for some in (held, ddp.trained_params))
    why = "" if held else ": no layer here makes output and input gradient in FP8"
    return (
        f"FP8 weights: {len(held)} of this rank's {len(ddp.trained_params)} parameters, "
        f"{resting / max(every, 1):.1%} of its elements, rest in FP8 (--fp8-param-gather){why}"
    )


def device_notes(cfg: RunConfig, fp8: Fp8State, backend: str) -> list[str]:
    """What a run should know about FP8 on its device, a line each.

    What is padded; and on a CUDA device how products and casts were found to be right there, or
    why others take their place. Checks the device if that was not done before.
    """
    notes = [padding_note(cfg, fp8, backend)]
    for recipe in fp8.policy.recipes if backend == "native" and fp8.device.type == "cuda" else ():
        found = fp8.products(recipe)
        where = "in hardware" if found.hardware else "emulated"
        notes.append(f"FP8 products ({recipe.name}): {where}, {found.reason}")
        groups = ("blocks" if isinstance(recipe, BlockRecipe) else "casts", "fused")
        for group, why in kernels.describe(fp8.device, groups).items():
            notes.append(f"FP8 casts ({kernels.WHAT[group]}): {why}")
    return [note for note in dict.fromkeys(notes) if note]


def fallback_warning(rows: Iterable[PrecisionRow]) -> str:
    """What a run that may fall back should say once; empty if nothing fell back."""
    fallen, listed = _fallen(rows)
    if not fallen:
        return ""
    return f"{len(fallen)} GEMM(s) do not run as asked, and --fp8-allow-fallback is given: {listed}"


def refuse_fallback(rows: Iterable[PrecisionRow]) -> None:
    """Raise when a layer runs in less than what was asked for.

    A layer that the configuration itself keeps out of FP8 (first and last layers, the output layer)
    was not asked to run in FP8 and is no fallback.

    Raises:
        PrecisionError: Names every such layer.
    """
    fallen, listed = _fallen(rows)
    if not fallen:
        return
    raise PrecisionError(
        complaint(
            "--fp4-format" if fallen[0].requested.startswith("fp4") else "--fp8-format",
            f"{len(fallen)} GEMM(s) without {fallen[0].requested[:3].upper()}",
            listed,
            "Pass --fp8-allow-fallback to train like this all the same, or change what stops it",
        )
    )


def _fallen(rows: Iterable[PrecisionRow]) -> tuple[list[PrecisionRow], str]:
    """The products that fell back, and in words, once for layers that are alike."""
    fallen = [r for r in rows if r.is_fallback]
    kinds = {
        (_LAYER_NUMBER.sub("*", r.path), r.requested, r.delivered, r.reason): None for r in fallen
    }
    listed = "; ".join(
        f"{path} was to run in {wanted} and runs in {got} ({why or 'no reason given'})"
        for path, wanted, got, why in kinds
    )
    return fallen, listed
