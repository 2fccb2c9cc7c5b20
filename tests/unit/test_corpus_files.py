"""Corpora that do not exist are problems of the configuration."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError
from megatron.config.cli import parse
from megatron.config.corpus_files import corpora_exist

TINY = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
TINY += ["--seq-length", "8", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"]
TINY += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]


@pytest.fixture
def there(tmp_path):
    for ending in (".bin", ".idx"):
        (tmp_path / f"there{ending}").touch()
    return str(tmp_path / "there")


def problems(*flags):
    try:
        parse([*TINY, *flags], 1, None, [corpora_exist])
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_what_is_there_is_accepted(there):
    assert problems("--data-path", "1", there, "2", there) == []
    assert problems("--mock-data") == []


def test_all_that_are_missing_are_named_with_the_other_problems(there):
    found = problems("--data-path", "1", "no", "2", there, "3", "neither", "--num-layers", "0")
    assert len(found) == 2
    assert found[1].startswith("--data-path: got no neither. no.idx does not exist or is not a")
    assert "neither.idx does not exist" in found[1]


def test_a_long_list_is_cut():
    (found,) = problems("--data-path", *(f"c{i}" for i in range(9)))
    assert "c4.idx" in found
    assert "c5" not in found
    assert "4 others" in found


def test_the_file_that_named_them_is_named(tmp_path):
    (tmp_path / "list").write_text("no")
    (found,) = problems("--data-args-path", str(tmp_path / "list"))
    assert found.startswith("--data-args-path: got no.")


def test_validation_data_only_count_when_they_are_read(there):
    flags = ["--train-data-path", there, "--valid-data-path", "no"]
    assert problems(*flags) == []
    (found,) = problems(*flags, "--eval-interval", "1", "--eval-iters", "1")
    assert found.startswith("--valid-data-path: got no.")


def test_settings_are_printed_without_them(capsys):
    with pytest.raises(SystemExit):
        parse([*TINY, "--data-path", "no", "--print-config"], 1, None, [corpora_exist])
    assert "data_path" in capsys.readouterr().out
