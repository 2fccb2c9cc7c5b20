"""The global functions answer from the installed mesh, and from nothing else."""

from __future__ import annotations

import pytest

from megatron.core import parallel_state as ps
from megatron.core.errors import MeshError
from megatron.core.mesh import MeshSizes, ParallelState


@pytest.fixture(autouse=True)
def _clean():
    ps.destroy_model_parallel()
    yield
    ps.destroy_model_parallel()


def test_nothing_installed():
    assert not ps.model_parallel_is_initialized()
    with pytest.raises(MeshError, match="initialize_model_parallel"):
        ps.get_tensor_model_parallel_rank()


def test_one_process():
    ps.initialize_model_parallel()
    assert ps.model_parallel_is_initialized()
    assert ps.get_tensor_model_parallel_group() is None
    assert ps.get_data_parallel_world_size(with_context_parallel=True) == 1
    assert ps.is_pipeline_first_stage()
    assert ps.is_pipeline_last_stage()
    with pytest.raises(MeshError, match="destroy_model_parallel"):
        ps.initialize_model_parallel()


def test_one_process_cannot_be_two_tensor_parallel_ranks():
    with pytest.raises(MeshError, match="world size: got 1"):
        ps.initialize_model_parallel(tensor_model_parallel_size=2)


def test_virtual_stages_need_a_pipeline():
    with pytest.raises(MeshError, match="virtual_pipeline_model_parallel_size: got 2"):
        ps.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    sizes = MeshSizes(world=4, pp=4, vpp=2)
    mesh = ParallelState.build(sizes, 3, 4, make_group=lambda ranks: tuple(ranks))
    assert mesh.pipe_forward_wrap.ranks == (0, 3)


def test_ranks_in_a_world_of_sixteen():
    sizes = MeshSizes(world=16, tp=2, cp=2, pp=2, ep=4, etp=1)
    ps.install(ParallelState.build(sizes, 6, 16, make_group=lambda ranks: tuple(ranks)))
    assert ps.get_tensor_model_parallel_group() == (6, 7)
    assert ps.get_tensor_model_parallel_src_rank() == 6
    assert ps.get_tensor_model_parallel_ranks() == [6, 7]
    assert ps.get_tensor_model_parallel_world_size() == 2
    assert ps.get_data_parallel_group() == (2, 6)
    assert ps.get_data_parallel_rank() == 1
    assert ps.get_data_parallel_src_rank() == 2
    assert ps.get_data_parallel_group(with_context_parallel=True) == (0, 2, 4, 6)
    assert ps.get_context_parallel_group() == (4, 6)
    assert ps.get_context_parallel_rank() == 1
    assert ps.get_context_parallel_global_ranks() == [4, 6]
    assert ps.get_tensor_and_context_parallel_group() == (4, 5, 6, 7)
    assert ps.get_pipeline_model_parallel_group() == (6, 14)
    assert ps.get_pipeline_model_parallel_next_rank() == 14
    assert ps.get_pipeline_model_parallel_prev_rank() == 14
    assert ps.get_pipeline_model_parallel_first_rank() == 6
    assert ps.get_pipeline_model_parallel_last_rank() == 14
    assert ps.is_pipeline_first_stage()
    assert not ps.is_pipeline_last_stage()
    assert ps.is_rank_in_embedding_group()
    assert ps.get_expert_model_parallel_group() == (4, 5, 6, 7)
    assert ps.get_expert_model_parallel_rank() == 2
    assert ps.get_expert_data_parallel_group() == (2, 6)
    assert ps.get_expert_tensor_parallel_world_size() == 1
    assert ps.get_expert_tensor_and_model_parallel_group() == (4, 5, 6, 7)
    assert ps.get_expert_tensor_and_model_parallel_world_size() == 4
    assert ps.get_expert_tensor_and_model_parallel_rank() == 2
    assert ps.get_tensor_and_expert_parallel_group() == (4, 5, 6, 7)
    assert ps.get_data_modulo_expert_parallel_group() == (2, 6)
    assert ps.get_data_parallel_group(True, partial_data_parallel=True) == (0, 2, 4, 6)
    assert ps.get_expert_data_parallel_group(partial_expert_data_parallel=True) == (2, 6)
    assert ps.get_inter_distributed_optimizer_instance_group() is None
    with pytest.raises(MeshError, match="with_context_parallel=True"):
        ps.get_data_parallel_rank(partial_data_parallel=True)
    assert ps.get_amax_reduction_group() == tuple(range(8))
