"""Random streams are functions of their address, and recompute replays them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from megatron.core.errors import MeshError
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.tensor_parallel.random import RngStreams, checkpoint


def streams(rank: int = 0, seed: int = 1, **sizes: int) -> RngStreams:
    world = sizes.pop("world", 1)
    mesh = ParallelState.build(
        MeshSizes(world, **sizes), rank, world, make_group=lambda ranks: None
    )
    return RngStreams(seed, mesh)


def draw(rng: RngStreams, path: str = "a", axis: str = "replicated") -> torch.Tensor:
    return torch.rand(16, generator=rng.generator(path, axis))


def test_a_stream_is_a_function_of_its_address():
    rng = streams()
    first = draw(rng)
    assert torch.equal(first, draw(rng))
    assert not torch.equal(first, draw(rng, "b"))
    assert not torch.equal(first, draw(streams(seed=2)))
    for position in ((1, 0), (0, 1)):
        with rng.at(position):
            assert not torch.equal(first, draw(rng))
    assert rng.position == (0, 0)
    assert torch.equal(first, draw(rng))


def test_default_generator_is_not_touched():
    before = torch.random.get_rng_state()
    streams().dropout(torch.ones(8), 0.5, "a", sharded=False)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tensor_parallel_ranks_share_replicated_streams_only():
    ranks = [streams(rank, world=4, tp=2) for rank in range(4)]
    replicated = [draw(rng) for rng in ranks]
    sharded = [draw(rng, axis="tp") for rng in ranks]
    assert torch.equal(replicated[0], replicated[1])
    assert torch.equal(replicated[2], replicated[3])
    assert not torch.equal(replicated[0], replicated[2])  # other data-parallel rank, other tokens
    distinct = {tuple(values.tolist()) for values in [*sharded, replicated[0], replicated[2]]}
    assert len(distinct) == 6


def test_context_parallel_ranks_hold_other_tokens():
    assert not torch.equal(draw(streams(0, world=2, cp=2)), draw(streams(1, world=2, cp=2)))


def test_unknown_axis():
    with pytest.raises(MeshError, match="replicated or tp"):
        streams().generator("a", "dp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_and_its_gradient(dtype):
    rng = streams()
    x = torch.ones(64, 64, dtype=dtype, requires_grad=True)
    y = rng.dropout(x, 0.25, "a", sharded=False)
    kept = y != 0
    assert 0.70 < kept.float().mean() < 0.80
    assert torch.equal(y[kept], torch.full_like(y[kept], 4 / 3))
    y.backward(torch.full_like(y, 3.0))
    assert torch.equal(x.grad, torch.where(kept, torch.tensor(4.0, dtype=dtype), 0.0))
    assert torch.equal(kept, rng.dropout(x, 0.25, "a", sharded=False) != 0)


def test_dropout_that_does_nothing_costs_nothing():
    x = torch.ones(4)
    assert streams().dropout(x, 0.0, "a", sharded=True) is x
    assert streams().dropout(x, 0.5, "a", sharded=True, training=False) is x


class Recorder:
    """Stands for FP8 state: counts what a forward records outside of a replay."""

    def __init__(self) -> None:
        self.recording = True
        self.recorded = 0

    def recompute_contexts(self):
        return self._first(), self._again()

    @contextmanager
    def _first(self):
        yield

    @contextmanager
    def _again(self):
        self.recording = False
        try:
            yield
        finally:
            self.recording = True


def run(recompute: bool):
    rng, fp8 = streams(), Recorder()
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    def block(x, weight):
        fp8.recorded += fp8.recording
        return rng.dropout(torch.tanh(x @ weight), 0.5, "block", sharded=False)

    x = torch.randn(4, 8, requires_grad=True)
    outputs = []
    for microbatch in range(2):
        rng.position = (3, microbatch)
        y = x
        for weight in weights:
            y = checkpoint(block, y, weight, rng=rng, fp8=fp8) if recompute else block(y, weight)
        outputs.append(y)
    rng.position = (9, 9)  # backward must not look at where the loop stands now
    for y in outputs:
        y.sum().backward()
    return [x.grad, *(w.grad for w in weights)], fp8.recorded


def test_recompute_is_bitwise_equal_and_records_once():
    plain, recorded = run(recompute=False)
    replayed, recorded_again = run(recompute=True)
    assert recorded == recorded_again == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


def test_recompute_restores_the_position_it_found():
    rng = streams()
    x = torch.ones(4, requires_grad=True)
    y = checkpoint(lambda v: rng.dropout(v, 0.5, "a", sharded=False).square(), x, rng=rng)
    rng.position = (5, 5)
    y.sum().backward()
    assert rng.position == (5, 5)


def test_recompute_keeps_no_activations():
    kept = []
    x = torch.ones(32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        checkpoint(lambda v: v.exp().sin().exp(), x)
    assert len(kept) == 1  # the input
    assert kept[0] is x


def test_recompute_without_gradients_is_a_plain_call():
    with torch.no_grad():
        assert checkpoint(lambda a, b: a + b, torch.ones(1), 2).item() == 3
