"""Rules about corpora of splits and sets of validation data."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.data_mix import CORPORA, PER_SPLIT, naming_flag, per_split
from megatron.config.draft import Draft
from megatron.config.mix_words import MixError, number, read_mix
from megatron.config.problems import Problem, rule
from megatron.config.schema import flag_of

_SOURCES = ("data_path", "data_args_path", "per_split_data_args_path")


@rule
def corpora_are_named_once(c: Draft) -> Iterator[Problem]:
    """Corpora are named by --data-path, by a file with it, per split, or by a file with those."""
    named = [name for name in _SOURCES if c.given.get(name)]
    splits = [name for name in PER_SPLIT if c.given.get(name)]
    named += splits[:1]
    if len(named) > 1:
        yield Problem(
            tuple(flag_of(name) for name in named),
            "both" if len(named) == 2 else "all",
            "A run's corpora are named in one place",
            "Keep one of them",
        )
    elif c.given.get("mock_data") and named and named[0] != "data_path":
        yield Problem(
            ("--mock-data", flag_of(named[0])),
            "both",
            "A run has one source of data",
            "Remove one of them",
        )


@rule
def splits_have_their_corpora(c: Draft) -> Iterator[Problem]:
    """With corpora per split, training has some, evaluation has some, and --split is not given."""
    if not per_split(c):
        return
    if c.given.get("split"):
        yield Problem(
            ("--split", "--train-data-path"),
            c.split,
            "Each split has corpora of its own, which are not divided",
            "Remove --split",
        )
    if not c.train_data_path:
        yield Problem(
            ("--train-data-path",), "nothing", "There is nothing to train on", "Name a corpus"
        )
    if not c.valid_data_path and c.eval_interval and c.eval_iters:
        yield Problem(
            ("--valid-data-path", "--eval-interval"),
            f"nothing and {c.eval_interval}",
            "The run is to evaluate and has nothing to evaluate on",
            "Name a corpus, or leave out --eval-interval",
        )
    for name in PER_SPLIT:
        if c.values[name] is not None and not c.values[name]:
            yield Problem(
                (flag_of(name),),
                "nothing",
                "It names at least one corpus",
                f"Give a prefix, or remove {flag_of(name)}",
            )


@rule
def weights_and_corpora_pair_up(c: Draft) -> Iterator[Problem]:
    """Corpora are prefixes only, or each has a positive weight in front of it."""
    for name in CORPORA:
        words = c.values[name]
        if not words:
            continue
        try:
            read_mix(words)
        except MixError as error:
            yield Problem((naming_flag(c, name),), " ".join(words), error.why, error.fix)


@rule
def validation_sets_have_names(c: Draft) -> Iterator[Problem]:
    """--multiple-validation-sets comes with a list of corpora, and a name for each if any."""
    names = c.validation_set_names
    if not c.multiple_validation_sets:
        if names is not None:
            yield Problem(
                ("--validation-set-names", "--multiple-validation-sets"),
                " ".join(names),
                "There is one validation set, which has no name",
                "Add --multiple-validation-sets, or remove the names",
            )
        return
    if not c.valid_data_path:
        yield Problem(
            ("--multiple-validation-sets", "--valid-data-path"),
            "no list of corpora",
            "The sets are the corpora of the validation split",
            "Name them with --valid-data-path or --per-split-data-args-path",
        )
        return
    sets = c.valid_data_path
    if any(number(word) is not None for word in sets) and len(sets) % 2 == 0:
        yield Problem(
            ("--multiple-validation-sets", "--valid-data-path"),
            " ".join(sets),
            "Sets that are evaluated one by one have no weights",
            "Remove the weights",
        )
    elif names is not None and (len(names) != len(sets) or len(set(names)) != len(names)):
        yield Problem(
            ("--validation-set-names", "--valid-data-path"),
            f"{' '.join(names)} for {len(sets)} sets",
            "Each set has a name of its own",
            f"Give {len(sets)} different names, or none",
        )


@rule
def data_builder_has_threads(c: Draft) -> Iterator[Problem]:
    """--num-dataset-builder-threads is at least 1."""
    if c.num_dataset_builder_threads < 1:
        yield Problem(
            ("--num-dataset-builder-threads",),
            c.num_dataset_builder_threads,
            "Somebody has to build the index files",
            "Give 1 or more",
        )


@rule
def mix_changes_with_a_checkpoint(c: Draft) -> Iterator[Problem]:
    """--data-mix-change continue belongs to --load."""
    if c.data_mix_change == "continue" and c.load is None:
        yield Problem(
            ("--data-mix-change", "--load"),
            "continue and nothing",
            "Only a run that is resumed has a mix to continue",
            "Add --load, or remove --data-mix-change",
        )
