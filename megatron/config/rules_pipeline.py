"""Rules about pipeline parallelism: where layers go and which schedules exist."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.batch_size import replicas_step
from megatron.config.draft import Draft
from megatron.config.placement import PlacementError, stages_of
from megatron.config.problems import Problem, rule
from megatron.config.rules_batch import plan_of
from megatron.config.schema import flag_of

_WAYS_TO_INTERLEAVE = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)
_OTHER_SPLITS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _set(c: Draft, names: tuple[str, ...]) -> list[str]:
    """The settings among `names` that the user made; switches only when they are on."""
    return [n for n in names if c.given.get(n) not in (None, False)]


@rule
def pipeline_splits_agree(c: Draft) -> Iterator[Problem]:
    """At most one way to interleave, and no other split next to a layout."""
    ways = _set(c, _WAYS_TO_INTERLEAVE)
    if len(ways) > 1:
        yield Problem(
            tuple(flag_of(n) for n in ways),
            " and ".join(str(c.values[n]) for n in ways),
            "Each of them says by itself how many stages a rank holds",
            "Keep one",
        )
    others = _set(c, _OTHER_SPLITS)
    if c.pipeline_model_parallel_layout is not None and others:
        yield Problem(
            (flag_of("pipeline_model_parallel_layout"), *(flag_of(n) for n in others)),
            c.pipeline_model_parallel_layout,
            "The layout places every layer by itself",
            f"Remove {' and '.join(flag_of(n) for n in others)}",
        )


@rule
def pipeline_settings_have_a_pipeline(c: Draft) -> Iterator[Problem]:
    """Settings of a pipeline need --pipeline-model-parallel-size above 1."""
    if c.pipeline_model_parallel_size != 1:
        return
    names = (*_WAYS_TO_INTERLEAVE, *_OTHER_SPLITS)
    group = "microbatch_group_size_per_virtual_pipeline_stage"
    for name in _set(c, (*names, group)):
        yield Problem(
            (flag_of(name), "--pipeline-model-parallel-size"),
            f"{c.values[name]} and 1",
            "One rank holds all layers, so there is nothing to place or to interleave",
            f"Set --pipeline-model-parallel-size, or remove {flag_of(name)}",
        )


@rule
def weight_passes_have_a_backend(c: Draft) -> Iterator[Problem]:
    """--pipeline-schedule zb-h1 needs the native linear layers."""
    if c.pipeline_schedule == "zb-h1" and c.transformer_impl == "transformer_engine":
        yield Problem(
            ("--pipeline-schedule", "--transformer-impl"),
            "zb-h1 and transformer_engine",
            "Its linear layers compute the gradients of input and weight at once",
            "Use --transformer-impl native, or --pipeline-schedule 1f1b",
        )


@rule
def layers_fill_the_stages(c: Draft) -> Iterator[Problem]:
    """Layers spread over the stages as asked: evenly, or by an uneven split or a layout."""
    pp = c.pipeline_model_parallel_size
    if not c.counts("num_layers", "pipeline_model_parallel_size") or pp == 1:
        return
    if len(_set(c, _WAYS_TO_INTERLEAVE)) > 1 or c.broken & {*_WAYS_TO_INTERLEAVE, *_OTHER_SPLITS}:
        return  # refused by another rule
    numbers = [n for n in (*_WAYS_TO_INTERLEAVE[:2], *_OTHER_SPLITS[:2]) if c.was_given(n)]
    if not c.counts(*numbers):
        return
    try:
        stages_of(c)
    except PlacementError as error:
        yield Problem(error.flags, error.got, error.why, error.fix)


@rule
def microbatches_fill_the_groups(c: Draft) -> Iterator[Problem]:
    """Interleaved stages need whole groups of microbatches, at least one a rank."""
    pp, virtual = c.pipeline_model_parallel_size, c.virtual_pipeline_model_parallel_size
    group_flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    if virtual == 1:
        if c.was_given("microbatch_group_size_per_virtual_pipeline_stage") and pp > 1:
            yield Problem(
                (group_flag,),
                c.microbatch_group_size_per_virtual_pipeline_stage,
                "Only ranks with several virtual stages turn from one to the next",
                f"Add --num-virtual-stages-per-pipeline-rank, or remove {group_flag}",
            )
        return
    if c.pipeline_schedule != "1f1b":
        yield Problem(
            ("--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"),
            f"{c.pipeline_schedule} and {virtual}",
            "Virtual stages are interleaved by the schedule 1f1b",
            "Use --pipeline-schedule 1f1b, or one stage a rank",
        )
    group = c.microbatch_group_size_per_virtual_pipeline_stage or pp
    plan = plan_of(c)
    sizes = plan.sizes if plan is not None else ()
    for count in [size // replicas_step(c) for size in sizes] or [c.num_microbatches]:
        rest = count % group if group > 0 else 0
        if not (group < pp or count < group or 0 < rest < pp):
            continue
        step = c.micro_batch_size * c.data_parallel_size * pp
        yield Problem(
            ("--global-batch-size", group_flag, "--pipeline-model-parallel-size"),
            f"{count} microbatches in groups of {group} over {pp} ranks",
            "A rank turns to its next virtual stage after a group; it needs a microbatch a rank,"
            " in the last group too",
            f"Make --global-batch-size a multiple of {step} and leave {group_flag} out",
        )
        return
