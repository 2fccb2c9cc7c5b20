"""FP8 that starts later, layer by layer as a file says; the file written by measuring."""

from __future__ import annotations

import re

from tests.e2e.launch import ROOT, launch
from tests.e2e.refusals import tool_refused

SMALL = [
    "--mock-data", "--vocab-size", "250", "--num-layers", "4", "--hidden-size", "32",
    "--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "1",
    "--global-batch-size", "4", "--train-iters", "6", "--log-interval", "1", "--lr", "1e-3",
    "--device", "cpu", "--bf16", "--fp8-format", "hybrid", "--eval-interval", "2",
    "--eval-iters", "1",
]  # fmt: skip
PP2 = ["--pipeline-model-parallel-size", "2"]
TOOL = ROOT / "tools" / "fp8_sensitivity.py"


def test_warm_up_and_policy_on_the_command_line(tmp_path):
    """Two stages: what the second one does is told too."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules:\n  - {module: '*.linear_fc2', layers: 1-2, recipe: mxfp8}\n")
    root = str(tmp_path / "saved")
    flags = [*SMALL, *PP2, "--fp8-policy", str(policy), "--save", root, "--load", root,
             "--save-interval", "2"]  # fmt: skip
    straight = launch(2, [*flags, "--fp8-warmup-iters", "3", "--save", str(tmp_path / "other")])
    assert straight.codes == [0, 0], straight.out
    tables = straight.lines("linear layers in FP8")
    assert [re.search(r"\d+ of \d+", line)[0] for line in tables] == ["0 of 17", "16 of 17"]
    said = ["FP8 starts at iteration 4 (--fp8-warmup-iters 3)", "FP8 starts: iteration 4 is",
            "16 of 17"]  # by the first rank; losses come from the last one  # fmt: skip
    places = [straight.out.index(text) for text in said]
    assert places == sorted(places)
    assert straight.lines("in FP8 from iteration 4 (--fp8-warmup-iters 3); --fp8-policy rule 1")
    first = launch(2, [*flags, "--fp8-warmup-iters", "3", "--exit-interval", "2"])
    policy.write_text("rules:\n  - {layers: 1-2, recipe: bf16}\n")
    second = launch(2, [*flags, "--fp8-warmup-iters", "3"])
    assert first.losses() == straight.losses()[:2]
    assert second.losses()[0] == straight.losses()[2]  # still in BF16
    assert second.losses()[1] != straight.losses()[3]
    said = second.lines("FP8 state:")
    assert any("layers.1.mlp.linear_fc2: saved with mxfp8 hybrid, this run uses bf16" in x
               for x in said)  # fmt: skip
    assert any("layers.2.mlp.linear_fc2: saved with mxfp8 hybrid" in x for x in said)
    assert any("layers.2.mlp.linear_fc1: saved with delayed hybrid" in x for x in said)


def test_measure_write_and_follow(tmp_path):
    policy = tmp_path / "policy.yaml"
    flags = [*SMALL, "--fp8-recipe", "tensorwise", "--save", str(tmp_path / "saved"),
             "--save-interval", "2", "--exit-interval", "2"]  # fmt: skip
    trained = launch(1, flags)
    assert trained.codes == [0], trained.out
    texts = []
    for _ in range(2):
        asked = ["--output", str(policy), "--keep-top", "3", "--steps", "1"]
        measured = launch(1, [*asked, *flags, *PP2, "--load", str(tmp_path / "saved")], script=TOOL)
        assert measured.codes == [0], measured.out
        texts.append((policy.read_text(), measured.lines("decoder.layers")))
    assert texts[0] == texts[1]
    assert len(texts[0][1]) == 16
    assert "at iteration 2" in measured.out
    followed = launch(1, [*SMALL, "--fp8-recipe", "tensorwise", "--fp8-policy", str(policy)])
    assert followed.codes == [0], followed.out
    assert followed.lines("precision: 13 of 17")
    assert len(followed.lines("--fp8-policy rule")) == 3


def test_mistakes_of_the_tool_are_told(tmp_path):
    tool_refused("fp8_sensitivity.py", [*SMALL, "--output", tmp_path / "a" / "b"], 1, "--output",
                 "no such folder")  # fmt: skip
    tool_refused("fp8_sensitivity.py", [*SMALL, "--output", tmp_path / "b", "--lrr", "1"], 2,
                 "--lrr: got")  # fmt: skip
