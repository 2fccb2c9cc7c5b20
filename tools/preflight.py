#!/usr/bin/env python3
"""What does this machine have, and would my run get what it asks for?

    python tools/preflight.py
    python tools/preflight.py --strict --config configs/llama3_8b.yaml --fp8-format hybrid

Looks at devices, driver, CUDA and its libraries, Transformer Engine, packages that only look like
NVIDIA's, and at which FP8 recipe runs in hardware, is emulated, or does not run, and why. On a GPU
every product and kernel that FP8 would use is tried out against the emulation. With the flags of
pretrain_gpt.py it says what that run would get: layer backend, attention, padding, and what every
matrix product runs on. Nothing is trained and no other process is needed.

Lines marked LESS are where a run would get less than it asks for. Leaves with 0; with 1 under
--strict if there is such a line; with 2 if the flags cannot work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError
from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool
from megatron.core.errors import MegatronError
from megatron.training.preflight import LESS, Finding, preflight


def text(findings: Sequence[Finding]) -> str:
    """Return the findings as lines, a section after the other."""
    width = max(len(finding.name) for finding in findings)
    lines, section = [], ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(f"{section}:")
        lines.append(f"  {finding.status:4}  {finding.name:{width}}  {finding.text}")
    less = sum(finding.status == LESS for finding in findings)
    lines.append(f"{less} line(s) with less than asked for" if less else "nothing falls short")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = ToolParser(description=__doc__, prog="preflight.py")
    parser.add_argument("--strict", action="store_true", help="leave with 1 if something is LESS")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    args, flags = parser.parse_known_args(argv)
    try:
        findings = preflight(flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_ARGUMENTS
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    print(json.dumps([asdict(f) for f in findings], indent=1) if args.json else text(findings))
    return int(args.strict and any(finding.status == LESS for finding in findings))


if __name__ == "__main__":
    run_tool(main)
