"""tools/generate.py and tools/evaluate.py on a checkpoint of a small model."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.mesh import ParallelState
from megatron.training.progress import Progress
from megatron.training.restore import restore
from tests.saving import save_checkpoint
from tests.small_models import LLAMA, build_model, small_config, spread_weights

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TEXT = "To be, or not to be: that is the question. " * 3


def tool(name):
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["fp32", "fp8"])
def trained(request, tmp_path_factory):
    """A saved checkpoint and the model in it."""
    folder = tmp_path_factory.mktemp(request.param)
    precision = {"bf16": True, "fp8_format": "hybrid", "hidden_size": 64}
    config = small_config(
        **{**LLAMA, **(precision if request.param == "fp8" else {})},
        vocab_size=257,
        tokenizer_type="ByteLevelTokenizer",
        max_position_embeddings=40,
        save=str(folder),
        save_interval=1,
    )
    model, build = build_model(config)
    spread_weights(model, 0.1)
    tokens = torch.tensor([list(TEXT.encode()[: config.seq_length])])
    positions = torch.arange(config.seq_length)[None]
    model(tokens, positions, tokens).sum().backward()  # so that the FP8 scales are not 1
    build.fp8.sync()
    save_checkpoint(
        config,
        ParallelState.single(),
        model=model,
        optimizer=None,
        scheduler=None,
        fp8=build.fp8,
        progress=Progress(iteration=7),
    )
    return folder, model.eval(), build


def test_the_restored_model_is_the_saved_one(trained):
    folder, model, build = trained
    found = restore(str(folder))
    assert found.iteration == 7
    assert found.tokenizer.name == "ByteLevelTokenizer"
    assert not found.model.training
    tokens = torch.tensor([list(b"hello")])
    positions = torch.arange(5)[None]
    with torch.no_grad(), build.fp8.not_recording():
        assert torch.equal(found.model(tokens, positions), model(tokens, positions))


def test_generate_prints_the_continuation_of_every_prompt(trained, capsys):
    folder, _, _ = trained
    main = tool("generate").main
    args = ["--load", str(folder), "--max-new-tokens", "6", "--greedy", "--json"]
    assert main([*args, "--prompt", "To be", "--prompt", "question"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["To be", "question"]
    assert all(0 < len(line["tokens"]) <= 6 for line in lines)
    assert main([*args, "--prompt", "question"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == lines[1]["tokens"]


def test_a_tokenizer_may_be_named_with_all_its_flags(trained, capsys):
    main = tool("generate").main
    args = ["--load", str(trained[0]), "--max-new-tokens", "3", "--greedy", "--json"]
    args.append("--ignore-eod")
    assert main([*args, "--prompt", "hi"]) == 0
    named = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
    assert main([*args, *named, "--prompt", "104 105"]) == 0
    own, other = (json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines())
    assert other == own


def test_only_ids_of_the_tokenizer_are_generated(trained, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    words = {word: number for number, word in enumerate("abcdefghi")}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(path))
    args = ["--load", str(trained[0]), "--temperature", "1e6", "--max-new-tokens", "30", "--json"]
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(path)]
    assert tool("generate").main([*args, *named, "--prompt", "b"]) == 0
    assert max(json.loads(capsys.readouterr().out)["tokens"]) < 9


def test_generate_reads_prompts_from_a_file(trained, tmp_path, capsys):
    folder, _, _ = trained
    (tmp_path / "prompts.txt").write_text("a\n\nb\n")
    args = ["--load", str(folder), "--prompt-file", str(tmp_path / "prompts.txt")]
    assert tool("generate").main([*args, "--max-new-tokens", "3", "--ignore-eod"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def words_of_tiktoken(path):
    """A file in Megatron-LM's layout whose words are the bytes."""
    words = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": ""}
        for i in range(256)
    ]
    path.write_text(json.dumps(words))
    return str(path)


def test_a_tokenizer_with_settings_of_its_own(tmp_path, capsys):
    """Those of a tiktoken file come from the checkpoint, or from the command line."""
    own = {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "v1",
           "tiktoken_special_tokens": ["<unk>", "<s>", "</s>", "<mask>"],
           "tiktoken_num_special_tokens": 8,
           "tokenizer_model": words_of_tiktoken(tmp_path / "first.json")}  # fmt: skip
    for name, tokenizer in (("own", own), ("other", {"tokenizer_type": "NullTokenizer"})):
        folder = {"save": str(tmp_path / name), "save_interval": 1}
        config = small_config(**{**LLAMA, **tokenizer, **folder, "vocab_size": 264})
        model, build = build_model(config)
        spread_weights(model, 0.1)
        save_checkpoint(
            config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
            fp8=build.fp8, progress=Progress(iteration=1),
        )  # fmt: skip
    moved = str((tmp_path / "first.json").rename(tmp_path / "second.json"))
    (tmp_path / "text").write_text("To be or not")
    flags = ["--tokenizer-type", "TikTokenizer", "--tiktoken-pattern", "v1",
             "--tiktoken-num-special-tokens", "8",
             "--tiktoken-special-tokens", "<unk>", "<s>", "</s>", "<mask>"]  # fmt: skip
    found = []
    for name, more in (("own", []), ("other", flags)):
        args = ["--load", str(tmp_path / name), "--tokenizer-model", moved, *more]
        line = ["--prompt", "To", "--max-new-tokens", "4", "--greedy", "--json", "--ignore-eod"]
        assert tool("generate").main([*args, *line]) == 0
        tokens = json.loads(capsys.readouterr().out)["tokens"]
        assert tool("evaluate").main([*args, "--text", str(tmp_path / "text"), "--json"]) == 0
        found.append((tokens, json.loads(capsys.readouterr().out)["lm loss"]))
    assert found[0] == found[1]
    there = restore(str(tmp_path / "own"), settings={"tokenizer_model": moved})
    assert there.tokenizer.tokenize("To") == [8 + ord("T"), 8 + ord("o")]
    assert there.tokenizer.eod == 2


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A checkpoint of a model whose experts drop most tokens while it is trained."""
    folder = tmp_path_factory.mktemp("crowded")
    config = small_config(
        **LLAMA,
        vocab_size=257,
        tokenizer_type="ByteLevelTokenizer",
        max_position_embeddings=40,
        num_experts=4,
        moe_expert_capacity_factor=0.3,
        moe_token_drop_policy="position",
        moe_pad_expert_input_to_capacity=True,
        save=str(folder),
        save_interval=1,
    )
    model, build = build_model(config)
    spread_weights(model, 0.3)
    save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=None, scheduler=None, fp8=build.fp8,
        progress=Progress(iteration=1),
    )  # fmt: skip
    return folder


def test_a_tool_drops_no_token(crowded, tmp_path, capsys):
    """What a model says about a text depends on no other text, and on no later token."""
    args = ["--load", str(crowded), "--max-new-tokens", "6", "--greedy", "--json", "--ignore-eod"]
    prompts = ["To be, or not to be", "that is the question"]
    both = [arg for prompt in prompts for arg in ("--prompt", prompt)]
    assert tool("generate").main([*args, *both]) == 0
    together = capsys.readouterr().out.splitlines()
    for prompt, line in zip(prompts, together, strict=True):
        assert tool("generate").main([*args, "--prompt", prompt]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(line)
    (tmp_path / "text").write_text(TEXT)
    losses = []
    for rows in ("1", "4"):
        args = ["--load", str(crowded), "--text", str(tmp_path / "text"), "--json"]
        assert tool("evaluate").main([*args, "--micro-batch-size", rows]) == 0
        losses.append(json.loads(capsys.readouterr().out)["lm loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # sums of rows in another order


def test_any_temperature_gives_a_token(trained, capsys):
    folder, _, _ = trained
    args = ["--load", str(folder), "--prompt", "x", "--max-new-tokens", "3", "--json"]
    assert tool("generate").main([*args, "--greedy", "--ignore-eod"]) == 0
    greedy = json.loads(capsys.readouterr().out)["tokens"]
    assert tool("generate").main([*args, "--temperature", "1e-300", "--ignore-eod"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == greedy


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--prompt", "x", "--seed", "99999999999999999999999"], "--seed"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["--prompt", "x", "--max-new-tokens", "400"], "--max-position-embeddings"),
        ([], "--prompt"),
        (["--prompt", "x", "--top-p", "2"], "--top-p"),
        (["--prompt", "x", "--ckpt-step", "3"], "--ckpt-step"),
    ],
)
def test_generate_refuses_in_one_line(trained, capsys, args, named):
    folder, _, _ = trained
    assert tool("generate").main(["--load", str(folder), *args]) == 1
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_a_checkpoint_is_named(tmp_path, capsys):
    assert tool("generate").main(["--load", str(tmp_path), "--prompt", "x"]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_evaluate_scores_every_token_once_whatever_the_batch(trained, tmp_path, capsys):
    folder, model, build = trained
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    figures = []
    for rows in ("1", "3", "100"):
        args = ["--load", str(folder), "--text", str(path), "--json", "--micro-batch-size", rows]
        assert tool("evaluate").main(args) == 0
        figures.append(json.loads(capsys.readouterr().out))
    ids = list(TEXT.encode())
    length, total = build.config.seq_length, 0.0
    with torch.no_grad(), build.fp8.not_recording():
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor([ids[start : start + length + 1]])
            positions = torch.arange(window.shape[1] - 1)[None]
            total += model(window[:, :-1], positions, window[:, 1:]).double().sum().item()
    for found in figures:
        assert found["tokens"] == len(ids) - 1
        assert found["iteration"] == 7
        assert found["lm loss"] == pytest.approx(total / found["tokens"], rel=1e-5)
        assert found["ppl"] == pytest.approx(math.exp(found["lm loss"]))
        assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(ids), rel=1e-5)


def test_evaluate_reads_a_corpus_like_the_text(trained, tmp_path, capsys):
    folder, _, _ = trained
    ids = np.array(list(TEXT.encode()), dtype=np.uint16)
    builder = IndexedDatasetBuilder(tmp_path / "corpus", dtype=np.uint16)
    builder.add_document(ids[:50], [50])
    builder.add_document(ids[50:], [len(ids) - 50])
    builder.finalize()
    (tmp_path / "text.txt").write_text(TEXT)
    found = []
    for source in (["--data-path", str(tmp_path / "corpus")], ["--text", f"{tmp_path}/text.txt"]):
        assert tool("evaluate").main(["--load", str(folder), "--json", *source]) == 0
        found.append(json.loads(capsys.readouterr().out)["lm loss"])
    assert found[0] == found[1]
    assert (
        tool("evaluate").main(
            ["--load", str(folder), "--data-path", str(tmp_path / "corpus"), "--max-tokens", "60"]
        )
        == 0
    )
    assert "on 59 tokens | lm loss value: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--text", "missing.txt"], "--text"),
        (["--data-path", "missing"], "--data-path"),
        (["--text", "text.txt", "--seq-length", "41"], "--max-position-embeddings"),
        (["--text", "text.txt", "--micro-batch-size", "0"], "--micro-batch-size"),
        (["--text", "empty.txt"], "nothing to predict"),
    ],
)
def test_evaluate_refuses_in_one_line(trained, tmp_path, monkeypatch, capsys, args, named):
    folder, _, _ = trained
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("empty.txt").write_text("")
    assert tool("evaluate").main(["--load", str(folder), *args]) == 1
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_evaluate_says_what_to_do_with_a_huggingface_directory(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text(TEXT)
    args = ["--load", str(tmp_path), "--text", str(tmp_path / "text.txt")]
    assert tool("evaluate").main(args) == 1
    assert "It is a HuggingFace directory" in capsys.readouterr().err
