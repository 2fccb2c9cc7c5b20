"""What a pipeline rank holds, and the schedule it takes part in."""

from __future__ import annotations

from typing import Any

from megatron.config.placement import Stage, stages_of, stages_of_rank
from megatron.core.mesh import Axis
from megatron.core.pipeline_parallel.schedule import Schedule, generate, lower
from megatron.core.pipeline_parallel.simulate import simulate


def local_stages(config: Any, axis: Axis) -> tuple[Stage, ...]:
    """Return the stages of this rank.

    Args:
        config: The finished configuration.
        axis: The pipeline axis.
    """
    return stages_of_rank(stages_of(config), axis.size, axis.rank)


def checked_schedule(config: Any, training: bool = True) -> Schedule:
    """Return the schedule that a configuration asks for, with transfers, once it is known to end.

    Args:
        config: The finished configuration.
        training: Whether the step has backward passes.

    Raises:
        ScheduleError: The schedule would hang.
    """
    schedule = lower(
        generate(
            config.num_microbatches,
            pipeline_size=config.pipeline_model_parallel_size,
            virtual_size=config.virtual_pipeline_model_parallel_size,
            kind=config.pipeline_schedule,
            group_size=config.microbatch_group_size_per_virtual_pipeline_stage,
            training=training,
        ),
        prefetch=config.overlap_p2p_communication,
    )
    simulate(schedule)
    return schedule
