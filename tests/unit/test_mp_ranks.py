"""Megatron-LM's format `torch`: written at many layouts, read back bitwise; wrong files refused."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace

import pytest
import torch

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import mp_ranks
from megatron.core.dist_checkpointing.mp_reader import open_reader
from megatron.core.errors import CheckpointError
from megatron.core.mesh import ParallelState
from megatron.core.optimizer import build_optimizer
from megatron.training.checkpointing import load_checkpoint
from megatron.training.foreign_state import check_optimizer_form
from megatron.training.megatron_convert import Target, convert
from megatron.training.progress import Progress
from tests.saving import save_checkpoint
from tests.small_models import GQA, LLAMA, build_model, small_config, spread_weights
from tools.checkpoint import convert as convert_tool

LAYERS = {"num_layers": 4, "ffn_hidden_size": 48, "bf16": True, "num_attention_heads": 8}
EXPERTS = {
    **LLAMA, **LAYERS, **GQA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
MODELS = {
    "llama": {**LLAMA, **LAYERS, **GQA},
    "gpt": {**LAYERS, "position_embedding_type": "learned_absolute"},  # tied, with biases
    "tied": {**LLAMA, **LAYERS, "untie_embeddings_and_output_weights": False,
             "qk_layernorm": True},
    "experts": EXPERTS,
    "some": {**EXPERTS, "moe_layer_freq": "([0]*1+[1]*3)"},
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """One checkpoint of each model, and its configuration."""
    made = {}
    for name, settings in MODELS.items():
        root = tmp_path_factory.mktemp(name)
        config = small_config(**settings, save=str(root), save_interval=1)
        model, build = build_model(config)
        spread_weights(model)
        for path, buffer in model.named_buffers():
            if "expert_bias" in path:
                buffer.copy_(torch.randn(buffer.shape))
        save_checkpoint(
            config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
            fp8=build.fp8, progress=Progress(iteration=9, consumed_train_samples=18),
        )  # fmt: skip
        made[name] = (root, config)
    return made


def same_tensors(one, two):
    assert set(one.tensors) == {k for k in two.tensors if "." in k}
    for key in one.tensors:
        a, b = one.read(key), two.read(key)
        rows = min(a.shape[0], b.shape[0])  # the vocabulary's padding follows the layout
        assert a.dtype == b.dtype, key
        assert torch.equal(a[:rows], b[:rows]), key
        assert not a[rows:].any(), key


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("llama", {}), ("llama", {"tp": 2, "pp": 2}), ("llama", {"pp": 2, "vpp": 2, "local": True}),
        ("gpt", {"tp": 2, "pp": 4}), ("gpt", {"tp": 8, "local": True}), ("tied", {"tp": 2}),
        ("llama", {"tp": 4, "pp": 2, "first_layers": 1}),  # two ranks share a query group
        ("tied", {"pp": 3, "first_layers": 1, "last_layers": 2}),
        ("tied", {"tp": 4, "pp": 2, "vpp": 2}), ("experts", {"tp": 2, "ep": 2}),
        ("experts", {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "grouped": True}),
        ("experts", {"ep": 2, "local": True, "vpp": 2, "pp": 2}),
        ("some", {"tp": 2, "pp": 2, "ep": 2}), ("some", {"ep": 4, "local": True, "grouped": True}),
    ],
)  # fmt: skip
def test_there_and_back(model, sizes, originals, tmp_path):
    root, config = originals[model]
    written = convert(root, Target("torch", tmp_path / "torch", **sizes))
    back = open_reader(written)
    same_tensors(back, open_reader(root / "iter_0000009"))
    assert back.common["iteration"] == 9
    whole = convert(tmp_path / "torch", Target("megatron", tmp_path / "whole"))
    same_tensors(open_reader(whole), open_reader(root / "iter_0000009"))


def test_a_run_continues_from_ranks_files(originals, tmp_path):
    root, config = originals["experts"]
    convert(root, Target("torch", tmp_path, tp=2, pp=2, ep=2))
    own = small_config(**EXPERTS, load=str(tmp_path), no_load_optim=True)
    model, build = build_model(own)
    progress = Progress()
    assert load_checkpoint(
        own, ParallelState.single(), model=model, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=progress, say=lambda line: None,
    )  # fmt: skip
    assert (progress.iteration, progress.consumed_train_samples) == (9, 18)
    stored = open_reader(root / "iter_0000009")
    assert torch.equal(
        model.decoder.layers[3].mlp.experts.linear_fc1.weight2,
        stored.read_row("decoder.layers.mlp.experts.experts.linear_fc1.weight", 3, 2),
    )


def test_the_optimizer_of_ranks_files_is_refused(originals, tmp_path):
    root, _ = originals["llama"]
    reader = open_reader(convert(root, Target("torch", tmp_path)))
    with pytest.raises(CheckpointError, match=r"in format torch.*--no-load-optim \(or --finetune"):
        check_optimizer_form(reader.common, reader)


def test_what_a_file_of_a_rank_holds(originals, tmp_path):
    """The format's facts: local numbers of layers, gate and up of each rank, whole query groups."""
    root, _ = originals["llama"]
    stored = open_reader(root / "iter_0000009")
    convert(root, Target("torch", tmp_path, tp=2, pp=2, local=True))
    path = tmp_path / "iter_0000009" / "mp_rank_01_001" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    model = content["model"]
    fc1 = stored.read_row("decoder.layers.mlp.linear_fc1.weight", 2)
    mine = model["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(mine, torch.cat([fc1[24:48], fc1[72:]]))
    norm = stored.read_row("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 3)
    assert torch.equal(model["decoder.layers.1.input_layernorm.weight"], norm)
    qkv = stored.read_row("decoder.layers.self_attention.linear_qkv.weight", 2)
    part = model["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert torch.equal(part, qkv[qkv.shape[0] // 2 :])
    assert model["decoder.layers.0.self_attention.linear_qkv._extra_state"] is None
    assert "embedding.word_embeddings.weight" not in model
    args = content["args"]
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 9)
    assert (args.tensor_model_parallel_size, args.padded_vocab_size) == (2, 64)
    assert model["output_layer.weight"].shape == (32, 32)


# ------------------------------------------------------------------ wrong inputs


@pytest.fixture
def ranks(originals, tmp_path):
    convert(originals["tied"][0], Target("torch", tmp_path, tp=2, pp=2))
    return tmp_path / "iter_0000009"


def edit(directory, rank, change):
    path = directory / rank / mp_ranks.RANK_FILE
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def drop(name):
    return lambda content: content["model"].pop(name)


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
NORM = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"


@pytest.mark.parametrize(
    ("rank", "change", "match"),
    [
        ("mp_rank_01_001", lambda c: c.update(checkpoint_version=2.0), "checkpoint_version is 2.0"),
        ("mp_rank_01_001", drop(QKV), r"linear_qkv.weight: \d+ of \d+ elements"),
        ("mp_rank_00_001", lambda c: c.update(iteration=8), "not of one checkpoint: iteration"),
        ("mp_rank_01_000", lambda c: c["model"][NORM].add_(1), "its copy of decoder.layers.1.mlp"),
        ("mp_rank_01_001", lambda c: c["model"]["output_layer.weight"].add_(1),
         "its copy of embedding.word_embeddings.weight differs"),
        ("mp_rank_00_000", lambda c: c.pop("model"), "it has no model, but args"),
        ("mp_rank_00_000", lambda c: c["model"].update(language_model={}), "older classes"),
        ("mp_rank_00_000", lambda c: c.pop("args"), "it has no arguments"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_by_name(rank, change, match, ranks):
    edit(ranks, rank, change)
    with pytest.raises(CheckpointError, match=match):
        open_reader(ranks)


def test_missing_and_foreign_files(ranks):
    shutil.copytree(ranks / "mp_rank_01_001", ranks / "mp_rank_02_001")
    shutil.rmtree(ranks / "mp_rank_01_001")
    with pytest.raises(CheckpointError, match=r"missing: mp_rank_01_001; not of this .*mp_rank_02"):
        open_reader(ranks)
    shutil.move(ranks / "mp_rank_02_001", ranks / "mp_rank_01_001")
    path = ranks / "mp_rank_01_001" / mp_ranks.RANK_FILE
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001.*no complete archive"):
        open_reader(ranks)


def test_tensors_that_the_arguments_do_not_imply(ranks, tmp_path):
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        edit(ranks, rank, lambda c: c["model"].update(extra=torch.ones(2)))
    with pytest.raises(CheckpointError, match="not in this model: extra"):
        convert(tmp_path, Target("megatron", tmp_path / "out"))
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        edit(ranks, rank, drop("extra"))
        edit(ranks, rank, drop(NORM))
    with pytest.raises(CheckpointError, match=r"layer_norm_weight: 96 of 128 elements"):
        convert(tmp_path, Target("megatron", tmp_path / "out"))


def test_sizes_that_do_not_divide(originals, tmp_path):
    root, _ = originals["llama"]
    for sizes, match in (
        ({"tp": 3}, "num-query-groups"),
        ({"pp": 3}, "4 layers cannot be shared out"),
        ({"pp": 2, "first_layers": 4}, "4 layers, 4 on rank 0, cannot"),
        ({"first_layers": 2}, "4 layers, 2 on rank 0, cannot"),
        ({"pp": 2, "vpp": 2, "last_layers": 1}, "2 with 2 virtual stages"),
    ):
        with pytest.raises(CheckpointError, match=match):
            convert(root, Target("torch", tmp_path / "x", **sizes))
    assert not list(tmp_path.rglob("mp_rank*"))


def test_uneven_stages():
    """Interleaved ones go round the ranks, each with its share of the rank's layers."""
    layout = mp_ranks.Layout(pp=3, vpp=2, first_layers=2, last_layers=4)
    assert layout.stages(14) == [
        [range(1), range(1, 5), range(5, 7)], [range(7, 8), range(8, 12), range(12, 14)],
    ]  # fmt: skip
    assert mp_ranks.Layout(pp=2, first_layers=1).stages(4) == [[range(1), range(1, 4)]]


def test_what_uneven_stages_leave_in_the_files(originals, tmp_path):
    root, _ = originals["llama"]
    written = convert(root, Target("torch", tmp_path, pp=2, first_layers=1))
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(written / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=True)
    layers = {mp_ranks.layer_of(name) for name in content["model"]} - {None}
    assert layers == {0, 1, 2}
    assert content["args"].decoder_first_pipeline_num_layers == 1


def test_ranks_of_a_layout():
    layout = mp_ranks.Layout(tp=2, pp=1, ep=2, etp=1, num_experts=4)
    needed = [n for n, (tp, _, ep) in layout.directories().items() if layout.needed(tp, ep)]
    assert needed == ["mp_rank_00_000", "mp_rank_01_001"]
    assert len(replace(layout, etp=2).directories()) == 4
    assert place.iteration_of(place.Path("iter_0000009")) == 9


def test_the_command_line(originals, tmp_path, capsys):
    root, _ = originals["tied"]
    line = ["--model-type", "GPT", "--loader", "mcore", "--saver", "torch", "--load-dir", str(root),
            "--save-dir", str(tmp_path / "out"), "--target-tensor-parallel-size"]  # fmt: skip
    assert convert_tool.main([*line, "2"]) == 0
    out = capsys.readouterr().out
    assert "iter_0000009" in out
    assert "left out: the random state; the result" in out
    assert mp_ranks.is_one(tmp_path / "out" / "iter_0000009")
    assert convert_tool.main([*line, "5"]) == 1
    assert "--num-query-groups" in capsys.readouterr().err


def test_what_stays_behind_is_named(tmp_path, capsys):
    fields = {"bf16": True, "fp8_format": "hybrid", "train_iters": 2, "lr": 1e-3}
    config = small_config(**LLAMA, **fields, save=str(tmp_path / "in"), save_interval=1)
    model, build = build_model(config)
    optimizer = build_optimizer(config, model, ParallelState.single())
    save_checkpoint(
        config, ParallelState.single(), model=model, optimizer=optimizer, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=1),
    )  # fmt: skip
    line = ["--model-type", "GPT", "--loader", "megatron", "--saver", "torch"]
    places = ["--load-dir", str(tmp_path / "in"), "--save-dir", str(tmp_path / "out")]
    assert convert_tool.main([*line, *places]) == 0
    said = capsys.readouterr().out
    assert said.index("done: ") < said.index("left out: the optimizer's state (give")
    assert "the FP8 state, the random state" in said
    back = ["--load-dir", str(tmp_path / "out"), "--save-dir", str(tmp_path / "back")]
    assert convert_tool.main([*line[:-1], "megatron", *back]) == 0
    assert "left out" not in capsys.readouterr().out
