"""Which backend a run uses, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.config.fp8_policy import recipes_in_use
from megatron.core.backends.contract import Backend
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.errors import BackendUnavailable, complaint

if TYPE_CHECKING:
    from megatron.config import RunConfig

ALIASES = {"local": "native", "te": "transformer_engine"}


@dataclass(frozen=True)
class Choice:
    """The backend of a run.

    Attributes:
        backend: It.
        reason: Why that one, in one line.
        instead_of: The backend that was asked for by name, if this one takes its place.
        why: Why it cannot run; empty without `instead_of`.
    """

    backend: Backend
    reason: str
    instead_of: str = ""
    why: str = ""

    @property
    def warning(self) -> str:
        """What the user should see once; empty if nothing."""
        if not self.instead_of:
            return ""
        return (
            f"{self.instead_of} was asked for and cannot run ({self.why}); with"
            f" --fp8-allow-fallback the layers run on the {self.backend.name} backend"
        )


def backends() -> list[Backend]:
    """Every backend there is, in the order in which `auto` prefers them."""
    return [TransformerEngineBackend(), NativeBackend()]


def choose(
    config: RunConfig, device: torch.device | str, candidates: Sequence[Backend] | None = None
) -> Choice:
    """Choose the backend for a run by its configuration.

    Args:
        config: The finished configuration.
        device: Where the model will live.
        candidates: The backends to choose from; by default all of them.

    Raises:
        BackendUnavailable: As `resolve`, unless FP8 may fall back: then native runs instead.
    """
    recipes = sorted(recipes_in_use(config))
    try:
        backend, reason = resolve(config.transformer_impl, device, candidates, recipes)
    except BackendUnavailable:
        wanted = ALIASES.get(config.transformer_impl, config.transformer_impl)
        known = list(candidates) if candidates is not None else backends()
        asked = [backend for backend in known if backend.name == wanted]
        if not recipes or not config.fp8_allow_fallback or not asked:
            raise
        backend, reason = resolve("native", device, known)
        why = _can_run(asked[0], torch.device(device), recipes)[1]
        return Choice(backend, f"in place of {wanted}: {why}", wanted, why)
    return Choice(backend, reason)


def resolve(
    name: str,
    device: torch.device | str,
    candidates: Sequence[Backend] | None = None,
    recipes: Sequence[str] = (),
) -> tuple[Backend, str]:
    """Choose the backend for a run.

    Args:
        name: `auto`, or the name of a backend. `auto` takes the first one that can run.
        device: Where the model will live.
        candidates: The backends to choose from; by default all of them.
        recipes: Those that it has to have, by their names in `--fp8-recipe` or `--fp4-recipe`.

    Returns:
        The backend, and one line that says why it was chosen.

    Raises:
        BackendUnavailable: The named backend does not exist or cannot run here. The message lists
            every backend with its reason.
    """
    known = list(candidates) if candidates is not None else backends()
    where = torch.device(device)
    wanted = ALIASES.get(name, name)
    # Only those that may be chosen are asked: to answer, a library is imported and starts CUDA.
    refused: list[str] = []
    for backend in known:
        if wanted not in ("auto", backend.name):
            continue
        able, reason = _can_run(backend, where, recipes)
        if able and wanted == "auto":
            return backend, "; ".join([f"auto: {reason}", *refused])
        if able:
            return backend, f"asked for by name; {reason}"
        refused.append(f"{backend.name}: {reason}")
    verdicts = [(backend, *_can_run(backend, where, recipes)) for backend in known]
    table = "; ".join(
        f"{b.name}: {'can run' if able else 'cannot run'}, {reason}" for b, able, reason in verdicts
    )
    usable = ["auto", *(b.name for b, able, _ in verdicts if able)]
    why = f"It cannot run on {device} here ({table})"
    fix = f"Choose {' or '.join(usable)}"
    if recipes:
        fix += ", or pass --fp8-allow-fallback to take native with a warning"
    raise BackendUnavailable(complaint("--transformer-impl", name, why, fix))


def _can_run(backend: Backend, device: torch.device, recipes: Sequence[str]) -> tuple[bool, str]:
    able, reason = backend.availability()
    if able and backend.name == "transformer_engine" and device.type != "cuda":
        return False, f"it runs on CUDA devices only, and this run uses {device.type}"
    if able and isinstance(backend, TransformerEngineBackend):
        for recipe in recipes:
            has, why = backend.recipe_support(recipe)
            if not has:
                return False, f"it does not run the recipe {recipe} on this device: {why}"
    return able, reason
