"""Megatron's `parallel_state` functions, answered from one installed `ParallelState`.

This is for scripts that expect a global. The project's own layers receive their axes explicitly and
do not import this module.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron.core.errors import MeshError, complaint
from megatron.core.mesh import (
    DEFAULT_ORDER,
    Axis,
    MeshSizes,
    ParallelState,
)

Group = dist.ProcessGroup | None

_installed: ParallelState | None = None


def install(mesh: ParallelState) -> None:
    """Make `mesh` the one that every function here answers from."""
    global _installed
    _installed = mesh


def get_parallel_state() -> ParallelState:
    """The installed mesh.

    Raises:
        MeshError: If there is none.
    """
    if _installed is None:
        raise MeshError(
            complaint(
                "parallel_state",
                "no mesh",
                "Model parallelism is not initialised in this process",
                "Call initialize_model_parallel, or start through megatron.training",
            )
        )
    return _installed


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    order: str = DEFAULT_ORDER,
    amax_reduction: str = "tp-cp-dp",
) -> None:
    """Build the mesh of all processes and install it. Collective.

    Raises:
        MeshError: If the sizes do not fit the world, or a mesh is installed already.
    """
    if _installed is not None:
        raise MeshError(
            complaint(
                "initialize_model_parallel",
                f"a second call ({_installed.label()})",
                "A process has one mesh",
                "Call destroy_model_parallel first",
            )
        )
    distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    sizes = MeshSizes(
        world=world,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
        optimizer_instances=num_distributed_optimizer_instances,
        vpp=virtual_pipeline_model_parallel_size or 1,
    )
    install(ParallelState.build(sizes, rank, world, amax_reduction=amax_reduction))


def model_parallel_is_initialized() -> bool:
    """Whether a mesh is installed."""
    return _installed is not None


is_initialized = model_parallel_is_initialized


def destroy_model_parallel() -> None:
    """Forget the installed mesh. Its process groups live as long as `torch.distributed` does."""
    global _installed
    _installed = None


def _axis(name: str) -> Axis:
    axis: Axis = getattr(get_parallel_state(), name)
    return axis


# Tensor parallelism


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Group:
    """Process group of the tensor-parallel ranks; None if there is one rank."""
    return _axis("tp").group


def get_tensor_model_parallel_world_size() -> int:
    """Number of tensor-parallel ranks."""
    return _axis("tp").size


def get_tensor_model_parallel_rank() -> int:
    """Index among the tensor-parallel ranks."""
    return _axis("tp").rank


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first tensor-parallel rank."""
    return _axis("tp").ranks[0]


def get_tensor_model_parallel_ranks() -> list[int]:
    """Global ranks that share this process's tensor-parallel group."""
    return list(_axis("tp").ranks)


# Data parallelism


def _data_axis(with_context_parallel: bool, partial: bool = False) -> Axis:
    if partial and not with_context_parallel and _axis("cp").size > 1:
        raise MeshError(
            complaint(
                "partial_data_parallel",
                "no context-parallel ranks",
                "The optimizer is spread over data- and context-parallel ranks together",
                "Pass with_context_parallel=True",
            )
        )
    name = "dp_cp" if with_context_parallel or partial else "dp"
    return _axis(f"{name}_inner" if partial else name)


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Group:
    """Process group of the data-parallel ranks; None if there is one rank.

    Args:
        with_context_parallel: Include the ranks that share a sequence.
        partial_data_parallel: Only those that share one instance of the distributed optimizer.
    """
    return _data_axis(with_context_parallel, partial_data_parallel).group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Number of data-parallel ranks."""
    return _data_axis(with_context_parallel, partial_data_parallel).size


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Index among the data-parallel ranks."""
    return _data_axis(with_context_parallel, partial_data_parallel).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first data-parallel rank."""
    return _data_axis(with_context_parallel).ranks[0]


def get_inter_distributed_optimizer_instance_group() -> Group:
    """Process group of the ranks that own the same part in every instance of the optimizer."""
    return _axis("dp_cp_outer").group


# Pipeline parallelism


def get_pipeline_model_parallel_group() -> Group:
    """Process group of the pipeline stages; None if there is one stage."""
    return _axis("pp").group


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _axis("pp").size


def get_pipeline_model_parallel_rank() -> int:
    """Index of this process's stage."""
    return _axis("pp").rank


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return _axis("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return _axis("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the first one after the last."""
    axis = _axis("pp")
    return axis.ranks[(axis.rank + 1) % axis.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage; the last one before the first."""
    axis = _axis("pp")
    return axis.ranks[(axis.rank - 1) % axis.size]


def is_pipeline_first_stage(ignore_virtual: bool = True) -> bool:
    """Whether this process holds the first stage."""
    return _axis("pp").is_first


def is_pipeline_last_stage(ignore_virtual: bool = True) -> bool:
    """Whether this process holds the last stage."""
    return _axis("pp").is_last


def get_embedding_group() -> Group:
    """Process group of first and last stage, which hold tied embeddings; None elsewhere."""
    return _axis("embedding").group


def is_rank_in_embedding_group() -> bool:
    """Whether this process holds the first or the last stage."""
    pp = _axis("pp")
    return pp.is_first or pp.is_last


# Context parallelism


def get_context_parallel_group() -> Group:
    """Process group of the context-parallel ranks; None if there is one rank."""
    return _axis("cp").group


def get_context_parallel_world_size() -> int:
    """Number of context-parallel ranks."""
    return _axis("cp").size


def get_context_parallel_rank() -> int:
    """Index among the context-parallel ranks."""
    return _axis("cp").rank


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks that share this process's context-parallel group."""
    return list(_axis("cp").ranks)


def get_tensor_and_context_parallel_group() -> Group:
    """Process group over tensor- and context-parallel ranks; None if there is one rank."""
    return _axis("tp_cp").group


def get_tensor_and_context_parallel_world_size() -> int:
    """Number of tensor- and context-parallel ranks."""
    return _axis("tp_cp").size


# Expert parallelism


def get_expert_model_parallel_group() -> Group:
    """Process group of the expert-parallel ranks; None if there is one rank."""
    return _axis("ep").group


def get_expert_model_parallel_world_size() -> int:
    """Number of expert-parallel ranks."""
    return _axis("ep").size


def get_expert_model_parallel_rank() -> int:
    """Index among the expert-parallel ranks."""
    return _axis("ep").rank


def get_expert_tensor_parallel_group() -> Group:
    """Process group of the ranks that share one expert's matrices; None if there is one rank."""
    return _axis("etp").group


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that share one expert's matrices."""
    return _axis("etp").size


def get_expert_tensor_parallel_rank() -> int:
    """Index among the ranks that share one expert's matrices."""
    return _axis("etp").rank


def _expert_data_axis(partial: bool) -> Axis:
    return _axis("edp_inner" if partial else "edp")


def get_expert_data_parallel_group(partial_expert_data_parallel: bool = False) -> Group:
    """Process group of the ranks that hold copies of the same experts; None if there is one.

    Args:
        partial_expert_data_parallel: Only those that share one instance of the distributed
            optimizer.
    """
    return _expert_data_axis(partial_expert_data_parallel).group


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of ranks that hold copies of the same experts."""
    return _expert_data_axis(partial_expert_data_parallel).size


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Index among the ranks that hold copies of the same experts."""
    return _expert_data_axis(partial_expert_data_parallel).rank


def get_expert_tensor_and_model_parallel_group() -> Group:
    """Process group of the ranks that hold a layer's experts between them; None if there is one."""
    return _axis("ep_etp").group


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of ranks that hold a layer's experts between them."""
    return _axis("ep_etp").size


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Index among the ranks that hold a layer's experts between them."""
    return _axis("ep_etp").rank


# The names of older releases of Megatron-Core
get_tensor_and_expert_parallel_group = get_expert_tensor_and_model_parallel_group
get_tensor_and_expert_parallel_world_size = get_expert_tensor_and_model_parallel_world_size
get_tensor_and_expert_parallel_rank = get_expert_tensor_and_model_parallel_rank
get_data_modulo_expert_parallel_group = get_expert_data_parallel_group
get_data_modulo_expert_parallel_rank = get_expert_data_parallel_rank


# FP8


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> Group:
    """Process group over which FP8 magnitudes are reduced; None if there is one rank.

    `--fp8-amax-reduction` decided at start-up; the arguments exist so that Megatron's calls work.
    """
    return _axis("amax").group
