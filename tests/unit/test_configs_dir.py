"""Every file in configs/ makes a run at the number of processes it names, with every overlay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config.cli import parse
from megatron.config.fp8 import recipe_of
from megatron.config.moe import moe_layers

ROOT = Path(__file__).resolve().parents[2] / "configs"
MODELS = sorted(ROOT.glob("*.yaml"))
OVERLAYS = sorted((ROOT / "fp8").glob("*.yaml"))


def intended_world_size(path):
    match = re.match(r"# world_size: (\d+)\n", path.read_text())
    assert match, f"{path.name} begins with its number of processes"
    return int(match.group(1))


def load(model, *overlays, extra=()):
    tokens = ["--config", str(model)]
    for overlay in overlays:
        tokens += ["--config", str(overlay)]
    return parse([*tokens, *extra], intended_world_size(model))


def parameters(cfg):
    """Return the number of weights in the model's matrices and embeddings."""
    heads = cfg.num_attention_heads * cfg.kv_channels
    kv = 2 * cfg.num_query_groups * cfg.kv_channels
    attention = cfg.hidden_size * (2 * heads + kv)
    matrices = (3 if cfg.swiglu else 2) * cfg.hidden_size
    mlp = matrices * cfg.ffn_hidden_size
    embeddings = cfg.padded_vocab_size * (2 if cfg.untie_embeddings_and_output_weights else 1)
    if cfg.position_embedding_type == "learned_absolute":
        embeddings += cfg.max_position_embeddings
    moe = experts = 0
    if cfg.num_experts:
        moe = sum(moe_layers(cfg))
        width = cfg.num_experts * cfg.moe_ffn_hidden_size
        width += cfg.moe_shared_expert_intermediate_size or 0
        experts = matrices * width + cfg.num_experts * cfg.hidden_size
    mlps = (cfg.num_layers - moe) * mlp + moe * experts
    return cfg.num_layers * attention + mlps + embeddings * cfg.hidden_size


def test_the_expected_files_exist():
    names = {path.stem for path in MODELS}
    assert {"gpt3_126m", "gpt3_5b", "gpt3_175b", "llama3_8b", "quickstart_llama_10m"} <= names
    assert {"delayed", "tensorwise", "e4m3", "blockwise", "mxfp8", "nvfp4"} <= {
        path.stem for path in OVERLAYS
    }


@pytest.mark.parametrize("overlay", [None, *OVERLAYS], ids=lambda p: p.stem if p else "bf16")
@pytest.mark.parametrize("model", MODELS, ids=lambda p: p.stem)
def test_finalizes(model, overlay):
    cfg, _ = load(model, *([overlay] if overlay else []))
    assert cfg.world_size == intended_world_size(model)
    assert cfg.bf16
    assert (recipe_of(cfg) is not None) == (overlay is not None)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt3_126m", (120, 130)),
        ("gpt3_5b", (4900, 5300)),
        ("gpt3_175b", (174_000, 176_000)),
        ("llama3_1b", (1230, 1240)),
        ("llama3_8b", (7950, 8100)),
        ("quickstart_llama_10m", (9, 11)),
        ("mixtral_8x7b", (46_600, 46_800)),
        ("moe_16b_fine_grained", (16_300, 16_500)),
    ],
)
def test_has_the_size_in_its_name(name, millions):
    cfg, _ = load(ROOT / f"{name}.yaml")
    low, high = millions
    assert low <= parameters(cfg) / 1e6 <= high


def test_quickstart_runs_on_two_ranks_and_when_shortened():
    extra = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--train-iters", "5"]
    tokens = ["--config", str(ROOT / "quickstart_llama_10m.yaml"), "--fp8-format", "hybrid"]
    cfg, _ = parse([*tokens, *extra], 2)
    assert (cfg.data_parallel_size, cfg.num_microbatches, cfg.train_iters) == (1, 1, 5)


@pytest.mark.parametrize("path", [*MODELS, *OVERLAYS], ids=lambda p: p.stem)
def test_explains_itself(path):
    comments = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    assert len([line for line in comments if "world_size" not in line]) >= 1
