"""The command line: flags built from the fields, YAML overlays below them, notices and errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import compat, overlap_cfg, yaml_text
from megatron.config.field import Spec
from megatron.config.inherit import SavedConfig, inherit
from megatron.config.problems import ConfigError, Problem, Rule
from megatron.config.runconfig import RunConfig, finalize
from megatron.config.schema import SECTIONS, SPECS

OWN_FLAGS = ("--config", "--print-config", "--help")
_DESCRIPTION = (
    "Pretrain a GPT model, in FP8 where that is asked for. Settings come from --config files and"
    " from flags; a flag wins over a file, a later file over an earlier one. Every switch --x has"
    " a --no-x that undoes a file. docs/flags.md explains every flag and every rule."
)


def _spellings() -> dict[str, tuple[Spec, bool | None]]:
    """Map every spelling to its field and, for a switch, the value that it sets."""
    table: dict[str, tuple[Spec, bool | None]] = {}
    for spec in SPECS.values():
        is_switch = spec.kind is bool
        for flag in spec.inverse_flags:
            table[flag.replace("_", "-")] = (spec, spec.default)
        for flag in spec.flags:
            table[flag.replace("_", "-")] = (spec, not spec.default if is_switch else None)
    return table


SPELLINGS = _spellings()


class _Reader:
    """Turns argument tokens into field values, problems and notices."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.fields: dict[str, Any] = {}
        self.files: list[str] = []
        self.print_config = False
        self.problems: list[Problem] = []
        self.notices: list[str] = []

    def read(self, argv: Sequence[str]) -> None:
        """Read all tokens, remembering every problem instead of stopping at the first."""
        position = 0
        while position < len(argv):
            token = argv[position]
            position += 1
            if not token.startswith("--") or token == "--":
                self._stray(token)
                continue
            name, equals, attached = token.partition("=")
            values = [attached] if equals else []
            if not equals:
                while position < len(argv) and not argv[position].startswith("--"):
                    values.append(argv[position])
                    position += 1
            self._flag(name.replace("_", "-"), values)

    def _stray(self, token: str) -> None:
        self.problems.append(
            Problem(
                (token,),
                "a lone value",
                "It follows no flag that could take it",
                "Remove it, or write the flag with its two dashes in front",
            )
        )

    def _flag(self, flag: str, values: list[str]) -> None:
        if flag == "--config":
            if not values:
                self._missing_value(flag, "a YAML file")
            self.files.extend(values)
        elif flag == "--print-config":
            self.print_config = True
            self._no_values(flag, values)
        elif flag in SPELLINGS:
            self._declared(flag, values)
        else:
            self._undeclared(flag, values)

    def _declared(self, flag: str, values: list[str]) -> None:
        spec, switch = SPELLINGS[flag]
        if switch is not None:
            self._no_values(flag, values)
            self.fields[spec.name] = switch
            if flag == "--fp8-wgrad":
                self.notices.append(
                    "--fp8-wgrad: weight gradients run in FP8 unless --no-fp8-wgrad"
                )
        elif spec.many:
            self.fields[spec.name] = tuple(values)
        elif not values:
            self._missing_value(flag, spec.kind.__name__)
        else:
            self.fields[spec.name] = values[0]
            self._no_values(flag, values[1:])

    def _undeclared(self, flag: str, values: list[str]) -> None:
        arity = compat.arity(flag)
        taken = values if arity in (None, "*") else values[: int(arity)]
        for token in values[len(taken) :]:
            self._stray(token)
        verdict = compat.judge(
            flag, taken, known=(*SPELLINGS, *OWN_FLAGS), world_size=self.world_size
        )
        if isinstance(verdict, Problem):
            self.problems.append(verdict)
            return
        self.notices.append(verdict.notice)
        if isinstance(verdict, compat.Rewritten):
            self._flag(verdict.tokens[0], list(verdict.tokens[1:]))

    def _missing_value(self, flag: str, kind: str) -> None:
        self.problems.append(
            Problem((flag,), "nothing", f"It takes a value ({kind})", "Write the value after it")
        )

    def _no_values(self, flag: str, values: Sequence[str]) -> None:
        spec_and_switch = SPELLINGS.get(flag)
        is_switch = spec_and_switch is None or spec_and_switch[1] is not None
        for token in values:
            why = f"{flag} is a switch" if is_switch else f"{flag} takes one value"
            fix = f"Remove {token}" + ("; --no-... switches off" if is_switch else "")
            self.problems.append(Problem((flag,), token, why, fix))


def _load(path: str, flag: str) -> tuple[Any, list[Problem]]:
    """Return what a YAML file holds, None for nothing, and why it cannot be read."""
    try:
        return yaml_text.read_text(Path(path).read_text(encoding="utf-8")), []
    except OSError as error:
        fix = "Check the path; it is relative to the current folder"
        return None, [Problem((flag,), path, f"It cannot be read: {error.strerror}", fix)]
    except UnicodeDecodeError as error:
        why = f"It is not YAML that can be read: {error}"
        return None, [Problem((flag,), path, why, "Correct the file")]
    except ValueError as error:
        return None, [Problem((flag,), path, str(error), "Correct the file")]


def read_overlap_cfg(
    path: str, *, rs_dgrad: bool, fp8: bool
) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Read a file for ``--tp-comm-overlap-cfg``.

    Args:
        path: A YAML file.
        rs_dgrad: Whether --tp-comm-overlap-rs-dgrad is on.
        fp8: Whether the run is in FP8.

    Returns:
        Settings by buffer and what is wrong with the file.
    """
    content, problems = _load(path, overlap_cfg.FLAG)
    if not problems:
        problems = list(overlap_cfg.check(content, path, rs_dgrad=rs_dgrad, fp8=fp8))
    return {} if problems else content, problems


def read_yaml(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Read one overlay.

    Args:
        path: A YAML file whose keys are field names.

    Returns:
        The settings and what is wrong with the file itself.
    """
    content, problems = _load(path, "--config")
    if content is None:
        return {}, problems
    if not isinstance(content, dict):
        why = "A settings file maps names to values"
        return {}, [Problem(("--config",), path, why, "Write lines like `num_layers: 8`")]
    fields = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict):
            why = "Settings are not nested" if name in SECTIONS else "A setting is not a mapping"
            fix = "Write its entries at the left margin"
            problems.append(Problem((str(key),), f"a mapping in {path}", why, fix))
        else:
            fields[name] = value
    return fields, problems


def _layers(reader: _Reader) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the files and the flags; later ones win. Also returns where each value came from."""
    fields: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in reader.files:
        found, problems = read_yaml(path)
        reader.problems.extend(problems)
        fields.update(found)
        origins.update(dict.fromkeys(found, path))
    fields.update(reader.fields)
    origins.update(dict.fromkeys(reader.fields, "command line"))
    return fields, origins


def read_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a command line and its files as they are written, unchecked.

    For a program that has to know one of them, such as a parallel size, before it calls `parse`.

    Args:
        argv: Tokens without the program's name.
    """
    reader = _Reader(world_size=1)
    reader.read(argv)
    return _layers(reader)[0]


def parse(
    argv: Sequence[str] | None = None,
    world_size: int = 1,
    saved_config: SavedConfig | None = None,
    more: Sequence[Rule] = (),
) -> tuple[RunConfig, tuple[str, ...]]:
    """Read the command line.

    Args:
        argv: Tokens without the program's name; by default those of this process.
        world_size: Number of processes, from the launcher.
        saved_config: Looks up the configuration in a checkpoint (folder, step), for a run that
            names a checkpoint and no model size.
        more: Rules about what is outside the configuration; --print-config does without.

    Returns:
        The finished configuration and the lines that the user should see once.

    Raises:
        ConfigError: Lists every problem of the command line, the files and the rules.
        SystemExit: After printing what --help or --print-config asks for.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if "--help" in tokens or "-h" in tokens:
        sys.stdout.write(build_parser().format_help())
        raise SystemExit(0)
    reader = _Reader(world_size)
    reader.read(tokens)
    fields, origins = _layers(reader)
    if isinstance(fields.get("tp_comm_overlap_cfg"), str):
        _, problems = read_overlap_cfg(
            fields["tp_comm_overlap_cfg"],
            rs_dgrad=fields.get("tp_comm_overlap_rs_dgrad") is True,
            fp8=fields.get("fp8_format") is not None,
        )
        reader.problems.extend(problems)
    inherited, notices = inherit(fields, saved_config)
    origins.update(dict.fromkeys(inherited, "checkpoint"))
    try:
        more = () if reader.print_config else more
        config = finalize({**inherited, **fields}, world_size, origins=origins, more=more)
    except ConfigError as error:
        raise ConfigError([*reader.problems, *error.problems]) from None
    if reader.problems:
        raise ConfigError(reader.problems)
    if reader.print_config:
        sys.stdout.write(config.to_yaml(origins))
        raise SystemExit(0)
    return config, (*reader.notices, *notices, *config.notices)


def _help_text(spec: Spec) -> str:
    text = spec.setting.help
    if spec.kind is bool and spec.default:
        text = f"Switch off: {text}"
    if spec.setting.choices:
        text += f" One of {', '.join(str(c) for c in spec.setting.choices)}."
    default = spec.setting.fallback or ("" if spec.default is None else spec.default)
    if isinstance(default, tuple):
        default = " ".join(str(x) for x in default)
    if spec.kind is not bool and default != "":
        text += f" Default: {default}."
    return text.replace("%", "%%")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser that prints ``--help``; one group a section, one entry a field."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        allow_abbrev=False,
        usage="%(prog)s [flags]",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file of settings; repeatable."
    )
    parser.add_argument(
        "--print-config", action="store_true", help="Print YAML that reproduces the run, and leave."
    )
    for section, section_class in SECTIONS.items():
        group = parser.add_argument_group(section, (section_class.__doc__ or "").strip())
        for spec in SPECS.values():
            if spec.section != section or spec.setting.derived:
                continue
            if spec.kind is bool:
                group.add_argument(*spec.flags, action="store_true", help=_help_text(spec))
            else:
                metavar = (spec.setting.units or spec.kind.__name__).upper()
                group.add_argument(
                    *spec.flags,
                    metavar=metavar,
                    nargs=spec.setting.nargs or None,
                    help=_help_text(spec),
                )
    return parser
