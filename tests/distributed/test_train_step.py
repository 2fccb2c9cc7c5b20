"""One optimizer step at any layout is the same step: loss, norm and every global weight.

FP32, no dropout, SGD without momentum (Adam and clipping hide errors of scale), and loss masks that
differ a lot between samples, so that a mean of means would show.
"""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from megatron.config import make_config
from megatron.core.datasets.source import Source
from megatron.core.shards import gather_full
from megatron.core.tensor_parallel.mappings import gather_objects
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep, evaluate
from tests.distpool import run_ranks

SEQ, VOCAB, BATCH = 16, 61, 8


class UnevenSamples:
    """Random tokens; sample i counts only its first 1 + 2 i labels."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        window = torch.randint(0, VOCAB, (SEQ + 1,), generator=generator)
        mask = (torch.arange(SEQ) < 1 + 2 * (index % BATCH)).float()
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": mask,
                "position_ids": torch.arange(SEQ)}  # fmt: skip


def train(rank, world_size, **fields):
    """Take two steps; return losses, norms, an evaluation and the global weights."""
    settings = {
        "mock_data": True, "vocab_size": VOCAB, "make_vocab_size_divisible_by": 16,
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ,
        "micro_batch_size": 2, "global_batch_size": BATCH, "train_iters": 4, "lr": 0.1,
        "lr_decay_style": "constant", "optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 0.0,
        "weight_decay": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu",
        "eval_interval": 4, "eval_iters": 1,
    }  # fmt: skip
    cfg = make_config(world_size=world_size, **{**settings, **fields})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    mesh = runtime.mesh
    parts = setup_model(cfg, runtime)
    source = Source(UnevenSamples(), micro_batch_size=cfg.micro_batch_size,
                    data_parallel_size=mesh.dp.size)  # fmt: skip
    step = TrainStep(cfg, runtime, parts, source)
    outcomes, consumed = [], 0
    for iteration in (1, 2):
        size = cfg.batches().size(consumed)
        step.use_batch(size)
        outcomes.append(step.run(iteration, consumed))
        consumed += size
    score = evaluate(cfg, runtime, parts, source, 3 * BATCH)
    own = {name: gather_full(p.detach(), p, mesh.tp).numpy()
           for name, p in parts.model.named_parameters()}  # fmt: skip
    weights = {
        name: value for stage in gather_objects(own, mesh.pp) for name, value in stage.items()
    }
    rows = weights["embedding.word_embeddings.weight"]
    weights["embedding.word_embeddings.weight"] = rows[:VOCAB]  # padding depends on the layout
    return ([(o.loss, o.update.grad_norm, o.tokens, o.update.num_zeros) for o in outcomes],
            score, weights)  # fmt: skip


def close(one, two, rel):
    (steps, score, weights), (other_steps, other_score, other_weights) = one, two
    assert score == pytest.approx(other_score, rel=rel)
    for own, other in zip(steps, other_steps, strict=True):
        assert own[:3] == pytest.approx(other[:3], rel=rel)
    assert weights.keys() == other_weights.keys()
    for name in weights:
        torch.testing.assert_close(
            torch.from_numpy(weights[name]), torch.from_numpy(other_weights[name]),
            rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    """One rank, one microbatch."""
    (found,) = run_ranks(train, 1, micro_batch_size=BATCH)
    assert found[0][0][2] == sum(1 + 2 * i for i in range(BATCH))
    return found


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (1, {"micro_batch_size": 1}),
        (2, {}),
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    ],
    ids=["ga8", "dp2-ga2", "dp2-tp2-sp", "pp2-dp2"],
)
def test_layouts_agree(world_size, fields, reference):
    for found in run_ranks(train, world_size, **fields):
        close(found, reference, rel=2e-5)  # fp32 sums in another order


GROWING = {
    "train_iters": None,
    "train_samples": 40,
    "rampup_batch_size": (4, 4, 4),
    "micro_batch_size": 1,
    "num_layers": 4,
    "num_experts": 2,
    "moe_z_loss_coeff": 0.1,
    "add_bias_linear": False,
}


def test_a_growing_batch_on_several_ranks():
    """Four samples, then eight: replicas and interleaved stages take other microbatches each."""
    (alone,) = run_ranks(train, 1, **GROWING)
    assert [tokens for _, _, tokens, _ in alone[0]] == [16, 48 + 16]
    layout = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "use_distributed_optimizer": True,
    }
    for found in run_ranks(train, 4, **GROWING, **layout):
        close(found, alone, rel=2e-5)  # fp32 sums in another order


def test_zeros_and_norm_count_every_element_once():
    # No biases: a key bias has a gradient of zero up to rounding, which depends on the layout.
    fields = {
        "log_num_zeros_in_grad": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 1,
        "vocab_size": 64,
    }
    ((one, _, _),) = run_ranks(train, 1, **fields)
    layouts = (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
    )
    for layout in layouts:
        for steps, _, _ in run_ranks(train, 2, **layout, **fields):
            # Tokens that do not occur have zero rows in the embedding's gradient.
            assert [s[3] for s in steps] == [s[3] for s in one]
            assert steps[0][3] > 0
            assert steps[0][1] == pytest.approx(one[0][1], rel=1e-5)


def timeouts(rank, world_size):
    """Timeouts with which the mesh's groups are made."""
    seen, new_group = [], dist.new_group

    def recorded(ranks, timeout=None):
        seen.append(timeout)
        return new_group(ranks, timeout=timeout)

    dist.new_group = recorded
    cfg = make_config(world_size=world_size, mock_data=True, num_layers=1, hidden_size=16,
                      num_attention_heads=1, seq_length=8, distributed_timeout_minutes=3,
                      device="cpu")  # fmt: skip
    start(cfg, Launch(rank, world_size))
    return seen


def test_every_group_has_the_timeout_of_the_flag():
    for seen in run_ranks(timeouts, 2):
        assert len(seen) >= 1
        assert set(seen) == {datetime.timedelta(minutes=3)}
