"""The file beside a corpus that says which tokenizer wrote it: merged, compared, never needed."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

import pytest

from megatron.config import make_config
from megatron.core.datasets import origin, preprocess
from megatron.core.datasets.encoding import EncodeOptions
from megatron.core.datasets.source import build_sources
from megatron.core.datasets.tokenizers import TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError
from megatron.core.mesh import ParallelState

TOOL = Path(__file__).resolve().parents[2] / "tools/merge_datasets.py"
spec = importlib.util.spec_from_file_location("merge_datasets", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

BYTES = TokenizerOptions(tokenizer_type="ByteLevelTokenizer")


def shuffled(folder, first):
    """A tokenizer whose words are the bytes, in an order of its own."""
    words = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([b])).decode(), "token_str": ""}
        for i, b in enumerate([*range(first, 256), *range(first)])
    ]
    path = folder / f"from{first}.json"
    path.write_text(json.dumps(words))
    return TokenizerOptions(
        tokenizer_type="TikTokenizer", tokenizer_model=str(path), tiktoken_pattern="v2",
        tiktoken_num_special_tokens=8,
    )  # fmt: skip


def corpus(prefix, tokenizer=BYTES, **options):
    """Write `PREFIX_text_document` and return that prefix."""
    prefix.parent.mkdir(exist_ok=True)
    text = prefix.with_name(prefix.name + ".jsonl")
    text.write_text("".join(json.dumps({"text": f"text number {i}"}) + "\n" for i in range(40)))
    options = EncodeOptions(**{"append_eod": True, **options})
    preprocess.encode_files([text], prefix, tokenizer, options, workers=1)
    return f"{prefix}_text_document"


def merged(tmp_path):
    out = f"{tmp_path}/merged"
    return tool.main(["--input", str(tmp_path / "in"), "--output-prefix", out]), origin.path_of(out)


def test_what_preprocessing_writes(tmp_path):
    found = origin.read(corpus(tmp_path / "a"), "--x")
    assert found["tokenizer_type"] == "ByteLevelTokenizer"
    assert (found["vocab_size"], found["eod"], found["append_eod"]) == (257, 256, True)
    assert found == origin.describe(build_tokenizer(BYTES), append_eod=True)


def test_an_interruption_leaves_no_file_of_another_corpus(tmp_path, monkeypatch):
    """Neither between the old corpus and the new one, nor after resuming."""
    prefix = corpus(tmp_path / "a")
    stopped = {"publish": origin.path_of(prefix)}

    def fail(*args):
        assert not stopped["publish"].exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "publish", fail)
        with pytest.raises(KeyboardInterrupt):
            corpus(tmp_path / "a", append_eod=False)
    text = tmp_path / "a.jsonl"
    options = EncodeOptions(append_eod=False)
    preprocess.encode_files([text], tmp_path / "a", BYTES, options, workers=1, resume=True)
    assert origin.read(prefix, "--x")["append_eod"] is False


def test_a_merge_of_one_tokenizer_keeps_what_is_known(tmp_path, capsys):
    first = corpus(tmp_path / "in" / "a")
    corpus(tmp_path / "in" / "b")
    code, path = merged(tmp_path)
    assert code == 0
    assert json.loads(path.read_text()) == origin.read(first, "--x")
    origin.forget(first)
    code, path = merged(tmp_path)
    assert code == 0
    assert "a_text_document has no .meta.json file; whether" in capsys.readouterr().err
    assert not path.exists()  # that of the earlier merge neither


@pytest.mark.parametrize(
    ("other", "options", "says"),
    [
        (lambda folder: shuffled(folder, 7), {}, "two vocabularies of TikTokenizer"),
        (lambda folder: BYTES, {}, "of TikTokenizer and ByteLevelTokenizer that give"),
        (lambda folder: shuffled(folder, 0), {"append_eod": False}, "append_eod is True and False"),
    ],
)  # fmt: skip
def test_a_merge_of_two_tokenizers_is_refused(other, options, says, tmp_path, capsys):
    corpus(tmp_path / "in" / "a", shuffled(tmp_path, 0))
    corpus(tmp_path / "in" / "b", other(tmp_path), **options)
    code, _ = merged(tmp_path)
    assert code == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "merged.bin").exists()


def opened(prefix, tokenizer):
    settings = {"vocab_size": tokenizer.vocab_size, "tokenizer_type": tokenizer.name,
                "tokenizer_model": "model", "tiktoken_pattern": "v2"}  # fmt: skip
    config = make_config(
        1, num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, lr=1e-3,
        max_position_embeddings=8, micro_batch_size=1, train_iters=2, eval_iters=0,
        data_path=[prefix], split="1,0,0", **settings,
    )  # fmt: skip
    return build_sources(config, tokenizer, ParallelState.single())


def test_training_refuses_a_corpus_of_another_vocabulary(tmp_path):
    one, other = (build_tokenizer(shuffled(tmp_path, first)) for first in (0, 7))
    prefix = corpus(tmp_path / "a", shuffled(tmp_path, 0))
    assert opened(prefix, one).train is not None
    with pytest.raises(DataError, match="--data-path.*two vocabularies of TikTokenizer"):
        opened(prefix, other)
    origin.forget(prefix)  # no corpus needs the file
    assert opened(prefix, other).train is not None


def test_numbers_alone_need_room_for_all_ids(tmp_path):
    prefix = corpus(tmp_path / "a")
    for size in (257, 300):
        numbers = TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=size)
        origin.check(prefix, build_tokenizer(numbers), "--data-path")
    numbers = TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=256)
    with pytest.raises(DataError, match="vocab_size is 257 and 256"):
        origin.check(prefix, build_tokenizer(numbers), "--data-path")


def test_two_types_may_read_one_vocabulary(tmp_path):
    prefix = corpus(tmp_path / "a")
    same = build_tokenizer(BYTES)
    same.name = "OtherTokenizer"
    same.detokenize = lambda ids: "shown otherwise"
    origin.check(prefix, same, "--data-path")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}'])
def test_a_file_that_is_not_understood(text, tmp_path):
    prefix = corpus(tmp_path / "a")
    origin.path_of(prefix).write_text(text)
    with pytest.raises(DataError, match=r"--data-path: got .*a_text_document\.meta\.json"):
        origin.check(prefix, build_tokenizer(BYTES), "--data-path")
