"""What docs/fp8.md shows runs as written."""

from __future__ import annotations

import re
from pathlib import Path

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
