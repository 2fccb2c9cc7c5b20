"""Writes ``docs/flags.md`` from the fields, the rules and the tables of Megatron-LM's flags."""

from __future__ import annotations

from megatron.config.field import Spec
from megatron.config.retired import ACCEPTED, REFUSED, REWRITTEN
from megatron.config.rules import RULES
from megatron.config.schema import SECTIONS, SPECS
from megatron.config.values import yaml_value

_INTRO = """\
# Flags

This file is generated: `python tools/gen_docs.py` writes it from `megatron/config`.

One name everywhere: the flag `--num-layers` is the YAML key `num_layers`, the Python field
`config.num_layers` and the row below. Names and defaults are Megatron-LM's where it has the flag.

- `--config FILE` reads settings from a YAML file (repeatable). A flag wins over a file and a later
  file over an earlier one.
- `--print-config` prints YAML that reproduces the run, with the origin of every value, and leaves.
- Every switch `--x` has a `--no-x` that undoes what a file says, and the other way round.
- Underscores and dashes in flags mean the same.
- All mistakes are reported at once, each with its reason and what to do.
"""

_FIRST_COLUMN = "| Flag | Default | Choices | Meaning |\n|---|---|---|---|\n"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


def _default(spec: Spec) -> str:
    if spec.setting.fallback:
        return _cell(spec.setting.fallback)
    if spec.default is None:
        return "none"
    if spec.kind is bool:
        return "on" if spec.default else "off"
    value = spec.default
    return f"`{' '.join(str(x) for x in value) if spec.many else yaml_value(value).strip(chr(34))}`"


def _row(spec: Spec) -> str:
    kind = "" if spec.kind is bool else f" {spec.kind.__name__}{' ...' if spec.many else ''}"
    flags = "<br>".join(f"`{flag}{kind}`" for flag in spec.flags)
    choices = ", ".join(f"`{choice}`" for choice in spec.setting.choices)
    meaning = spec.setting.help
    if spec.kind is bool and spec.default:
        meaning = f"Switches off: {meaning}"
    if spec.setting.units:
        meaning += f" In {spec.setting.units}."
    return f"| {flags} | {_default(spec)} | {choices} | {_cell(meaning)} |\n"


def _section(name: str, section_class: type) -> str:
    specs = [spec for spec in SPECS.values() if spec.section == name]
    lines = [f"\n## {name}\n\n{(section_class.__doc__ or '').strip()}\n\n{_FIRST_COLUMN}"]
    lines.extend(_row(spec) for spec in specs if not spec.setting.derived)
    derived = [spec for spec in specs if spec.setting.derived]
    if derived:
        lines.append("\nFollows from the others and has no flag:\n\n")
        lines.extend(f"- `{spec.name}`: {spec.setting.help}\n" for spec in derived)
    return "".join(lines)


def _rules() -> str:
    lines = ["\n## Rules\n\nA configuration that breaks one of these is refused.\n\n"]
    for one in RULES:
        lines.append(f"- {(one.__doc__ or '').strip().splitlines()[0]}\n")
    return "".join(lines)


def _megatron() -> str:
    lines = [
        "\n## Flags of Megatron-LM without a setting here\n\n",
        "Accepted with one line of notice, because what they ask for happens anyway:\n\n",
        "| Flag | Values | Notice |\n|---|---|---|\n",
    ]
    for flag, (values, notice) in sorted(ACCEPTED.items()):
        shown = ", ".join(f"`{value}`" for value in values)
        lines.append(f"| `{flag}` | {shown} | {_cell(notice)} |\n")
    lines.append("\nRead as another spelling:\n\n| Flag | Means |\n|---|---|\n")
    for flag, tokens in sorted(REWRITTEN.items()):
        lines.append(f"| `{flag}` | `{' '.join(t if t != '*' else '...' for t in tokens)}` |\n")
    lines.append("\nRefused, with the reason:\n\n| Flag | Why | Instead |\n|---|---|---|\n")
    for flag, (why, fix) in sorted(REFUSED.items()):
        lines.append(f"| `{flag}` | {_cell(why)} | {_cell(fix)} |\n")
    lines.append(
        "\nEvery other flag that Megatron-LM has is refused as one that this release does not"
        " have;\na flag that neither has is refused with the nearest name.\n"
    )
    return "".join(lines)


def flags_markdown() -> str:
    """Return the text of ``docs/flags.md``."""
    sections = "".join(_section(name, cls) for name, cls in SECTIONS.items())
    return _INTRO + sections + _rules() + _megatron()
