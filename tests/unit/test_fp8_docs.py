"""What docs/fp8.md shows runs as written."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.cli import parse
from megatron.config.fp8_policy import KEYS, recipes_in_use

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
