"""What docs/fp8.md and docs/observability.md show runs as written."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.cli import parse
from megatron.config.fp8_policy import KEYS, recipes_in_use
from megatron.config.schema import SPECS

DOC = Path(__file__).parents[2] / "docs" / "fp8.md"


def test_example_of_the_library_api(capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "autocast" in block]
    names = {}
    exec(compile(example, str(DOC), "exec"), names)
    loss, scale = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert loss < 0.9  # it starts at 1.02
    newest = names["model"][0].fp8_meta["scaling_fwd"].amax_history[-1, 0].item()
    assert scale == round(448 / newest, 1)
    assert len(names["recipe"].__dataclass_fields__) > 3


def test_policies_that_are_shown_can_be_followed():
    text = (DOC.parent / "fp8-policy.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    root = DOC.parents[1] / "configs"
    for policy in (shown, str(root / "fp8_policy" / "example.yaml")):
        tokens = ["--config", str(root / "quickstart_llama_10m.yaml"), "--fp8-policy", policy]
        cfg, _ = parse([*tokens, "--config", str(root / "fp8" / "tensorwise.yaml")])
        assert recipes_in_use(cfg) == {"mxfp8", "tensorwise"}
    for entry in KEYS:
        assert f"`{entry}`" in text


def test_example_of_the_figures(capsys):
    doc = DOC.with_name("observability.md")
    (example,) = re.findall(r"```python\n(.*?)```", doc.read_text(), re.DOTALL)
    exec(compile(example, str(doc), "exec"), {})
    snr, saturated = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert 25 < snr < 40
    assert saturated == 0.0


def test_every_flag_and_alert_of_the_figures_is_described():
    text = DOC.with_name("observability.md").read_text()
    section = [name for name, spec in SPECS.items() if spec.section == "fp8_stats"]
    assert all(f"`--{name.replace('_', '-')}" in text for name in section)
    source = (DOC.parents[1] / "megatron" / "training" / "fp8_alerts.py").read_text()
    kinds = re.findall(r'^            \("([a-z ]+)", ', source, re.MULTILINE)
    assert len(kinds) == 7
    assert all(f"| {kind} |" in text for kind in kinds)
