"""Start a process: environment, threads, device, process groups, mesh, backend, seeds.

The only module that reads the environment; everything after it is passed explicitly.
"""

from __future__ import annotations

import datetime
import os
import random
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron.config import ConfigError, Problem, RunConfig
from megatron.config.alignment import misaligned
from megatron.core.backends.contract import Backend
from megatron.core.backends.registry import Choice, choose
from megatron.core.dist_checkpointing.lock import Job
from megatron.core.errors import MeshError, complaint
from megatron.core.mesh import ParallelState
from megatron.core.tensor_parallel.mappings import gather_objects

# Whether the backward products of attention are in FP8; and what an earlier run of this process has
# set it to.
_BACKWARD, _BACKWARD_OF_A_RUN = "NVTE_FP8_DPA_BWD", "MEGATRON_SET_NVTE_FP8_DPA_BWD"
# With these Transformer Engine would give attention another recipe than its layers.
_ATTENTION_VARIABLES = (
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
)


@dataclass(frozen=True)
class Launch:
    """This process's place among the processes that the launcher started."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job: Job = Job()


@dataclass(frozen=True)
class Process:
    """Where a rank runs.

    Attributes:
        machine: Processes with the same text can see each other.
        pid: Process id.
        label: The rank and its place in the mesh.
    """

    machine: str
    pid: int
    label: str = ""

    @classmethod
    def own(cls, label: str = "") -> Process:
        """This process."""
        # In containers of one machine the same process id means different processes.
        space = Path("/proc/self/ns/pid")
        return cls(
            f"{socket.gethostname()} {space.readlink() if space.exists() else ''}",
            os.getpid(),
            label,
        )

    def has_ended(self) -> bool:
        """Whether this process, which must be of this machine, is no more."""
        state = self._state()
        # Without /proc nothing is known.
        return state in "ZX" if state else Path("/proc/self").exists()

    def is_stopped(self) -> bool:
        """Whether this process, which must be of this machine, was stopped by a signal."""
        return self._state() in ("T", "t")

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


@dataclass(frozen=True)
class Runtime:
    """What a process has after `start`.

    Attributes:
        config: The finished configuration.
        mesh: The process mesh.
        backend: The layer backend.
        backend_reason: Why that one.
        device: Where the model lives.
        launch: Rank and world size.
        started: `time.monotonic()` at the start.
        processes: The processes of all ranks; empty when there is only one.
        tp_overlap: What `--tp-comm-overlap` overlaps and how; empty without it.
        fallback: How the backend was chosen, if it is not the one that was asked for.
    """

    config: RunConfig
    mesh: ParallelState
    backend: Backend
    backend_reason: str
    device: torch.device
    launch: Launch
    started: float
    processes: tuple[Process, ...] = ()
    tp_overlap: str = ""
    fallback: Choice | None = None

    def close(self) -> None:
        """Leave the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise MeshError(
            complaint(name, text, "The launcher sets it to a number", "Start with torchrun")
        )
    return int(text)


def read_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Read what torchrun (or anything that sets the same variables) tells this process.

    Args:
        env: The environment; default the process's own.

    Raises:
        MeshError: The variables contradict each other.
    """
    env = os.environ if env is None else env
    world_size = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0)
    if world_size > 1 and "RANK" not in env:
        raise MeshError(
            complaint(
                "WORLD_SIZE",
                world_size,
                "Several processes need a RANK each, and it is not set",
                "Start with torchrun, or unset WORLD_SIZE for a single process",
            )
        )
    if rank >= max(world_size, 1):
        raise MeshError(
            complaint("RANK", rank, f"WORLD_SIZE is {world_size}", "Start with torchrun")
        )
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1),
        job=Job(env.get("SLURM_JOB_ID", ""), _number(env, "SLURM_RESTART_COUNT", 0)),
    )


def _device(wanted: str, launch: Launch) -> torch.device:
    """Choose the device; each local rank has a GPU of its own.

    Raises:
        MeshError: CUDA was asked for and is missing, or there are fewer GPUs than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MeshError(
            complaint("--device", wanted, "torch sees no CUDA device", "Use --device cpu or auto")
        )
    if launch.local_rank >= torch.cuda.device_count():
        raise MeshError(
            complaint(
                "local rank",
                launch.local_rank,
                f"This machine has {torch.cuda.device_count()} GPU(s), one for each rank",
                "Lower --nproc-per-node or use --device cpu",
            )
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _share_cores(launch: Launch, env: Mapping[str, str]) -> None:
    """Give each local rank its share of the cores, unless the user decided already.

    Ranks that each use every core spend their time waiting for one another.
    """
    if "OMP_NUM_THREADS" in env or launch.local_world_size == 1:
        return
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // launch.local_world_size))


def _transport(cfg: RunConfig, device: torch.device) -> str:
    """Name the transport of collectives, in torch's terms.

    Raises:
        MeshError: NCCL was asked for without CUDA.
    """
    if cfg.distributed_backend == "nccl" and device.type != "cuda":
        raise MeshError(
            complaint(
                "--distributed-backend", "nccl", "NCCL needs CUDA", "Use gloo or auto on a CPU"
            )
        )
    if cfg.distributed_backend != "auto":
        return str(cfg.distributed_backend)
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _timeout(cfg: RunConfig) -> datetime.timedelta:
    return datetime.timedelta(minutes=cfg.distributed_timeout_minutes)


def _join(cfg: RunConfig, launch: Launch, device: torch.device) -> None:
    """Meet the other processes.

    Raises:
        MeshError: They did not come, or the address is wrong.
    """
    if launch.world_size == 1 or dist.is_initialized():
        return
    transport = _transport(cfg, device)
    try:
        dist.init_process_group(
            transport,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_timeout(cfg),
            device_id=device if transport == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise MeshError(
            complaint(
                "MASTER_ADDR:MASTER_PORT",
                address,
                f"Rank {launch.rank} of {launch.world_size} could not join: {error}",
                "Start every rank with the same address, reachable from all of them",
            )
        ) from error


def _introduce(mesh: ParallelState) -> tuple[Process, ...]:
    """Exchange the ranks' processes, so that one that vanishes can be named."""
    if mesh.world.size == 1:
        return ()
    return tuple(gather_objects(Process.own(mesh.label()), mesh.world))


def _seed(cfg: RunConfig, device: torch.device) -> None:
    """Seed the global generators; weights and dropout have streams of their own."""
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2**32)
    torch.manual_seed(cfg.seed)
    if cfg.deterministic_mode:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _check_sizes(cfg: RunConfig, backend: str) -> None:
    """Refuse sizes that the chosen backend does not take; a rule does so if it was named."""
    problems = list(misaligned(cfg)) if backend == "transformer_engine" else []
    if problems:
        raise ConfigError(problems)


def _tell_attention(cfg: RunConfig, backend: str, env: MutableMapping[str, str]) -> None:
    """Say to Transformer Engine, which reads it in the environment, how FP8 attention is to run.

    Raises:
        ConfigError: The environment says something else than the configuration.
    """
    if not cfg.fp8_dot_product_attention:
        return
    wanted = "1" if cfg.fp8_dpa_bwd else "0"
    told = env.get(_BACKWARD, wanted)
    problems = []
    if told not in (wanted, env.get(_BACKWARD_OF_A_RUN)):
        flag = "without --no-fp8-dpa-bwd" if cfg.fp8_dpa_bwd else "with --no-fp8-dpa-bwd"
        problems.append(
            Problem(
                (_BACKWARD,),
                f"{told} {flag}",
                "The flag says in which precision the backward products of attention run",
                "Unset the variable",
            )
        )
    for name in _ATTENTION_VARIABLES if backend == "transformer_engine" else ():
        if env.get(name):
            problems.append(
                Problem(
                    (name,),
                    env[name],
                    "The recipe of attention is that of the run, --fp8-recipe",
                    "Unset the variable",
                )
            )
    if problems:
        raise ConfigError(problems)
    if backend == "transformer_engine":
        env[_BACKWARD] = env[_BACKWARD_OF_A_RUN] = wanted


def start(cfg: RunConfig, launch: Launch | None = None) -> Runtime:
    """Start this process for a run. Collective: every rank calls it.

    Args:
        cfg: The finished configuration.
        launch: This process's place; default what the environment says.

    Raises:
        MeshError: The processes cannot be arranged as asked.
        BackendUnavailable: The layer backend asked for cannot run here.
        MegatronError: It cannot overlap as asked.
        ConfigError: The layer backend that was chosen does not take the sizes of the model, or the
            environment contradicts the configuration.
    """
    started = time.monotonic()
    launch = launch or read_launch()
    if launch.world_size != cfg.world_size:
        raise MeshError(
            complaint(
                "WORLD_SIZE",
                launch.world_size,
                f"The configuration was made for {cfg.world_size} processes",
                "Pass this world size when the configuration is made",
            )
        )
    device = _device(cfg.device, launch)
    _share_cores(launch, os.environ)
    choice = choose(cfg, device)
    backend = choice.backend
    _check_sizes(cfg, backend.name)
    _tell_attention(cfg, backend.name, os.environ)
    _join(cfg, launch, device)
    # A group does not inherit the timeout of the default one.
    mesh = ParallelState.build(
        cfg,
        launch.rank,
        launch.world_size,
        lambda ranks: dist.new_group(ranks, timeout=_timeout(cfg)),
    )
    tp_overlap = backend.start_tp_overlap(cfg, mesh) if cfg.tp_comm_overlap else ""
    _seed(cfg, device)
    # A terminal shows lines as they come; a pipe to a log file must not hold them back either.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    processes = _introduce(mesh)
    place = (device, launch, started, processes, tp_overlap, choice if choice.instead_of else None)
    return Runtime(cfg, mesh, backend, choice.reason, *place)
