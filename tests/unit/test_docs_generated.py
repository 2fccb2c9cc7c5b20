"""Generated documents say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron.config.docs import flags_markdown
from megatron.config.retired import ACCEPTED, REFUSED, REWRITTEN
from megatron.config.rules import RULES
from megatron.config.schema import SPECS

ROOT = Path(__file__).resolve().parents[2]


def test_flags_document_is_current():
    written = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == flags_markdown(), "run: python tools/gen_docs.py"


def test_check_mode_agrees():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gen_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout


def test_every_flag_and_rule_has_an_entry():
    text = flags_markdown()
    for spec in SPECS.values():
        for flag in spec.flags:
            assert f"`{flag}" in text
        assert spec.setting.help.replace("|", "\\|") in text
    for one in RULES:
        assert one.__doc__.strip().splitlines()[0] in text
    for flag in (*ACCEPTED, *REFUSED, *REWRITTEN):
        assert f"`{flag}`" in text


def test_tables_have_four_cells_a_row():
    for line in flags_markdown().splitlines():
        if line.startswith("| `--") and "<br>" in line:
            assert line.replace("\\|", "").count("|") == 5
