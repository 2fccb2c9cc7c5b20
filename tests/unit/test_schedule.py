"""Schedules as data, and the loop that runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron.core.errors import MegatronError
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedule import (
    Action,
    Op,
    from_text,
    generate,
    microbatches_of,
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
    assert microbatches_of(generate(3)[0], Op.B) == [0, 1, 2]


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


def test_runner_names_the_action_that_failed():
    work = Recorder()
    runner = Runner(work)
    with pytest.raises(KeyError):
        runner.run([Action(0, Op.F, 0), Action(0, Op.B, 1)])
    assert str(runner.current) == "0B1"
