"""Which recipe's products run on which kernel of which device, and why.

The answer for a device that is here comes from the device; for any other one it comes from the
table, and a check on the device itself has the last word when a run starts there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.config import RunConfig
from megatron.core.capability import Target
from megatron.core.fp8 import PrecisionRow, Recipe, Role
from megatron.core.fp8.gemm import kernel_name
from megatron.core.fp8.hardware import GEMMS, OPERANDS, Verdict, plans, verdict
from megatron.core.fp8.precision import LinearPrecision
from megatron.core.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from megatron.training.dry_run.trace import paper_mesh, paper_runtime
from megatron.training.providers import build_gpt

#: The recipes as they are by default, by `--fp8-recipe`.
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "tensorwise": Float8CurrentScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}


@dataclass(frozen=True)
class Place:
    """A device, here or imagined.

    Attributes:
        target: What products depend on.
        device: The device if it is here.
    """

    target: Target
    device: torch.device | None = None

    @classmethod
    def here(cls) -> Place:
        """The device that a run on this machine would take."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return cls(Target.of(device), device)

    @classmethod
    def imagined(cls, capability: str) -> Place:
        """A CPU (`cpu`), or a CUDA device of some compute capability (`9.0`).

        Raises:
            ValueError: If it is neither.
        """
        if capability == "cpu":
            return cls(Target("cpu"), torch.device("cpu"))
        major, point, minor = capability.partition(".")
        if not (point and major.isdigit() and minor.isdigit()):
            raise ValueError(capability)
        return cls(Target.imagined((int(major), int(minor))))

    def describe(self) -> str:
        """In words."""
        if self.device is not None and self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, {self.target.describe()}"
        here = (
            "" if self.device is not None else " (not here: a check at the start of a run decides)"
        )
        return self.target.describe() + here

    def verdict(self, recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> Verdict:
        """Whether a recipe's products run in hardware there."""
        if self.target.kind == "cpu":
            return Verdict(False, "a CPU has no FP8 products")
        if self.device is not None:
            return verdict(recipe, self.device, dtype)
        made = plans(recipe, self.target)
        reasons = list(dict.fromkeys(one.reason for one in made.values() if one.reason))
        if reasons:
            return Verdict(False, "; ".join(reasons))
        return Verdict(True, "", tuple(one.kernel for one in made.values()))

    def kernel(
        self,
        recipe: Recipe,
        gemm: str,
        emulation: str = "fast",
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[str, str]:
        """What multiplies in a GEMM there, and why it is emulated if it is."""
        found = self.verdict(recipe, dtype)
        if found.hardware:
            return found.kernel(gemm), ""
        first, second = (recipe.format_of(role) for role in OPERANDS[gemm])
        device = self.device or torch.device(self.target.kind)
        exact = recipe.exact_in_bf16
        name = kernel_name(first, second, emulation=emulation, device=device, exact_in_bf16=exact)
        return name, found.reason


def rows_of_recipes(place: Place) -> list[dict[str, str]]:
    """One entry for each GEMM of each recipe: `recipe`, `gemm`, `operands`, `kernel`, `reason`."""
    rows = []
    for name, recipe in RECIPES.items():
        for gemm, roles in OPERANDS.items():
            kernel, reason = place.kernel(recipe, gemm)
            operands = " x ".join(_operand(recipe, role) for role in roles)
            rows.append(
                {
                    "recipe": name,
                    "gemm": gemm,
                    "operands": operands,
                    "kernel": kernel,
                    "reason": reason,
                }
            )
    return rows


def _operand(recipe: Recipe, role: Role) -> str:
    return f"{role.value} {recipe.format_of(role).name}"


def rows_of_layers(layers: Iterable[LinearPrecision], place: Place) -> list[PrecisionRow]:
    """The precision table of layers as it would be on another device."""
    rows = []
    for layer in layers:
        recipe, state = layer.decision.recipe, layer.state
        for gemm in GEMMS:
            row = layer.row(gemm)
            if recipe is not None and row.delivered.startswith("fp8"):
                kernel, reason = place.kernel(recipe, gemm, state.emulation, state.params_dtype)
                row = replace(row, kernel=kernel, reason=reason)
            rows.append(row)
    return rows


def layers_on_paper(cfg: RunConfig) -> list[LinearPrecision]:
    """The linear layers of a run's whole model, without memory.

    Args:
        cfg: The finished configuration; `padded_vocab_size` must be known.
    """
    layers: list[LinearPrecision] = []
    for rank in paper_mesh(cfg, 0).pp.ranks:
        _, fp8, _ = build_gpt(cfg, paper_runtime(cfg, rank))
        layers += fp8.layers.values()
    return layers


def table(rows: Sequence[dict[str, str]]) -> str:
    """Entries with the same keys as lines of columns, with a head."""
    head = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in head]
    lines = [dict(zip(head, head, strict=True)), *rows]
    return "\n".join(
        "  ".join(line[n].ljust(w) for n, w in zip(head, widths, strict=True)).rstrip()
        for line in lines
    )
