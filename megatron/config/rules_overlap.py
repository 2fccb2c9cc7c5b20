"""Rules about transfers behind the products of tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of

_PARTS = (
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_bulk_wgrad",
)


@rule
def tp_overlap_has_shards_to_send(c: Draft) -> Iterator[Problem]:
    """--tp-comm-overlap needs --sequence-parallel and a tensor-parallel size above 1."""
    if not c.tp_comm_overlap:
        return
    if c.tensor_model_parallel_size == 1:
        yield Problem(
            ("--tp-comm-overlap", "--tensor-model-parallel-size"),
            1,
            "One rank holds whole matrices, and nothing travels between its products",
            "Remove --tp-comm-overlap, or set --tensor-model-parallel-size 2 --sequence-parallel",
        )
    elif not c.sequence_parallel:
        yield Problem(
            ("--tp-comm-overlap", "--sequence-parallel"),
            "--tp-comm-overlap alone",
            "Without shards of the sequence a sum starts only when the whole product is there",
            "Add --sequence-parallel",
        )


@rule
def tp_overlap_has_a_part_left(c: Draft) -> Iterator[Problem]:
    """--tp-comm-overlap needs at least one of its parts."""
    if c.tp_comm_overlap and not any(c.values[name] for name in _PARTS):
        switched_off = [flag_of(name) for name in _PARTS if flag_of(name).startswith("--no-")]
        yield Problem(
            ("--tp-comm-overlap", *switched_off),
            "every part switched off",
            "Nothing is left to overlap",
            "Remove --tp-comm-overlap, or one of the others",
        )


@rule
def tp_overlap_settings_belong_to_it(c: Draft) -> Iterator[Problem]:
    """Settings of --tp-comm-overlap need it; those of userbuffers need Transformer Engine."""
    buffers = ("tp_comm_overlap_cfg", "tp_comm_bootstrap_backend")
    for name in (*buffers, "tp_comm_overlap_rs_dgrad"):
        flag, value = flag_of(name), c.values[name]
        if value == SPECS[name].default:
            continue
        if not c.tp_comm_overlap:
            yield Problem(
                (flag, "--tp-comm-overlap"),
                "set" if value is True else value,
                "It belongs to --tp-comm-overlap",
                f"Add --tp-comm-overlap, or remove {flag}",
            )
        elif name in buffers and c.transformer_impl == "native":
            yield Problem(
                (flag, "--transformer-impl"),
                f"{value} and native",
                "It is about Transformer Engine's userbuffers; native layers send messages",
                f"Remove {flag}, or use --transformer-impl transformer_engine",
            )
