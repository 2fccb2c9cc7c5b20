"""The real command lines: what is there, and FP8 that is asked for and cannot be had."""

from __future__ import annotations

from tests.e2e.launch import ROOT, launch
from tests.e2e.refusals import FP8, MOCK, accepted, check_refused

ENGINE = [*MOCK, *FP8, "--fp8-recipe", "mxfp8", "--transformer-impl", "transformer_engine"]


def test_preflight_says_what_the_run_then_does():
    done = launch(1, ["--strict", *ENGINE], script=ROOT / "tools" / "preflight.py")
    assert done.codes == [1], done.out
    assert "the run would stop: --transformer-impl: got transformer_engine" in done.out
    check_refused(launch(1, ENGINE), 1, "--transformer-impl", "--fp8-allow-fallback")


def test_with_leave_the_run_falls_back_and_says_so_once():
    done = accepted([*ENGINE, "--fp8-allow-fallback"], world_size=1)
    assert done.out.count("WARNING: transformer_engine was asked for and cannot run") == 1
    assert "fp8 e4m3xe4m3 mxfp8 on transformer_engine  fp8 e4m3xe4m3 mxfp8" in done.out
    assert "iteration        2/       2" in done.out
