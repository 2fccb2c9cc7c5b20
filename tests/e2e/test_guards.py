"""The guards on the command line: what a run says, writes down and returns."""

from __future__ import annotations

import json

from tests.e2e.launch import launch
from tests.e2e.refusals import check_refused
from tests.e2e.test_resume import DELAYED, SMALL

# With such a rate the second step's loss is far above the first one's.
WILD = ["--lr", "30", "--lr-warmup-iters", "12", "--clip-grad", "0", "--train-iters", "40"]
ROLLBACK = [
    "--fp8-spike-rollback", "--fp8-spike-rollback-interval", "2",
    "--fp8-spike-rollback-window", "4",
    "--fp8-spike-rollback-deviations", "3", "--fp8-spike-rollback-limit", "2",
    "--fp8-spike-rollback-precision", "bf16",
]  # fmt: skip


def test_a_run_that_cannot_be_saved_stops_after_its_rollbacks(tmp_path):
    log = tmp_path / "log.json"
    flags = [*SMALL, *DELAYED, *WILD, *ROLLBACK, "--fp8-auto-fallback", "--fp8-stats-interval", "1"]
    done = launch(2, [*flags, "--use-distributed-optimizer", "--dllogger-json", str(log)])
    check_refused(done, 1, "--fp8-spike-rollback-limit", "2 rollbacks and another spike")
    assert len(done.lines("spike rollback: a snapshot every 2 iterations")) == 1
    shown = done.lines("ROLLBACK ")
    assert [line.split(":")[0] for line in shown] == ["ROLLBACK 1 of 2", "ROLLBACK 2 of 2"]
    records = [json.loads(line[5:])["data"] for line in log.read_text().splitlines()]
    written = [one["Rollback"] for one in records if "Rollback" in one]
    assert [one["count"] for one in written] == [1, 2]
    assert written[0]["end_sample"] <= written[1]["first_sample"]
    assert all(one["without_fp8_until"] == one["back_to"] + 100 for one in written)
