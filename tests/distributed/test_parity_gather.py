"""The parity harness finds the global gradients wherever they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distpool import RankError, run_ranks
from parity import run_layout, worst

from megatron.core.errors import MegatronError
from megatron.core.mesh import Axis
from megatron.training.parity.outcome import errors, join, same_bits

ZERO = {"use_distributed_optimizer": True, "ddp_bucket_size": 2000}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}


@pytest.mark.parametrize(("fields", "ranks"), [({}, 2), (TP2, 4), (PP2, 4)], ids=str)
def test_gradients_under_the_distributed_optimizer(fields, ranks):
    """Each rank has its ranges only; gathered they are those of plain data parallelism."""
    plain = run_layout(fields, ranks)[0]
    for outcome in run_layout(fields | ZERO, ranks):
        assert list(outcome.grads) == list(plain.grads)
        assert worst(outcome.grads, plain.grads)[0] == 0


def joined(rank, world_size, drift):
    pair = Axis("pp", 2, rank, (0, 1), dist.group.WORLD)
    own = {f"of {rank}": torch.ones(1), "tied": torch.full((2,), 1.0 + drift * rank)}
    return join(own, pair)


def test_joining_finds_copies_that_differ():
    assert run_ranks(joined, 2, 0.0)[1].keys() == {"of 0", "of 1", "tied"}
    with pytest.raises(RankError, match="tied: got another value on pp rank 1"):
        run_ranks(joined, 2, 1e-7)
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert same_bits({"x": nan}, {"x": nan.clone()})
    assert not same_bits({"x": nan}, {"x": zero})
    assert not same_bits(zero, torch.zeros(2))


def test_errors_are_relative_and_a_nan_is_the_worst():
    reference = {"w": torch.tensor([1.0, -4.0]), "output_layer.weight": torch.ones(3, 1)}
    ours = {
        "w": torch.tensor([1.0, -4.2]),
        "output_layer.weight": torch.tensor([[1.0], [1.0], [9.0]]),  # the last row is padding
    }
    found = errors(ours, reference, vocab_size=2)
    assert found == {"w": pytest.approx(0.05), "output_layer.weight": 0}
    ours["w"][0] = float("nan")
    assert errors(ours, reference, 2)["w"] == float("inf")
    with pytest.raises(MegatronError, match="bias"):
        errors(ours | {"bias": torch.ones(1)}, reference, 2)
