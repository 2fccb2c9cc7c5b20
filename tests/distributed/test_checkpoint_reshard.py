"""Saving under one arrangement of ranks and loading under another, with a small sharded model."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing import directory as place
from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.shard import whole
from megatron.core.dist_checkpointing.storage import Reader
from megatron.core.errors import CheckpointError
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.shards import (
    gather_full,
    global_name,
    init_parameter,
    mark_expert,
    mark_sharded,
    shard_axis,
)
from megatron.training.checkpointing import load_checkpoint
from megatron.training.foreign_state import LR_NAMES, WD_NAMES
from megatron.training.progress import Progress
from tests.distpool import run_ranks
from tests.saving import save_checkpoint

VOCAB = 10
EXPERTS = 4
GROUP = "decoder.layers.1.experts.fc1"  # of experts, in the FP8 state


class Layer(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        tp = mesh.tp.size
        self.fc1 = nn.Linear(4, 16 // tp)
        self.fc2 = nn.Linear(8 // tp, 4)
        for parameter in self.fc1.parameters():
            mark_sharded(parameter, 0, stride=2)
        mark_sharded(self.fc2.weight, 1)
        self.router = nn.Module()
        self.router.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.experts = nn.Module()
        for kind, rows, columns in (("fc1", 12, 4), ("fc2", 4, 6)):
            group = nn.Module()
            for i, number in enumerate(own_experts(mesh)):
                split = 0 if kind == "fc1" else 1
                shape = [rows, columns]
                shape[split] //= mesh.etp.size
                weight = nn.Parameter(torch.zeros(shape))
                mark_expert(weight, number)
                mark_sharded(weight, split, stride=2 if kind == "fc1" else 1)
                group.register_parameter(f"weight{i}", weight)
            self.experts.register_module(kind, group)


def own_experts(mesh):
    count = EXPERTS // mesh.ep.size
    return list(range(mesh.ep.rank * count, (mesh.ep.rank + 1) * count))


class Model(nn.Module):
    """Padded embedding, gated MLP layers with experts beside them, replicated norm."""

    def __init__(self, mesh, dtype):
        super().__init__()
        tp = mesh.tp.size
        padded = -(-VOCAB // (4 * tp)) * 4 * tp
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(padded // tp, 4)
        mark_sharded(self.embedding.word_embeddings.weight, 0)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(mesh) for _ in range(3))
        self.decoder.final_layernorm = nn.LayerNorm(4)
        self.to(dtype)
        for layer in self.decoder.layers:
            layer.router.float()


class Moments:
    """An optimizer's state without its arithmetic."""

    def __init__(self, model):
        self.model = model
        self.owned_ranges = {}
        self.step = 0
        self.state = {
            name: {"param": p.detach().float(), "exp_avg": torch.zeros(p.shape)}
            for name, p in model.named_parameters()
        }

    def named_state(self):
        return iter(self.state.items())

    lends_copies = False

    def loadable_state(self):
        return self.named_state()

    def scalars(self):
        return {"step": self.step}

    def load_scalars(self, values):
        self.step = values["step"]

    def write_model_params(self):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.state[name]["param"])

    def finish_load(self):
        self.write_model_params()

    def fp8_values(self):
        return {}

    def reload_model_params(self, fp8_values):
        assert fp8_values == {}
        for name, p in self.model.named_parameters():
            self.state[name]["param"].copy_(p.detach())


class Schedule:
    def __init__(self):
        self.samples = 0

    def state_dict(self):
        shape = {k: dict.fromkeys(n.values()) for k, n in (("lr", LR_NAMES), ("wd", WD_NAMES))}
        return {"num_samples": self.samples, **shape}

    def load_state_dict(self, state):
        self.samples = state["num_samples"]


class Scales:
    """FP8 state of a dense layer and of the experts that a rank holds."""

    def __init__(self, mesh, value, offset=0.0):
        numbers = own_experts(mesh)
        rows = torch.tensor(numbers).view(-1, 1) * 10.0 + torch.arange(3.0) + offset
        experts = {GROUP: {"numbers": numbers, "scale": rows}}
        self.state = {
            "recipe": "delayed", "layers": {"decoder.layers.0.fc1": value}, "experts": experts
        }  # fmt: skip

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        return ["scales taken over"]


def _arrays(node):
    if isinstance(node, Mapping):
        return {key: _arrays(value) for key, value in node.items()}
    if isinstance(node, range):
        return list(node)
    return node.numpy() if isinstance(node, torch.Tensor) else node


def config(root, **fields):
    values = {
        "save": str(root), "load": str(root), "ckpt_step": None, "ckpt_format": "torch_dist",
        "num_layers": 3, "no_save_optim": False, "no_save_rng": False, "no_load_optim": False,
        "no_load_rng": False, "finetune": False, "exit_on_missing_checkpoint": False,
        "fp8_amax_reduction": "tp-cp-dp", "num_experts": EXPERTS, "moe_layer_freq": "1",
        "non_persistent_ckpt_type": None, "no_ckpt_fallback": False,
        "use_checkpoint_opt_param_scheduler": False, "optimizer": "sgd",
        "ckpt_fully_parallel_load": False, **fields,
    }  # fmt: skip
    names = ("num_layers", "hidden_size", "vocab_size", "num_experts")
    plain = {k: values.get(k) for k in names}
    from megatron.training import checkpoint_config

    for name in checkpoint_config.ARCHITECTURE:
        values.setdefault(name, None)
    return SimpleNamespace(
        **values, to_dict=lambda: {k: v for k, v in plain.items() if v}, given_dict=dict
    )


@functools.cache
def mesh_of(rank, world, layout):
    """Once in each process: groups of processes take longer to make than anything else here."""
    return ParallelState.build(MeshSizes(world=world, **dict(layout)), rank, world)


def parts(rank, world, layout, dtype=torch.bfloat16):
    mesh = mesh_of(rank, world, tuple(layout.items()))
    model = Model(mesh, dtype)
    return mesh, model, Moments(model)


def fill(mesh, model, optimizer):
    """The same global values whatever the layout; padding rows get ones."""
    for name, p in model.named_parameters():
        rows = VOCAB if "word_embeddings" in name else None
        axis, path = shard_axis(p, mesh), global_name(name, p)
        for seed, tensor in enumerate(optimizer.state[name].values()):
            init_parameter(_like(tensor, p), axis, lambda t: t.normal_(), seed, path, rows)
    optimizer.write_model_params()
    optimizer.step = 11
    for number, layer in enumerate(model.decoder.layers):
        layer.router.expert_bias.copy_(torch.arange(EXPERTS) + 10.0 * number)


def _like(tensor, param):
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(param, attribute):
            setattr(tensor, attribute, getattr(param, attribute))
    return tensor


def everything(mesh, model, optimizer):
    """Global values of what this rank has; the experts are those of its expert-parallel rank."""
    found = {}
    for name, p in model.named_parameters():
        for kind, tensor in {"model": p.detach(), **optimizer.state[name]}.items():
            full = gather_full(tensor, p, shard_axis(p, mesh))
            full = full[:VOCAB] if "word_embeddings" in name else full
            # As arrays: a tensor would travel as shared memory that dies with its rank.
            found[f"{kind}.{global_name(name, p)}"] = full.float().numpy()
    for name, buffer in model.named_buffers():
        found[f"model.{name}"] = buffer.numpy().copy()
    return found


def save(rank, world, layout, root, **fields):
    mesh, model, optimizer = parts(rank, world, layout)
    fill(mesh, model, optimizer)
    schedule = Schedule()
    schedule.samples = 70
    save_checkpoint(
        config(root, **fields), mesh, model=model, optimizer=optimizer, scheduler=schedule,
        fp8=Scales(mesh, torch.arange(3.0)),
        progress=Progress(iteration=7, consumed_train_samples=70),
    )  # fmt: skip
    return everything(mesh, model, optimizer)


def load(rank, world, layout, root, dtype=torch.bfloat16, **fields):
    mesh, model, optimizer = parts(rank, world, layout, dtype)
    for tensors in optimizer.state.values():
        for tensor in tensors.values():
            tensor.fill_(5.0)
    progress, schedule, scales = Progress(), Schedule(), Scales(mesh, None)
    lines = []
    done = load_checkpoint(
        config(root, **fields), mesh, model=model, optimizer=optimizer, scheduler=schedule,
        fp8=scales, progress=progress, say=lines.append,
    )  # fmt: skip
    padding = model.embedding.word_embeddings.weight.detach()
    first = mesh.tp.rank * padding.shape[0]
    rest = padding[max(VOCAB - first, 0) :]
    return {
        "done": done, "state": everything(mesh, model, optimizer), "progress": progress,
        "samples": schedule.samples, "step": optimizer.step, "scales": _arrays(scales.state),
        "padding_is_zero": bool((rest == 0).all()), "lines": lines,
    }  # fmt: skip


TP2 = {"tp": 2}
# By number of ranks; the rest is DP. ETP is TP where it is not given.
LAYOUTS = {
    1: [{}],
    2: [TP2, {"ep": 2}],
    4: [{"ep": 4}, {"ep": 2, "etp": 2}, {"tp": 2, "ep": 2, "etp": 1}],
}


def save_each(rank, world, root):
    for number, layout in enumerate(LAYOUTS[world]):
        state = save(rank, world, layout, root / f"{world}.{number}")
    return state


def load_each(rank, world, roots):
    return [(layout, load(rank, world, layout, r)) for layout in LAYOUTS[world] for r in roots]


def test_every_arrangement_loads_every_other(tmp_path):
    (expected,) = run_ranks(save_each, 1, tmp_path)
    for world in (2, 4):
        run_ranks(save_each, world, tmp_path)
    roots = sorted(tmp_path.iterdir())
    for world in LAYOUTS:
        by_rank = run_ranks(load_each, world, roots, detail=False)
        for results in zip(*by_rank, strict=True):
            layout = results[0][0]
            assert set().union(*(r["state"] for _, r in results)) == set(expected)
            for _, result in results:
                check(result, expected, layout)


def check(result, expected, layout):
    assert result["done"]
    for key, value in result["state"].items():
        assert np.array_equal(expected[key], value), (key, layout)
    assert result["padding_is_zero"]
    assert (result["progress"].iteration, result["progress"].consumed_train_samples) == (7, 70)
    assert (result["samples"], result["step"]) == (70, 11)
    assert result["scales"]["layers"]["decoder.layers.0.fc1"].tolist() == [0.0, 1.0, 2.0]
    group = result["scales"]["experts"][GROUP]
    assert group["numbers"] == list(range(EXPERTS))
    assert group["scale"].tolist() == [[e * 10.0 + i for i in range(3)] for e in range(EXPERTS)]


def save_scales(rank, world, layout, root):
    mesh = ParallelState.build(MeshSizes(world=world, **layout), rank, world)
    save_checkpoint(
        config(root, fp8_amax_reduction="tp"), mesh, model=nn.Module(), optimizer=None,
        scheduler=None, fp8=Scales(mesh, torch.ones(1) * rank, 100.0 * rank),
        progress=Progress(iteration=7),
    )  # fmt: skip


def load_scales(rank, world, layout, root):
    mesh = ParallelState.build(MeshSizes(world=world, **layout), rank, world)
    scales = Scales(mesh, None)
    load_checkpoint(
        config(root, fp8_amax_reduction="tp"), mesh, model=nn.Module(), optimizer=None,
        scheduler=None, fp8=scales, progress=Progress(), say=lambda line: None,
    )  # fmt: skip
    return scales.state["experts"][GROUP]["scale"][:, 0].tolist()


def test_replicas_of_an_expert_with_scales_of_their_own(tmp_path):
    """Two tensor-parallel ranks hold whole experts; they reduce maxima with nobody."""
    whole_experts = {"tp": 2, "etp": 1}
    run_ranks(save_scales, 2, whole_experts, tmp_path)
    own = [[0.0, 10.0, 20.0, 30.0], [100.0, 110.0, 120.0, 130.0]]
    assert run_ranks(load_scales, 2, whole_experts, tmp_path) == own
    assert run_ranks(load_scales, 1, {}, tmp_path) == own[:1]


def test_layers_that_differ_are_stored_one_by_one(tmp_path):
    """And how they are stored is read from the checkpoint."""
    differ = {"moe_layer_freq": "([1]*3)"}
    expected = run_ranks(save, 2, {"ep": 2}, tmp_path, **differ)[1]
    keys = Reader(tmp_path / "iter_0000007").tensors
    key = "decoder.layers.2.experts.experts.fc1.weight"
    assert keys[key].shape == keys[f"optimizer.state.exp_avg.{key}"].shape == (EXPERTS, 12, 4)
    for fields in ({}, differ):
        (result,) = run_ranks(load, 1, {}, tmp_path, **fields)
        for name, value in expected.items():
            assert np.array_equal(result["state"][name], value)


def test_replicas_share_the_writing(tmp_path):
    run_ranks(save, 2, {}, tmp_path)
    sizes = [p.stat().st_size for p in (tmp_path / "iter_0000007").glob("*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.2 * sum(sizes)


def test_weights_only_loads(tmp_path):
    expected = run_ranks(save, 2, TP2, tmp_path)[0]
    for fields in ({"finetune": True}, {"no_load_optim": True}):
        (result,) = run_ranks(load, 1, {}, tmp_path, **fields)
        for key, value in expected.items():
            kind, name = key.split(".", 1)
            if kind == "model":
                assert np.array_equal(result["state"][key], value)
                assert np.array_equal(result["state"].get(f"param.{name}", value), value)
        assert result["progress"].iteration == (0 if "finetune" in fields else 7)
        assert (result["samples"], result["step"]) == (0, 0)


def test_masters_reach_a_run_in_fp32_unrounded(tmp_path):
    expected = run_ranks(save, 2, TP2, tmp_path)[0]
    (result,) = run_ranks(load, 1, {}, tmp_path, dtype=torch.float32)
    for key, value in result["state"].items():
        kind, name = key.split(".", 1)
        if kind == "model" and "expert_bias" not in name:
            assert np.array_equal(value, expected[f"param.{name}"])


def test_lines_that_people_look_for(tmp_path):
    run_ranks(save, 2, TP2, tmp_path)
    first, second = run_ranks(load, 2, TP2, tmp_path)
    assert second["lines"] == []
    text = "\n".join(first["lines"])
    assert f" loading distributed checkpoint from {tmp_path} at iteration 7" in text
    assert f"  successfully loaded checkpoint from {tmp_path}" in text
    assert "0 missing" in text
    assert "scales taken over" in text
    assert "random state" not in text


def test_nothing_to_load(tmp_path):
    for result in run_ranks(load, 2, TP2, tmp_path):
        assert result["done"] is False
    lines = run_ranks(load, 2, TP2, tmp_path)[0]["lines"]
    assert "WARNING: could not find the metadata file" in lines[0]
    assert "will not load any checkpoints and will start from random" in lines[1]


def refused(rank, world, *args, **kwargs):
    try:
        load(rank, world, *args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return None


def test_refusals_are_the_same_on_all_ranks(tmp_path):
    assert "exit-on-missing" in "".join(
        set(run_ranks(refused, 2, TP2, tmp_path, exit_on_missing_checkpoint=True))
    )
    run_ranks(save, 2, TP2, tmp_path)
    (text,) = set(run_ranks(refused, 2, TP2, tmp_path, num_layers=4))
    assert "--num-layers is 3 in the checkpoint and 4 in this run" in text
    file = next((tmp_path / "iter_0000007").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    (text,) = set(run_ranks(refused, 2, TP2, tmp_path))
    assert file.name in text


def test_missing_tensors_are_listed(tmp_path):
    cut = config(tmp_path, no_save_optim=True)

    def without_optimizer(rank, world):
        mesh, model, optimizer = parts(rank, world, TP2)
        save_checkpoint(
            cut, mesh, model=model, optimizer=optimizer, scheduler=None, fp8=None,
            progress=Progress(iteration=1),
        )  # fmt: skip

    run_ranks(without_optimizer, 2)
    (text,) = set(run_ranks(refused, 2, TP2, tmp_path))
    assert "optimizer.state.exp_avg.decoder.layers.fc1.weight" in text
    assert "--no-load-optim" in text
    assert run_ranks(load, 2, TP2, tmp_path, no_load_optim=True)[0]["done"]


def test_random_state_returns_to_each_rank(tmp_path):
    def draw():
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]

    def saver(rank, world):
        for module in (random, np.random):
            module.seed(rank)
        torch.manual_seed(rank)
        save(rank, world, {}, tmp_path)
        return draw()

    def loader(rank, world):
        lines = load(rank, world, {}, tmp_path)["lines"]
        return draw(), lines

    expected = run_ranks(saver, 2)
    assert [r[0] for r in run_ranks(loader, 2)] == expected
    assert "random state was not restored" in "".join(run_ranks(loader, 1)[0][1])


def failing_save(rank, world, root, failing_rank):
    mesh = ParallelState.build(MeshSizes(world=world), rank, world)
    from megatron.core.dist_checkpointing import storage

    if rank == failing_rank:

        def full(self, data):
            raise OSError(28, "No space left on device")

        storage._ChecksumStream.write = full
    tensors = {f"t{i}": whole(torch.ones(100)) for i in range(4)}
    try:
        io.save(root, 2, tensors, {}, Peers(mesh.world))
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path, failing_rank):
    run_ranks(save, 2, {}, tmp_path)
    first, second = run_ranks(failing_save, 2, tmp_path, failing_rank)
    assert first == second
    assert f"No space left on device (rank {failing_rank})" in first
    assert sorted(os.listdir(tmp_path)) == ["iter_0000007", place.TRACKER_FILE]
    assert place.find(tmp_path).iteration == 7


def test_an_unwritable_place_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_ranks(failing_save, 2, tmp_path / "file" / "x", -1)
    assert first == second
    assert "cannot be written to" in first
