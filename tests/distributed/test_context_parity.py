"""Context parallelism trains the model of one process, with everything it combines with."""

from __future__ import annotations

import functools

import pytest
import torch
from distpool import run_ranks
from parity import BASE, different, mean_error, run_layout, worst

from megatron.config import make_config
from megatron.core.datasets.batch import Batch, cut_window
from megatron.core.tensor_parallel.mappings import all_gather
from megatron.core.transformer.context_parallel import to_sequence
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from tests.distributed.test_parity import (
    DELAYED,
    LLAMA,
    MODELS,
    SP,
    TP2,
    alone,
    assert_replicas_agree,
)

CP2 = {"context_parallel_size": 2}
CP4 = {"context_parallel_size": 4}
GATHER, HEADS = {"cp_comm_type": ("all_gather",)}, {"cp_comm_type": ("a2a",)}
LEVELS = {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
MIXED = {"cp_comm_type": ("p2p", "all_gather")}  # one a layer
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

# name -> (fields, ranks)
LAYOUTS = {
    "cp2": (CP2, 2),
    "cp4": (CP4, 4),
    "cp2-gather": (CP2 | GATHER, 2),
    "cp2-heads": (CP2 | HEADS, 2),
    "cp4-levels": (CP4 | LEVELS, 4),
    "cp4-levels-mixed": (CP4 | LEVELS | {"cp_comm_type": ("a2a+p2p", "all_gather")}, 4),
    "cp2-mixed": (CP2 | MIXED, 2),
    "cp2-tp2": (CP2 | TP2, 4),
    "cp2-tp2-sp": (CP2 | TP2 | SP, 4),
    "cp2-dp2": (CP2, 4),
    "cp2-recompute": (CP2 | FULL, 2),
    "tp2-sp": (TP2 | SP, 2),  # packed documents without context parallelism
}
CASES = [("gpt", {}, name) for name in LAYOUTS if name != "tp2-sp"]
CASES += [("llama", {}, name) for name in ("cp2", "cp2-tp2-sp")]
CASES += [
    ("llama", PACKED, name)
    for name in ("cp2", "cp4", "cp2-gather", "cp2-heads", "cp4-levels", "tp2-sp")
]
CASES += [("gpt", PACKED, "cp2-tp2-sp")]


@pytest.mark.parametrize(("model", "settings", "layout"), CASES)
def test_fp32(model, settings, layout):
    """Masks are uneven: half of a sequence counts, or none of it, so a mean of means shows."""
    fields, ranks = LAYOUTS[layout]
    expected = alone(model, 2, **settings)
    outcomes = run_layout(MODELS[model] | settings | fields, ranks, 2)
    assert_replicas_agree(outcomes)
    outcome = outcomes[0]
    assert worst(outcome.initial, expected.initial)[0] == 0
    # Only the order of fp32 additions differs between layouts.
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
    assert worst(outcome.grads, expected.grads)[0] < 1e-5
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


def test_documents_matter():
    """Guards the cases above: looking across documents is another model."""
    apart, across = alone("llama", 2, **PACKED), alone("llama", 2)
    assert abs(apart.losses[0] - across.losses[0]) > 1e-4


@functools.cache
def delayed(ranks, **fields):
    return run_layout(DELAYED | {"fp8_emulation": "exact"} | fields, ranks, 6)


@pytest.mark.parametrize("name", ["cp2", "cp2-tp2-sp"])
def test_delayed_scales_are_those_of_one_process(name):
    """Maxima are taken over the context-parallel ranks too."""
    sized = {"seq_length": 32, "max_position_embeddings": 32}
    fields, ranks = LAYOUTS[name]
    expected = delayed(1, **sized)[0]
    outcomes = delayed(ranks, **sized, **fields)
    assert_replicas_agree(outcomes)
    assert different(outcomes[0], expected, rtol=1e-6) == set()
    # A value that crosses a boundary of the grid moves by 6 %; the losses differ without a trend.
    assert mean_error(outcomes[0], expected) < 1e-3


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("recompute", [FULL, {"recompute_granularity": "selective"}])
def test_recompute_is_bitwise(comm, recompute):
    """With dropout in the ring and delayed scaling, over packed documents."""
    settings = CP2 | DELAYED | PACKED | {"bf16": True, "cp_comm_type": (comm,)}
    settings |= {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    settings |= {"seq_length": 32, "max_position_embeddings": 32}
    plain = run_layout(settings, 2, 2)[0]
    again = run_layout(settings | recompute, 2, 2)[0]
    assert again.losses == plain.losses
    assert worst(again.grads, plain.grads)[0] == 0
    assert different(again, plain) == set()


def test_dropout_streams_differ_between_context_parallel_ranks_and_runs_repeat():
    settings = CP2 | {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    one, two = (run_layout(settings, 2, 2)[0] for _ in range(2))
    assert one.losses == two.losses
    assert one.losses != alone("gpt", 2).losses


def logits_of_two_texts(rank, world_size, fields):
    """Logits of this rank's tokens before and after the first document changes."""
    cfg = make_config(world_size=world_size, **{**BASE, **LLAMA, **PACKED, **fields})
    runtime = start(cfg, Launch(rank, world_size, rank, world_size))
    parts, cp = setup_model(cfg, runtime), runtime.mesh.cp
    parts.model.eval()
    found = []
    with torch.no_grad():
        for first in (7, 45):
            window = torch.cat([torch.full((5,), first), torch.tensor([0]), torch.arange(1, 12)])
            sample = cut_window(
                window, eod=0, pad=None, eod_mask_loss=True, reset_position_ids=True,
                reset_attention_mask=True,
            )  # fmt: skip
            batch = Batch.stack([sample]).context_shard(cp)
            logits = parts.model(
                batch.tokens, batch.position_ids, document_starts=batch.document_starts
            )
            found.append(to_sequence(all_gather(logits[0], cp), cp.size))
    return found


@pytest.mark.parametrize("comm", ["alone", "p2p", "all_gather", "a2a"])
def test_logits_of_a_document_do_not_see_the_one_before(comm):
    fields = {} if comm == "alone" else CP2 | {"cp_comm_type": (comm,)}
    ranks = 1 if comm == "alone" else 2
    before, after = run_ranks(logits_of_two_texts, ranks, fields)[0]
    assert torch.equal(before[6:], after[6:])
    assert not torch.equal(before[:6], after[:6])
