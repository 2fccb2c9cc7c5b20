"""What a run tells about its FP8 casts: events, alerts, the dump, and where they end up."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from megatron.config import ConfigError, make_config
from megatron.core.errors import TrainingError
from megatron.core.fp8 import Role
from megatron.observe.events import Fp8Alert, Fp8Figures, Fp8Stats, Incident, Message
from megatron.observe.sinks import ConsoleSink, DlloggerSink, ScalarSink
from megatron.training import fp8_watch
from megatron.training.fp8_watch import Fp8Watch
from megatron.training.initialize import Launch, start
from megatron.training.providers import setup_model
from megatron.training.step import TrainStep
from tests.parity import BASE, SyntheticSource

FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_stats_interval": 1, "train_iters": 8}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 1}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "add_bias_linear": False}


class Run:
    """A run of a few steps with a watch, as the trainer has it."""

    def __init__(self, **fields):
        cfg = make_config(**{**BASE, **FP8, **fields})
        self.runtime = start(cfg, Launch())
        self.parts = setup_model(cfg, self.runtime)
        self.parts.fp8.stats = fp8_watch.collector(self.runtime)
        self.events = []
        self.watch = Fp8Watch(self.runtime, self.parts.fp8, self.events.append)
        self.step = TrainStep(cfg, self.runtime, self.parts, SyntheticSource(cfg, 1))
        self.iteration = 0

    def go(self, steps=1):
        size = self.runtime.config.global_batch_size
        for _ in range(steps):
            self.step.run(self.iteration + 1, self.iteration * size)
            self.iteration += 1
            self.watch.after_step()
        return self

    def kinds(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def test_a_step_that_is_due_brings_figures_of_every_layer_in_order():
    run = Run(fp8_stats_interval=2, first_last_layers_bf16=True, num_layers=3).go(4)
    found = run.kinds(Fp8Stats)
    assert [event.iteration for event in found] == [1, 2, 4]
    paths = list(dict.fromkeys(one.path for one in found[-1].figures))
    assert len(paths) == 4  # what the table has in high precision is not cast
    assert all(path.startswith("decoder.layers.1.") for path in paths)
    assert {one.role for one in found[-1].figures} == {role.value for role in Role}
    assert not run.kinds(Fp8Alert)
    assert not run.kinds(Incident)


def test_experts_of_a_layer_share_a_line_and_each_has_figures_of_its_own():
    run = Run(**EXPERTS).go()
    lines = [one for one in run.kinds(Fp8Stats)[0].figures if one.path.endswith("linear_fc1.*")]
    assert len(lines) == 2 * 3
    line = next(one for one in lines if one.role == "input")
    name = line.path.removesuffix("*")
    stats = run.parts.fp8.stats
    own = [stats.latest(f"{name}{i}")[Role.INPUT] for i in range(4) if stats.latest(f"{name}{i}")]
    assert len(own) > 1
    assert line.amax == max(one.amax for one in own)
    assert line.scale == min(one.scale for one in own)
    assert line.elements == sum(one.elements for one in own)


def test_a_tensor_that_is_not_finite_is_named(monkeypatch):
    run = Run().go()
    layer = run.parts.model.decoder.layers[1].mlp.linear_fc2
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: forward(x * math.inf))
    run.go(2)
    (alert,) = [a for a in run.kinds(Fp8Alert) if a.kind == "not finite"]
    assert (alert.iteration, alert.path) == (2, "decoder.layers.1.mlp.linear_fc2")
    assert alert.role == "input"


def test_a_layer_that_says_fp8_and_casts_nothing_is_told_of_once(monkeypatch):
    run = Run()
    layer = run.parts.model.decoder.layers[0].mlp.linear_fc1
    weight = layer.weight
    monkeypatch.setattr(
        layer, "forward", lambda x: ((layer.normalize(x).to(weight.dtype) @ weight.t()), layer.bias)
    )
    run.go(2)
    (alert,) = run.kinds(Fp8Alert)
    assert (alert.kind, alert.path) == ("not cast", "decoder.layers.0.mlp.linear_fc1")


def test_a_library_that_casts_by_itself_shows_magnitudes_and_scales(monkeypatch):
    run = Run(fp8_amax_history_len=2)
    run.parts.fp8.stats.note = lambda *_: None  # stands in for casts inside a library's kernels
    run.go(2)
    figures = run.kinds(Fp8Stats)[-1].figures
    assert len(figures) == 8 * 3
    assert all(one.amax > 0 and one.scale > 0 and one.elements == 0 for one in figures)
    assert all(one.saturated is one.underflow is one.snr_db is None for one in figures)
    slots = run.parts.fp8.layers["decoder.layers.0.mlp.linear_fc1"].slots
    one = next(f for f in figures if f.path == slots.path and f.role == "input")
    assert one.amax == slots.forward.amax_history[-1, 0]
    monkeypatch.setattr(type(run.runtime.backend), "name", "transformer_engine")
    events = []
    Fp8Watch(run.runtime, run.parts.fp8, events.append)
    assert isinstance(events[0], Message)
    assert "transformer_engine casts inside its kernels" in events[0].text


# -- the dump -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_dumps_of_two_runs_show_the_first_difference(tmp_path, recipe):
    fields = {"fp8_recipe": recipe, "fp8_stats_interval": 1,
              "fp8_format": "hybrid" if recipe == "delayed" else "e4m3"}  # fmt: skip
    files = {}
    for name, extra in {
        "plain": {}, "recompute": RECOMPUTE, "other": {"seed": 7},
    }.items():  # fmt: skip
        path = tmp_path / "deep" / name
        Run(**fields, **extra, fp8_debug_dump=str(path)).go(3)
        files[name] = path.read_text()
    assert files["plain"] == files["recompute"]
    assert files["plain"] != files["other"]
    records = [json.loads(line) for line in files["plain"].splitlines()]
    assert len(records) == 3 * 8 * 3
    assert records[0].keys() == {"iteration", "module", "tensor", "amax", "scale"}
    Run(**fields, fp8_debug_dump=str(tmp_path / "deep" / "plain")).go(1)
    assert len((tmp_path / "deep" / "plain").read_text().splitlines()) == 8 * 3  # started anew


def test_a_dump_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="--fp8-debug-dump: got .*cannot be written"):
        Run(fp8_debug_dump=str(tmp_path / "file" / "x"))
    run = Run(fp8_debug_dump=str(tmp_path / "dump")).go()
    monkeypatch.setattr(run.watch, "_dump", tmp_path)  # a folder: opening it fails
    run.go(2)
    assert [event.where for event in run.kinds(Incident)] == ["--fp8-debug-dump"]


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_stats_interval": -1}, "--fp8-stats-interval: got -1"),
        ({"fp8_stats_samples": -5}, "--fp8-stats-samples: got -5"),
        ({"fp8_alert_saturation": 2.0}, "--fp8-alert-saturation: got 2.0"),
        ({"fp8_alert_underflow": -0.1}, "--fp8-alert-underflow: got -0.1"),
        ({"fp8_alert_amax_ratio": 0.5}, "--fp8-alert-amax-ratio: got 0.5"),
        ({"fp8_debug_dump": "x", "fp8_stats_interval": 0}, "--fp8-debug-dump: got x"),
        ({"fp8_debug_dump": "x", "fp8_format": None}, "--fp8-debug-dump: got x"),
    ],
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**{**BASE, **FP8, **fields})


# -- sinks ----------------------------------------------------------------------------------------

LINE = Fp8Figures("decoder.layers.0.a", "input", 1 / 3, 448.0, 0.0, 0.25, None, 64)
STATS = Fp8Stats(7, (LINE, replace(LINE, role="weight", amax=math.inf, snr_db=30.5)))
ALERT = Fp8Alert(7, "saturation", "decoder.layers.0.a", "input", 0.5, 0.01, "50% are", ("x y",))


def test_the_json_file_has_figures_by_column_and_alerts(tmp_path):
    path = tmp_path / "log.json"
    sink = DlloggerSink(str(path))
    for event in (Message("words"), STATS, ALERT):
        sink.handle(event)
    sink.close()
    stats, alert = (json.loads(line[5:])["data"] for line in path.read_text().splitlines())
    assert stats["Fp8Stats"]["iteration"] == 7
    assert stats["Fp8Stats"]["role"] == ["input", "weight"]
    assert stats["Fp8Stats"]["amax"] == [0.333333333, None]
    assert stats["Fp8Stats"]["snr_db"] == [None, 30.5]
    assert alert["Fp8Alert"]["others"] == ["x y"]


def test_a_kind_of_event_that_the_file_does_not_know_is_written_as_it_is(tmp_path):
    path = tmp_path / "log.json"
    sink = DlloggerSink(str(path))
    sink.handle(replace(ALERT, kind="new"))
    sink.close()
    assert json.loads(path.read_text()[5:])["data"]["Fp8Alert"]["kind"] == "new"


def test_scalars_have_a_name_for_each_tensor():
    written = []
    cfg = make_config(**{**BASE, **FP8})
    sink = ScalarSink("board", lambda *scalar: written.append(scalar), lambda: None, cfg)
    sink.handle(STATS)
    assert ("fp8 underflow/decoder.layers.0.a/input", 0.25, 7) in written
    assert ("fp8 snr_db/decoder.layers.0.a/weight", 30.5, 7) in written
    assert len(written) == 2 * 4 + 1


def test_the_console_shows_alerts_only_and_only_once(capsys):
    for first in (True, False):
        console = ConsoleSink(first=first, last=not first)
        console.handle(STATS)
        console.handle(ALERT)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "FP8 saturation at iteration 7" in shown.err


def test_an_incident_of_every_rank_is_shown_once_and_logged(capsys, tmp_path):
    for first in (True, False):
        ConsoleSink(first=first, last=not first).handle(Incident("oh", shared=True))
        ConsoleSink(first=first, last=not first).handle(Incident("own"))
    assert capsys.readouterr().err.splitlines() == ["WARNING: oh"] + ["WARNING: own"] * 2
    sink = DlloggerSink(str(tmp_path / "log"))  # which the last rank has
    sink.handle(Incident("oh", shared=True))
    sink.close()
    assert '"what": "oh"' in (tmp_path / "log").read_text()


def test_names_of_experts():
    for path, name in [
        ("decoder.layers.3.mlp.experts.linear_fc1.12", "decoder.layers.3.mlp.experts.linear_fc1.*"),
        ("decoder.layers.3.mlp.linear_fc1", "decoder.layers.3.mlp.linear_fc1"),
        ("mlp.experts.local_experts.3.linear_fc2", "mlp.experts.local_experts.*.linear_fc2"),
    ]:
        assert fp8_watch._together(path) == name
