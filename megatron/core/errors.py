"""The project's error classes and the one form every message takes."""

from __future__ import annotations

from typing import TypeVar


class MegatronError(Exception):
    """Base class of every error the project raises on purpose.

    Attributes:
        shared: Whether every rank raises it at the same place. Then one message is for all.
    """

    shared = False


E = TypeVar("E", bound=MegatronError)


def on_every_rank(error: E) -> E:
    """Mark an error that every rank raises, and return it."""
    error.shared = True
    return error


class BackendUnavailable(MegatronError):  # noqa: N818 - says what is the case, without "Error"
    """The requested layer backend cannot run here."""


class PrecisionError(MegatronError):
    """A precision that was asked for cannot be delivered."""


class DataError(MegatronError):
    """A dataset, tokenizer or input text is unusable."""


class CheckpointError(MegatronError):
    """A checkpoint cannot be written or read."""


class UnusableCheckpointError(CheckpointError):
    """The files of a checkpoint are damaged, incomplete or of another kind.

    Args:
        problem: Which file, and what is wrong with it: a sentence without its full stop.
        name: The flag that led to the files, or what they are.
        fix: What to do, a sentence without its full stop.

    Attributes:
        problem: As above.
    """

    def __init__(
        self,
        problem: str,
        name: str = "checkpoint",
        fix: str = "Load another one with --ckpt-step or by path, or restore its files from a copy",
    ) -> None:
        self.problem = problem.rstrip(".")
        super().__init__(complaint(name, "unusable content", self.problem, fix))


class MeshError(MegatronError):
    """Processes cannot be arranged into the requested axes."""


class TrainingError(MegatronError):
    """Training cannot go on (non-finite loss, exhausted data, lost rank)."""


def complaint(name: str, got: object, why: str, fix: str) -> str:
    """Build a message of the form ``<flag or name>: got X. <why>. <fix>.``

    Args:
        name: The flag or object that is wrong, e.g. ``--load``.
        got: The offending value.
        why: Why it cannot work, a sentence without its full stop.
        fix: What to do, a sentence without its full stop.

    Returns:
        One line of text.
    """
    return f"{name}: got {got}. {why.rstrip('.')}. {fix.rstrip('.')}."
