"""The Transformer Engine backend: NVIDIA's library behind the project's layer contract.

This is the only file that imports `transformer_engine`, and it does so when a layer is built, not
when the project is imported: importing Transformer Engine starts CUDA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from megatron.core.backends import te_calls, te_overlap
from megatron.core.backends.contract import (
    ColumnGroupedLinear,
    ColumnLinear,
    CoreAttention,
    NormFactory,
    RowGroupedLinear,
    RowLinear,
)
from megatron.core.backends.te_calls import NEWEST_CHECKED, OLDEST, Library
from megatron.core.backends.te_classes import LayerClasses, layer_classes
from megatron.core.errors import BackendUnavailable, complaint

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.mesh import ParallelState

DISTRIBUTIONS = ("transformer-engine", "transformer-engine-torch")
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
    """Leaf classes that run on NVIDIA's Transformer Engine.

    Args:
        library: A loaded library to use in place of the installed one.
    """

    name = "transformer_engine"

    def __init__(self, library: Library | None = None) -> None:
        self._library = library
        self._classes: LayerClasses | None = None

    @property
    def library(self) -> Library:
        """Transformer Engine, imported at first use.

        Raises:
            BackendUnavailable: It cannot be imported.
        """
        if self._library is None:
            self._library = load_library()
        return self._library

    @property
    def classes(self) -> LayerClasses:
        """The layer classes, made at first use.

        Raises:
            BackendUnavailable: Transformer Engine cannot be imported.
        """
        if self._classes is None:
            self._classes = layer_classes(self.library)
        return self._classes

    @property
    def column_parallel_linear(self) -> ColumnLinear:
        """Linear layer with split outputs."""
        kind: ColumnLinear = self.classes.column
        return kind

    @property
    def row_parallel_linear(self) -> RowLinear:
        """Linear layer with split inputs."""
        kind: RowLinear = self.classes.row
        return kind

    @property
    def layernorm_column_parallel_linear(self) -> ColumnLinear:
        """A norm followed by a linear layer with split outputs, in one module."""
        kind: ColumnLinear = self.classes.layernorm_column
        return kind

    @property
    def column_parallel_grouped_linear(self) -> ColumnGroupedLinear:
        """Linear layers of a rank's experts with split outputs."""
        kind: ColumnGroupedLinear = self.classes.column_grouped
        return kind

    @property
    def row_parallel_grouped_linear(self) -> RowGroupedLinear:
        """Linear layers of a rank's experts with split inputs."""
        kind: RowGroupedLinear = self.classes.row_grouped
        return kind

    @property
    def norm(self) -> NormFactory:
        """Norm that stands alone."""
        kind: NormFactory = self.classes.norm
        return kind

    @property
    def core_attention(self) -> CoreAttention:
        """Attention without its projections."""
        kind: CoreAttention = self.classes.attention
        return kind

    def start_tp_overlap(self, config: RunConfig, mesh: ParallelState) -> str:
        """Set up userbuffers, which has to happen before the first layer is built.

        Raises:
            ConfigError: `--tp-comm-overlap-cfg` is wrong.
            MegatronError: The installed release cannot, or Transformer Engine refuses.
        """
        return te_overlap.start(self.library, config, mesh.tp)

    def recipe_support(self, name: str) -> tuple[bool, str]:
        """Whether a recipe of `--fp8-recipe` runs on this device, and why not.

        Raises:
            BackendUnavailable: Transformer Engine cannot be imported.
        """
        return te_calls.recipe_support(self.library, name)

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
