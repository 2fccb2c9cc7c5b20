"""Small GPT models for tests: built from settings, filled with random weights, run on a batch."""

from __future__ import annotations

import torch

from megatron.config import make_config
from megatron.core.backends.native import NativeBackend
from megatron.core.build import Build
from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.gpt_model import GPTModel

CPU = torch.device("cpu")
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 24,
    "vocab_size": 50,
    "make_vocab_size_divisible_by": 16,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 1,
    "lr": 1e-3,
}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "ffn_hidden_size": 48,
}
GQA = {"group_query_attention": True, "num_query_groups": 2}


def small_config(world_size=1, **settings):
    return make_config(world_size=world_size, **{**SMALL, **settings})


def build_model(config, mesh=None):
    """The model and the state objects it was built with: `(model, build)`."""
    build = Build.root(config, mesh or ParallelState.single(), NativeBackend(), CPU)
    return GPTModel(build), build


def small_model(**settings):
    return build_model(small_config(**settings))


def spread_weights(model, std=0.3, seed=0):
    """Random values for every parameter, so that no bias is zero and no norm is one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * std
            if "norm" in name and name.endswith("weight"):
                noise = 1 + noise * 0.3
            parameter.copy_(noise)


def batch(config, seed=0, rows=2):
    """`tokens, position_ids, labels`, each `[rows, seq_length]`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, config.seq_length)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    labels = torch.randint(0, config.vocab_size, shape, generator=generator)
    return tokens, torch.arange(config.seq_length).expand(shape), labels
