"""Writes the generated documents; with ``--check`` only says whether they are up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.config.docs import flags_markdown  # noqa: E402  (the path is set just above)
from megatron.config.tool_flags import run_tool  # noqa: E402

DOCUMENTS = {ROOT / "docs" / "flags.md": flags_markdown}


def stale() -> list[Path]:
    """Return the documents whose text differs from what the code says."""
    return [
        path
        for path, make in DOCUMENTS.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != make()
    ]


def main() -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail when stale.")
    check = parser.parse_args().check
    for path in stale():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run python tools/gen_docs.py")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(DOCUMENTS[path](), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale() else 0


if __name__ == "__main__":
    run_tool(main)
