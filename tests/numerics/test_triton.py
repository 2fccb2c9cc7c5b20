"""Triton's kernels without a GPU: interpreted against plain torch, and compiled for two chips."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.fp8 import kernels
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.kernels import device

HERE = Path(__file__).resolve().parent
pytest.importorskip("triton")


def test_interpreted_kernels_are_bitwise_plain_torch():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", str(HERE / "interpreted_triton.py")],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


# -- compiled ahead of time: catches what the interpreter lets through ---------------------------

FORMAT = {"E5M2": False, "MAX": 448.0, "FLOOR": 121 << 23, "OFFSET": (20 << 23) | 0x400000}
BLOCKS = {
    **FORMAT, "DIRECTION": 0, "TURNED": False, "BOTH": False, "HELD": False, "FOLD": False,
    "LENGTH": 128, "RULE": 1, "CAP": 3.4e38, "TILE": 128,
}  # fmt: skip
NORM = {"SHIFTED": False, "ZERO_CENTERED": True, "E5M2": False, "BLOCK": 4096}
CASES = {
    "magnitude": ("casts", "amax_kernel", {"BLOCK": 4096}),
    "cast": ("casts", "cast_kernel", {**FORMAT, "HELD": False, "WANT_AMAX": True, "BLOCK": 4096}),
    "cast e5m2": (
        "casts",
        "cast_and_turn_kernel",
        {"E5M2": True, "WANT_AMAX": True, "TILE": 128},
    ),
    "round": ("casts", "cast_kernel", {**FORMAT, "HELD": True, "WANT_AMAX": False, "BLOCK": 4096}),
    "turn": ("casts", "turn_kernel", {"TILE": 128}),
    "both directions": ("blocks", "blocks_kernel", {**BLOCKS, "BOTH": True}),
    "squares": ("blocks", "blocks_kernel", {**BLOCKS, "DIRECTION": 2}),
    "mx columns": (
        "blocks",
        "blocks_kernel",
        {**BLOCKS, "DIRECTION": 1, "TURNED": True, "LENGTH": 32, "RULE": 2, "TILE": 64},
    ),
    "held blocks": ("blocks", "blocks_kernel", {**BLOCKS, "HELD": True, "FOLD": True}),
    "norm and cast": ("fused", "norm_kernel", {**NORM, "CENTERED": False, "CAST": True}),
    "layer norm": (
        "fused",
        "norm_kernel",
        {**NORM, "CENTERED": True, "SHIFTED": True, "CAST": False},
    ),
    "swiglu and cast": (
        "fused",
        "swiglu_kernel",
        {"KEEP": True, "CAST": True, "E5M2": False, "BLOCK": 1024},
    ),
    "swiglu backward": ("fused", "swiglu_grad_kernel", {"BLOCK": 1024}),
}


def types_of(kernel, constants):
    """The types of the arguments of a kernel, all with the alignment that torch's tensors have."""
    codes = {"x": "*bf16", "out": "*u8", "second": "*u8", "codes": "*u8", "turned": "*u8"}
    if constants.get("HELD") or constants.get("CAST") is False or "KEEP" in constants:
        codes["out"] = "*bf16"
    if kernel.arg_names[1] == "grad":
        codes["out"] = "*bf16"
    numbers = {"rows": "i32", "cols": "i32", "size": "i32", "eps": "fp32", "amax": "*i32"}
    weights = dict.fromkeys(("weight", "shift", "grad"), "*bf16")
    known = {**codes, **numbers, **weights}
    return {
        name: "constexpr" if name in constants else known.get(name, "*fp32")
        for name in kernel.arg_names
    }


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_and_keep_every_bit(case, arch):
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    group, name, constants = CASES[case]
    kernel = getattr(device.module(group), name)
    constants = {**constants, "EMULATE": False}
    types = types_of(kernel, constants)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if types[arg] != "constexpr" and types[arg] != "fp32"
    }
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = compiler.compile(
        source, target=target, options={"num_warps": 8, "enable_fp_fusion": False}
    )
    assert len(made.asm["cubin"]) > 1000
    ptx = made.asm["ptx"]
    assert ".ftz" not in ptx.replace("ex2.approx.ftz", "")  # subnormals are kept
    if group != "fused":
        assert "fma.rn" not in ptx  # a product is rounded before it is added
    if types.get("out") == "*u8" or "codes" in types and "CAST" in constants:
        kind = "e5m2x2" if constants["E5M2"] else "e4m3x2"
        assert f"cvt.rn.satfinite.{kind}.f32" in ptx
    # 8 or 16 bytes at a time, in both orientations.
    assert re.search(r"ld\.global(\.\w+)*\.v[24]\.b32", ptx)
    if "turned" in types:
        assert not re.search(r"st\.global(\.\w+)*\.b8", ptx)


# -- where they run ------------------------------------------------------------------------------


def test_without_a_gpu_they_are_not_used():
    assert not device.is_interpreted()
    with pytest.raises(ValueError, match="triton"):
        kernels.use("triton")
    assert set(kernels.describe(device.torch.device("cpu"))) == set(device.GROUPS)


def test_a_device_on_which_they_fail_takes_plain_torch(monkeypatch):
    def broken(group, where, has_fp8):
        raise RuntimeError("no kernel image\nand more")

    where = device.torch.device("cuda", 99)
    monkeypatch.setattr(device.torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(device, "checks", broken)
    module, reason = device.verdict.__wrapped__("casts", where)
    assert module is None
    assert reason.endswith("failed here: RuntimeError: no kernel image")
    monkeypatch.setattr(device, "checks", lambda *_: [("cast", lambda: False)])
    module, reason = device.verdict.__wrapped__("casts", where)
    assert module is None
    assert reason.endswith("computes something else here (cast)")
    monkeypatch.setattr(device, "checks", lambda *_: [("cast", lambda: True)])
    assert device.verdict.__wrapped__("casts", where)[0] is device.module("casts")
    monkeypatch.setattr(device, "triton_version", lambda: "")
    assert device.verdict.__wrapped__("casts", where) == (
        None,
        "plain torch: Triton is not installed",
    )


def test_formats_of_the_cases_are_those_of_the_library():
    constants = importlib.import_module("megatron.core.fp8.kernels.triton_math").format_constants
    assert {**constants(E4M3), "E5M2": False} == FORMAT
    assert constants(E5M2)["MAX"] == 57344.0
