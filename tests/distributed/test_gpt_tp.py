"""A model split over tensor-parallel ranks computes what one process computes."""

from __future__ import annotations

import pytest
import torch

from megatron.core.mesh import ParallelState
from megatron.core.models.gpt.generation import Sampling, generate
from megatron.core.shards import gather_full
from megatron.core.tensor_parallel.mappings import all_gather, all_reduce
from megatron.training.progress import Progress
from megatron.training.restore import restore
from tests.distpool import run_ranks
from tests.saving import save_checkpoint
from tests.small_models import GQA, LLAMA, batch, build_model, small_config

MODELS = {
    "gpt": {},
    "llama": {**LLAMA, **GQA, "vocab_size": 51, "make_vocab_size_divisible_by": 1},
    "norms": {**LLAMA, "qk_layernorm": True, "untie_embeddings_and_output_weights": False},
}
PRECISIONS = {
    "fp32": {},
    "delayed": {"fp8_format": "hybrid", "fp8_emulation": "exact"},
}


def train(rank, world_size, settings, seed=7):
    """Loss, whole gradients by name, and logits of one microbatch."""
    config = small_config(world_size=world_size, **settings)
    mesh = ParallelState.build(config, rank, world_size)
    model, build = build_model(config, mesh)
    fp8 = [row for row in model.named_precision_rows() if "fp8" in row.delivered]
    assert len(fp8) == (24 if config.fp8_format else 0)
    # Biases start at zero and norms at one: move them, alike on every rank.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = gather_full(parameter, parameter, mesh.tp)
            noise = torch.randn(full.shape, generator=torch.Generator().manual_seed(len(name)))
            if not parameter.dim() - 1:
                full = (full + noise * 0.1).to(full.dtype)
                parameter.copy_(local_part(full, parameter, mesh.tp))
    for step in range(2):  # the second one quantizes with scales that the first one found
        model.zero_grad()
        build.rng.position = (step, 0)
        inputs = batch(config, seed=seed)
        losses = model(*inputs)
        losses.sum().backward()
        build.fp8.sync(mesh.amax)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        if getattr(parameter, "sequence_parallel", False):
            gradient = all_reduce(gradient, mesh.tp)
        gradients[name] = gather_full(gradient, parameter, mesh.tp)
    with torch.no_grad():
        logits = all_gather(model(*inputs[:2]), mesh.tp, dim=-1)
    return losses.detach(), gradients, logits[..., : config.vocab_size]


def local_part(full, parameter, axis):
    if full.shape == parameter.shape:
        return full
    stride = parameter.partition_stride
    sections = full.view(stride, axis.size, -1)
    return sections[:, axis.rank].reshape(parameter.shape)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_tp2_equals_tp1(name, sequence_parallel, precision):
    settings = {**MODELS[name], **PRECISIONS[precision]}
    if precision != "fp32":
        settings["hidden_size"] = 64
        settings["ffn_hidden_size"] = 96
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    expected = train(0, 1, settings)
    results = run_ranks(train, 2, {**settings, **split})
    # FP8 is as close (3e-7 here) unless a sum in another order tips a value over to the next code.
    tolerance = 2e-5 if precision == "fp32" else 1e-3
    for losses, gradients, logits in results:
        close(losses, expected[0], tolerance)
        close(logits, expected[2], tolerance)
        assert gradients.keys() == expected[1].keys()
        for key, gradient in gradients.items():
            rows = min(len(gradient), len(expected[1][key]))  # padding depends on the layout
            close(gradient[:rows], expected[1][key][:rows], tolerance, key)


def close(found, expected, tolerance, what=""):
    error = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-20)
    assert error.item() <= tolerance, f"{what}: relative error {error.item():.3g}"


def masks(rank, world_size, sequence_parallel):
    """What the dropout of the embedding and of the first layer's attention leaves over."""
    config = small_config(
        world_size=world_size,
        tensor_model_parallel_size=world_size,
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.5,
        attention_dropout=0.5,
    )
    mesh = ParallelState.build(config, rank, world_size)
    model, build = build_model(config, mesh)
    tokens, positions, _ = batch(config)
    kept = model.embedding(tokens, positions) != 0
    drawn, generator = {}, build.rng.generator

    def spy(path, axis="replicated"):
        assert path not in drawn, f"two dropouts share the stream {path}"
        drawn[path] = generator(path, axis).initial_seed()
        return generator(path, axis)

    build.rng.generator = spy
    model(tokens, positions)
    return kept, drawn


def test_dropout_is_shared_in_replicated_regions_and_different_in_sharded_ones():
    for sequence_parallel in (False, True):
        (first, seeds), (second, others) = run_ranks(masks, 2, sequence_parallel)
        assert seeds.keys() == others.keys()
        assert len(seeds) == 1 + 2 * 3  # embedding; attention weights, attention, MLP of each layer
        for path in seeds:
            sharded = path.endswith("core_attention") or sequence_parallel
            assert (seeds[path] != others[path]) == sharded, path
        assert first.shape[0] == (8 if sequence_parallel else 16)  # half of the sequence, or all
        assert torch.equal(first, second) != sequence_parallel


PROMPTS = [[1, 2, 3], [4]]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=2.0, top_k=20)]


def continued(rank, world_size, folder):
    """Continuations of the prompts; rank 0 of several also leaves a checkpoint behind."""
    config = small_config(
        world_size=world_size,
        tensor_model_parallel_size=world_size,
        **LLAMA,
        **GQA,
        vocab_size=51,  # padded to 64 on one rank, to 96 on two of them
        make_vocab_size_divisible_by=32 if world_size == 1 else 48,
        tokenizer_type="NullTokenizer",
        save=folder,
        save_interval=1,
    )
    mesh = ParallelState.build(config, rank, world_size)
    model, _ = build_model(config, mesh)
    save_checkpoint(
        config,
        mesh,
        model=model,
        optimizer=None,
        scheduler=None,
        fp8=None,
        progress=Progress(iteration=3),
    )
    return [generate(model.eval(), PROMPTS, 8, sampling) for sampling in SAMPLINGS]


def test_every_layout_continues_alike_and_so_does_one_process_on_its_checkpoint(tmp_path):
    expected = continued(0, 1, str(tmp_path / "one"))
    for found in run_ranks(continued, 2, str(tmp_path / "two")):
        assert found == expected
    for folder in ("one", "two"):
        model = restore(str(tmp_path / folder)).model
        assert [generate(model, PROMPTS, 8, sampling) for sampling in SAMPLINGS] == expected
