"""Schedules as data, and the loop that runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron.core.errors import MegatronError
from megatron.core.fp8 import Fp8State, linear
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedule import (
    Action,
    Op,
    from_text,
    generate,
    to_text,
)


def test_text_form_round_trips():
    text = "0F0 0SEND_F0 0RECV_B0 0B0 0GRAD_SYNC 0AMAX_SYNC\n1RECV_F0 1F0 1B0 1SEND_B0 1GRAD_SYNC"
    assert to_text(from_text(text)) == text
    assert Action.parse("2SEND_F1") == Action(2, Op.SEND_F, 1)


@pytest.mark.parametrize("text", ["F1", "0X1", "0F", "0GRAD_SYNC3", "0f1", ""])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(MegatronError):
        Action.parse(text)


def test_one_stage_alternates_and_syncs_once():
    assert to_text(generate(3)) == "0F0 0B0 0F1 0B1 0F2 0B2 0GRAD_SYNC 0AMAX_SYNC"
    assert to_text(generate(2, training=False)) == "0F0 0F1"


def test_schedules_need_no_torch():
    code = "import sys, megatron.core.pipeline_parallel.schedule; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class Recorder:
    def __init__(self):
        self.calls = []
        self.weight = torch.ones((), requires_grad=True)

    def forward(self, stage, microbatch, received):
        self.calls.append(f"F{microbatch}")
        return self.weight * (microbatch + 1)

    def sync_gradients(self):
        self.calls.append(f"G{self.weight.grad:g}")

    def sync_amax(self):
        self.calls.append("A")


def test_runner_executes_in_order_and_scales_the_root():
    work = Recorder()
    Runner(work, lambda: torch.tensor(4.0)).run(generate(3)[0])
    assert work.calls == ["F0", "F1", "F2", "G24", "A"]


def test_zero_bubble_puts_weight_passes_off_and_runs_them_all():
    first, last = generate(3, pipeline_size=2, kind="zb-h1")
    assert to_text([first]) == "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2 0GRAD_SYNC 0AMAX_SYNC"
    assert to_text([last]) == "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2 1GRAD_SYNC 1AMAX_SYNC"
    assert to_text(generate(2, pipeline_size=2, kind="zb-h1", training=False)) == (
        "0F0 0F1\n1F0 1F1"
    )
    assert Action.parse("1W2") == Action(1, Op.W, 2)


class Layers(Recorder):
    """Two linear layers that may put their weight gradients off."""

    def __init__(self, queue):
        super().__init__()
        precision = Fp8State.disabled(params_dtype=torch.float32).for_linear("layer")
        self.weights = [torch.nn.Parameter(torch.full((2, 2), float(i))) for i in (1, 2)]
        for weight in self.weights:
            weight.main_grad = torch.zeros(2, 2)
        self.apply = lambda x, w: linear(x, w, None, precision, later=queue)

    def forward(self, stage, microbatch, received):
        self.calls.append(f"F{microbatch}: {self.weights[0].main_grad.sum():g}")
        x = torch.full((3, 2), microbatch + 1.0, requires_grad=True)
        return self.apply(self.apply(x, self.weights[0]), self.weights[1]).sum()

    def sync_gradients(self):
        self.calls.append(f"G: {self.weights[0].main_grad.sum():g}")


def test_runner_runs_weight_passes_where_the_schedule_has_them():
    queue = WeightGradQueue()
    late, together = Layers(queue), Layers(queue)
    Runner(late, weight_grads=queue).run(
        from_text("0F0 0B0 0F1 0B1 0W0 0F2 0B2 0W1 0W2 0GRAD_SYNC 0AMAX_SYNC")[0]
    )
    Runner(together, weight_grads=queue).run(generate(3)[0])
    assert late.calls == ["F0: 0", "F1: 0", "F2: 48", "G: 288", "A"]
    assert together.calls == ["F0: 0", "F1: 48", "F2: 144", "G: 288", "A"]
    for one, other in zip(late.weights, together.weights, strict=True):
        assert torch.equal(one.main_grad, other.main_grad)


def test_a_schedule_with_weight_passes_needs_a_queue():
    with pytest.raises(TypeError, match="weight_grads"):
        Runner(Recorder()).run(from_text("0F0 0B0 0W0")[0])


def test_runner_names_the_action_that_failed():
    work = Recorder()
    runner = Runner(work)
    with pytest.raises(KeyError):
        runner.run([Action(0, Op.F, 0), Action(0, Op.B, 1)])
    assert str(runner.current) == "0B1"
