"""Which backend a run uses, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.backends.contract import Backend
from megatron.core.backends.native import NativeBackend
from megatron.core.backends.te import TransformerEngineBackend
from megatron.core.errors import BackendUnavailable, complaint

ALIASES = {"local": "native", "te": "transformer_engine"}


def backends() -> list[Backend]:
    """Every backend there is, in the order in which `auto` prefers them."""
    return [TransformerEngineBackend(), NativeBackend()]


def resolve(
    name: str, device: torch.device | str, candidates: Sequence[Backend] | None = None
) -> tuple[Backend, str]:
    """Choose the backend for a run.

    Args:
        name: `auto`, or the name of a backend. `auto` takes the first one that can run.
        device: Where the model will live.
        candidates: The backends to choose from; by default all of them.

    Returns:
        The backend, and one line that says why it was chosen.

    Raises:
        BackendUnavailable: The named backend does not exist or cannot run here. The message lists
            every backend with its reason.
    """
    known = list(candidates) if candidates is not None else backends()
    verdicts = [(backend, *_can_run(backend, torch.device(device))) for backend in known]
    wanted = ALIASES.get(name, name)
    if wanted == "auto":
        refused = [f"{b.name}: {reason}" for b, able, reason in verdicts if not able]
        for backend, able, reason in verdicts:
            if able:
                return backend, "; ".join([f"auto: {reason}", *refused])
    for backend, able, reason in verdicts:
        if backend.name == wanted and able:
            return backend, f"asked for by name; {reason}"
    table = "; ".join(
        f"{b.name}: {'can run' if able else 'cannot run'}, {reason}" for b, able, reason in verdicts
    )
    usable = ["auto", *(b.name for b, able, _ in verdicts if able)]
    why = f"It cannot run on {device} here ({table})"
    raise BackendUnavailable(
        complaint("--transformer-impl", name, why, f"Choose {' or '.join(usable)}")
    )


def _can_run(backend: Backend, device: torch.device) -> tuple[bool, str]:
    able, reason = backend.availability()
    if able and backend.name == "transformer_engine" and device.type != "cuda":
        return False, f"it runs on CUDA devices only, and this run uses {device.type}"
    return able, reason
