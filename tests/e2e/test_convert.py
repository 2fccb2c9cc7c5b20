"""The converter's command line with random models of every supported architecture."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from megatron.core.dist_checkpointing import schema  # noqa: E402
from megatron.core.dist_checkpointing.storage import Reader  # noqa: E402
from megatron.core.mesh import ParallelState  # noqa: E402
from megatron.training import hf_config, hf_map, hf_rows, hf_verify  # noqa: E402
from megatron.training.progress import Progress  # noqa: E402
from tests.e2e.launch import launch  # noqa: E402
from tests.saving import save_checkpoint  # noqa: E402
from tests.small_models import LLAMA as LLAMA_HERE  # noqa: E402
from tests.small_models import build_model, small_config  # noqa: E402
from tests.unit.test_hf_tokenizer import EXACT  # noqa: E402
from tests.unit.test_tokenizers import sentencepiece_model  # noqa: E402
from tools.checkpoint import convert  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 257  # not a multiple of anything the model pads to

LLAMA = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
GPT2 = {
    "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "vocab_size": VOCAB,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip

MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 6}
DEEPSEEK = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 4, "n_routed_experts": 8, "head_dim": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip

MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 6}),
    "llama-one-group": ("Llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("Llama", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None},
    ),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-dense-layers": (
        "Qwen3Moe",
        {**MOE, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {**DEEPSEEK, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "glm4-moe-groups": ("Glm4Moe", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "gpt2": ("GPT2", {}),
    "gpt2-untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 80}),
}


def make_model(name, directory, dtype=torch.float32):
    family, change = MODELS[name]
    base = GPT2 if family == "GPT2" else LLAMA
    config = getattr(transformers, f"{family}Config")(**{**base, **change})
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, head)(config)
    with torch.no_grad():  # biases and norms start at constants, which would hide mistakes
        biases = [b for n, b in model.named_buffers() if n.endswith("correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.to(dtype).save_pretrained(directory)
    return model


def run(loader, saver, load, save, *flags):
    return convert.main(
        ["--model-type", "GPT", "--loader", loader, "--saver", saver, "--load-dir", str(load),
         "--save-dir", str(save), *flags]
    )  # fmt: skip


def logits(model, tokens):
    with torch.no_grad():
        if isinstance(model, transformers.PreTrainedModel):
            return model(input_ids=tokens).logits
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(tokens, positions)[..., :VOCAB]


def state_of(directory):
    from megatron.training.hf_files import HfWeights

    weights = HfWeights(Path(directory))
    return {name: weights.get(name) for name in weights}


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bitwise_and_logits_agree(tmp_path, capsys, name):
    theirs = make_model(name, tmp_path / "hf").eval()
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 0
    assert "verified: all tensors equal" in capsys.readouterr().out
    ours = hf_verify.load_ours(tmp_path / "ckpt" / "release")
    tokens = torch.randint(0, VOCAB, (2, 48))
    assert (logits(ours, tokens) - logits(theirs, tokens)).abs().max() <= 1e-4
    ckpt = tmp_path / "ckpt" / "release"
    report = hf_verify.verify(ckpt, tmp_path / "hf", "fp32", streamed=True)
    assert report.max_difference <= 1e-4
    assert report.same_greedy == 1.0
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back") == 0
    before, after = state_of(tmp_path / "hf"), state_of(tmp_path / "back")
    assert set(before) == set(after)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
        assert after[key].dtype == value.dtype
    old, new = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("hf", "back"))
    old.pop("transformers_version")
    assert new == old
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits(reloaded.eval(), tokens), logits(theirs, tokens))
    assert reloaded.config.vocab_size == VOCAB
    assert reloaded.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    assert reloaded.config.eos_token_id == 2


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_through_the_files_of_megatrons_ranks(tmp_path, name):
    make_model(name, tmp_path / "hf")
    sizes = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "3")
    (tmp_path / "ranks.tmp").mkdir()  # somebody's own
    assert run("hf", "torch", tmp_path / "hf", tmp_path / "ranks", *sizes) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "ranks", "ranks.tmp"}
    assert run("torch", "hf", tmp_path / "ranks", tmp_path / "back") == 0
    before, after = state_of(tmp_path / "hf"), state_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_target_dtype(tmp_path, capsys):
    make_model("llama", tmp_path / "hf")
    assert run(
        "huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--target-dtype", "bf16",
        "--target-tensor-parallel-size", "2",
    ) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "verified" in out
    assert "do not depend on the layout" in out
    reader = Reader(tmp_path / "ckpt" / "release")
    assert {e.dtype for e in reader.tensors.values()} == {torch.bfloat16}
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back") == 0
    for key, value in state_of(tmp_path / "hf").items():
        assert torch.equal(value.bfloat16(), state_of(tmp_path / "back")[key])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_router_of_a_bf16_model_keeps_its_bias_in_fp32(tmp_path):
    make_model("glm4-moe", tmp_path / "hf")
    assert run(
        "huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--target-dtype", "bf16",
        "--no-verify",
    ) == 0  # fmt: skip
    stored = Reader(tmp_path / "ckpt" / "release").tensors
    kept = {key for key, entry in stored.items() if entry.dtype == torch.float32}
    assert kept == {f"decoder.layers.{i}.mlp.router.expert_bias" for i in (1, 2)}
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back") == 0
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(state_of(tmp_path / "back")[name], state_of(tmp_path / "hf")[name])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    make_model("glm4-moe", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(path), "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, path)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify") == 0
    assert "predict further tokens (MTP) are left out" in capsys.readouterr().out


def test_tokenizer_files_travel(tmp_path):
    make_model("llama", tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_text('{"x": 1}')
    run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify")
    run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back", "--no-verify")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def trained_from_scratch(folder, **tokenizer):
    """Save an untrained model as a run with this tokenizer does."""
    config = small_config(**LLAMA_HERE, vocab_size=400, save=str(folder),
                          save_interval=1, **tokenizer)  # fmt: skip
    model, build = build_model(config)
    save_checkpoint(config, ParallelState.single(), model=model, optimizer=None, scheduler=None,
                    fp8=build.fp8, progress=Progress(iteration=3))  # fmt: skip


def test_an_export_has_the_tokenizer_of_its_run(tmp_path, capsys):
    path = sentencepiece_model(tmp_path / "own.model", add_dummy_prefix=False, **EXACT)
    trained_from_scratch(tmp_path / "ckpt", tokenizer_model=path)
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "hf", "--verify") == 0
    assert "AutoTokenizer gives the run's ids for 4 texts" in capsys.readouterr().out
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "hf" / name).read_text())
        assert (values["bos_token_id"], values["eos_token_id"]) == (1, 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == 2
    # A model that rewrites its texts, which transformers' tokenizer does not.
    rewrites = {**EXACT, "remove_extra_whitespaces": True}
    sentencepiece_model(tmp_path / "own.model", **rewrites)
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "other", "--verify") == 1
    assert "LlamaTokenizer of transformers gives other ids" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


# ------------------------------------------------------------------ a wrong mapping is caught


def swapped(tensors):
    return torch.cat(list(tensors)[::-1])


def sections(tensors, groups, width):
    return torch.cat(list(tensors))


def unsections(fused, groups, width):
    heads = fused.shape[0] // width - 2 * groups
    return torch.split(fused, [heads * width, groups * width, groups * width])


def transposed(monkeypatch):
    """One square matrix, turned in both directions."""
    real = hf_map.rows_for

    def rows(*args):
        return [
            replace(r, join=lambda t: t[0].t(), split=lambda t: [t.t()])
            if r.name.endswith("linear_proj.weight") else r
            for r in real(*args)
        ]  # fmt: skip

    monkeypatch.setattr(hf_map, "rows_for", rows)


def exchanged_experts(monkeypatch):
    def of(self, template):
        theirs = template.startswith("model.") and self.expert in (1, 2)
        return template.format(i=self.layer, e=3 - self.expert if theirs else self.expert)

    monkeypatch.setattr(hf_rows.Place, "of", of)


def other_theta(monkeypatch):
    real = hf_config._rope_fields
    monkeypatch.setattr(hf_config, "_rope_fields", lambda *a: {**real(*a), "rotary_base": 500})


FAULTS = {
    "transposed": ("llama", transposed, "model.layers.0.self_attn.o_proj (by"),
    "expert": ("mixtral", exchanged_experts, "the MLP of layer 0 (by"),
    "theta": ("llama", other_theta, "the scores of attention in layer 0, whose queries, keys and"),
    "theta of qwen3": ("qwen3", other_theta, "the scores of attention in layer 0"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_tables_is_found_and_named(tmp_path, capsys, monkeypatch, fault, streamed):
    """The same mistake in both directions: only the other implementation knows better."""
    name, inject, message = FAULTS[fault]
    make_model(name, tmp_path / "hf")
    inject(monkeypatch)
    if streamed:
        monkeypatch.setattr(convert, "_WHOLE_MODEL", 0)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 1
    error = capsys.readouterr().err
    assert f"The first part that differs is {message}" in error
    assert ("expert 1 (gate_up_proj)" in error) == (fault == "expert")
    assert os.listdir(tmp_path / "ckpt") == []


WRONG = {
    "gate and up": (
        {"stack": swapped, "halves": lambda t: t.chunk(2)[::-1]},
        "model.layers.0.mlp.gate_proj",
    ),
    "qkv layout": (
        {"interleave_qkv": sections, "split_qkv": unsections},
        "model.layers.0.self_attn.q_proj",
    ),
}


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_mapping_fails_and_names_the_place(tmp_path, capsys, monkeypatch, what, direction):
    make_model("llama", tmp_path / "hf")
    changes, place = WRONG[what]
    if direction == "out":
        assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 0
    for name, function in changes.items():
        monkeypatch.setattr(hf_map, name, function)
    if direction == "in":
        code = run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt")
        assert sorted(os.listdir(tmp_path / "ckpt")) == []
    else:
        code = run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back")
        assert sorted(os.listdir(tmp_path)) == ["ckpt", "hf"]
    assert code == 1
    assert f"The first part that differs is {place}" in capsys.readouterr().err


def test_a_wrong_tensor_is_named(tmp_path, capsys, monkeypatch):
    make_model("llama", tmp_path / "hf")
    from megatron.training import hf_convert

    real = hf_convert._lazy

    def damaged(source, row, at, *rest):
        piece = real(source, row, at, *rest)
        if at.layer == 1 and row.key.endswith("linear_fc2.weight"):
            return piece._replace(make=lambda: piece.values() + 1)
        return piece

    monkeypatch.setattr(hf_convert, "_lazy", damaged)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 1
    error = capsys.readouterr().err
    assert "decoder.layers.mlp.linear_fc2.weight, layer 1" in error
    assert "model.layers.1.mlp.down_proj.weight" in error


# ------------------------------------------------------------------ wrong inputs


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom'"),
        ({"num_hidden_layers": 4}, "missing tensors: model.layers.3"),
        ({"num_hidden_layers": 2}, "tensors without a place in the model: model.layers.2"),
        ({"intermediate_size": 64}, "config.json implies"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the word embeddings"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(tmp_path, capsys, changes, message):
    make_model("llama", tmp_path / "hf")
    edit_config(tmp_path / "hf", **changes)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


def test_untied_without_an_output_layer_is_refused(tmp_path, capsys):
    make_model("llama-tied", tmp_path / "hf")
    edit_config(tmp_path / "hf", tie_word_embeddings=False)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 1
    assert "missing tensors: lm_head.weight" in capsys.readouterr().err


def test_a_copy_of_tied_embeddings_is_accepted(tmp_path):
    from safetensors.torch import load_file, save_file

    make_model("llama-tied", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    state = load_file(path)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, path)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify") == 0
    assert "output_layer.weight" not in Reader(tmp_path / "ckpt" / "release").tensors


def test_places(tmp_path, capsys):
    make_model("llama", tmp_path / "hf")
    assert run("huggingface", "megatron", tmp_path / "absent", tmp_path / "ckpt") == 1
    assert "There is no such directory" in capsys.readouterr().err
    assert run("megatron", "huggingface", tmp_path / "hf", tmp_path / "x") == 1
    assert "latest_checkpointed_iteration.txt" in capsys.readouterr().err
    run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify")
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "hf") == 1
    assert "It is not empty" in capsys.readouterr().err
    release = tmp_path / "ckpt" / "release"
    assert run("megatron", "huggingface", release, tmp_path / "back", "--no-verify") == 0


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    make_model("llama", tmp_path / "hf")
    run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify")
    file = tmp_path / "ckpt" / "release" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back") == 1
    assert "__0_0.distcp" in capsys.readouterr().err


def test_bare_gpt2_files_without_the_prefix(tmp_path):
    from safetensors.torch import load_file, save_file

    make_model("gpt2", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    state = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the causal mask that old files carry
    save_file(state, path)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify") == 0
    reader = Reader(tmp_path / "ckpt" / "release")
    assert {k for k in reader.tensors if schema.is_model_key(k)} == set(reader.tensors)


def test_as_a_command(tmp_path):
    make_model("gpt2", tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "elsewhere" / "hf")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "checkpoint" / "convert.py"), "--model-type", "GPT",
         "--loader", "huggingface", "--saver", "megatron", "--load-dir", "hf", "--save-dir", "out",
         "--no-verify"],
        cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "done: out/release (fp32)" in result.stdout


def rewrite(directory, change):
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


def padded(state):
    rows = torch.zeros(3, 48)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {**state, **{n: torch.cat([state[n], rows]) for n in names}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (padded, "model.embed_tokens.weight has 260 rows and vocab_size is 257"),
        (lambda s: {**s, "model.extra": torch.ones(2)}, "in the model: model.extra"),
        (lambda s: {k: v for k, v in s.items() if "1.mlp.up" not in k}, "layers.1.mlp.up_proj"),
        (lambda s: {**s, "lm_head.weight": s["lm_head.weight"].int()}, "holds int32, not weights"),
    ],
    ids=["padded", "extra", "missing", "integers"],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, capsys, change, message):
    make_model("llama", tmp_path / "hf")
    rewrite(tmp_path / "hf", change)
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards(tmp_path, capsys, kind):
    model = make_model("llama", tmp_path / "whole")
    make_model("llama", tmp_path / "hf").save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    (tmp_path / "hf" / "model.safetensors").unlink()
    if kind == "bin":
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        files = {n: f.replace("safetensors", "bin") for n, f in index["weight_map"].items()}
        for file in set(files.values()):
            own = {n: t for n, t in model.state_dict().items() if files[n] == file}
            torch.save(own, tmp_path / "hf" / file)
        for path in (tmp_path / "hf").glob("model*.safetensors*"):
            path.unlink()
        (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": files})
        )
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify") == 0
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "back", "--no-verify") == 0
    expected = state_of(tmp_path / "whole")
    assert all(torch.equal(v, expected[k]) for k, v in state_of(tmp_path / "back").items())
    shard = sorted((tmp_path / "hf").glob(f"model-*.{kind}"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "x", "--no-verify") == 1
    assert shard.name in capsys.readouterr().err


# ------------------------------------------------------------------ Megatron's spellings


def test_the_command_line_of_megatrons_tool(tmp_path, capsys):
    make_model("llama", tmp_path / "hf")
    (tmp_path / "tokenizer.json").write_text("{}")
    flags = [
        "--checkpoint-type", "hf", "--model-size", "llama3", "--bf16", "--max-queue-size", "9",
        "--tokenizer-model", str(tmp_path / "tokenizer.json"), "--no-verify",
        "--target-tensor-parallel-size", "2", "--saver-transformer-impl", "transformer_engine",
    ]  # fmt: skip
    assert run("llama_mistral", "core", tmp_path / "hf", tmp_path / "ckpt", *flags) == 0
    assert "--model-size is not needed" in capsys.readouterr().out
    assert (tmp_path / "ckpt" / "release" / "tokenizer" / "tokenizer.json").is_file()
    kinds = {e.dtype for e in Reader(tmp_path / "ckpt" / "release").tensors.values()}
    assert kinds == {torch.bfloat16}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint-type", "meta"], "--checkpoint-type: got meta"),
        (["--bf16", "--target-dtype", "fp32"], "--bf16: got set. --target-dtype is fp32"),
        (["--tokenizer-model", "nowhere"], "--tokenizer-model: got nowhere"),
        (["--true-vocab-size", "100"], "--true-vocab-size: got 100. The source says 257"),
    ],
)
def test_spellings_that_cannot_be_honoured(tmp_path, capsys, flags, message):
    make_model("llama", tmp_path / "hf")
    assert run("llama_mistral", "core", tmp_path / "hf", tmp_path / "ckpt", *flags) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-dtype", "fp8"], "--target-dtype: got fp8"),
        (["--fp8-weights", "tensor"], "--fp8-weights: got tensor"),
        (["--target-expert-parallel-size", "0"], "--target-expert-parallel-size: got 0"),
        (["--bf16", "--target-dtype", "fp32"], "--bf16: got set"),
    ],
)
def test_what_megatrons_formats_do_not_have(tmp_path, capsys, flags, message):
    assert run("megatron", "torch", tmp_path / "ckpt", tmp_path / "out", *flags) == 1
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------ together with training

SIZES = ["--num-layers", "2", "--hidden-size", "48", "--num-attention-heads", "6"]
TRAIN = [
    "--mock-data", "--vocab-size", str(VOCAB), "--seq-length", "32", "--micro-batch-size", "2",
    "--global-batch-size", "4", "--train-iters", "2", "--lr", "1e-2", "--device", "cpu",
    "--log-interval", "1", "--hidden-dropout", "0", "--attention-dropout", "0",
]  # fmt: skip
LIKE_LLAMA = [
    "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope",
    "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2",
    "--untie-embeddings-and-output-weights",
]  # fmt: skip
TP2 = ["--tensor-model-parallel-size", "2"]


LIKE_DEEPSEEK = [
    *LIKE_LLAMA, "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32",
    "--moe-layer-freq", "([0]*1+[1]*1)", "--moe-router-score-function", "sigmoid",
    "--moe-router-enable-expert-bias", "--moe-shared-expert-intermediate-size", "64",
]  # fmt: skip
EP2 = ["--expert-model-parallel-size", "2"]
ETP1 = ["--expert-tensor-parallel-size", "1"]


@pytest.mark.parametrize(
    "flags",
    [
        [*LIKE_LLAMA, *TP2],
        [*LIKE_LLAMA, "--apply-layernorm-1p", *TP2],
        TP2,
        [*LIKE_DEEPSEEK, *EP2],
    ],
    ids=["llama", "1p", "gpt2", "experts"],
)
def test_a_model_trained_on_two_ranks_is_exported(tmp_path, capsys, flags):
    save = ["--save", f"{tmp_path}/ckpt", "--save-interval", "2"]
    done = launch(2, [*TRAIN, *SIZES, *flags, *save])
    assert done.codes == [0, 0], done.out
    assert run("megatron", "huggingface", tmp_path / "ckpt", tmp_path / "hf") == 0
    assert "verified" in capsys.readouterr().out
    rows = {n: t.shape[0] for n, t in state_of(tmp_path / "hf").items() if t.dim() == 2}
    names = ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight")
    assert [rows[n] for n in names if n in rows] == [VOCAB] * (2 if LIKE_LLAMA[0] in flags else 1)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == VOCAB


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama-tied", TP2), ("glm4-moe", [*TP2, "--sequence-parallel", *EP2, *ETP1])],
    ids=["llama", "experts"],
)
def test_an_imported_model_trains_the_same_at_every_layout(tmp_path, name, layout):
    make_model(name, tmp_path / "hf")
    assert run("huggingface", "megatron", tmp_path / "hf", tmp_path / "ckpt", "--no-verify") == 0
    flags = [*TRAIN, "--load", str(tmp_path / "ckpt"), "--use-checkpoint-args"]
    one, two = launch(1, flags), launch(2, [*flags, *layout])
    assert one.codes == [0], one.out
    assert two.codes == [0, 0], two.out
    assert one.lines("iteration        1/")
    assert one.losses()[0] > 6  # these random weights are surer of themselves than fresh ones
    for a, b in zip(one.losses(), two.losses(), strict=True):
        assert abs(a - b) < 2e-5
