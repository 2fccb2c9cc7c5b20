"""Rules about how checkpoints are written, kept and replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.config import stores
from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule
from megatron.config.schema import flag_of

_OF_SAVING = (
    "async_save",
    "verify_checkpoint",
    "keep_last",
    "keep_every",
    "non_persistent_save_interval",
)


@rule
def saving_is_described_where_it_happens(c: Draft) -> Iterator[Problem]:
    """Settings about saving are given only with --save."""
    for name in _OF_SAVING:
        if c.save is None and c.values[name]:
            yield Problem(
                (flag_of(name), "--save"),
                f"{c.values[name]} and nothing",
                "Nothing is saved",
                f"Add --save and --save-interval, or remove {flag_of(name)}",
            )


@rule
def counts_of_checkpoints_are_positive(c: Draft) -> Iterator[Problem]:
    """--keep-last, --keep-every and --non-persistent-save-interval are at least 1."""
    for name in ("keep_last", "keep_every", "non_persistent_save_interval"):
        if c.values[name] is not None and c.values[name] < 1:
            yield Problem(
                (flag_of(name),),
                c.values[name],
                "The newest checkpoint always stays, and steps are counted from 1",
                f"Use at least 1, or remove {flag_of(name)}",
            )


@rule
def kept_checkpoints_are_saved(c: Draft) -> Iterator[Problem]:
    """--save-interval divides --keep-every."""
    interval, every = c.save_interval, c.keep_every
    if interval and every and every > 0 and every % interval:
        yield Problem(
            ("--keep-every", "--save-interval"),
            f"{every} and {interval}",
            "Only some of the steps that --keep-every divides have a checkpoint",
            f"Use a multiple of {interval}",
        )


@rule
def non_persistent_checkpoints_have_a_place(c: Draft) -> Iterator[Problem]:
    """--non-persistent-save-interval comes with the type, and the type with what it needs."""
    kind, interval = c.non_persistent_ckpt_type, c.non_persistent_save_interval
    if kind is None and interval is not None:
        yield Problem(
            ("--non-persistent-ckpt-type", "--non-persistent-save-interval"),
            f"nothing and {interval}",
            "It must be known where these checkpoints go",
            "Add --non-persistent-ckpt-type global or local",
        )
    if kind == "local" and c.non_persistent_local_ckpt_dir is None:
        yield Problem(
            ("--non-persistent-local-ckpt-dir", "--non-persistent-ckpt-type"),
            "nothing and local",
            "Each machine needs a folder of its own for them",
            "Name a folder on a disk of the machine",
        )
    for own in ("global", "local"):
        name = f"non_persistent_{own}_ckpt_dir"
        if c.values[name] is not None and kind != own:
            yield Problem(
                (flag_of(name), "--non-persistent-ckpt-type"),
                f"{c.values[name]} and {kind or 'nothing'}",
                f"It belongs to --non-persistent-ckpt-type {own}",
                f"Use that type, or remove {flag_of(name)}",
            )


@rule
def deadline_has_a_signal(c: Draft) -> Iterator[Problem]:
    """--exit-signal-deadline is positive and comes with --exit-signal-handler, as --exit-signal."""
    deadline = c.exit_signal_deadline
    if deadline is not None and deadline <= 0:
        yield Problem(
            ("--exit-signal-deadline",),
            deadline,
            "Nothing can be saved in no time",
            "Use the seconds that the scheduler leaves between the signal and the end",
        )
    for name in ("exit_signal_deadline", "exit_signal"):
        if c.was_given(name) and not c.exit_signal_handler:
            yield Problem(
                (flag_of(name), "--exit-signal-handler"),
                f"{c.values[name]} and no handler",
                "Without the handler a signal ends the process at once",
                f"Add --exit-signal-handler, or remove {flag_of(name)}",
            )


_CHECKPOINTS = ("save", "load")
_FILES = (
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
    "data_cache_path",
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
)


@rule
def places_of_files_are_in_the_file_system(c: Draft) -> Iterator[Problem]:
    """Corpora and non-persistent checkpoints are files; object stores are for --save and --load."""
    for name in _FILES:
        given = c.values[name] or ()
        for place in (given,) if isinstance(given, str) else given:
            if "://" in str(place):
                yield Problem(
                    (flag_of(name),),
                    place,
                    "Only paths of the file system can be read and written",
                    "Give a path on a disk, or where the store is mounted",
                )


@rule
def a_run_saves_beside_its_checkpoints(c: Draft) -> Iterator[Problem]:
    """--save names the directory of the checkpoints, not one of them."""
    place = (c.save or "").rstrip("/")
    parent, _, name = place.rpartition("/")
    if re.fullmatch(r"iter_\d{7,}|release", name):
        yield Problem(
            ("--save",),
            place,
            "That is the name of one checkpoint, and saves would lie inside it",
            f"Give {parent or 'the directory above'}, or another directory",
        )


@rule
def stores_have_a_name(c: Draft) -> Iterator[Problem]:
    """An object store is written protocol://bucket/name, without patterns."""
    for name in _CHECKPOINTS:
        place = c.values[name] or ""
        if stores.in_store(place) and not stores.has_form(place):
            yield Problem((flag_of(name),), place, stores.WHY, stores.FIX)


@rule
def non_persistent_checkpoints_stay_on_disks(c: Draft) -> Iterator[Problem]:
    """With --save or --load in an object store, --non-persistent-ckpt-type global has a folder."""
    for name in _CHECKPOINTS:
        place = c.values[name] or ""
        without = c.non_persistent_ckpt_type == "global" and not c.non_persistent_global_ckpt_dir
        if without and stores.in_store(place):
            yield Problem(
                ("--non-persistent-global-ckpt-dir", flag_of(name)),
                f"nothing and {place}",
                "Checkpoints that the next one replaces belong on a disk, not into the store",
                "Name a folder on a shared disk",
            )
