"""The data of the FP8 report: broken, resumed, rolled-back and large logs, and wrong folders."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.observe.run_log import LoggedEvent, RunLogError, find_log, read_log
from tools import fp8_report

ROOT = Path(__file__).resolve().parents[2]

START = {"config": {"fp8_format": "hybrid", "fp8_stats_interval": 5}, "iteration": 0}
PATHS = ("decoder.layers.0.a", "decoder.layers.1.a")


def line(step, **data):
    return f"DLLL {json.dumps({'type': 'LOG', 'step': step, 'data': data})}\n"


def step(iteration, loss):
    return line(iteration, **{"lm loss": loss, "learning_rate": 1.0, "grad_norm": 0.5})


def stats(iteration, snr=30.0, **columns):
    size = len(PATHS)
    made = {"path": list(PATHS), "role": ["input"] * size, "snr_db": [snr] * size,
            "amax": [2.0] * size, "scale": [64.0] * size, "saturated": [0.0] * size,
            "underflow": [0.0] * size, **columns}  # fmt: skip
    return line([], Fp8Stats={"iteration": iteration, **made})


def log_of(tmp_path, *lines):
    path = tmp_path / "log.json"
    path.write_text("".join(lines))
    return read_log(path)


def run(*args):
    command = [sys.executable, ROOT / "tools" / "fp8_report.py", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_last_line_that_was_cut_off(tmp_path):
    log = log_of(tmp_path, line("PARAMETER", **START), step(1, 5.0), step(2, 4.0)[:40])
    assert (log.steps[1]["lm loss"], log.last_iteration) == (5.0, 1)
    assert log.only_the_end_is_missing
    assert "incomplete" in fp8_report.notes(log)[0]


def test_lines_that_cannot_be_read_are_named_and_left_out(tmp_path):
    bad = ["garbage\n", "DLLL 5\n", line([], Fp8Stats=3), "DLLL {}\n", "DLLL [\x00\n"]
    log = log_of(tmp_path, step(1, 5.0), *bad, step(2, 4.0))
    assert log.unreadable == [2, 3, 4, 5, 6]
    assert list(log.steps) == [1, 2]
    assert fp8_report.notes(log) == [
        "Lines that could not be read and are left out: 2, 3, 4, 5, 6."
    ]


def test_a_resumed_run_keeps_the_newest_record_of_a_step(tmp_path):
    again = line("PARAMETER", **{**START, "iteration": 2})
    log = log_of(tmp_path, line("PARAMETER", **START), step(1, 5.0), step(2, 4.0), step(3, 9.0),
                 stats(3), step(4, 9.0), again, step(3, 3.0))  # fmt: skip
    assert {i: x["lm loss"] for i, x in log.steps.items()} == {1: 5.0, 2: 4.0, 3: 3.0}
    assert [i for i, _ in log.abandoned] == [3, 4]
    assert log.stats == {}
    assert log.starts == 2


def test_a_new_run_in_the_file_of_an_old_one_counts_alone(tmp_path):
    start = line("PARAMETER", **START)
    incident = line([], Incident={"what": "old", "where": ""})
    log = log_of(tmp_path, start, step(1, 9.0), stats(1), incident, start, step(2, 3.0))
    assert list(log.steps) == [2]
    assert (log.stats, log.events, log.abandoned, log.earlier_runs) == ({}, [], [], 1)
    assert fp8_report.notes(log) == ["Earlier runs in the same log are left out."]


def test_a_run_that_went_back_shows_what_it_left(tmp_path):
    event = {"iteration": 4, "back_to": 2, "reason": "loss 9", "count": 1}
    log = log_of(tmp_path, step(1, 5.0), step(2, 4.0), step(4, 9.0), line([], Rollback=event),
                 step(3, 3.0))  # fmt: skip
    assert sorted(log.steps) == [1, 2, 3]
    data = fp8_report.page_data(log)
    assert data["curve"]["abandoned"] == [[4, 9.0]]
    (shown,) = data["events"]
    assert shown["kind"] == "rollback"
    assert (shown["category"], shown["iteration"]) == ("decision", 4)
    assert shown["text"] == "loss 9 (back to 2, count 1)"


def test_events_of_any_kind_become_lines():
    alert = {"iteration": 7, "kind": "outlier", "path": "a.b", "role": "input", "value": 50.0,
             "limit": 32.0, "what": "too large", "others": ["c input"], "where": "pp1"}  # fmt: skip
    shown = fp8_report.event_line(LoggedEvent("Fp8Alert", 7, alert))
    assert shown == {"iteration": 7, "kind": "outlier", "category": "alert", "where": "a.b input",
                     "text": "too large", "others": ["c input"]}  # fmt: skip
    change = {"iteration": 9, "layer": "a.b", "what": "unstable", "figures": {"variation": 1 / 3}}
    shown = fp8_report.event_line(LoggedEvent("PrecisionChange", 9, change))
    assert shown["kind"] == "precision change"
    assert shown["text"] == "unstable (variation 0.333333)"
    shown = fp8_report.event_line(LoggedEvent("CheckpointSaved", 9, {"path": "x/iter_9"}))
    assert (shown["category"], shown["where"], shown["text"]) == ("quiet", "", "x/iter_9")


def test_an_event_without_an_iteration_is_placed_by_its_neighbours(tmp_path):
    log = log_of(tmp_path, step(8, 5.0), line([], Incident={"what": "oh", "where": "sink x"}))
    assert [(event.kind, event.iteration) for event in log.events] == [("Incident", 8)]


def test_a_second_precision_table_is_news_and_the_newest_counts(tmp_path):
    tables = [line([], PrecisionTable={"lines": [{"module": m, "count": 1, "delivered": "fp8"}]})
              for m in ("a", "a", "b")]  # fmt: skip
    log = log_of(tmp_path, *tables[:2], step(4, 1.0), tables[2])
    assert [x["module"] for x in log.precision] == ["b"]
    assert [(event.kind, event.iteration) for event in log.events] == [("PrecisionTable", 4)]


def test_a_long_run_is_thinned_to_the_worst(tmp_path):
    many = range(1, 1001)
    bad = {777: 3.0}
    log = log_of(tmp_path, *(stats(i, bad.get(i, 30.0)) for i in many),
                 *(step(i, float(i)) for i in range(1, 5001)))  # fmt: skip
    data = fp8_report.page_data(log)
    heat, curve = data["heat"], data["curve"]
    assert heat["thinned"]
    assert heat["measured"] == 1000
    assert len(heat["last"]) <= fp8_report.MAX_COLUMNS
    assert heat["first"][0] == 1
    assert heat["last"][-1] == 1000
    row = heat["cells"]["input"]["snr_db"][1]
    assert sorted(set(row)) == [3.0, 30.0]
    column = row.index(3.0)
    assert heat["first"][column] <= 777 <= heat["last"][column]
    assert curve["thinned"]
    assert len(curve["iterations"]) <= fp8_report.MAX_POINTS
    assert curve["loss"][0] == 2.0  # the mean of 1, 2 and 3


def test_layers_and_steps_without_figures_stay_empty(tmp_path):
    only = {"path": [PATHS[1]], "role": ["weight"], "snr_db": [None], "amax": [1.0],
            "scale": [2.0], "saturated": [None], "underflow": [None]}  # fmt: skip
    log = log_of(tmp_path, stats(5), stats(10, **only), line([], Fp8Stats={"iteration": 15}))
    heat = fp8_report.page_data(log)["heat"]
    assert heat["last"] == [5, 10]
    assert heat["cells"]["input"]["amax"] == [[2.0, None], [2.0, None]]
    assert heat["cells"]["weight"]["amax"] == [[None, None], [None, 1.0]]
    assert heat["cells"]["weight"]["snr_db"] == [[None, None], [None, None]]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"fp8_format": None}, "not in FP8"),
        ({"fp8_format": "hybrid", "fp8_stats_interval": 0}, "--fp8-stats-interval 0"),
        ({"fp8_format": "hybrid", "fp8_stats_interval": 5}, "no figures of FP8 casts (yet)"),
    ],
)
def test_why_there_is_no_heat_map(tmp_path, config, why):
    log = log_of(tmp_path, line("PARAMETER", config=config), step(1, math.nan))
    data = fp8_report.page_data(log)
    assert data["heat"] is None
    assert why in data["why_nothing"]
    assert data["curve"]["loss"] == [None]


def test_text_of_a_log_cannot_leave_its_place(tmp_path):
    evil = "</script><script>alert(1)</script>"
    log = log_of(tmp_path, line([], Incident={"what": evil, "where": evil}), step(1, math.inf))
    page = fp8_report.render(fp8_report.page_data(log))
    assert evil not in page
    assert page.count("</script>") == 2
    assert "NaN" not in page.split('id="data">')[1].split("</script>")[0]


def test_the_page_needs_nothing_else(tmp_path):
    (tmp_path / "log.json").write_text(line("PARAMETER", **START) + step(1, 5.0) + stats(1))
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 layers, 1 steps of FP8 casts" in done.stdout
    page = (tmp_path / "fp8_report.html").read_text()
    for word in ("http://", "https://", "src=", "@import", "url(", "fetch("):
        assert word not in page.replace("http://www.w3.org/2000/svg", "")


def test_wrong_folders(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    for place, message in [
        (tmp_path / "missing", "There is no such folder. Check the path."),
        (tmp_path, "No file in it is the log of a run. Train with --dllogger-json FILE"),
        (tmp_path / "notes.txt", "It is no log of a run"),
    ]:
        with pytest.raises(RunLogError, match=message.replace(".", r"\.")):
            find_log(place)
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(step(1, 5.0))
    with pytest.raises(RunLogError, match=r"logs of 2 runs: a\.json, b\.json\. Give one of"):
        find_log(tmp_path)
    assert find_log(tmp_path / "b.json").name == "b.json"
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: RUN_DIR: got ")
    done = run(tmp_path / "a.json", "-o", tmp_path / "none" / "x.html")
    assert done.returncode == 2
    assert "error: --output: got" in done.stderr
