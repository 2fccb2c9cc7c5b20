"""A training loop of one's own over the pipeline: Megatron's calling convention, the same model."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from distpool import run_ranks
from parity import BASE, SyntheticSource, run_layout, worst

from megatron.config import make_config
from megatron.core import parallel_state
from megatron.core.build import Build
from megatron.core.distributed import DistributedDataParallel, finalize_gradients
from megatron.core.errors import MegatronError
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.layout import local_stages
from megatron.core.pipeline_parallel.schedules import forward_backward, get_forward_backward_func
from megatron.training.initialize import Launch, start
from megatron.training.parity.outcome import join

PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"num_virtual_stages_per_pipeline_rank": 2}
ZB = PP2 | {"pipeline_schedule": "zb-h1"}
FOUR = {"num_layers": 4}


@pytest.fixture(autouse=True)
def _no_mesh_is_left():
    yield
    parallel_state.destroy_model_parallel()


def per_token(mask, losses):
    """Megatron's loss function: sum, number of tokens, report."""
    total = (losses * mask).sum()
    return total, mask.sum().int(), {"lm loss": (total.detach().item(), mask.sum().item())}


def averaged(mask, losses):
    mean = (losses * mask).sum() / mask.sum().clamp(min=1.0)
    return mean, {"lm loss": mean.item()}


def forward_step(loss, iterator, model):
    batch = next(iterator)
    output = model(batch.tokens, batch.position_ids, labels=batch.labels)
    return output, functools.partial(loss, batch.loss_mask)


class OwnLoop:
    """What somebody writes who has a loop: parts, gradient buffers, iterators."""

    def __init__(self, rank, world_size, fields, loss=per_token):
        self.cfg = make_config(world_size=world_size, **{**BASE, "train_iters": 1, **fields})
        runtime = start(self.cfg, Launch(rank, world_size, rank, world_size))
        self.mesh = runtime.mesh
        parallel_state.destroy_model_parallel()
        parallel_state.install(self.mesh)
        self.queue = WeightGradQueue() if self.cfg.pipeline_schedule == "zb-h1" else None
        build = Build.root(self.cfg, self.mesh, runtime.backend, runtime.device)
        build = replace(build, weight_grads=self.queue)
        self.parts = [
            DistributedDataParallel(
                GPTModel(build, stages=[stage]), self.mesh.dp_cp, weight_grads=self.queue
            )
            for stage in local_stages(self.cfg, self.mesh.pp)
        ]
        self.source = SyntheticSource(self.cfg, self.mesh.dp.size)
        self.step = functools.partial(forward_step, loss)
        self.finalized = []

    def iterators(self):
        count = self.cfg.num_microbatches
        return [
            (self.source.batch(0, m, self.mesh.dp.rank) for m in range(count)) for _ in self.parts
        ]

    def finalize(self, parts, tokens):
        self.finalized.append(None if tokens is None else tokens.item())
        finalize_gradients(parts, self.mesh, 1 if tokens is None else tokens)

    def run(self, **more):
        for part in self.parts:
            part.zero_grad_buffer()
        arguments = {
            "forward_step_func": self.step,
            "data_iterator": self.iterators(),
            "model": self.parts,
            "num_microbatches": self.cfg.num_microbatches,
            "seq_length": self.cfg.seq_length,
            "micro_batch_size": self.cfg.micro_batch_size,
            "decoder_seq_length": self.cfg.seq_length,
            "finalize_model_grads_func": self.finalize,
            "weight_grads": self.queue,
        }
        return get_forward_backward_func()(**(arguments | more))

    def grads(self):
        own = {
            name: param.main_grad.clone()
            for part in self.parts
            for name, param in part.module.named_parameters()
        }
        return join(own, self.mesh.pp)


def step_and_evaluation(rank, world_size, fields):
    loop = OwnLoop(rank, world_size, fields)
    reports = loop.run()
    grads = loop.grads()
    evaluated = loop.run(forward_only=True)
    untouched = not any(g.any() for g in loop.grads().values())
    return reports, evaluated, grads, loop.finalized, untouched


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [({}, 1), (PP2, 2), (FOUR | VPP2, 2), (ZB, 2), (PP2 | {"micro_batch_size": 1}, 4)],
    ids=["pp1", "pp2", "pp2-vpp2", "pp2-zb", "pp2-dp2"],
)
def test_gradients_and_losses_are_those_of_the_projects_own_loop(fields, ranks):
    expected = run_layout(FOUR if "num_layers" in fields else {}, 1)[0]
    found = run_ranks(step_and_evaluation, ranks, fields, detail=False)
    last = [rank for rank in range(ranks) if rank >= ranks // 2] if ranks > 1 else [0]
    total, tokens = (
        sum(report["lm loss"][i] for rank in last for report in found[rank][0]) for i in (0, 1)
    )
    assert total / tokens == pytest.approx(expected.losses[0], rel=1e-6)
    for rank, (reports, evaluated, grads, finalized, untouched) in enumerate(found):
        assert len(reports) == (8 // BASE["micro_batch_size"] if rank in last else 0)
        assert evaluated == reports  # nothing was updated in between
        assert untouched
        assert worst(grads, expected.grads)[0] < 1e-5  # fp32 sums in another order
        assert len(finalized) == 1
    if ranks < 4:
        assert {f[0] for _, _, _, f, _ in found} == {tokens}


def means(rank, world_size, fields):
    loop = OwnLoop(rank, world_size, fields, averaged)
    reports = loop.run(grad_scale_func=lambda x: 4.0 * x)
    return reports, loop.grads(), loop.finalized


def test_a_loss_without_a_count_is_averaged_over_the_microbatches():
    alone = run_ranks(means, 1, {}, detail=False)[0]
    for reports, grads, finalized in run_ranks(means, 2, PP2, detail=False):
        assert finalized == [None]
        assert reports in ([], alone[0])
        assert worst(grads, alone[1])[0] < 1e-5
    # By hand: the mean of the microbatches' means, times the scale.
    loop = OwnLoop(0, 1, {}, averaged)
    for batch in loop.iterators()[0]:
        output, loss = loop.step(iter([batch]), loop.parts[0])
        (loss(output)[0] / loop.cfg.num_microbatches * 4.0).backward()
    assert worst(alone[1], loop.grads())[0] < 1e-6


def test_what_is_not_a_loss_is_collected():
    loop = OwnLoop(0, 1, {}, lambda mask, output, non_loss_data=False: output.shape)
    shapes = loop.run(forward_only=True, collect_non_loss_data=True)
    assert shapes == [(2, 16)] * 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"decoder_seq_length": 8}, "decoder_seq_length: got 8"),
        ({"collect_non_loss_data": True}, "collect_non_loss_data: got True"),
        ({"data_iterator": [None, None]}, "data_iterator: got 2 of them"),
        ({"num_microbatches": 0}, "microbatches: got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(more, words):
    loop = OwnLoop(0, 1, {})
    with pytest.raises(MegatronError, match=words):
        loop.run(**more)


def test_there_is_one_function_for_every_pipeline():
    assert get_forward_backward_func() is forward_backward
