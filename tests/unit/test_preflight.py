"""tools/preflight.py: what a machine has, and what a run would get on it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron.core.capability import Target
from megatron.training import preflight
from megatron.training.preflight import LESS, MISSING, OK
from megatron.training.products import Place

PATH = Path(__file__).resolve().parents[2] / "tools" / "preflight.py"
MODEL = [
    "--num-layers", "2", "--hidden-size", "40", "--num-attention-heads", "4", "--seq-length", "32",
    "--vocab-size", "128", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3",
    "--train-iters", "2", "--mock-data", "--bf16",
]  # fmt: skip
FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="written for a CPU machine")


def tool(capsys, *args):
    spec = importlib.util.spec_from_file_location("tool_preflight", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = module.main([*args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def by_name(findings, section):
    return {f.name: f for f in findings if f.section == section}


def test_a_machine_without_a_device():
    found = preflight.preflight()
    machine = by_name(found, "machine")
    assert set(machine) == {"device", "cpu", "driver", "cuda", "cublas", "cudnn", "nccl"}
    assert machine["device"].status == MISSING
    assert "CUDA" in machine["device"].text
    recipes = by_name(found, "recipes")
    for name in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        assert recipes[f"{name}, native"].text == "emulated: a CPU has no FP8 products"
        assert "not installed" in recipes[f"{name}, transformer_engine"].text
    assert not [f for f in found if f.status == LESS]  # nothing was asked for


def test_a_run_that_would_get_less(capsys):
    code, out, _ = tool(capsys, *FP8, *MODEL)
    assert code == 0
    assert "LESS  device" in out
    assert "24 products: fp8 e4m3xe4m3 mxfp8 on emulated" in out
    assert "2 line(s) with less than asked for" in out
    code, out, _ = tool(capsys, "--strict", "--json", *FP8, *MODEL)
    assert code == 1
    assert {f["status"] for f in json.loads(out)} == {OK, MISSING, LESS}


def test_a_run_that_asks_for_a_cpu_gets_it(capsys):
    code, out, _ = tool(capsys, "--strict", *FP8, *MODEL, "--device", "cpu")
    assert code == 0
    assert "nothing falls short" in out
    assert "emulated products take any size" in out


def test_a_backend_that_cannot_run(capsys):
    engine = [*FP8, *MODEL, "--device", "cpu", "--transformer-impl", "transformer_engine",
              "--hidden-size", "64"]  # fmt: skip
    code, out, _ = tool(capsys, "--strict", *engine)
    assert code == 1
    assert "the run would stop: --transformer-impl: got transformer_engine" in out
    code, out, _ = tool(capsys, "--strict", *engine, "--fp8-allow-fallback")
    assert code == 1
    assert "with --fp8-allow-fallback the layers run on the native backend" in out


def test_flags_that_cannot_work(capsys):
    code, out, err = tool(capsys, "--fp8-recipe", "quick", *MODEL)
    assert (code, out) == (2, "")
    assert "--fp8-recipe: got 'quick'" in err


def test_the_smallest_launch_is_assumed():
    layout = ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2"]
    flags = [*MODEL, "--hidden-size", "64", *layout]
    assert preflight.read_run(flags).world_size == 8
    assert preflight.read_run([*flags, "--fake-world-size", "16"]).world_size == 16


@pytest.mark.parametrize(
    ("capability", "recipe", "less"),
    [((9, 0), "mxfp8", "E8M0 scales need compute capability 10.0"), ((10, 0), "mxfp8", None)],
)
def test_a_run_on_a_device(capability, recipe, less, monkeypatch):
    place = Place(Target("cuda", capability, (13, 0)))
    monkeypatch.setattr(Place, "here", classmethod(lambda cls: place))
    monkeypatch.setattr(
        preflight.kernels, "describe", lambda device, groups: dict.fromkeys(groups, "Triton 3.6")
    )
    flags = ["--fp8-format", "e4m3", "--fp8-recipe", recipe, *MODEL, "--hidden-size", "64"]
    found = list(preflight.run(preflight.read_run(flags)))
    products = [f for f in found if f.name == "precision"]
    assert products[0].status == (LESS if less else OK)
    assert (less or "scales 1 x 32") in products[0].text
    assert by_name(found, "run")["casts"].status == OK
    assert by_name(found, "run")["device"].status == OK


def test_padding_is_less(monkeypatch):
    place = Place(Target("cuda", (9, 0), (13, 0)))
    monkeypatch.setattr(Place, "here", classmethod(lambda cls: place))
    monkeypatch.setattr(
        preflight.kernels, "describe", lambda device, groups: dict.fromkeys(groups, "plain torch")
    )
    flags = ["--fp8-format", "hybrid", *MODEL]
    found = by_name(preflight.run(preflight.read_run(flags)), "run")
    assert found["alignment"].status == LESS
    assert "the hidden size 40 as 48" in found["alignment"].text
    assert found["casts"].status == LESS


# -- packages that only look like NVIDIA's -------------------------------------------------------


def installed(monkeypatch, folder, **versions):
    monkeypatch.setattr(preflight, "folder_of", lambda module: folder)
    monkeypatch.setattr(preflight, "distribution", lambda name: versions.get(name, ""))


def test_apex(monkeypatch, tmp_path):
    installed(monkeypatch, None)
    assert preflight.apex().status == MISSING
    installed(monkeypatch, tmp_path, apex="0.9.10.dev0")
    assert preflight.apex().status == LESS
    assert "unrelated web toolkit" in preflight.apex().text
    (tmp_path / "normalization").mkdir()
    installed(monkeypatch, tmp_path, apex="0.1")
    assert preflight.apex() == preflight.Finding(
        "libraries", "apex", OK, "NVIDIA Apex 0.1; not needed here"
    )


def test_dllogger(monkeypatch, tmp_path):
    installed(monkeypatch, None)
    assert preflight.dllogger().status == MISSING
    installed(monkeypatch, None, **{"nvidia-dllogger": "0.0.1"})
    assert "placeholder" in preflight.dllogger().text
    assert preflight.dllogger().status == LESS
    (tmp_path / "logger.py").touch()
    installed(monkeypatch, tmp_path)
    assert preflight.dllogger().status == OK


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    (tmp_path / "explosive").mkdir()
    (tmp_path / "explosive" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preflight.folder_of("explosive") == tmp_path / "explosive"
    assert preflight.folder_of("no_such_package") is None
    assert preflight.distribution("torch") == torch.__version__


def test_an_engine_that_is_installed_and_cannot_run_is_less(monkeypatch):
    monkeypatch.setattr(preflight, "installed_version", lambda: "1.0")
    found = {f.name: f for f in preflight.libraries()}
    assert found["transformer_engine"].status == LESS
