"""Rules about fill-in-the-middle."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.fim import FimConfig
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of

_DETAILS = [name for name in FimConfig.__dataclass_fields__ if name != "fim_data"]
_RATES = ("fim_rate", "fim_spm_rate", "fim_fragment_rate")
_MARKS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")


@rule
def fim_settings_come_with_fim_data(c: Draft) -> Iterator[Problem]:
    """The other settings of fill-in-the-middle are given only with --fim-data."""
    for name in _DETAILS:
        if not c.fim_data and c.values[name] != SPECS[name].default:
            yield Problem(
                (flag_of(name), "--fim-data"),
                f"{c.values[name]} and nothing",
                "Documents are rearranged only with --fim-data",
                f"Add --fim-data, or remove {flag_of(name)}",
            )


@rule
def fim_reads_text(c: Draft) -> Iterator[Problem]:
    """--fim-data needs text, not --mock-data."""
    if c.fim_data and c.mock_data:
        yield Problem(
            ("--fim-data", "--mock-data"),
            "both",
            "Synthetic sequences are numbers, which have no middle to fill in",
            "Give --data-path, or remove --fim-data",
        )


@rule
def fim_rates_are_shares(c: Draft) -> Iterator[Problem]:
    """--fim-rate, --fim-spm-rate and --fim-fragment-rate are 0 to 1."""
    for name in _RATES:
        value = c.values[name]
        if value is not None and not 0.0 <= value <= 1.0:
            yield Problem((flag_of(name),), value, "It is a share of the texts", "Use 0 to 1")


@rule
def fim_fragments_have_a_border_and_a_rate(c: Draft) -> Iterator[Problem]:
    """--fim-split-sample and --fim-fragment-rate are given together."""
    border, rate = c.fim_split_sample, c.fim_fragment_rate
    if c.fim_data and (border is None) != (rate is None):
        yield Problem(
            ("--fim-split-sample", "--fim-fragment-rate"),
            f"{border or 'nothing'} and {'nothing' if rate is None else rate}",
            "One says where fragments end, the other how many of them are rearranged",
            "Give both, or neither",
        )


@rule
def fim_tokens_differ(c: Draft) -> Iterator[Problem]:
    """The prefix, middle and suffix tokens mean nothing else."""
    names = (*_MARKS, "fim_pad_token", "fim_eod_token", "fim_split_sample")
    for place, name in enumerate(names):
        same = [other for other in names[:place] if c.values[other] == c.values[name]]
        if c.fim_data and set(same) & set(_MARKS):
            yield Problem(
                (flag_of(same[0]), flag_of(name)),
                f"{c.values[name]} for both",
                "The model could not tell where a part begins",
                "Give each a token of its own",
            )
