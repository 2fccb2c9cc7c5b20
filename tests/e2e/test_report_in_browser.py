"""The FP8 report in a real browser: a run writes a log, the tool a page, Chromium shows it."""

from __future__ import annotations

import html.parser
import json
import os
import shutil
import subprocess
import sys

import pytest
from matplotlib.image import imread

from tests.e2e.launch import ROOT
from tests.e2e.test_pretrain import FP8, TP2, run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome",
                                    "google-chrome-stable"))), None,
)  # fmt: skip
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; apt-get install chromium, or put Chrome on the PATH"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on two ranks with figures of every second step, and limits so low that they alert."""
    root = tmp_path_factory.mktemp("run")
    done = run(
        2, *TP2, "--sequence-parallel", *FP8, "delayed", "--train-iters", "6",
        "--first-last-layers-bf16", "--num-layers", "3", "--eval-interval", "3", "--eval-iters",
        "1", "--fp8-stats-interval", "2", "--fp8-stats-samples", "0", "--fp8-alert-saturation",
        "1e-9", "--dllogger-json", str(root / "log.json"),
    )  # fmt: skip
    assert done.codes == [0, 0], done.out
    assert len(done.lines("WARNING: FP8 saturation at iteration ")) > 0  # once, not once a rank
    assert len(done.lines("WARNING: FP8")) == len(set(done.lines("WARNING: FP8")))
    return root


def write(place, *args):
    command = [sys.executable, ROOT / "tools" / "fp8_report.py", place, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Page(html.parser.HTMLParser):
    """Cells, texts of marked elements and attributes of the root, after scripts have run."""

    def __init__(self, text):
        super().__init__()
        self.root, self.cells, self.marks, self.told, self.texts = {}, [], 0, 0, []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "html":
            self.root = attrs
        kind = attrs.get("class", "")
        self.cells += [attrs] if kind == "cell" else []
        self.marks += kind == "mark"
        self.told += kind == "told"

    def handle_data(self, data):
        self.texts.append(data)


def browse(page, tmp_path, *args, where=""):
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1280,1800", *args, f"{page.as_uri()}{where}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert done.returncode == 0, done.stderr
    assert console == []
    return done.stdout


def logged(folder):
    records = [json.loads(x[5:])["data"] for x in (folder / "log.json").read_text().splitlines()]
    return [x["Fp8Stats"] for x in records if "Fp8Stats" in x]


@needs_browser
@pytest.mark.parametrize(("metric", "role"), [("snr_db", "input"), ("scale", "grad_output")])
def test_every_cell_shows_the_number_of_the_log(folder, tmp_path, metric, role):
    assert "4 layers, 4 steps of FP8 casts" in write(folder)
    report = folder / "fp8_report.html"
    page = Page(browse(report, tmp_path, "--dump-dom", where=f"#{metric}/{role}/0"))
    assert page.root.get("data-error") is None
    assert page.root["data-ready"] == "yes"
    stats = logged(folder)
    assert [columns["iteration"] for columns in stats] == [1, 2, 4, 6]
    expected = {}
    for column, columns in enumerate(stats):
        paths = list(dict.fromkeys(columns["path"]))
        for path, one, value in zip(columns["path"], columns["role"], columns[metric], strict=True):
            if one == role:
                expected[paths.index(path), column] = value
    found = {(int(c["data-r"]), int(c["data-c"])): c["data-value"] for c in page.cells}
    assert len(found) == 4 * 4 == int(page.root["data-cells"])
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        assert (float(found[place]) if found[place] else None) == value
    assert page.marks > 0
    shown = " ".join(page.texts)
    assert "layers.1.attn.linear_qkv" in shown
    assert "fp8 e4m3xe4m3 delayed" in shown
    assert "--first-last-layers-bf16: among the first 1 layers" in shown
    assert "beyond the format" in shown


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_it_is_not_blank(folder, tmp_path, scheme):
    report, picture = tmp_path / "report.html", tmp_path / "page.png"
    write(folder / "log.json", "-o", report)
    browse(
        report, tmp_path, f"--screenshot={picture}",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
    )  # fmt: skip
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (1800, 1280)
    assert (pixels[2, 2].mean() > 0.5) == (scheme == "light")
    # Text and lines everywhere, and the colours of a heat map: many and saturated.
    rows = (pixels.std(axis=1).mean(axis=1) > 0.01).mean()
    assert rows > 0.5
    vivid = pixels[pixels.max(axis=-1) - pixels.min(axis=-1) > 0.25]
    assert len(vivid) > 5000
    assert len({tuple(colour) for colour in (vivid[::7] * 16).astype(int)}) > 8


@needs_browser
def test_a_run_without_figures_says_why(tmp_path):
    log = tmp_path / "log.json"
    done = run(1, "--train-iters", "2", "--dllogger-json", str(log))
    assert done.codes == [0], done.out
    assert "no figures of FP8 casts" in write(tmp_path)
    page = Page(browse(tmp_path / "fp8_report.html", tmp_path, "--dump-dom"))
    assert page.root["data-ready"] == "yes"
    assert (page.root["data-cells"], page.cells) == ("0", [])
    assert "This run is not in FP8" in " ".join(page.texts)
