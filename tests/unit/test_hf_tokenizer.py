"""The tokenizer of an export, as transformers loads it."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from megatron.core.errors import CheckpointError  # noqa: E402
from megatron.training import hf_tokenizer  # noqa: E402
from tests.unit.test_tokenizers import LINES, sentencepiece_model  # noqa: E402

EXACT = {
    "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True,
    "model_type": "bpe", "vocab_size": 340,
}  # fmt: skip


def bpe(folder):
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(
        LINES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.save_model(str(folder))
    return model


def files_of(kind, folder):
    if kind == "GPT2BPETokenizer":
        bpe(folder)
        return {name: folder / name for name in ("vocab.json", "merges.txt")}
    if kind == "HuggingFaceTokenizer":
        model = tokenizers.Tokenizer.from_str(bpe(folder).to_str())
        model.add_special_tokens(["<s>", "</s>"])
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
        )
        model.save(str(folder / "tokenizer.json"))
        return {"tokenizer.json": folder / "tokenizer.json"}
    spaces = kind == "Llama2Tokenizer"
    path = sentencepiece_model(folder / "own.model", add_dummy_prefix=spaces, **EXACT)
    return {"tokenizer.model": path}


def exported(tmp_path, kind, **source):
    """Describe a tokenizer in a folder as an export does; return both."""
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    out.mkdir()
    files = files_of(kind, home)
    settings = {"tokenizer_type": kind}
    fields = {"tokenizer": files, "tokenizer_settings": settings, "kept": {}, **source}
    tokenizer = hf_tokenizer.of_run(SimpleNamespace(**fields))
    for name, path in files.items():
        shutil.copy(path, out / name)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    if tokenizer is not None:
        hf_tokenizer.describe(out, tokenizer)
    return out, tokenizer


@pytest.mark.parametrize(
    "kind",
    ["SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer"],
)
def test_transformers_tokenizes_as_the_run_did(tmp_path, kind):
    out, tokenizer = exported(tmp_path, kind)
    assert tokenizer.name == kind
    assert "the run's ids" in hf_tokenizer.compare(out, tokenizer, transformers)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == tokenizer.eod
    assert hf_tokenizer.special_tokens(tokenizer)["eos_token_id"] == tokenizer.eod


def test_other_ids_are_refused_by_name(tmp_path):
    out, tokenizer = exported(tmp_path, "SentencePieceTokenizer")
    config = json.loads((out / "tokenizer_config.json").read_text())
    config["add_prefix_space"] = True
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="LlamaTokenizer.* gives other ids for 'Hello"):
        hf_tokenizer.compare(out, tokenizer, transformers)


def test_a_tokenizer_that_cannot_be_loaded_is_refused(tmp_path):
    out, tokenizer = exported(tmp_path, "HuggingFaceTokenizer")
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="AutoTokenizer cannot load it"):
        hf_tokenizer.compare(out, tokenizer, transformers)


def test_a_directory_of_its_own_keeps_its_files(tmp_path):
    out, tokenizer = exported(tmp_path, "HuggingFaceTokenizer", kept={"model_type": "llama"})
    assert tokenizer is None
    assert hf_tokenizer.special_tokens(None) == {}
    assert not (out / "tokenizer_config.json").exists()


def test_a_broken_file_is_said(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    source = SimpleNamespace(tokenizer={path.name: path}, tokenizer_settings={}, kept={})
    said = []
    assert hf_tokenizer.of_run(source, said.append) is None
    assert "names no special tokens" in said[0]
