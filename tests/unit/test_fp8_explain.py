"""tools/fp8_explain.py: its three commands and what it says about bad input."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

PATH = Path(__file__).resolve().parents[2] / "tools" / "fp8_explain.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("tool_fp8_explain", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def explain(tool, capsys):
    def run(*args):
        try:
            code = tool.main([str(arg) for arg in args])
        except SystemExit as stopped:
            code = stopped.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_formats(explain):
    code, out, _ = explain("formats")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    # The last two: infinities, and NaNs of either sign.
    expected = {
        "e4m3": "1+4+3 448 2^-6 2^-9 2^-3 254 253 0 2",
        "e5m2": "1+5+2 57344 2^-14 2^-16 2^-2 248 247 2 6",
        "e2m1": "1+2+1 6 2^0 2^-1 2^-1 16 15 0 0",
    }
    assert {name: " ".join(rows[name][1:10]) for name in expected} == expected


def test_codes(explain):
    _, out, _ = explain("formats", "--codes", "e4m3")
    lines = out.splitlines()
    assert len(lines) == 1 + 128
    assert lines[0x7E + 1].split() == ["0x7e", "0", "1111", "110", "448"]
    assert lines[-1].split()[-1] == "nan"


@pytest.mark.parametrize(
    ("args", "e4m3", "e5m2"),
    [
        (["0.3"], "rounds to 0.3125 (0x2a = 0 0101 010), off by +4.17 %", "rounds to 0.3125"),
        # Halfway between 16 and 18, and between 18 and 20: to the even code.
        (["17"], "rounds to 16 ", "rounds to 16 "),
        (["19"], "rounds to 20 ", "rounds to 20 "),
        (["920"], "rounds to 448 (0x7e", "rounds to 896"),
        (["449"], "saturates, the largest value is 448", "rounds to 448"),
        (["920", "--scale", "0.25"], "rounds to 224 (0x76 = 0 1110 110), read back as 896", ""),
        (["-1e-4"], "underflows, the smallest value is 0.00195312", "rounds to -0.000106"),
        (["0.002"], "subnormal, fewer than 4 bits", ""),
        (["nan"], "stays no number", "stays no number"),
        (["inf"], "rounds to 448", "saturates"),
    ],
)
def test_rounding_of_a_number(explain, args, e4m3, e5m2):
    code, out, _ = explain("value", *args)
    assert code == 0
    lines = out.splitlines()
    assert e4m3 in next(line for line in lines if line.startswith("e4m3"))
    assert e5m2 in next(line for line in lines if line.startswith("e5m2"))


def test_neighbours(explain):
    _, out, _ = explain("value", "0.3", "--around", "2")
    block = out.split("\n\n")[1].splitlines()[1:]
    assert [line.split()[-2] for line in block] == ["0.25", "0.28125", "0.3125", "0.34375", "0.375"]
    assert block[2].split()[0] == ">"
    # Across zero, and at the end of the format.
    _, out, _ = explain("value", "0.0001", "--around", "1")
    values = [line.split()[-2] for line in out.split("\n\n")[1].splitlines()[1:]]
    assert values == ["-0.001953125", "0", "0.001953125"]
    _, out, _ = explain("value", "1e9", "--around", "1")
    assert [line.split()[-2] for line in out.split("\n\n")[1].splitlines()[1:]] == ["416", "448"]


def table(out):
    """SQNR, closed form and shares by recipe and format."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("recipe"))
    found = {}
    for line in lines[start + 2 :]:
        for fmt in ("e4m3", "e5m2", "e2m1"):
            name, _, rest = line.partition(f"  {fmt}  ")
            if rest:
                found[name.strip(), fmt] = rest.split()
    return found


def files(tmp_path):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "x.npy", x.numpy())
    torch.save({"layers": [1, 2], "layer": {"weight": x.bfloat16()}}, tmp_path / "x.pt")
    safetensors.torch.save_file({"a": x, "b": x[:1].clone()}, tmp_path / "x.safetensors")
    return x


@pytest.mark.parametrize(
    "args", [["x.npy"], ["x.pt"], ["x.safetensors", "--name", "a"]], ids=lambda args: args[0]
)
def test_a_normal_tensor(explain, tmp_path, args):
    files(tmp_path)
    code, out, err = explain("tensor", tmp_path / args[0], *args[1:])
    assert (code, err) == (0, "")
    assert out.startswith("[64, 256]")
    found = table(out)
    four_bits = [found.pop(key) for key in list(found) if key[1] == "e2m1"]
    # Two bits less; squares have a scale for 256 values; at random, 3 dB less.
    assert [float(row[3]) for row in four_bits] == pytest.approx([20.4, 19.0, 17.3], abs=0.2)
    assert [float(row[4]) for row in four_bits[:2]] == pytest.approx([20.4, 19.0], abs=0.2)
    assert len(four_bits[2]) == len(four_bits[1]) - 1  # no closed form
    assert len(found) == 7 + 1 + 7
    for (recipe, fmt), (*scale, sqnr, closed, _, _, _) in found.items():
        figure = 31.5 if fmt == "e4m3" else 25.55
        assert float(sqnr) == pytest.approx(figure, abs=0.3), recipe
        assert float(closed) == pytest.approx(figure, abs=0.15), recipe
        assert scale
    assert found["delayed, first step", "e4m3"][0] == "1"


def test_small_and_large_values(explain, tmp_path):
    """One scale loses small rows and the scale 1 large values; blocks keep both."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[::2] *= 2.0**-18
    x[0, 0] = 1e4
    np.save(tmp_path / "x.npy", x.numpy())
    found = table(explain("tensor", tmp_path / "x.npy")[1])
    assert found["delayed, first step", "e4m3"][-3] != "-"  # saturated
    assert float(found["delayed later, tensorwise", "e4m3"][-2].rstrip("%")) > 50  # to 0
    assert found["mxfp8, rows", "e4m3"][-3] == "-"
    assert found["mxfp8, rows", "e4m3"][0] != found["mxfp8, rows", "e4m3"][2]


def test_nothing_to_measure(explain, tmp_path):
    np.save(tmp_path / "x.npy", np.array([0.0, np.nan, np.inf]))
    code, out, _ = explain("tensor", tmp_path / "x.npy")
    assert code == 0
    assert "2 not finite" in out
    assert "nothing to measure" in out
    np.save(tmp_path / "x.npy", np.array(3.0))
    assert "SQNR" in explain("tensor", tmp_path / "x.npy")[1]


def bad(tmp_path):
    files(tmp_path)
    (tmp_path / "x.txt").write_text("1 2 3")
    (tmp_path / "broken.npy").write_bytes(b"no array")
    (tmp_path / "broken.pt").write_bytes(b"no tensor")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "whole.npy", np.arange(3))
    np.save(tmp_path / "empty.npy", np.zeros((0, 3)))
    torch.save({"n": 3}, tmp_path / "none.pt")
    with open(tmp_path / "evil.pt", "wb") as file:
        pickle.dump(Path("/"), file, protocol=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["x.txt"], "got .txt. It is not known what kind of file this is. Give a .npy, .pt"),
        (["missing.npy"], "No such file"),
        (["broken.npy"], "got an unreadable file"),
        (["broken.pt"], "got an unreadable file"),
        (["broken.safetensors"], "got an unreadable file"),
        (["objects.npy"], "nothing else in it is unpacked"),
        (["evil.pt"], "nothing else in it is unpacked"),
        (["text.npy"], "no array of numbers"),
        (["whole.npy"], "got [3] torch.int64. Errors are measured on numbers in"),
        (["empty.npy"], "got [0, 3] torch.float64"),
        (["none.pt"], "got no tensor"),
        (["x.safetensors"], "--name: got nothing."),
        (["x.safetensors", "--name", "c"], "holds 2 tensors: a, b. Name one of them."),
        (["x.pt", "--name", "weight"], "holds 1 tensor: layer.weight."),
        (["x.npy", "--name", "a"], "one tensor, which has no name. Remove it."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_files(explain, tmp_path, args, words):
    bad(tmp_path)
    code, out, err = explain("tensor", tmp_path / args[0], *args[1:])
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "got nothing"),
        (["value"], "x: got nothing"),
        (["value", "many"], "x: got 'many'. It takes a number"),
        (["value", "1", "--scale", "0"], "--scale: got 0.0."),
        (["value", "1", "--scale", "nan"], "--scale: got nan."),
        (["value", "1", "--around", "-1"], "--around: got -1."),
        (["formats", "--codes", "e4m4"], "Did you mean e4m3?"),
        (["tensor"], "file: got nothing"),
    ],
)
def test_bad_arguments(explain, args, words):
    code, _, err = explain(*args)
    assert code == 2
    assert words in err
