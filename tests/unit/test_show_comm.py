"""tools/show.py comm: what ranks send, as a table and as JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "show.py"
MODEL = [
    "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--vocab-size", "128", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3",
    "--train-iters", "2", "--mock-data",
]  # fmt: skip
PP4 = ["--pipeline-model-parallel-size", "4", "--fake-world-size", "8"]


def show(capsys, *args):
    spec = importlib.util.spec_from_file_location("tool_show", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = module.main(["comm", *map(str, args)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_ranks_that_send_the_same_share_a_table(capsys):
    code, out, _ = show(capsys, *MODEL, *PP4)
    assert code == 0
    heads = [line.split(",")[0] for line in out.splitlines() if "a step of 8 rank(s)" in line]
    assert heads == ["pipeline rank 0", "pipeline rank 1-2", "pipeline rank 3"]
    first = out[: out.index("pipeline rank 1-2")].splitlines()
    assert first[1].split()[:7] == ["part", "kind", "axis", "ranks", "count", "payload", "sent"]
    # 4 microbatches of 32 x 32 fp32 activations.
    size = ["16.00", "KiB"]
    assert first[2].split() == ["forward", "send", "pipe-forward", "4", "4", *size, *size]


def test_json_holds_the_same_in_bytes(capsys):
    code, out, _ = show(capsys, "--json", *MODEL, *PP4)
    assert code == 0
    found = json.loads(out)
    assert found["world_size"] == 8
    assert [x["pipeline_ranks"] for x in found["communication"]] == [[0], [1, 2], [3]]
    for entry in found["communication"]:
        assert entry["sent_bytes"] == sum(row["sent_bytes"] for row in entry["rows"])
    assert found["communication"][0]["rows"][0] == {
        "part": "forward", "kind": "send", "axis": "pipe-forward", "ranks": 4, "count": 4,
        "payload_bytes": 16384, "sent_bytes": 16384, "plain_bytes": 16384, "spent_bytes": 0,
    }  # fmt: skip
    assert found["communication"][0]["savings"][0] == {
        "what": "pipeline, forward", "sent_bytes": 16384, "plain_bytes": 16384, "spent_bytes": 0,
        "switch": "",
    }  # fmt: skip


EP2 = [
    *MODEL, "--bf16", "--num-experts", "4", "--disable-bias-linear", "--fake-world-size", "2",
    "--expert-model-parallel-size", "2",
]  # fmt: skip


def test_what_fp8_saves_and_costs(capsys):
    _, out, _ = show(capsys, *EP2, "--moe-dispatch-fwd-dtype", "mxfp8")
    head, *lines = out[out.index("FP8 on the wire") :].splitlines()
    assert head.split("  ")[0] == "FP8 on the wire"
    forward, backward, *_, everything = (line.split() for line in lines)
    assert forward[:2] == ["experts,", "forward"]
    assert forward[-1] == "--moe-dispatch-fwd-dtype"
    assert backward[-1] == "--moe-combine-bwd-dtype"
    assert backward[6] == "-"  # saves nothing
    assert everything[0] == "all"
    _, out, _ = show(capsys, "--json", *EP2, "--moe-dispatch-fwd-dtype", "mxfp8")
    saved = json.loads(out)["communication"][0]["savings"][0]
    # 4 microbatches, 4 layers: 32 tokens of 32 bf16 elements, one rank's, without their scales.
    codes = 4 * 4 * 32 * 32
    assert saved["spent_bytes"] == codes // 32
    assert saved["plain_bytes"] - saved["sent_bytes"] == codes - codes // 32


def test_without_fp8_there_is_nothing_to_save(capsys):
    _, out, _ = show(capsys, *EP2)
    assert "FP8 on the wire" not in out


def test_one_rank(capsys):
    code, out, _ = show(capsys, "--rank", 6, "--json", *MODEL, *PP4)
    assert code == 0
    (entry,) = json.loads(out)["communication"]
    assert entry["ranks"] == [6]
    assert {row["kind"] for row in entry["rows"] if row["axis"] == "pipe-forward"} == {"recv"}


def test_a_single_rank_sends_nothing(capsys):
    code, out, _ = show(capsys, *MODEL)
    assert code == 0
    assert "nothing is sent: there is one rank" in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--rank", "8"], 2, "  - --rank: got 8. The run has the ranks 0 to 7."),
        (["--global-batch-size", "9"], 2, "--global-batch-size"),
        (["--jsn"], 2, "--jsn: got set. There is no such flag"),
    ],
)
def test_mistakes(capsys, args, code, message):
    found, _, err = show(capsys, *MODEL, *PP4, *args)
    assert found == code
    assert message in err
