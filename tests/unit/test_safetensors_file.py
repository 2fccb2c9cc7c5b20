"""Weight files: what is written is what the format's own library reads, and damage is named."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.core.errors import CheckpointError
from megatron.training.safetensors_file import Planned, read_header, read_tensor, write_file

TENSORS = {
    "a": torch.randn(5, 3),
    "b": torch.randn(7).bfloat16(),
    "c": torch.randn(3, 3).to(torch.float8_e4m3fn),
    "d": torch.tensor(2.5),
    "e": torch.empty(0, 4),
    "f": torch.arange(6),
}


def planned(tensors):
    return [Planned(n, tuple(t.shape), lambda t=t: t, t.dtype) for n, t in tensors.items()]


def same(a, b):
    bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def test_the_library_reads_what_is_written_here(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, planned(TENSORS), torch.float32)
    loaded = load_file(path)
    assert set(loaded) == set(TENSORS)
    assert all(same(loaded[n], t) for n, t in TENSORS.items())
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_the_library_writes_is_read_here(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    header = read_header(path)
    for name, tensor in TENSORS.items():
        assert header[name].shape == tuple(tensor.shape)
        assert same(read_tensor(path, name, header[name]), tensor)
    assert same(read_tensor(path, "a", header["a"], slice(1, 3)), TENSORS["a"][1:3])
    assert read_tensor(path, "a", header["a"], slice(4, 9)).shape == (1, 3)


def test_tensors_are_aligned_and_keep_their_order_where_they_can(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, planned({"x": torch.ones(3).bfloat16(), "y": torch.ones(2)}), torch.float32)
    header = read_header(path)
    assert all(e.start % e.dtype.itemsize == 0 for e in header.values())
    write_file(path, planned({"x": torch.ones(4).bfloat16(), "y": torch.ones(2)}), torch.float32)
    header = read_header(path)
    assert header["x"].start < header["y"].start


def test_one_tensor_is_made_at_a_time(tmp_path):
    made = []

    def make(i):
        made.append(i)
        return torch.full((2,), float(i))

    write_file(
        tmp_path / "x.safetensors",
        [Planned(str(i), (2,), lambda i=i: make(i)) for i in range(4)],
        torch.bfloat16,
    )
    assert made == [0, 1, 2, 3]
    assert load_file(tmp_path / "x.safetensors")["3"].tolist() == [3.0, 3.0]


def test_a_tensor_of_another_shape_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="x"):
        write_file(
            tmp_path / "x", [Planned("x", (3,), lambda: torch.ones(2))], torch.float32
        )  # fmt: skip


def test_values_beyond_a_narrower_type_are_refused(tmp_path):
    large = [Planned("x", (2,), lambda: torch.tensor([7e4, float("inf")]))]
    with pytest.raises(CheckpointError, match="x holds finite values above 65504"):
        write_file(tmp_path / "x", large, torch.float16)
    write_file(tmp_path / "y", large, torch.bfloat16)


def header_only(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or no safetensors file"),
        (b"\0" * 7, "truncated or no safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "truncated or no safetensors file"),
        (struct.pack("<Q", 2) + b"{]", "damaged header"),
        (header_only(GOOD, b"\0" * 7), "is truncated: it has"),
        (header_only(GOOD, b"\0" * 9), "bytes that belong to no tensor"),
        (header_only({"a": {**GOOD["a"], "shape": [3]}}, b"\0" * 8), "damaged header"),
        (header_only({"a": {**GOOD["a"], "shape": [-2]}}, b"\0" * 8), "damaged header"),
        (header_only({"a": {**GOOD["a"], "data_offsets": [4, 12]}}, b"\0" * 12), "does not begin"),
        (header_only({"a": 3}), "damaged header"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00003.*{message}"):
        read_header(path)
