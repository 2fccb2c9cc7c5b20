"""What a user gets wrong: one clear message, an exit code on every rank, nothing lost, no hang.

Every message has the form ``<flag or name>: got X. <why>. <what to do>.``
"""

from __future__ import annotations

import gzip
import json
import os
import re
import struct

import numpy as np
import pytest

from megatron.config import ConfigError
from megatron.config import cli as config_cli
from megatron.config.cli import parse
from megatron.core.datasets.indexed import HEADER, bin_path, idx_path
from tests.e2e.launch import ROOT, launch
from tests.e2e.refusals import (
    FORM,
    FP8,
    MOCK,
    MODEL,
    TP2,
    accepted,
    changed,
    corpus,
    cut,
    file_size_limit,
    messages,
    overwrite,
    refused,
    snapshot,
    tool_refused,
)

# ------------------------------------------------------------------------------- configuration


def problems(args, world_size=2):
    with pytest.raises(ConfigError) as caught:
        parse([str(a) for a in args], world_size)
    for problem in caught.value.problems:
        assert FORM.fullmatch(str(problem)), problem
    return [str(problem) for problem in caught.value.problems]


TE_FP8 = [*FP8, "--transformer-impl", "transformer_engine"]
CONTRADICTIONS = {
    "heads and TP": (
        [*changed(MOCK, "--num-attention-heads", 1), *TP2],
        ["--num-attention-heads, --tensor-model-parallel-size: got 1 and 2"],
    ),
    "groups and TP": (
        [*MOCK, *TP2, "--group-query-attention", "--num-query-groups", "1"],
        ["--num-query-groups, --tensor-model-parallel-size: got 1 and 2"],
    ),
    "groups and heads": (
        [*MOCK, "--group-query-attention", "--num-query-groups", "3"],
        ["--num-query-groups, --num-attention-heads: got 3 and 4"],
    ),
    "ffn and TP": ([*MOCK, *TP2, "--ffn-hidden-size", "129"], ["got 129 and 2", "130"]),
    "heads and width": (changed(MOCK, "--num-attention-heads", 3), ["got 32 and 3"]),
    "batch": (changed(MOCK, "--global-batch-size", 3), ["got 3 and 1 with 2 replicas", "2 or 4"]),
    "two precisions": ([*MOCK, "--fp16", "--bf16"], ["--fp16, --bf16: got both"]),
    "two sources": (
        [*MOCK, "--data-path", "x", "--tokenizer-type", "NullTokenizer"],
        ["--mock-data, --data-path: got both"],
    ),
    "two durations": (
        [*MOCK, "--train-samples", "100"],
        ["--train-iters, --train-samples: got 2", "--lr-decay-iters, --train-samples: got 2"],
    ),
    "sequence and positions": (
        changed(MOCK, "--max-position-embeddings", 16),
        ["--seq-length, --max-position-embeddings: got 32 and 16"],
    ),
    "save without interval": ([*MOCK, "--save", "x"], ["--save-interval, --save: got nothing"]),
    "step without load": ([*MOCK, "--ckpt-step", "3"], ["--ckpt-step, --load: got 3 and nothing"]),
    "corpus without tokenizer": (
        [*MODEL[2:], "--data-path", "x"],
        ["--tokenizer-type, --data-path: got nothing and x"],
    ),
    "FP8 width": (
        [*changed(MOCK, "--hidden-size", 60), *TE_FP8],
        ["--hidden-size: got 60", "multiple of 16", "48 or 64"],
    ),
    "FP8 sequence": (
        [*changed(MOCK, "--seq-length", 31), *TE_FP8],
        ["--seq-length, --micro-batch-size: got 31", "16 or 32"],
    ),
    "FP8 width of a rank": (
        [*MOCK, *TE_FP8, *TP2, "--ffn-hidden-size", "48"],
        ["--ffn-hidden-size, --tensor-model-parallel-size: got 24", "one rank"],
    ),
    "pipeline": (
        [*MOCK, "--pipeline-model-parallel-size", "2", "--num-layers", "3"],
        ["--num-layers, --pipeline-model-parallel-size: got 3 layers over 2 stages"],
    ),
    "experts": (
        [*MOCK, "--expert-model-parallel-size", "2"],
        ["--expert-model-parallel-size: got no --num-experts", "Add --num-experts"],
    ),
    "recipe of another release": (
        [*MOCK, *FP8, "--fp8-recipe", "custom"],
        ["--fp8-recipe: got custom", "tensorwise, blockwise or mxfp8"],
    ),
    "recipe misspelt": ([*MOCK, *FP8, "--fp8-recipe", "delyed"], ["Did you mean delayed?"]),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_settings_that_cannot_work_together(case):
    args, parts = CONTRADICTIONS[case]
    text = "\n".join(problems(args))
    for part in parts:
        assert part in text, text


MISTYPED = {
    "--hiden-size 3": "--hiden-size: got 3. There is no such flag. Did you mean --hidden-size?",
    "--foo-bar x": "--foo-bar: got x. There is no such flag. docs/flags.md lists",
    "--seed": "--seed: got nothing. It takes a value",
    "--seed 1 2": "--seed: got 2. --seed takes one value",
    "--seed one": "--seed: got 'one'. It takes a whole number",
    "--num-layers 2.5": "--num-layers: got '2.5'. It takes a whole number",
    "--num-layers 0": "--num-layers: got 0. It must be at least 1",
    "--lr nan": "--lr: got 'nan'. It takes a number",
    "--bf16 true": "--bf16: got true. --bf16 is a switch",
    "--split a,b": "--split: got a,b.",
    "--save=": "--save: got ''. It takes text that is not empty",
    "--seed 99999999999": "--seed: got 99999999999. The order of the samples",
    "--transformer-impl cuda": "--transformer-impl: got 'cuda'. The choices are auto, native",
    "--moe-latent-size 8": "--moe-latent-size: got 8. Megatron-LM has this flag, but that part",
    "--num-experts 8": "--num-experts, --disable-bias-linear: got 8 experts with biases",
    "--use-megatron-fsdp": "--use-megatron-fsdp: got",
}


@pytest.mark.parametrize("typed", MISTYPED)
def test_a_flag_that_is_not_read(typed):
    flag = typed.split()[0]
    args = MOCK
    if flag in args:
        at = args.index(flag)
        args = [*args[:at], *args[at + 2 :]]
    assert any(MISTYPED[typed] in line for line in problems([*args, *typed.split()]))


YAMLS = {
    "hiden_size: 3": "hiden_size: got 3 in {file}. There is no setting of this name. Did you mean "
    "hidden_size?",
    "- a": "--config: got {file}. A settings file maps names to values",
    "just text": "--config: got {file}. A settings file maps names to values",
    "a: [1": "--config: got {file}. It is not YAML",
    "\tseed: 1": "--config: got {file}. It is not YAML",
    "seed: 1\nseed: 2": "seed stands there twice in line 2",
    "seed: !!python/object/apply:os.getcwd []": "--config: got {file}. It is not YAML",
    "seed: one": "--seed: got 'one' in {file}. It takes a whole number",
    "clip_grad: yes": "--clip-grad: got True in {file}. It takes a number",
    "log_params_norm: 3": "--log-params-norm: got 3 in {file}. It takes true or false",
    "weight_decay: [1]": "--weight-decay: got [1] in {file}. It takes a number",
    "model: {seed: 1}": "model: got a mapping in {file}. Settings are not nested",
}


@pytest.mark.parametrize("text", YAMLS)
def test_a_settings_file_that_is_not_read(text, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    wanted = YAMLS[text].format(file=file)
    assert any(wanted in line for line in problems([*MOCK, "--config", file]))


@pytest.mark.parametrize("where", ["nowhere.yaml", ".", "binary"])
def test_a_settings_file_that_cannot_be_opened(where, tmp_path):
    (tmp_path / "binary").write_bytes(b"\x80\x00\xff")
    assert any("--config: got" in x for x in problems([*MOCK, "--config", tmp_path / where]))


def test_all_problems_are_listed_at_once_on_one_rank_and_all_ranks_leave():
    done = refused([*MOCK, "--fp16", "--bf16", "--hiden-size", "3"], 2, "--fp16, --bf16: got both")
    assert done.out.startswith("2 configuration problems:\n")
    assert len(messages(done.out)) == 2


def test_processes_that_cannot_be_divided():
    refused([*MOCK, *TP2], 2, "got 2, 1 and 1 on 3 processes", world_size=3)


def test_a_settings_file_that_one_rank_lacks(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\n")
    read = config_cli.read_yaml

    def missing_on_one(path):
        return read(f"{path}.{os.environ['RANK']}" if os.environ["RANK"] == "1" else path)

    monkeypatch.setattr(config_cli, "read_yaml", missing_on_one)
    monkeypatch.setattr("megatron.training.failures._MEET_S", 1)
    monkeypatch.setattr("tests.e2e.launch._GRACE_S", 0.5)
    done = launch(2, [*MOCK, "--config", str(file)])
    assert done.codes[1] == 2
    assert done.codes[0] != 0  # ended by the launcher, as it waits for the other
    assert f"[rank 1] 1 configuration problem:\n  - --config: got {file}.1. It cannot" in done.out


def test_retired_spellings_are_accepted_with_a_notice():
    old = ["--use-mcore-models", "--no-fp16-lgs", "--use-flash-attn"]
    _, notices = parse([*MOCK, *old], 1)
    assert [notice.split(":")[0] for notice in notices] == old
    accepted([*MOCK, *old], "NOTE: --use-flash-attn: ", world_size=1)


def test_a_backend_that_cannot_run():
    done = refused(
        [*MOCK, "--transformer-impl", "transformer_engine"],
        1,
        "--transformer-impl: got transformer_engine",
        "native: can run",
        "Choose auto or native",
    )
    assert len(messages(done.out)) == 1  # every rank has the same to say, and the first says it


def test_a_model_that_does_not_fit():
    refused([*MOCK, "--ffn-hidden-size", "1000000000000"], 1, "memory: got", "can't allocate")


def test_outputs_that_cannot_be_written_do_not_stop_training(tmp_path):
    (tmp_path / "file").touch()
    bad = ["--dllogger-json", tmp_path / "file" / "x", "--tensorboard-dir", tmp_path / "file"]
    done = accepted([*MOCK, *bad], world_size=1)
    assert len(done.lines("WARNING: --")) == 2


# ------------------------------------------------------------------------------------- corpora


def on(prefix, *more):
    return [*MODEL, "--tokenizer-type", "NullTokenizer", "--data-path", prefix, *more]


POINTERS = HEADER.size + 4 * 40

BROKEN = {
    "short tokens": (lambda p: cut(bin_path(p), 7), "corpus.bin: got 3993 bytes", "cut short"),
    "long tokens": (
        lambda p: bin_path(p).write_bytes(bytes(4002)),
        "corpus.bin: got 4002 bytes",
        "not the one this index was made for",
    ),
    "wrong magic": (lambda p: overwrite(idx_path(p), 0, b"X"), "corpus.idx: got the first bytes"),
    "wrong version": (lambda p: overwrite(idx_path(p), 9, b"\7"), "got format version 7"),
    "wrong type": (lambda p: overwrite(idx_path(p), 17, b"\x63"), "got dtype code 99"),
    "short index": (lambda p: cut(idx_path(p), 7), "corpus.idx: got", "40 sequences"),
    "empty index": (lambda p: idx_path(p).write_bytes(b""), "corpus.idx: got the first bytes b''"),
    "length below 0": (
        lambda p: overwrite(idx_path(p), HEADER.size, struct.pack("<i", -5)),
        "got length -5 of sequence 0",
    ),
    "pointers outside": (
        lambda p: overwrite(idx_path(p), POINTERS, struct.pack("<q", 10**9) * 39),
        "corpus.idx: got a sequence of",
        "corpus.bin has 4000 bytes",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_corpus(damage, tmp_path):
    prefix = corpus(tmp_path)
    break_it, *parts = BROKEN[damage]
    break_it(prefix)
    before = snapshot(tmp_path)
    refused(on(prefix), 1, *parts)
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_missing_corpora_are_among_the_configuration_problems(tmp_path):
    prefix = corpus(tmp_path)
    bin_path(prefix).unlink()
    args = on(prefix, tmp_path / "typo", "--num-attention-heads", "3")
    done = refused(args, 2, "corpus.bin does not exist", "typo.idx does not exist")
    assert "2 configuration problems" in done.out


def test_a_corpus_for_another_vocabulary(tmp_path):
    refused(on(corpus(tmp_path, top=500)), 1, "--data-path", "got token id", "ids 0 to 127")


def test_one_foreign_token_that_one_rank_reads(tmp_path):
    prefix = corpus(tmp_path)
    tokens = np.fromfile(bin_path(prefix), np.uint16)
    tokens[1003] = 300
    tokens.tofile(bin_path(prefix))
    iters = ["--train-iters", "30", "--lr-decay-iters", "30"]
    done = refused(on(prefix, *iters), 1, "got token id 300 in document 20")
    reader = next(m for m in messages(done.out) if "token id 300" in m)
    other = next(m for m in messages(done.out) if "got no answer" in m)
    read, lost = (re.match(r"\[rank (\d) .*, iteration (\d+)[],]", m) for m in (reader, other))
    assert read[1] != lost[1]
    assert read[2] == lost[2]
    assert re.search(rf"\] rank {read[1]} [^(]*\(process", other)


@pytest.mark.parametrize(
    ("documents", "length", "says"),
    [(0, 1, "got an empty corpus"), (1, 10, "1 of 1 documents with 10 tokens")],
)
def test_a_corpus_without_one_sample(documents, length, says, tmp_path):
    prefix = corpus(tmp_path, documents=documents, length=length)
    refused(on(prefix), 1, f"--data-path {prefix}: got", says, "One sample takes 33 tokens")


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ("100,0,0", "--split: got 100,0,0. The valid split is empty"),
        ("999,1,0", "valid split of 0 of 40"),
    ],
)
def test_evaluation_without_validation_data(split, says, tmp_path):
    evaluation = ["--split", split, "--eval-interval", "1", "--eval-iters", "1"]
    refused(on(corpus(tmp_path), *evaluation), 1, says)


def test_a_cache_that_cannot_be_written(tmp_path):
    prefix = corpus(tmp_path)
    cache = bin_path(prefix)
    refused(on(prefix, "--data-cache-path", cache), 1, f"--data-cache-path: got {cache}")


def test_a_blend_with_weights_in_the_wrong_place(tmp_path):
    prefix = corpus(tmp_path)
    refused(on(prefix, "0.5", prefix, "0.5"), 2, "--data-path: got", "must be a weight")


def test_tokenizers_that_cannot_be_built(tmp_path):
    (tmp_path / "garbage").write_bytes(b"garbage" * 9)
    kind = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    data = [*MODEL, "--data-path", corpus(tmp_path)]
    refused([*data, *kind, tmp_path / "none"], 1, f"--tokenizer-model: got {tmp_path / 'none'}")
    refused([*data, *kind, tmp_path / "garbage"], 1, "It is not a SentencePiece model")
    # ByteLevelTokenizer has 257 ids, the model 128.
    refused([*data, "--tokenizer-type", "ByteLevelTokenizer"], 1, "--vocab-size: got 128", "257")


# --------------------------------------------------------------------------------------- tools


def preprocess(source, out):
    return ["--input", source, "--output-prefix", out, "--tokenizer-type", "NullTokenizer",
            "--vocab-size", "100"]  # fmt: skip


LINES = {
    b'{"text": "1 2"}\nnot json\n': "lines:2: Expecting value",
    b"[1, 2]\n": "lines:1: the line is a JSON list",
    b'{"content": "1"}\n': "no field 'text'; the fields are content",
    b'{"text": 5}\n': "field 'text' holds a JSON int",
    b'{"text": "words"}\n': "It reads numbers separated by spaces",
    b'{"text": "500"}\n': "The text has id 500",
    b"\xff\xfe\x00": "lines:1: ",
    b"": "No text is left for 'text'",
    gzip.compress(b'{"text": "1"}\n' * 9999)[:-20]: "It cannot be read after line",
}


@pytest.mark.parametrize("content", LINES, ids=lambda x: str(x[:20]))
def test_text_that_is_no_corpus(content, tmp_path):
    (tmp_path / "lines").write_bytes(content)
    args = preprocess(tmp_path / "lines", tmp_path / "out" / "x")
    tool_refused("preprocess_data.py", args, 1, "error: --input: got", LINES[content])
    assert not any((tmp_path / "out").iterdir())


def test_a_bad_line_leaves_the_previous_corpus(tmp_path):
    (tmp_path / "lines").write_text('{"text": "1 2"}\n')
    args = [str(a) for a in preprocess(tmp_path / "lines", tmp_path / "x")]
    script = ROOT / "tools" / "preprocess_data.py"
    assert launch(1, args, script=script).codes == [0]
    before = snapshot(tmp_path)
    (tmp_path / "lines").write_text('{"text": "1 2"}\n' * 600 + "{\n")
    tool_refused("preprocess_data.py", args, 1, "lines:601: ")
    assert snapshot(tmp_path).keys() == before.keys()
    for file in (bin_path(tmp_path / "x_text_document"), idx_path(tmp_path / "x_text_document")):
        assert file.read_bytes() == before[file.name]


def test_preprocessing_where_nothing_can_be_written(tmp_path):
    (tmp_path / "lines").write_text('{"text": "1 2"}\n')
    out = tmp_path / "lines" / "x"
    args = preprocess(tmp_path / "lines", out)
    tool_refused("preprocess_data.py", args, 1, f"--output-prefix: got {out}")
    (tmp_path / "lines").write_text('{"text": "%s"}\n' % ("7 " * 9000))
    with file_size_limit(9000):
        args = preprocess(tmp_path / "lines", tmp_path / "x")
        tool_refused("preprocess_data.py", args, 1, "--output-prefix: got", "File too large")
    assert os.listdir(tmp_path) == ["lines"]


PREPROCESS = preprocess("nothing", "out")
GENERATE = ["--load", "{ckpt}", "--prompt", "1 2", "--max-new-tokens", "3"]
EVALUATE = ["--load", "{ckpt}", "--data-path", "{corpus}"]
CONVERT = ["--model-type", "GPT", "--load-dir", "{ckpt}", "--save-dir", "{out}"]

# script, its arguments, exit code, what it says
TOOL_CALLS = [
    ("preprocess_data.py", [], 2, "--input, --output-prefix, --tokenizer-type: got nothing"),
    ("preprocess_data.py", [*PREPROCESS, "--worker", "3"], 2, "Did you mean --workers?"),
    ("preprocess_data.py", [*PREPROCESS, "--workers", "three"], 2, "It takes a whole number"),
    ("preprocess_data.py", PREPROCESS, 1, "--input: got nothing. No file has this name"),
    ("preprocess_data.py", ["--tokenizer-type", "Nope"], 2, "--tokenizer-type: got 'Nope'"),
    ("build_corpus.py", [], 2, "--output-dir: got nothing"),
    ("build_corpus.py", ["--output-dir", "{out}", "--min-megabytes", "nan"], 1, "got nan"),
    ("build_corpus.py", ["--output-dir", "{out}", "--min-megabytes", "-1"], 1, "got -1.0"),
    ("build_corpus.py", ["--output-dir", "{out}", "--statistics"], 1, "--data-path: got {out}"),
    ("generate.py", ["--load", "{ckpt}"], 1, "--prompt: got nothing"),
    ("generate.py", ["--load", "{out}", "--prompt", "1"], 1, "--load: got {out}"),
    ("generate.py", ["--load", "{corpus}.bin", "--prompt", "1"], 1, "It is a file"),
    ("generate.py", [*GENERATE, "--ckpt-step", "9"], 1, "--ckpt-step: got 9"),
    ("generate.py", [*GENERATE, "--max-new-tokens", "99"], 1, "--max-new-tokens: got 99"),
    ("generate.py", [*GENERATE, "--temperature", "-1"], 1, "--temperature: got -1.0"),
    ("generate.py", [*GENERATE, "--prompt-file", "{corpus}.idx"], 1, "--prompt-file: got"),
    ("generate.py", [*GENERATE, "--prompt", "word"], 1, "It reads numbers"),
    ("generate.py", [*GENERATE, "--promt", "1"], 2, "Did you mean --prompt?"),
    ("generate.py", [*GENERATE, "--device", "cud"], 2, "Did you mean cuda?"),
    ("generate.py", [*GENERATE, "lone"], 2, "lone: got a lone value"),
    ("evaluate.py", ["--load", "{ckpt}"], 2, "--data-path, --text: got nothing"),
    ("evaluate.py", [*EVALUATE, "--text", "x"], 2, "--text, --data-path: got both"),
    ("evaluate.py", [*EVALUATE, "--seq-length", "999"], 1, "--seq-length: got 999"),
    ("evaluate.py", ["--load", "{ckpt}", "--data-path", "{out}"], 1, "--data-path: got {out}"),
    ("evaluate.py", ["--load", "{ckpt}", "--text", "{out}"], 1, "--text: got {out}"),
    ("evaluate.py", ["--load", "{out}", "--text", "{out}"], 1, "--text: got {out}"),
    ("evaluate.py", ["--load", "{out}", "--data-path", "{corpus}"], 1, "--load: got {out}"),
    ("checkpoint/convert.py", [], 2, "--model-type, --load-dir, --save-dir: got nothing"),
    ("checkpoint/convert.py", ["--model-type", "BERT"], 2, "--model-type: got 'BERT'"),
    ("checkpoint/convert.py", [*CONVERT, "--loader", "hf"], 1, "--load-dir: got {ckpt}"),
    ("checkpoint/convert.py", [*CONVERT, "--load-dir", "{out}"], 1, "--load-dir: got {out}"),
    ("checkpoint/convert.py", [*CONVERT, "--save-dir", "{ckpt}"], 1, "--save-dir: got {ckpt}"),
    ("checkpoint/convert.py", [*CONVERT, "--save-dir", "{corpus}.bin/x"], 1, "cannot be written"),
]


@pytest.mark.parametrize("call", TOOL_CALLS, ids=lambda c: f"{c[0]} {' '.join(c[1][-2:])}")
def test_a_tool_with_wrong_arguments(call, saved, tmp_path):
    script, args, code, says = call
    names = {"ckpt": saved, "corpus": corpus(tmp_path), "out": tmp_path / "out"}
    before = snapshot(tmp_path), snapshot(saved)
    args = [str(a).format(**names) for a in args]
    tool_refused(script, args, code, says.format(**names))
    assert (snapshot(tmp_path), snapshot(saved)) == before


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
HF_FILES = {
    "no json": ({"config.json": "{"}, "config.json is not JSON"),
    "a list": ({"config.json": "[]"}, "config.json holds no dictionary"),
    "another model": ({"config.json": '{"model_type": "bert"}'}, "got model_type 'bert'"),
    "no size": ({"config.json": json.dumps({"model_type": "llama"})}, "num_hidden_layers is None"),
    "words": (
        {"config.json": json.dumps({**LLAMA, "hidden_size": "wide"})},
        "hidden_size is 'wide': a size is a whole number",
    ),
    "no weights": ({"config.json": json.dumps(LLAMA)}, "It holds neither model.safetensors"),
    "junk": (
        {"config.json": json.dumps(LLAMA), "model.safetensors": "junk" * 9},
        "model.safetensors is truncated or no safetensors file",
    ),
    "a bad index": (
        {"config.json": json.dumps(LLAMA), "model.safetensors.index.json": "{}"},
        "is no index of weight files",
    ),
}


@pytest.mark.parametrize("case", HF_FILES)
def test_a_directory_that_is_not_what_it_seems(case, tmp_path):
    files, says = HF_FILES[case]
    source = tmp_path / "source"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    args = ["--model-type", "GPT", "--loader", "hf", "--load-dir", source, "--save-dir",
            tmp_path / "out"]  # fmt: skip
    tool_refused("checkpoint/convert.py", args, 1, "--load-dir: got", says)
    assert os.listdir(tmp_path) == ["source"]
