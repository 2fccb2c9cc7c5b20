"""What a file for `--tp-comm-overlap-cfg` may hold: settings of Transformer Engine's userbuffers.

A buffer serves one product of one kind of layer: `<layer>_<product>`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.problems import Problem

FLAG = "--tp-comm-overlap-cfg"
_GATHER, _SCATTER = ("ring_exchange",), ("pipeline", "ring_exchange")
# Buffer to the methods that overlap its product; `bulk` and `external` serve another product.
BUFFERS: dict[str, tuple[str, ...]] = {
    "qkv_fprop": _GATHER,
    "qkv_dgrad": ("bulk", *_SCATTER),
    "qkv_wgrad": ("bulk",),
    "proj_fprop": _SCATTER,
    "proj_dgrad": _GATHER,
    "proj_wgrad": ("external",),
    "fc1_fprop": _GATHER,
    "fc1_dgrad": ("bulk", *_SCATTER),
    "fc1_wgrad": ("bulk",),
    "fc2_fprop": _SCATTER,
    "fc2_dgrad": _GATHER,
    "fc2_wgrad": ("external",),
}
# The input gradient of a column-parallel layer: sent in parts, or behind the weight gradient.
INPUT_GRADS = ("qkv_dgrad", "fc1_dgrad")
_COUNTS = ("num_sm", "cga_size", "num_splits")
_NUMBERS = ("comm_priority", "gemm_priority")
SWITCHES = (
    "is_reduce_scatter",
    "set_sm_margin",
    "aggregate",
    "atomic_gemm",
    "use_ce",
    "fp8_buf",
    "pipeline_rs_overlap_first_gemm",
)
KEYS = ("method", *_COUNTS, *_NUMBERS, *SWITCHES)


def check(content: Any, path: str, *, rs_dgrad: bool, fp8: bool) -> Iterator[Problem]:
    """Say what is wrong with the file.

    Args:
        content: What its YAML holds.
        path: Where it is, for the messages.
        rs_dgrad: Whether --tp-comm-overlap-rs-dgrad is on.
        fp8: Whether the run is in FP8.
    """
    if not isinstance(content, Mapping):
        yield Problem(
            (FLAG,),
            path,
            "It maps names of buffers to their settings",
            "Write lines like `qkv_fprop: {method: ring_exchange}`",
        )
        return
    for buffer, settings in content.items():
        where = f"{buffer} in {path}"
        if buffer not in BUFFERS:
            yield Problem((FLAG,), where, "There is no such buffer", _choose(buffer, BUFFERS))
        elif not isinstance(settings, Mapping):
            yield Problem(
                (FLAG,),
                f"{buffer}: {settings} in {path}",
                "The settings of a buffer are a mapping",
                f"Write `{buffer}: {{method: {BUFFERS[buffer][0]}}}`",
            )
        else:
            yield from _check_settings(str(buffer), settings, path, fp8)
            if buffer in INPUT_GRADS:
                yield from _check_input_grad(str(buffer), settings, content, path, rs_dgrad)


def _choose(name: object, names: Any) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(names)}"


def _check_settings(
    buffer: str, settings: Mapping[str, Any], path: str, fp8: bool
) -> Iterator[Problem]:
    for key, value in settings.items():
        got = f"{buffer}: {key}: {value} in {path}"
        if key not in KEYS:
            yield Problem((FLAG,), got, "A buffer has no such setting", _choose(key, KEYS))
        elif key == "method" and value not in BUFFERS[buffer]:
            yield Problem(
                (FLAG,),
                got,
                f"{buffer} has no such method",
                f"Use {' or '.join(BUFFERS[buffer])}",
            )
        elif key in SWITCHES and value not in (True, False):
            yield Problem((FLAG,), got, "It is a switch", "Write true or false")
        elif key in _COUNTS and not (type(value) is int and value > 0):
            yield Problem((FLAG,), got, "It is a count", "Write a whole number above 0")
        elif key in _NUMBERS and type(value) is not int:
            yield Problem((FLAG,), got, "It is a priority", "Write a whole number")
        elif key == "atomic_gemm" and value and not fp8:
            yield Problem(
                (FLAG, "--fp8-format"),
                got,
                "Atomic products exist in FP8 only",
                "Remove it, or add --fp8-format",
            )
        elif (key == "is_reduce_scatter" and value != scatters(buffer, settings)) or (
            key == "fp8_buf" and value != _bytes_travel(buffer, settings, bool(value))
        ):
            yield Problem((FLAG,), got, f"It follows from {buffer} and its method", f"Remove {key}")


def scatters(buffer: str, settings: Mapping[str, Any]) -> bool:
    """Whether a buffer sums and scatters; the others gather."""
    if buffer in INPUT_GRADS:
        return settings.get("method", "bulk") != "bulk"
    return buffer in ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")


def _bytes_travel(buffer: str, settings: Mapping[str, Any], wanted: bool) -> bool:
    """Whether FP8 bytes travel in a buffer of an FP8 run: gathering always, sums by choice."""
    if not scatters(buffer, settings):
        return True
    default = "pipeline" if buffer.endswith("fprop") else "bulk"
    return wanted and settings.get("method", default) == "pipeline"


def _check_input_grad(
    buffer: str, settings: Mapping[str, Any], content: Mapping[str, Any], path: str, rs_dgrad: bool
) -> Iterator[Problem]:
    flags = (FLAG, "--tp-comm-overlap-rs-dgrad")
    method = settings.get("method")
    in_parts = rs_dgrad if method is None else method != "bulk"
    if in_parts != rs_dgrad:
        what = "in parts" if in_parts else "behind the weight gradient"
        yield Problem(
            flags,
            f"{buffer}: method: {method} in {path}, and the flag is {'on' if rs_dgrad else 'off'}",
            f"This method sends the input gradient {what}",
            "Add --tp-comm-overlap-rs-dgrad"
            if in_parts
            else "Remove --tp-comm-overlap-rs-dgrad, or use ring_exchange or pipeline",
        )
    weight = buffer.replace("dgrad", "wgrad")
    if in_parts and weight in content:
        yield Problem(
            (FLAG,),
            f"{weight} next to {buffer} in {path}",
            f"Nothing travels behind {weight} when the input gradient is sent in parts",
            f"Remove {weight}",
        )
