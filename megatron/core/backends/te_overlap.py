"""Transformer Engine's userbuffers: transfers behind its products (`--tp-comm-overlap`).

A userbuffer is memory that tensor-parallel ranks share, one for each product of each kind of layer.
They are set up once, before the first layer is built; a layer then names its buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron.config import ConfigError
from megatron.config.cli import read_overlap_cfg
from megatron.config.fp8_policy import recipes_in_use, some_layers_plain
from megatron.config.overlap_cfg import INPUT_GRADS, SWITCHES
from megatron.core.backends import te_calls
from megatron.core.backends.te_calls import EXTERNAL_BUFFERS, UB_MODES, Library
from megatron.core.errors import MegatronError, PrecisionError, complaint
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.overlap import parts_in_use

if TYPE_CHECKING:
    from megatron.config import RunConfig

# Last part of a layer's path to the name that its buffers begin with.
BUFFER_OF = {"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def layer_arguments(
    config: RunConfig, path: str, axis: Axis, *, by_column: bool, buffer: str | None
) -> dict[str, Any]:
    """Arguments of a linear layer's constructor that let it use its buffers.

    Args:
        config: The run's configuration.
        path: The layer's path.
        axis: Ranks that share the layer.
        by_column: Whether its output features are split over them.
        buffer: Name that its buffers begin with; by default from the path.

    Returns:
        Nothing for a layer without buffers: its transfers are not overlapped.
    """
    buffer = buffer or BUFFER_OF.get(path.rpartition(".")[2])
    if not config.tp_comm_overlap or axis.size == 1 or buffer is None:
        return {}
    found: dict[str, Any] = {"ub_name": buffer, "ub_overlap_ag": config.tp_comm_overlap_ag}
    if not by_column:
        return {**found, "ub_overlap_rs": config.tp_comm_overlap_rs}
    in_parts = config.tp_comm_overlap_rs_dgrad
    return {
        **found,
        "ub_overlap_rs_dgrad": in_parts,
        "ub_bulk_dgrad": config.tp_comm_bulk_dgrad and not in_parts,
        "ub_bulk_wgrad": config.tp_comm_bulk_wgrad and not in_parts,
    }


def buffer_settings(config: RunConfig, version: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Settings by buffer, from `--tp-comm-overlap-cfg`; others keep Transformer Engine's.

    Raises:
        ConfigError: The file is wrong.
        MegatronError: This release lacks one of its buffers.
    """
    in_parts = config.tp_comm_overlap_rs_dgrad
    content: dict[str, dict[str, Any]] = {}
    if config.tp_comm_overlap_cfg is not None:
        content, problems = read_overlap_cfg(
            config.tp_comm_overlap_cfg, rs_dgrad=in_parts, fp8=config.fp8_format is not None
        )
        if problems:
            raise ConfigError(problems)
    late = [name for name in ("proj_wgrad", "fc2_wgrad") if name in content]
    if late and version < EXTERNAL_BUFFERS:
        raise MegatronError(
            complaint(
                "--tp-comm-overlap-cfg",
                ", ".join(late),
                f"These buffers came with release {EXTERNAL_BUFFERS[0]}.{EXTERNAL_BUFFERS[1]}, and"
                f" {version[0]}.{version[1]} is installed",
                "Remove them",
            )
        )
    found = {
        name: {key: bool(v) if key in SWITCHES else v for key, v in settings.items()}
        for name, settings in content.items()
    }
    for name in INPUT_GRADS if in_parts else ():
        # Left alone, this buffer would gather the input behind the input gradient's product.
        found[name] = {"method": "ring_exchange", **found.get(name, {})}
    return found


def start(library: Library, config: RunConfig, axis: Axis) -> str:
    """Set the buffers up, unless that has been done. Collective over all ranks.

    Args:
        library: Transformer Engine.
        config: The run's configuration.
        axis: Tensor-parallel ranks.

    Returns:
        What is overlapped and how, in words.

    Raises:
        ConfigError: `--tp-comm-overlap-cfg` is wrong.
        PrecisionError: Some layers run in FP8 and others do not, which this release cannot.
        MegatronError: Transformer Engine refuses.
    """
    settings = buffer_settings(config, library.version)
    rows = config.seq_length // config.context_parallel_size * config.micro_batch_size
    arguments = te_calls.userbuffer_arguments(
        library,
        shape=[rows, config.hidden_size],
        tp_size=axis.size,
        modes=_modes(config, library.version),
        dtype=getattr(torch, config.params_dtype),
        settings=settings,
        bootstrap_backend=config.tp_comm_bootstrap_backend,
    )
    key = repr(arguments)
    if library.userbuffers != [key]:
        try:
            if library.userbuffers:
                te_calls.destroy_userbuffers(library)
            library.userbuffers.clear()
            te_calls.initialize_userbuffers(library, arguments)
        except (RuntimeError, ValueError, AssertionError, KeyError) as error:
            raise MegatronError(
                complaint(
                    "--tp-comm-overlap",
                    "userbuffers that cannot be set up",
                    f"Transformer Engine says: {type(error).__name__}: {error}",
                    "Remove --tp-comm-overlap, or follow this advice",
                )
            ) from error
        library.userbuffers.append(key)
    return f"{parts_in_use(config)}, in Transformer Engine's userbuffers"


def _modes(config: RunConfig, version: tuple[int, int]) -> tuple[bool, ...]:
    """For each set of buffers that is needed: whether FP8 bytes travel in it."""
    if "nvfp4" in recipes_in_use(config):
        raise PrecisionError(
            complaint(
                "--tp-comm-overlap",
                "nvfp4",
                "Transformer Engine's userbuffers carry FP8 and wider types only",
                "Remove one of them, or use --transformer-impl native, which overlaps both",
            )
        )
    if not recipes_in_use(config):
        return (False,)
    if not some_layers_plain(config):
        return (True,)
    if version < UB_MODES:
        raise PrecisionError(
            complaint(
                "--first-last-layers-bf16, --fp8-warmup-iters or --fp8-policy",
                "--tp-comm-overlap",
                "Buffers for FP8 and for other layers at once came with Transformer Engine"
                f" {UB_MODES[0]}.{UB_MODES[1]}, and {version[0]}.{version[1]} is installed",
                "Remove one of them, or install a newer release",
            )
        )
    return (True, False)
