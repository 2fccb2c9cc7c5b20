"""The bus sums steps up, and the sinks show or store events."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types

import pytest
import torch

from megatron.config import make_config
from megatron.core.mesh import Axis
from megatron.observe.bus import Bus
from megatron.observe.events import (
    CheckpointSaved,
    EvalEnd,
    Incident,
    IntervalEnd,
    MemoryUse,
    Message,
    RunStart,
    StepEnd,
)
from megatron.observe.sinks import ConsoleSink, DlloggerSink, ProgressSink, build_sinks


class Recorder:
    name = "recorder"

    def __init__(self):
        self.events = []

    def handle(self, event):
        self.events.append(event)

    def close(self):
        self.events.append("closed")

    def kinds(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def step(iteration, loss=1.0, **fields):
    losses = {} if fields.get("skipped") else {"lm loss": loss}
    figures = {"train_iters": 9, "consumed_samples": 4 * iteration, "learning_rate": 0.1}
    return StepEnd(iteration, losses=losses, global_batch_size=4, tokens=100, flops=6e12,
                   **figures, **fields)  # fmt: skip


def bus(*sinks, log_interval=2, clock=None):
    made = Bus(sinks, log_interval=log_interval, world=Axis.single("world"),
               device=torch.device("cpu"), clock=clock or Clock())  # fmt: skip
    made.start()
    return made


def test_first_step_and_every_interval_are_summed_up():
    sink, clock = Recorder(), Clock()
    own = bus(sink, clock=clock)
    for iteration, loss in [(1, 4.0), (2, 2.0), (3, 7.0), (4, 1.0)]:
        clock.now += 0.5
        own.emit(step(iteration, loss))
    first, second, third = sink.kinds(IntervalEnd)
    assert (first.iterations, first.losses["lm loss"]) == (1, 4.0)
    # The line after the first step does not start a new interval.
    assert (second.iterations, second.losses["lm loss"]) == (2, 3.0)
    assert (third.iterations, third.losses["lm loss"]) == (2, 4.0)
    assert third.seconds_per_iteration == third.fastest_seconds_per_iteration == 0.5
    assert third.tokens_per_second == 200.0
    assert third.tflops_per_rank == pytest.approx(12.0)


def test_skipped_steps_do_not_count_in_the_loss():
    sink = Recorder()
    own = bus(sink, log_interval=3)
    for event in [step(4, 1.0), step(5, skipped=True, nan=True), step(6, 3.0)]:
        own.emit(event)
    last = sink.kinds(IntervalEnd)[-1]
    assert last.losses["lm loss"] == 2.0
    assert (last.skipped_iterations, last.nan_iterations) == (1, 1)


def test_time_inside_paused_is_left_out():
    sink, clock = Recorder(), Clock()
    own = bus(sink, log_interval=1, clock=clock)
    clock.now += 1.0
    with own.paused():
        clock.now += 50.0
    own.emit(step(1))
    assert sink.kinds(IntervalEnd)[0].seconds_per_iteration == 1.0


def test_a_failing_sink_is_an_incident_and_is_not_asked_again():
    class Broken(Recorder):
        name = "broken"

        def handle(self, event):
            super().handle(event)
            raise OSError("disk full")

    broken, sound = Broken(), Recorder()
    own = bus(broken, sound)
    own.emit(step(1))
    own.emit(step(2))
    (incident,) = sound.kinds(Incident)
    assert incident.where == "sink broken"
    assert "OSError: disk full" in incident.what
    assert len(broken.events) == 1
    assert len(sound.kinds(StepEnd)) == 2
    own.close()
    assert sound.events[-1] == "closed"


def test_console_divides_the_talking_between_first_and_last_rank(capsys):
    events = [Message("hello"), RunStart({"lr": 1}, 2, "cpu", "native", "no CUDA", 7, 1.0),
              EvalEnd("iteration 1", 1, {"lm loss": 1.0})]  # fmt: skip
    for event in events:
        ConsoleSink(first=True, last=False).handle(event)
    out = capsys.readouterr().out
    assert "hello" in out
    assert "layer backend: native (no CUDA)" in out
    assert "validation" not in out
    for event in events:
        ConsoleSink(first=False, last=True).handle(event)
    out = capsys.readouterr().out
    assert "hello" not in out
    assert "validation loss at iteration 1 |" in out


def test_dllogger_lines_can_be_read_back(tmp_path):
    path = tmp_path / "deep" / "log.json"
    own = bus(DlloggerSink(str(path)), log_interval=1)
    own.emit(RunStart({"lr": 1}, 1, "cpu", "native", "", 7, 1.0))
    own.emit(step(1, 2.5, grad_norm=0.5, figures={"moe/load_entropy": 0.75}))
    own.emit(EvalEnd("iteration 1", 1, {"lm loss": 3.0}))
    own.emit(CheckpointSaved(1, "ckpt/iter_0000001"))
    own.close()
    lines = path.read_text().splitlines()
    assert all(line.startswith("DLLL ") for line in lines)
    records = [json.loads(line[5:]) for line in lines]
    assert [r["step"] for r in records] == ["PARAMETER", 1, 1, []]
    assert records[0]["data"]["config"] == {"lr": 1}
    assert records[1]["data"]["lm loss"] == 2.5
    assert records[1]["data"]["grad_norm"] == 0.5
    assert records[1]["data"]["moe/load_entropy"] == 0.75
    assert records[2]["data"]["validation lm loss"] == 3.0
    saved = {"iteration": 1, "path": "ckpt/iter_0000001"}
    assert records[3]["data"] == {"CheckpointSaved": saved}


def test_progress_bar_fills():
    stream = io.StringIO()
    sink = ProgressSink(stream, width=9)
    sink.handle(step(3))
    sink.handle(step(9))
    shown = stream.getvalue().split("\r\033[K")
    assert shown[1] == "[###......] 3/9 lm loss 1.0000"
    assert shown[2].startswith("[#########] 9/9")


def test_tensorboard_has_the_familiar_names(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = make_config(
        mock_data=True, num_layers=1, hidden_size=16, num_attention_heads=1, seq_length=8,
        tensorboard_dir=str(tmp_path), log_validation_ppl_to_tensorboard=True,
        log_timers_to_tensorboard=True, log_throughput=True,
    )  # fmt: skip
    sinks, incidents = build_sinks(cfg, rank=0)
    assert incidents == []
    own = bus(*sinks, log_interval=1)
    figures = {"moe/load_entropy": 0.75}
    own.emit(step(1, 2.0, grad_norm=0.5, num_zeros=3, params_norm=4.0, figures=figures))
    own.emit(EvalEnd("iteration 1", 1, {"lm loss": 3.0}, consumed_samples=4))
    own.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    for name in ["learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "num-zeros",
                 "params-norm", "moe/load_entropy", "lm loss validation",
                 "lm loss validation ppl"]:  # fmt: skip
        assert {name, f"{name} vs samples"} <= names, name
    assert {"iteration-time", "throughput"} <= names
    assert events.Scalars("lm loss vs samples")[0].step == 4


def test_an_output_that_cannot_be_opened_is_an_incident(tmp_path):
    (tmp_path / "file").write_text("")
    cfg = make_config(mock_data=True, num_layers=1, hidden_size=16, num_attention_heads=1,
                      seq_length=8, dllogger_json=str(tmp_path / "file" / "log.json"))  # fmt: skip
    sinks, (incident,) = build_sinks(cfg, rank=0)
    assert [s.name for s in sinks] == ["console"]
    assert incident.where == "--dllogger-json"


def test_events_need_nothing_but_the_standard_library():
    code = "import sys, megatron.observe.events; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_wandb_gets_the_scalars_without_the_second_axis(monkeypatch):
    logged, opened = [], {}

    class Run:
        def log(self, values, step):
            logged.append((values, step))

        def finish(self):
            logged.append("finished")

    def init(**settings):
        opened.update(settings)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    cfg = make_config(mock_data=True, num_layers=1, hidden_size=16, num_attention_heads=1,
                      seq_length=8, wandb_project="p", wandb_exp_name="e")  # fmt: skip
    sinks, incidents = build_sinks(cfg, rank=0)
    assert incidents == []
    own = bus(*sinks)
    own.emit(step(1, 2.0))
    own.close()
    assert (opened["project"], opened["name"]) == ("p", "e")
    assert opened["config"]["hidden_size"] == 16
    assert ({"lm loss": 2.0}, 1) in logged
    assert not [x for x in logged if "vs samples" in str(x)]
    assert logged[-1] == "finished"


def test_a_line_of_the_console_is_one_write(monkeypatch):
    # Several ranks share a stream that nothing buffers.
    writes = []
    stream = types.SimpleNamespace(write=writes.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    console = ConsoleSink(first=True, last=True)
    for event in (Message("one"), Incident("two"), MemoryUse(0, 1, "process", 1, 1, 1, 1)):
        console.handle(event)
    assert [text.count("\n") for text in writes] == [1, 1, 1]
