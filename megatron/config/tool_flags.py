"""The command line of a tool: argparse with this project's messages about what is wrong."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.config.data import TIKTOKEN_PATTERNS, TOKENIZER_TYPES
from megatron.config.problems import Problem
from megatron.config.values import nearest

BAD_ARGUMENTS = 2
CLOSED_PIPE = 141  # what a shell reports of a program that the signal for it ended
_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}


def run_tool(main: Callable[[], int | None]) -> NoReturn:
    """Run a program and leave with its exit code, see `exit_code_of`."""
    sys.exit(exit_code_of(main))


def exit_code_of(main: Callable[[], int | None]) -> int:
    """Run a program; quietly end it once nobody reads its output, as when `head` has left.

    Args:
        main: The program. What it writes is flushed.

    Returns:
        Its exit code, or `CLOSED_PIPE`.
    """
    try:
        try:
            return main() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not output_is_closed():
            raise
        # What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return CLOSED_PIPE


def stop_on_sigterm() -> None:
    """Let SIGTERM end a program by an exception, which passes through what cleans up."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def output_is_closed() -> bool:
    """Whether this process's output is a pipe that nobody reads any more."""
    look = select.poll()
    look.register(1, 0)  # errors and closed ends are reported whatever is asked for
    return bool(look.poll(0))


class ToolParser(argparse.ArgumentParser):
    """A parser that names the flag, what it got, why that is wrong and what to do.

    Flags are never abbreviated, and the description keeps its lines.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and leave with `BAD_ARGUMENTS`."""
        lines = [f"error: {problem}\n" for problem in self._explain(message)]
        self.exit(BAD_ARGUMENTS, "".join(lines))

    def _explain(self, message: str) -> list[Problem]:
        unknown = re.fullmatch(r"unrecognized arguments: (.+)", message, re.DOTALL)
        if unknown:
            return self._unknown(unknown[1].split())
        for pattern, problem in _MESSAGES:
            found = re.fullmatch(pattern, message, re.DOTALL)
            if found:
                return [problem(*found.groups())]
        return [Problem(("arguments",), repr(message), "They cannot be read", "See --help")]

    def _unknown(self, tokens: list[str]) -> list[Problem]:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        problems: list[Problem] = []
        while tokens:
            flag, equals, value = tokens.pop(0).partition("=")
            values = [value] if equals else []
            while flag.startswith("-") and tokens and not tokens[0].startswith("-"):
                values.append(tokens.pop(0))
            if not flag.startswith("-"):
                fix = "Remove it, or write the flag that takes it in front"
                problems.append(Problem((flag,), "a lone value", "No flag takes it", fix))
                continue
            guess = nearest(flag, flags)
            fix = f"Did you mean {guess}?" if guess else "--help lists every flag"
            got = " ".join(values) or "set"
            problems.append(Problem((flag,), got, "There is no such flag", fix))
        return problems


def add_tokenizer_flags(group: Any, *, required: bool = False) -> None:
    """Add the flags of `megatron.config.data.TOKENIZER_FIELDS` to a parser or a group of one."""
    group.add_argument("--tokenizer-type", required=required, choices=TOKENIZER_TYPES)
    group.add_argument("--tokenizer-model", help="file, or for some types its folder")
    group.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, help="number of ids of NullTokenizer")
    group.add_argument("--tiktoken-pattern", choices=TIKTOKEN_PATTERNS, help="of TikTokenizer")
    group.add_argument("--tiktoken-num-special-tokens", type=int, help="of TikTokenizer")
    group.add_argument(
        "--tiktoken-special-tokens",
        "--tokenizer-special-tokens",
        nargs="*",
        help="names of TikTokenizer's special tokens",
    )


def _required(names: str) -> Problem:
    return Problem(tuple(names.split(", ")), "nothing", "The tool needs it", "Give it; see --help")


def _one_required(names: str) -> Problem:
    return Problem(tuple(names.split()), "nothing", "The tool needs one of them", "Give one")


def _choice(flag: str, got: str, choices: str) -> Problem:
    known = [choice.strip().strip("'") for choice in choices.split(",")]
    guess = nearest(got.strip("'"), known)
    fix = f"Did you mean {guess}?" if guess else "Give one of these"
    return Problem((flag,), got, f"The choices are {', '.join(known)}", fix)


def _kind(flag: str, kind: str, got: str) -> Problem:
    return Problem((flag,), got, f"It takes {_KINDS.get(kind, kind)}", "Give such a value")


def _no_value(flag: str) -> Problem:
    return Problem((flag,), "nothing", "It takes a value", "Write the value after it")


def _exclusive(flag: str, other: str) -> Problem:
    return Problem((flag, other), "both", "They exclude each other", "Remove one of them")


def _switch(flag: str, got: str) -> Problem:
    return Problem((flag,), got, f"{flag} is a switch", "Write it without a value")


# What argparse says, and how it is said here.
_MESSAGES: tuple[tuple[str, Callable[..., Problem]], ...] = (
    (r"the following arguments are required: (.+)", _required),
    (r"one of the arguments (.+) is required", _one_required),
    (r"argument ([^:]+): invalid choice: (.+?) \(choose from (.+)\)", _choice),
    (r"argument ([^:]+): invalid (\w+) value: (.+)", _kind),
    (r"argument ([^:]+): expected .*argument.*", _no_value),
    (r"argument ([^:]+): not allowed with argument (.+)", _exclusive),
    (r"argument ([^:]+): ignored explicit argument (.+)", _switch),
)
