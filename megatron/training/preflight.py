"""What a machine has, and what a run would get on it: asked before the run.

Every finding says what was looked for, what was found, and whether a run that wants it would get
less than it asks for.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.config.alignment import misaligned, padding
from megatron.config.cli import parse, read_settings
from megatron.config.draft import own_world_size
from megatron.config.fp8 import recipe_of
from megatron.core.backends.registry import choose
from megatron.core.backends.te import TransformerEngineBackend, installed_version
from megatron.core.capability import cpu_bf16_gemm
from megatron.core.errors import BackendUnavailable
from megatron.core.fp8 import LinearPrecision, Recipe, kernels
from megatron.core.fp8.recipe import BlockRecipe
from megatron.training.dry_run import complete
from megatron.training.products import RECIPES, Place, layers_on_paper, rows_of_layers
from megatron.training.providers import saved_config

OK, MISSING, LESS = "ok", "no", "LESS"
_DRIVER = Path("/proc/driver/nvidia/version")
# NVIDIA's own packages have these folders; packages of the same name on PyPI do not.
_REAL_APEX = ("normalization", "optimizers", "multi_tensor_apply")


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        section: `machine`, `libraries`, `recipes` or `run`.
        name: What was looked for.
        status: `OK`; `MISSING`, which only matters to a run that wants it; or `LESS` where a run
            would get less than it asks for.
        text: Version, size or reason.
    """

    section: str
    name: str
    status: str
    text: str


def preflight(flags: Sequence[str] = ()) -> list[Finding]:
    """Ask for everything.

    Args:
        flags: Those of a run; none to look at the machine alone.

    Raises:
        ConfigError: The flags cannot work.
        MegatronError: The run's tokenizer or layout cannot.
    """
    found = [*machine(), *libraries(), *recipes()]
    if flags:
        found += run(read_run(flags))
    return found


def read_run(flags: Sequence[str]) -> RunConfig:
    """Read a run's command line as the run would, at its own size or the smallest that fits it.

    Raises:
        ConfigError: It cannot work.
        MegatronError: Its tokenizer cannot.
    """
    settings = read_settings(flags)
    tokens = [*flags, "--dry-run"]
    if not settings.get("fake_world_size"):
        tokens += ["--fake-world-size", str(own_world_size(settings))]
    return complete(parse(tokens, 1, saved_config)[0])[0]


# -- the machine -----------------------------------------------------------------------------------


def machine() -> Iterator[Finding]:
    """Yield devices, driver, CUDA and its libraries."""
    found = torch.cuda.is_available()
    built = torch.version.cuda
    if not found:
        why = "torch sees none" if built else f"torch {torch.__version__} is built without CUDA"
        yield Finding("machine", "device", MISSING, f"no CUDA device: {why}")
        yield Finding("machine", "cpu", OK, f"{platform.machine()}, {cpu_bf16_gemm().reason}")
    for index in range(torch.cuda.device_count() if found else 0):
        of = torch.cuda.get_device_properties(index)
        text = f"{of.name}, compute capability {of.major}.{of.minor}"
        yield Finding(
            "machine", f"device {index}", OK, f"{text}, {of.total_memory / 2**30:.0f} GiB"
        )
    yield _finding("machine", "driver", _driver(), "no NVIDIA driver on this machine")
    yield _finding("machine", "cuda", built and f"torch is built with {built}", "not in this torch")
    yield _finding("machine", "cublas", _cublas(found), "not installed")
    parts: Any = torch  # its modules below have no types
    cudnn = parts.backends.cudnn.version() if found else None
    yield _finding("machine", "cudnn", cudnn and str(cudnn), "not in this torch")
    nccl = found and hasattr(parts._C, "_nccl_version")
    version = ".".join(map(str, parts.cuda.nccl.version())) if nccl else ""
    yield _finding("machine", "nccl", version, "not in this torch: ranks talk through gloo")


def _finding(section: str, name: str, text: str | None, otherwise: str) -> Finding:
    return Finding(section, name, OK, text) if text else Finding(section, name, MISSING, otherwise)


def _driver() -> str:
    if not _DRIVER.is_file():
        return ""
    return _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()


def _cublas(has_device: bool) -> str:
    """Version of cuBLAS, from the library that torch has loaded, or from its package."""
    major = (torch.version.cuda or "").partition(".")[0]
    if has_device and major:
        try:
            number = int(ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion())
        except (OSError, AttributeError):
            number = 0
        if number:
            return f"{number // 10000}.{number // 100 % 100}.{number % 100} (cuBLASLt, loaded)"
    for name in ("nvidia-cublas", f"nvidia-cublas-cu{major}"):
        version = distribution(name)
        if version:
            return f"{version} (package {name})"
    return ""


# -- libraries -------------------------------------------------------------------------------------


def libraries() -> Iterator[Finding]:
    """Yield what is installed of what a run can use, and what only looks like it."""
    yield Finding("libraries", "torch", OK, torch.__version__)
    version = distribution("triton")
    yield _finding("libraries", "triton", version, "not installed: casts on CUDA take plain torch")
    version = distribution("numba")
    yield _finding("libraries", "numba", version, "not installed: casts on a CPU take plain torch")
    able, reason = TransformerEngineBackend().availability()
    status = OK if able else MISSING
    if not able and installed_version() is not None:
        status = LESS  # it was installed to be used
    yield Finding("libraries", "transformer_engine", status, reason)
    yield apex()
    yield dllogger()


def distribution(name: str) -> str:
    """Version of an installed package; empty without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def folder_of(module: str) -> Path | None:
    """Where a package lies, found without importing it; None without one."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def apex() -> Finding:
    """NVIDIA's Apex, or the unrelated package that `pip install apex` fetches."""
    folder, version = folder_of("apex"), distribution("apex")
    if folder is None and not version:
        return Finding("libraries", "apex", MISSING, "not installed, and not needed here")
    if folder is not None and any((folder / part).is_dir() for part in _REAL_APEX):
        return Finding("libraries", "apex", OK, f"NVIDIA Apex {version or '?'}; not needed here")
    return Finding(
        "libraries",
        "apex",
        LESS,
        f"{version or '?'} is not NVIDIA's: PyPI's apex is an unrelated web toolkit. Remove it with"
        " pip uninstall apex; nothing here needs Apex",
    )


def dllogger() -> Finding:
    """NVIDIA's DLLogger, or the placeholder that PyPI has for it."""
    folder, placeholder = folder_of("dllogger"), distribution("nvidia-dllogger")
    own = "JSON lines are written without it"
    if folder is not None and (folder / "logger.py").is_file():
        return Finding("libraries", "dllogger", OK, f"installed; {own}")
    if folder is None and not placeholder:
        return Finding("libraries", "dllogger", MISSING, f"not installed, and not needed: {own}")
    return Finding(
        "libraries",
        "dllogger",
        LESS,
        f"nvidia-dllogger {placeholder or '?'} on PyPI is a placeholder without the library. Remove"
        f" it with pip uninstall nvidia-dllogger; {own}",
    )


# -- FP8 -------------------------------------------------------------------------------------------


def recipes() -> Iterator[Finding]:
    """Yield for each FP8 recipe what runs it here, and why not in hardware or not at all."""
    place = Place.here()
    engine = TransformerEngineBackend()
    able, reason = engine.availability()
    for name, recipe in RECIPES.items():
        verdict = place.verdict(recipe)
        how = "in hardware" if verdict.hardware else "emulated"
        status = OK if verdict.hardware else MISSING
        yield Finding("recipes", f"{name}, native", status, f"{how}: {verdict.reason}")
        has, why = engine.recipe_support(name) if able else (False, reason)
        status = OK if has else MISSING
        yield Finding("recipes", f"{name}, transformer_engine", status, why or "available")
    if place.device is not None:
        for group, why in kernels.describe(place.device).items():
            plain = place.target.kind == "cuda" and why.startswith("plain")
            yield Finding("recipes", f"casts ({group})", LESS if plain else OK, why)


# -- a run -----------------------------------------------------------------------------------------


def run(cfg: RunConfig) -> Iterator[Finding]:
    """Yield what a run would get on this machine.

    Args:
        cfg: Its complete configuration.
    """
    place = Place.here()
    if cfg.device == "cpu":
        place = Place.imagined("cpu")
    on_cuda = place.target.kind == "cuda"
    where = place.describe() if on_cuda else "the CPU"
    wants_more = not on_cuda and cfg.device != "cpu"
    note = f", because torch sees no CUDA device (--device {cfg.device})" if wants_more else ""
    yield Finding("run", "device", LESS if wants_more else OK, where + note)
    backend = None
    try:
        choice = choose(cfg, torch.device(place.target.kind))
        backend = choice.backend.name
        status = LESS if choice.instead_of else OK
        yield Finding(
            "run", "layer backend", status, choice.warning or f"{backend}: {choice.reason}"
        )
    except BackendUnavailable as error:
        yield Finding("run", "layer backend", LESS, f"the run would stop: {error}")
    yield Finding("run", "attention", OK, _attention(cfg, backend, on_cuda))
    if recipe_of(cfg) is None:
        yield Finding("run", "precision", OK, "no FP8 (no --fp8-format)")
    elif backend == "transformer_engine":
        yield from _engine_sizes(cfg)
        yield Finding("run", "precision", OK, "FP8 by Transformer Engine; the run prints its table")
    else:
        layers = layers_on_paper(cfg)
        yield from _native_sizes(cfg, layers, place)
        yield from _products(layers, place, wanted=on_cuda or wants_more)
        if on_cuda:
            yield from _casts(layers)


def _attention(cfg: RunConfig, backend: str | None, on_cuda: bool) -> str:
    if backend == "transformer_engine":
        return "Transformer Engine's (cuDNN or FlashAttention); NVTE_DEBUG=1 makes it say which"
    if cfg.context_parallel_size > 1:
        return f"native, blocks of keys travel between {cfg.context_parallel_size} ranks"
    if not on_cuda:
        return "native, row chunks with fp32 scores"
    switches: Any = torch.backends.cuda
    kinds = {
        "flash": switches.flash_sdp_enabled(),
        "memory-efficient": switches.mem_efficient_sdp_enabled(),
        "cuDNN": switches.cudnn_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
    }
    enabled = ", ".join(name for name, on in kinds.items() if on)
    return f"torch's scaled-dot-product attention, which chooses among {enabled}"


def _engine_sizes(cfg: RunConfig) -> Iterator[Finding]:
    """Yield the sizes that Transformer Engine refuses."""
    problems = list(misaligned(cfg))
    for problem in problems:
        yield Finding("run", "alignment", LESS, f"the run would stop: {problem}")
    if not problems:
        yield Finding("run", "alignment", OK, "every size is one that Transformer Engine takes")


def _recipes_of(layers: Sequence[LinearPrecision]) -> list[Recipe]:
    recipes = dict.fromkeys(layer.decision.recipe for layer in layers)
    return [recipe for recipe in recipes if recipe is not None]


def _native_sizes(
    cfg: RunConfig, layers: Sequence[LinearPrecision], place: Place
) -> Iterator[Finding]:
    """Yield what is padded in hardware."""
    if not any(place.verdict(recipe).hardware for recipe in _recipes_of(layers)):
        yield Finding("run", "alignment", OK, "emulated products take any size")
        return
    padded = padding(cfg)
    yield Finding("run", "alignment", LESS if padded else OK, padded or "nothing has to be padded")


def _products(
    layers: Sequence[LinearPrecision], place: Place, *, wanted: bool
) -> Iterator[Finding]:
    """Yield in what and on what products run, once for those that are alike.

    Args:
        layers: Of the whole model.
        place: The device.
        wanted: Whether the run means to have FP8 hardware.
    """
    alike: dict[tuple[str, str], int] = {}
    for row in rows_of_layers(layers, place):
        less = row.is_fallback or (wanted and row.kernel.startswith("emulated"))
        why = f" ({row.reason})" if row.reason else ""
        key = (LESS if less else OK, f"{row.delivered} on {row.kernel}{why}")
        alike[key] = alike.get(key, 0) + 1
    for (status, text), count in alike.items():
        yield Finding("run", "precision", status, f"{count} products: {text}")


def _casts(layers: Sequence[LinearPrecision]) -> Iterator[Finding]:
    blocks = any(isinstance(recipe, BlockRecipe) for recipe in _recipes_of(layers))
    group = "blocks" if blocks else "casts"
    why = kernels.describe(torch.device("cuda"), (group,))[group]
    yield Finding("run", "casts", LESS if why.startswith("plain") else OK, why)
