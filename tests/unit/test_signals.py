"""Reasons to stop early."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from megatron.config import make_config
from megatron.core.mesh import Axis
from megatron.training import signals
from megatron.training.signals import ExitWatch

CPU = torch.device("cpu")


def watch(started=None, **fields):
    cfg = make_config(mock_data=True, num_layers=1, hidden_size=16, num_attention_heads=1,
                      seq_length=8, **fields)  # fmt: skip
    return ExitWatch(cfg, Axis.single("world"), CPU, started or time.monotonic())


def test_nothing_asked_nothing_happens():
    with watch() as own:
        assert own.reason(100) is None
        assert not own.interrupted()


def test_interval():
    with watch(exit_interval=5) as own:
        assert own.reason(4) is None
        assert own.reason(10) == "exiting program at iteration 10"


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; the list holds its time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_duration(clock):
    with watch(exit_duration_in_mins=2, started=clock[0] - 90) as own:
        assert own.reason(1) is None
        clock[0] += 60
        assert own.reason(1) == "exiting program after 2.50 minutes"


def test_signal_is_noted_inside_and_handled_as_before_outside():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("outer"))
    try:
        with watch(exit_signal_handler=True) as own:
            assert own.reason(1) is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert own.interrupted()
            assert own.reason(2) == "exiting program after receiving SIGUSR1."
        os.kill(os.getpid(), signal.SIGUSR1)
        with watch() as without_flag:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert without_flag.reason(1) is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["outer", "outer"]


def test_a_deadline_runs_from_the_signal_on(clock):
    with watch(exit_signal_handler=True, exit_signal="SIGHUP", exit_signal_deadline=5.0) as own:
        assert own.reason(1) is None
        assert own.seconds_left() is None
        os.kill(os.getpid(), signal.SIGHUP)
        clock[0] += 0.5
        assert own.reason(2) == "exiting program after receiving SIGHUP."
        assert own.seconds_left() == 4.5
