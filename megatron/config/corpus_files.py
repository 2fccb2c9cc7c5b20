"""Whether the corpora that a run names are there; of programs that read them, not a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.config.data_mix import CORPORA, naming_flag
from megatron.config.draft import Draft
from megatron.config.mix_words import MixError, read_mix
from megatron.config.problems import Problem

_ENDINGS = (".idx", ".bin")
_SHOWN = 5


def corpora_exist(c: Draft) -> Iterator[Problem]:
    """Both files of every corpus that the run reads exist on this machine."""
    evaluates = bool(c.eval_interval and c.eval_iters)
    for name in CORPORA:
        if not c.values[name] or not (evaluates or name in ("data_path", "train_data_path")):
            continue
        try:
            prefixes, _ = read_mix(c.values[name])
        except MixError:  # refused by a rule
            continue
        missing = [prefix for prefix in dict.fromkeys(prefixes) if _missing(prefix)]
        if not missing:
            continue
        files = [_missing(prefix) for prefix in missing[:_SHOWN]]
        more = f"; nor do those of {len(missing) - _SHOWN} others" if len(missing) > _SHOWN else ""
        yield Problem(
            (naming_flag(c, name),),
            " ".join(missing[:_SHOWN]) + (" ..." if more else ""),
            ". ".join(f"{file} does not exist or is not a file" for file in files) + more,
            "Give the path without its .bin or .idx ending; tools/preprocess_data.py writes both"
            " files",
        )


def _missing(prefix: str) -> str:
    """Return the first file of a corpus that is not there, empty if both are."""
    for ending in _ENDINGS:
        try:
            if not Path(prefix + ending).is_file():
                return prefix + ending
        except OSError:  # what opens it says why it cannot be read
            continue
    return ""
