"""Every tokenizer type: round trips, special ids, files, and what is missing."""

from __future__ import annotations

import base64
import io
import json
import sys

import pytest
import regex
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import make_config
from megatron.core.datasets.tokenizers import TOKENIZER_TYPES, TokenizerOptions, build_tokenizer
from megatron.core.datasets.tokenizers.rank_model import PATTERNS
from megatron.core.errors import DataError

LINES = [
    "def forward(self, x):",
    "    return self.scale * x + 12",
    "The quick brown fox jumps over the lazy dog.",
    "amax history and scaling factors",
] * 20


def sentencepiece_model(path, **changes):
    model = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "minloglevel": 2,
        "num_threads": 1,
        "hard_vocab_limit": False,
        **changes,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, **options
    )
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One folder with a SentencePiece model, GPT-2 style files and a tokenizer.json."""
    home = tmp_path_factory.mktemp("tokenizers")
    sentencepiece_model(home / "tokenizer.model", pad_id=3)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        LINES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(home))
    model = tokenizers.Tokenizer.from_str(bpe.to_str())
    model.add_special_tokens(["<s>", "</s>", "<end>"])
    begin = model.token_to_id("<s>")
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    model.save(str(home / "tokenizer.json"))
    write_ranks(home, bpe)
    return home


def write_ranks(home, bpe):
    """Write the tokens of another tokenizer as the two kinds of rank files."""
    decoder = tokenizers.decoders.ByteLevel()
    words = [bpe.id_to_token(number) for number in range(1 + 256, bpe.get_vocab_size())]
    tokens = [bytes([byte]) for byte in range(256)] + [decoder.decode([w]).encode() for w in words]
    encoded = [base64.b64encode(token).decode() for token in tokens]
    entries = [{"rank": i, "token_bytes": t, "token_str": None} for i, t in enumerate(encoded)]
    (home / "ranks.json").write_text(json.dumps(entries))
    (home / "ranks.tiktoken").write_text("".join(f"{t} {i}\n" for i, t in enumerate(encoded)))


def options(home, kind, **changes):
    files = {
        "SentencePieceTokenizer": {"tokenizer_model": str(home / "tokenizer.model")},
        "GPTSentencePieceTokenizer": {"tokenizer_model": str(home / "tokenizer.model")},
        "Llama2Tokenizer": {"tokenizer_model": str(home / "tokenizer.model")},
        "HuggingFaceTokenizer": {"tokenizer_model": str(home / "tokenizer.json")},
        "GPT2BPETokenizer": {
            "vocab_file": str(home / "vocab.json"),
            "merge_file": str(home / "merges.txt"),
        },
        "TikTokenizer": {
            "tokenizer_model": str(home / "ranks.json"),
            "tiktoken_pattern": "v2",
        },
        "NullTokenizer": {"vocab_size": 128},
    }
    return TokenizerOptions(tokenizer_type=kind, **{**files.get(kind, {}), **changes})


TEXT_TYPES = [kind for kind in TOKENIZER_TYPES if kind != "NullTokenizer"]


@pytest.mark.parametrize("kind", TEXT_TYPES)
@settings(max_examples=30)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_round_trip(home, kind, text):
    """Any text comes back, and no id is outside the vocabulary."""
    tokenizer = build_tokenizer(options(home, kind))
    if tokenizer.bos is not None and kind in ("Llama2Tokenizer", "HuggingFaceTokenizer"):
        assert tokenizer.tokenize(text)[0] == tokenizer.bos
    ids = tokenizer.tokenize(text)
    assert all(isinstance(number, int) and 0 <= number < tokenizer.vocab_size for number in ids)
    if kind == "HuggingFaceTokenizer":
        ids = ids[1:]  # its begin token is spelled out in text
    if "\u2581" in text and "\u2581" not in tokenizer.detokenize(ids):
        text = text.replace("\u2581", " ")  # SentencePiece's own sign for a space
    assert tokenizer.detokenize(ids) == text


@pytest.mark.parametrize("kind", TEXT_TYPES)
def test_known_text_is_compressed(home, kind):
    tokenizer = build_tokenizer(options(home, kind))
    ids = tokenizer.tokenize(LINES[2])
    assert tokenizer.name == kind
    assert len(ids) == len(LINES[2]) if kind == "ByteLevelTokenizer" else len(ids) < 30


def test_special_ids(home):
    got = {}
    for kind in TOKENIZER_TYPES:
        tokenizer = build_tokenizer(options(home, kind))
        got[kind] = (tokenizer.bos, tokenizer.eod, tokenizer.pad)
    bpe = json.loads((home / "vocab.json").read_text())
    assert got["SentencePieceTokenizer"] == got["Llama2Tokenizer"] == (1, 2, 3)
    assert got["GPT2BPETokenizer"] == (None, bpe["<|endoftext|>"], None)
    assert got["ByteLevelTokenizer"] == (None, 256, None)
    assert got["NullTokenizer"] == (None, 127, None)


def test_hugging_face_config_names_the_special_tokens(home, tmp_path):
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((home / name).read_bytes())
    plain = build_tokenizer(options(tmp_path, "HuggingFaceTokenizer"))
    ids = {
        token: tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(token)
        for token in ("<s>", "</s>", "<end>", "<|endoftext|>")
    }
    assert (plain.bos, plain.eod) == (ids["<s>"], ids["<|endoftext|>"])
    assert plain.vocab_size == max(ids.values()) + 1
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<end>"}, "bos_token": "<s>", "pad_token": None})
    )
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    named = build_tokenizer(
        options(tmp_path, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    assert (named.bos, named.eod, named.pad) == (ids["<s>"], ids["<end>"], None)
    assert [path.name for path in named.files] == [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ]
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json"):
        build_tokenizer(options(tmp_path, "HuggingFaceTokenizer"))


def test_a_document_cannot_forge_its_end(home):
    tokenizer = build_tokenizer(options(home, "GPT2BPETokenizer"))
    ids = tokenizer.tokenize("a<|endoftext|>b")
    assert tokenizer.eod not in ids
    assert tokenizer.detokenize(ids) == "a<|endoftext|>b"


def test_a_folder_stands_for_the_file_in_it(home):
    for kind in ("SentencePieceTokenizer", "HuggingFaceTokenizer"):
        tokenizer = build_tokenizer(options(home, kind, tokenizer_model=str(home)))
        assert tokenizer.files[0].parent == home
        assert tokenizer.files[0].is_file()


def test_rank_files(home):
    """JSON: special tokens first, as Megatron-LM has them. Plain: ids are ranks."""
    first = build_tokenizer(options(home, "TikTokenizer"))
    count = len(json.loads((home / "ranks.json").read_text()))
    assert (first.bos, first.eod, first.pad) == (1, 2, 4)
    assert first.vocab_size == 1000 + count
    model = str(home / "ranks.tiktoken")
    plain = build_tokenizer(options(home, "TikTokenizer", tokenizer_model=model))
    assert (plain.eod, plain.vocab_size) == (count, count + 1)
    text = LINES[2] + " </s> <|endoftext|> \u00e9"
    ids = plain.tokenize(text)
    assert plain.eod not in ids
    assert first.tokenize(text) == [number + 1000 for number in ids]
    assert plain.detokenize([*ids, plain.eod]) == text + "<|endoftext|>"
    assert first.detokenize([2, *first.tokenize("a"), 999, 5000]) == "</s>a<SPECIAL_999>"
    llama = {"tiktoken_special_tokens": ("<|begin_of_text|>", "<|end_of_text|>")}
    named = build_tokenizer(options(home, "TikTokenizer", tokenizer_model=model, **llama))
    assert (named.bos, named.eod) == (count, count + 1)
    cut = build_tokenizer(options(home, "TikTokenizer", vocab_size=1257))
    assert cut.vocab_size == 1257
    assert len(cut.tokenize(LINES[2])) > len(ids) / 2


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("v1", ["It", "'s", " ", "1", "2", "3", "4", " FooBar", ".\n\n", "  ", " x"]),
        ("v2", ["It", "'s", " ", "1", "2", "3", "4", " Foo", "Bar", ".\n\n", "  ", " x"]),
        ("cl100k", ["It", "'s", " ", "123", "4", " FooBar", ".\n\n", "  ", " x"]),
        ("o200k", ["It's", " ", "123", "4", " Foo", "Bar", ".\n\n", "  ", " x"]),
    ],
)
def test_patterns_cut_words(pattern, words):
    text = "It's 1234 FooBar.\n\n   x"
    assert regex.findall(PATTERNS[pattern], text) == words


def test_null_tokenizer():
    tokenizer = build_tokenizer(TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=10))
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.tokenize("3 1  9") == [3, 1, 9]
    assert tokenizer.detokenize([3, 1, 9]) == "3 1 9"
    with pytest.raises(DataError, match="--vocab-size: got 10. The text has id 10"):
        tokenizer.tokenize("1 10")
    with pytest.raises(DataError, match="numbers separated by spaces"):
        tokenizer.tokenize("one")


def test_a_configuration_builds_its_tokenizer():
    cfg = make_config(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=77)
    assert build_tokenizer(cfg.data).vocab_size == 77


def test_missing_end_of_document_names_the_tokenizer(tmp_path):
    path = sentencepiece_model(tmp_path / "noend.model", eos_id=-1)
    tokenizer = build_tokenizer(options(tmp_path, "SentencePieceTokenizer", tokenizer_model=path))
    assert tokenizer.eod is None
    with pytest.raises(DataError, match=r"--append-eod: got.*SentencePieceTokenizer.*noend.model"):
        tokenizer.require_eod("--append-eod")
    path = sentencepiece_model(tmp_path / "nobegin.model", bos_id=-1)
    with pytest.raises(DataError, match="begins every text with <s>"):
        build_tokenizer(options(tmp_path, "Llama2Tokenizer", tokenizer_model=path))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("SentencePieceTokenizer", {"tokenizer_model": "gone.model"}, "no such file"),
        ("SentencePieceTokenizer", {"tokenizer_model": None}, "--tokenizer-model: got nothing"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "org/model"}, "nothing is downloaded"),
        ("GPT2BPETokenizer", {"merge_file": "gone.txt"}, "--merge-file: got gone.txt"),
        ("GPT2BPETokenizer", {"vocab_file": None}, "--vocab-file: got nothing"),
        ("NullTokenizer", {"vocab_size": None}, "--vocab-size: got nothing"),
        ("NullTokenizer", {"vocab_size": 0}, "at least one id"),
        ("ByteLevelTokenizer", {"vocab_size": 256}, "has 257 ids"),
        ("TikTokenizer", {"tiktoken_pattern": None}, "--tiktoken-pattern: got nothing"),
        ("TikTokenizer", {"tokenizer_model": "cl100k_base"}, "nothing is downloaded"),
        ("TikTokenizer", {"tiktoken_num_special_tokens": 6}, "There are 7 of them"),
        ("TikTokenizer", {"tiktoken_special_tokens": ("a", "a")}, "named twice"),
        ("TikTokenizer", {"vocab_size": 1200}, "--vocab-size: got 1200. 56 of the 256 bytes"),
        ("OtherTokenizer", {}, "Choose one of"),
    ],
)
def test_what_is_missing_is_named(home, kind, changes, says):
    with pytest.raises(DataError, match=says):
        build_tokenizer(options(home, kind, **changes))


def test_files_of_another_kind_are_refused(home):
    model, described = str(home / "tokenizer.model"), str(home / "tokenizer.json")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        build_tokenizer(options(home, "SentencePieceTokenizer", tokenizer_model=described))
    with pytest.raises(DataError, match="not a tokenizer description"):
        build_tokenizer(options(home, "HuggingFaceTokenizer", tokenizer_model=model))
    for other in (model, described, str(home / "merges.txt")):
        with pytest.raises(DataError, match="not a list of ranks"):
            build_tokenizer(options(home, "TikTokenizer", tokenizer_model=other))
    with pytest.raises(DataError, match="not a BPE vocabulary"):
        build_tokenizer(options(home, "GPT2BPETokenizer", vocab_file=model))


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("SentencePieceTokenizer", "sentencepiece"),
        ("Llama2Tokenizer", "sentencepiece"),
        ("HuggingFaceTokenizer", "tokenizers"),
        ("GPT2BPETokenizer", "tokenizers"),
        ("TikTokenizer", "tiktoken"),
    ],
)
def test_missing_packages_are_named(home, kind, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"pip install {package}"):
        build_tokenizer(options(home, kind))
