"""benchmarks/train_step.py runs at a tiny size and reports every figure it promises."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "train_step.py"
TINY = {"layers": 1, "hidden": 64, "heads": 2, "ffn": 96, "vocab": 128, "seq": 32, "batch": 1}
TINY |= {"threads": 1, "steps": 1}


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_step_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(benchmark, monkeypatch, only):
    sizes = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["train_step.py", *sizes, "--only", only])
    benchmark.main()


def test_it_reports_times_losses_and_ratios(benchmark, monkeypatch, capsys):
    run(benchmark, monkeypatch, "native_bf16,native_fp8_delayed_plain")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {"native_bf16", "native_fp8_delayed_plain"}
    assert set(found["median_wall_s"]) == set(found["loss"]) == names
    assert abs(found["loss"]["native_bf16"] - found["loss"]["native_fp8_delayed_plain"]) < 0.5
    (ratio,) = found["ratios"].values()
    assert ratio["wall"] > 0
    assert found["model_flops_per_step"] > 0


def test_an_unknown_contender_is_named(benchmark, monkeypatch):
    with pytest.raises(SystemExit, match="nonsense"):
        run(benchmark, monkeypatch, "nonsense")
