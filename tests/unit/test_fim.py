"""Fill-in-the-middle: what becomes of documents, that it can be undone, and what is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from unit.test_data_mix import evaluations
from unit.test_inspect_data import shown
from unit.test_source import config

from megatron.config.fim import FimConfig
from megatron.core.datasets.fim import FillInTheMiddle
from megatron.core.datasets.gpt import GPTDataset, SampleConfig
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.source import build_sources
from megatron.core.datasets.tokenizers import TokenizerOptions, build_tokenizer
from megatron.core.errors import DataError
from megatron.core.mesh import ParallelState

LINES = ["def scale(self, x):", "    return self.scale * x + 12", "Größe: 7 €, naïve 😀 text"] * 20
NAMES = ["prefix", "middle", "suffix", "pad"]
MARKS = [f"<fim_{name}>" for name in NAMES]
EOD = "<|endoftext|>"
ALWAYS = {"fim_data": True, "fim_rate": 1.0}


def documents(count=90):
    lines = [*LINES[:3], "漢字 ∑ ж"]  # the last in single bytes, which are parts of characters
    draw = np.random.RandomState(0)
    return [
        "\n".join(lines[i] for i in draw.randint(0, 4, size=draw.randint(2, 7)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tokenizer of bytes, one that begins texts with a blank, and a corpus of each."""
    home = tmp_path_factory.mktemp("fim")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(LINES, vocab_size=320, show_progress=False)
    model = tokenizers.Tokenizer.from_str(bpe.to_str())
    model.add_special_tokens([EOD, "<s>", *MARKS, "<file>"])
    begin = ("<s>", model.token_to_id("<s>"))
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[begin]
    )
    model.save(str(home / "tokenizer.json"))
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, model_type="bpe", vocab_size=400,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=[*MARKS, EOD], minloglevel=2, num_threads=1, hard_vocab_limit=False,
    )  # fmt: skip
    (home / "tokenizer.model").write_bytes(written.getvalue())
    write(home / "corpus", bytes_of(home))
    write(home / "pieces", pieces_of(home))
    return home


def bytes_of(home):
    return build_tokenizer(
        TokenizerOptions(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(home / "tokenizer.json")
        )
    )


def pieces_of(home):
    return build_tokenizer(
        TokenizerOptions(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(home / "tokenizer.model")
        )
    )


def end_of(tokenizer):
    return EOD if tokenizer.token_id(EOD) == tokenizer.eod else "</s>"


def fim(tokenizer, **fields):
    settings = {"fim_eod_token": end_of(tokenizer), **ALWAYS, **fields}
    return FillInTheMiddle(tokenizer, FimConfig(**settings))


def write(prefix, tokenizer):
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for text in documents():
            builder.add_document([*tokenizer.tokenize_part(text), tokenizer.eod])
        builder.finalize()


def split(ids, border):
    """Cut a list at tokens of one kind."""
    found = [[]]
    for number in ids:
        if number == border:
            found.append([])
        else:
            found[-1].append(number)
    return found


def undone(tokenizer, ids):
    """Return the form of a rearranged document and its parts in their old order; None if whole.

    With the suffix in front, what follows the middle token may be prefix and middle.
    """
    prefix, middle, suffix = (tokenizer.token_id(mark) for mark in MARKS[:3])
    if prefix not in ids:
        return None
    front, ids = ids[: ids.index(prefix)], ids[ids.index(prefix) + 1 :]
    outer, inner = split(ids, middle)
    if ids[0] == suffix:
        return "spm", [front, [], inner, outer[1:]]
    first, last = split(outer, suffix)
    return "psm", [front, first, inner, last]


@pytest.mark.parametrize("read", [bytes_of, pieces_of], ids=["bytes", "pieces"])
def test_undoing_it_gives_the_text(home, read):
    """Samples begin and end anywhere, also inside a character."""
    tokenizer = read(home)
    held = IndexedDataset(str(home / ("corpus" if read is bytes_of else "pieces")))
    text = np.concatenate([held[i] for i in range(len(held))]).astype(np.int64)
    rearrange, forms, broken = fim(tokenizer), [], 0
    for number in range(40):
        window = text[number * 31 : number * 31 + 300]
        found, padding = rearrange.rearranged(window, 7, number)
        assert (found.dtype, found.size, padding) == (np.int64, 300, 0)
        before = split(window.tolist(), tokenizer.eod)
        after = split(found.tolist(), tokenizer.eod)
        for old, new in zip(before[: len(after) - 1], after[:-1], strict=True):
            if not old:
                assert not new
                continue
            form, parts = undone(tokenizer, new)
            forms.append(form)
            whole = [number for part in parts for number in part]
            assert tokenizer.detokenize(whole) == tokenizer.detokenize(old)
            if tokenizer.detokenize(old).startswith("\ufffd"):
                broken += 1
                assert whole[0] == old[0]  # a part of a character, not the sign for one
    assert forms.count("psm") > 50
    assert forms.count("spm") > 50
    assert broken or read is pieces_of


def test_parts_inside_a_text_get_no_blank(home):
    """SentencePiece puts one in front of every text, and takes it for the first of a word."""
    tokenizer = pieces_of(home)
    assert tokenizer.detokenize(tokenizer.tokenize_part("scale")) == "scale"
    ids = np.array(tokenizer.tokenize_part("return self.scale * x"), dtype=np.int64)
    padded = np.array([*ids, tokenizer.eod, *ids, *ids], dtype=np.int64)
    for number in range(30):
        found, _ = fim(tokenizer).rearranged(padded, 7, number)
        _, parts = undone(tokenizer, split(found.tolist(), tokenizer.eod)[0])
        texts = [tokenizer.token_id("<s>") and tokenizer.detokenize(part) for part in parts]
        assert "".join(texts).replace(" ", "") == "returnself.scale*x"
        whole = tokenizer.detokenize([number for part in parts for number in part])
        assert whole == "return self.scale * x"


def shares(home, count=400, **fields):
    """How many of many documents are rearranged, and how many of these begin with the suffix."""
    tokenizer = bytes_of(home)
    document = [*tokenizer.tokenize_part("one, two " * 15), tokenizer.eod]
    text = np.array(document * 2 * count, dtype=np.int64)
    found, _ = fim(tokenizer, **fields).rearranged(text, 7, 0)
    parts = split(found.tolist(), tokenizer.eod)[:count]
    forms = [undone(tokenizer, part) for part in parts]
    forms = [form[0] for form in forms if form is not None]
    return len(forms) / count, forms.count("spm") / max(len(forms), 1)


def test_rates(home):
    assert shares(home, fim_rate=1.0, fim_spm_rate=1.0) == (1.0, 1.0)
    assert shares(home, fim_rate=0.0) == (0.0, 0.0)
    # One of 69 texts is cut before its first character and reads alike in both forms. Elsewhere the
    # bounds are five standard deviations of as many draws.
    rate, first = shares(home, fim_rate=1.0, fim_spm_rate=0.0)
    assert rate == 1.0
    assert first < 0.05
    rate, first = shares(home, fim_rate=0.3, fim_spm_rate=0.5)
    assert abs(rate - 0.3) < 0.115
    assert abs(first - 0.5) < 0.24  # of about 120
    rate, first = shares(home, fim_rate=0.9, fim_spm_rate=0.2)
    assert abs(rate - 0.9) < 0.075
    assert abs(first - 0.2) < 0.12


def test_cuts_fall_anywhere(home):
    """Every part may be empty, and every character may be the first of one."""
    tokenizer = bytes_of(home)
    text = np.array([*tokenizer.tokenize_part("abc"), tokenizer.eod] * 400, dtype=np.int64)
    found, _ = fim(tokenizer, fim_spm_rate=0.0).rearranged(text, 7, 0)
    cuts = set()
    for part in split(found.tolist(), tokenizer.eod)[:150]:
        _, parts = undone(tokenizer, part)
        cuts.add(tuple(tokenizer.detokenize(one) for one in parts[1:]))
    every = [("abc"[:i], "abc"[i:j], "abc"[j:]) for i in range(4) for j in range(i, 4)]
    assert cuts == set(every)


def test_fragments_and_texts_that_stay(home):
    tokenizer = bytes_of(home)
    part = tokenizer.tokenize_part
    border, begin, eod = tokenizer.token_id("<file>"), tokenizer.bos, tokenizer.eod
    document = [begin, *part("first file"), border, border, *part("second"), eod]
    window = np.array(document * 6 + part("x" * 200), dtype=np.int64)

    def first(**fields):
        found, _ = fim(tokenizer, **fields).rearranged(window, 7, 0)
        return split(split(found.tolist(), eod)[0], border)

    fragments = {"fim_split_sample": "<file>", "fim_fragment_rate": 1.0}
    one, nothing, other = first(**fragments)
    assert one[0] == begin  # the begin of a document stays in front
    assert nothing == []
    for found, text in ((one[1:], "first file"), (other, "second")):
        _, parts = undone(tokenizer, found)
        assert tokenizer.detokenize([i for ids in parts for i in ids]) == text
    assert first(**{**fragments, "fim_fragment_rate": 0.0}) == split(document[:-1], border)
    one, _, other = first(**fragments, fim_no_prefix="first")
    assert one == [begin, *part("first file")]
    assert undone(tokenizer, other)
    # Without a border in it a document is a whole; what is rearranged already stays.
    (whole,) = split(first(fim_split_sample="<s>", fim_fragment_rate=0.0)[0], begin)[1:]
    assert undone(tokenizer, whole) is None
    ready = np.array([tokenizer.token_id(MARKS[0]), *part("a text"), eod], dtype=np.int64)
    assert fim(tokenizer).rearranged(ready, 7, 0)[0].tolist() == ready.tolist()


def test_a_sample_keeps_its_length(home, tmp_path):
    """What grows is cut off; what shrinks is filled up with tokens that have no loss."""
    tokenizer = bytes_of(home)
    letters = [tokenizer.token_id(letter) for letter in "return"]
    assert len(tokenizer.tokenize_part("return")) < 3
    with IndexedDatasetBuilder(tmp_path / "letters", np.int32) as builder:
        builder.add_document(letters * 30)
        builder.finalize()
    held = IndexedDataset(str(tmp_path / "letters"))
    settings = SampleConfig(sequence_length=60, eod=tokenizer.eod, fim=fim(tokenizer))
    data = GPTDataset(held, np.arange(1, dtype=np.int32), None, "train", settings)
    sample = data[0]
    padding = int((sample["labels"] == tokenizer.token_id("<fim_pad>")).sum())
    assert padding > 10
    assert sample["loss_mask"].tolist() == [1.0] * (60 - padding) + [0.0] * padding
    assert sample["labels"].tolist()[-padding:] == [tokenizer.token_id("<fim_pad>")] * padding
    text = tokenizer.detokenize(sample["tokens"].tolist()).replace("<fim_pad>", "")
    assert sum(text.count(letter) for letter in "n") >= 9


FLAGS = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None, "seq_length": 64}


def sources(home, tmp_path, **fields):
    fields = {"data_path": [str(home / "corpus")], "split": "8,2,0", **FLAGS, **fields}
    fields["tokenizer_model"] = str(home / "tokenizer.json")
    cfg = config(tmp_path, **fields)
    return build_sources(cfg, build_tokenizer(cfg.data), ParallelState.single())


def read(source, count=24):
    samples = [source.dataset[i] for i in range(count)]
    return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_no_rate_is_no_change_and_the_cache_is_the_same(home, tmp_path):
    plain = sources(home, tmp_path)
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    off = sources(home, tmp_path, fim_data=True, fim_rate=0.0)
    assert same(read(off.train), read(plain.train))
    assert same(read(off.valid[""]), read(plain.valid[""]))
    on = sources(home, tmp_path, **ALWAYS)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == names
    for one, other in ((on.train, plain.train), (on.valid[""], plain.valid[""])):
        changed = read(one)["tokens"] != read(other)["tokens"]
        assert changed.any(dim=1).all()  # every sample, also of validation
    assert not same(read(on.train), read(sources(home, tmp_path, **ALWAYS, seed=1).train))


def test_a_sample_depends_on_its_place_alone(home, tmp_path):
    """Whatever was read before, by how many threads, and however a step is divided."""
    fields = {**ALWAYS, "fim_rate": 0.5, "data_path": ["2", str(home / "corpus"), "1",
              str(home / "corpus")]}  # fmt: skip
    whole = read(sources(home, tmp_path, **fields).train, 40)["tokens"]
    backwards = sources(home, tmp_path, **fields, num_workers=3, micro_batch_size=1).train
    for consumed in (36, 12, 0):
        rows = [backwards.batch(consumed, i, 0).tokens for i in range(4)]
        assert torch.equal(torch.cat(rows), whole[consumed : consumed + 4])
    backwards.close()


def test_the_same_text_is_rearranged_anew_in_every_pass(home, tmp_path):
    fields = {**ALWAYS, "train_iters": 60, "fim_spm_rate": 0.0}
    made, plain = (sources(home, tmp_path, **more) for more in (fields, {"train_iters": 60}))
    seen = {}
    for i in range(len(plain.train.dataset)):
        window = tuple(plain.train.dataset.window(i).tolist())
        seen.setdefault(window, []).append(tuple(made.train.dataset[i]["tokens"].tolist()))
    again = [found for found in seen.values() if len(found) > 1]
    assert again
    assert all(len(set(found)) == len(found) for found in again)


def test_training_stops_and_goes_on_bitwise(home, tmp_path):
    fields = {"data_path": [str(home / "corpus")], "split": "8,2,0", **FLAGS, **ALWAYS,
              "tokenizer_model": str(home / "tokenizer.json"), "fim_rate": 0.5,
              "eval_iters": 1}  # fmt: skip
    whole, _ = evaluations(tmp_path, **fields)
    place = {"save": str(tmp_path / "saved"), "save_interval": 2}
    first, _ = evaluations(tmp_path, **fields, **place, exit_interval=2)
    rest, _ = evaluations(tmp_path, **fields, load=place["save"])
    assert [one.losses for one in [*first, *rest]] == [one.losses for one in whole]
    plain, _ = evaluations(tmp_path, **{**fields, "fim_rate": 0.0})
    assert plain[0].losses != whole[0].losses


def test_the_tool_shows_what_training_reads(home, tmp_path, capsys):
    made = sources(home, tmp_path, **ALWAYS, split="1,0,0", eval_interval=None)
    step = shown(
        capsys, "step", "--iteration", 3, "--json", "--num-layers", 1, "--hidden-size", 16,
        "--num-attention-heads", 2, "--seq-length", 64, "--max-position-embeddings", 64,
        "--micro-batch-size", 2, "--global-batch-size", 4, "--train-iters", 10, "--split", "1,0,0",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", home / "tokenizer.json",
        "--data-path", home / "corpus", "--data-cache-path", tmp_path / "cache", "--fim-data",
        "--fim-rate", "1.0", "--device", "cpu", "--lr", "0.1",
    )  # fmt: skip
    assert [sample["number"] for sample in step["samples"]] == [8, 9, 10, 11]
    for sample in step["samples"]:
        want = made.train.dataset[sample["number"]]
        assert sample["tokens"] == want["tokens"].tolist()
        assert sample["loss_mask"] == want["loss_mask"].tolist()
        assert MARKS[0] in sample["text"]
        assert sum(piece["length"] for piece in sample["pieces"]) == 65


def test_tokens_that_are_missing_are_named(home, tmp_path):
    said = r"--fim-prefix-token, --fim-pad-token: got <PRE> <none>. --tokenizer-type Hugging"
    with pytest.raises(DataError, match=said):
        sources(home, tmp_path, **ALWAYS, fim_prefix_token="<PRE>", fim_pad_token="<none>")
    with pytest.raises(DataError, match="--fim-eod-token: got <s>.*ends documents with id"):
        sources(home, tmp_path, **ALWAYS, fim_eod_token="<s>")
    split_at = {"fim_split_sample": "<repo>", "fim_fragment_rate": 0.5}
    with pytest.raises(DataError, match=r"--fim-split-sample: got <repo>"):
        sources(home, tmp_path, **ALWAYS, **split_at)
    null = build_tokenizer(TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=9))
    with pytest.raises(DataError, match="--fim-prefix-token, .*--fim-eod-token"):
        FillInTheMiddle(null, FimConfig(fim_data=True))
