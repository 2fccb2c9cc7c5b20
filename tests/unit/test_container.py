"""Tensors written with a kept frame are what ``torch.save`` would have written."""

from __future__ import annotations

import io
import re
import zipfile

import pytest
import torch

from megatron.core.dist_checkpointing import container
from megatron.core.dist_checkpointing.container import Frames

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
SHAPES = [(), (1,), (3, 5), (16,), (300, 70), (2, 1, 3), (0, 3)]


def written(frames, tensor):
    stream = io.BytesIO()
    frames.write(tensor, stream)
    return stream.getvalue()


def by_torch(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def without_identifier(archive):
    """The archive, but for the number by which torch tells contents apart, and its checksums."""
    place = archive.index(b"serialization_id")
    start = re.compile(rb"\d{40}").search(archive, place).start()
    listed = archive.rindex(b"serialization_id")
    listed = archive.rindex(b"PK\x01\x02", 0, listed) + 16
    spoiled = bytearray(archive)
    spoiled[start : start + 40] = bytes(40)
    spoiled[start + 44 : start + 48] = spoiled[listed : listed + 4] = bytes(4)
    return bytes(spoiled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_archive(dtype):
    frames = Frames()
    for shape in SHAPES:
        for seed in range(3):
            torch.manual_seed(seed)
            tensor = (100 * torch.rand(shape)).to(dtype)
            archive = written(frames, tensor)
            assert without_identifier(archive) == without_identifier(by_torch(tensor))
            assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
            again = torch.load(io.BytesIO(archive), weights_only=True)
            assert (again.dtype, again.shape) == (dtype, tensor.shape)
            assert bytes(again.view(-1).view(torch.uint8)) == bytes(
                tensor.view(-1).view(torch.uint8)
            )


def test_torch_is_asked_once_a_shape_and_type(monkeypatch):
    asked, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (asked.append(1), save(*args)))
    frames = Frames()
    for value in range(5):
        written(frames, torch.full((4, 3), float(value)))
        written(frames, torch.full((3, 4), value, dtype=torch.bfloat16))
    assert len(asked) == 2


def test_a_part_of_a_tensor_is_written_alone():
    big = torch.arange(1000.0).view(10, 100)
    for part in (big[2:4], big[:, 7], big.t()):
        archive = written(Frames(), part)
        assert len(archive) < 4 * part.numel() + 3000
        assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), part)


def test_an_archive_of_another_form_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(container, "_ENTRY", b"PK??")
    frames, tensor = Frames(), torch.arange(10.0)
    assert written(frames, tensor) == by_torch(tensor)
    assert written(frames, 2 * tensor) == by_torch(2 * tensor)
