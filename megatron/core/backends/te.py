"""The Transformer Engine backend: NVIDIA's library behind the project's layer contract.

This is the only file that imports `transformer_engine`, and it does so when a layer is built, not
when the project is imported: importing Transformer Engine starts CUDA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch

from megatron.core.backends import te_calls
from megatron.core.backends.te_calls import NEWEST_CHECKED, OLDEST, Library
from megatron.core.errors import BackendUnavailable, complaint

DISTRIBUTIONS = ("transformer-engine", "transformer_engine", "transformer-engine-torch")
INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]'"


def installed_version() -> str | None:
    """Version of the installed Transformer Engine, from package metadata; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def release(version: tuple[int, int]) -> str:
    """A release as people write it, `2.9`."""
    return f"{version[0]}.{version[1]}"


@lru_cache(maxsize=1)
def load_library() -> Library:
    """Import Transformer Engine.

    Raises:
        BackendUnavailable: It is not installed, or importing it fails.
    """
    version = installed_version()
    if version is None:
        raise BackendUnavailable(
            complaint("transformer_engine", "no such package", "It is not installed", INSTALL)
        )
    parsed = te_calls.parse_version(version)
    try:
        pytorch = _import("transformer_engine.pytorch")
        recipe = _import("transformer_engine.common.recipe")
        manager = _import(te_calls.quantization_module(parsed)).FP8GlobalStateManager
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # A build for another torch or CUDA shows up as any of these.
        raise BackendUnavailable(
            complaint(
                "transformer_engine",
                f"release {version}",
                f"Importing it failed: {type(error).__name__}: {error}",
                "Install a build for this torch and CUDA, or choose --transformer-impl native",
            )
        ) from error
    return Library(parsed, pytorch, recipe, manager)


def _import(name: str) -> ModuleType:
    return importlib.import_module(name)


class TransformerEngineBackend:
    """Leaf classes that run on NVIDIA's Transformer Engine."""

    name = "transformer_engine"

    def availability(self) -> tuple[bool, str]:
        """Whether Transformer Engine can run here, and the reason in words."""
        version = installed_version()
        if version is None:
            return False, f"the package transformer_engine is not installed ({INSTALL})"
        parsed = te_calls.parse_version(version)
        if parsed < OLDEST:
            return False, (
                f"transformer_engine {version} is installed, and the oldest release supported is "
                f"{release(OLDEST)}"
            )
        if not torch.cuda.is_available():
            return False, f"transformer_engine {version} needs CUDA, and torch sees no CUDA device"
        try:
            able, reason = te_calls.fp8_support(load_library())
        except BackendUnavailable as error:
            return False, str(error)
        if not able:
            return False, f"transformer_engine {version} has no FP8 on this device: {reason}"
        note = ""
        if parsed > NEWEST_CHECKED:
            note = f", newer than {release(NEWEST_CHECKED)}, the newest whose calls are checked"
        return True, f"transformer_engine {version} on {torch.cuda.get_device_name()}{note}"
