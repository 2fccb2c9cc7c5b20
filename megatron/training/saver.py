"""When and how a run saves: at once or behind its back, on a shared disk or on each machine's own.

A save is requested at an iteration and completed (its files put together, ``metadata.json`` and the
tracker written) at a later one, when all ranks find that all of them have written their share. At
most one is on its way: the next save, and the end of the run, wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from megatron.config import RunConfig
from megatron.core.comm_log import CONTROL
from megatron.core.dist_checkpointing import io
from megatron.core.dist_checkpointing import lock as locks
from megatron.core.dist_checkpointing.directory import directory_name, is_committed
from megatron.core.dist_checkpointing.peers import Peers
from megatron.core.dist_checkpointing.plans import Plans
from megatron.core.dist_checkpointing.retention import Retention, drop_newer
from megatron.core.dist_checkpointing.store import path_of
from megatron.core.dist_checkpointing.writing import HostBuffers
from megatron.core.mesh import Axis
from megatron.core.paper import numbers
from megatron.core.tensor_parallel.mappings import all_reduce_
from megatron.observe.bus import Bus
from megatron.observe.events import CheckpointSaved, Incident, Message
from megatron.training import finding
from megatron.training.checkpointing import Entries, check_save, saved_line, saving_line
from megatron.training.initialize import Runtime

PERSISTENT = "persistent"
_LOOK_S = 0.2


class Clock(Protocol):
    """Says how long the run may still take."""

    def seconds_left(self) -> float | None:
        """Return the seconds that are left here, None without a deadline."""


@dataclass(frozen=True)
class _OnItsWay:
    saving: io.Saving
    iteration: int
    kind: str
    root: Path
    good: bool
    alone: bool


def _nothing(needed_bytes: int) -> None:
    """Prepare no directory."""


class Saver:
    """Saves one run. Every rank has one and calls the same methods.

    Args:
        runtime: Mesh, device and configuration.
        collect: Describes the run's present state; the argument says whether each rank keeps a
            checkpoint of its own.
        bus: Receives what happens.
        buffers: Room for copies in host memory; by default made at the first use.

    Attributes:
        last: The newest complete persistent checkpoint; empty before there is one.
        last_good: The newest one whose weights were known to be sound.
        saved_at: The iteration of the newest persistent save, complete or not.
        requested_at: The iteration of the newest save of any kind.
    """

    def __init__(
        self,
        runtime: Runtime,
        collect: Callable[[bool], Entries],
        bus: Bus,
        buffers: HostBuffers | None = None,
    ) -> None:
        self._cfg: RunConfig = runtime.config
        self._mesh, self._device, self._job = runtime.mesh, runtime.device, runtime.launch.job
        self._peers, self._collect, self._bus = Peers(runtime.mesh.world), collect, bus
        self._buffers = buffers or HostBuffers()
        self._pending: _OnItsWay | None = None
        self._cares: dict[str, io.Care] = {}
        self._plans: dict[bool, Plans] = {}
        self._held: list[locks.Lock] = []
        self._slowest_s = 0.0
        self._dropped_newer = False
        self.last = self.last_good = ""
        self.saved_at: int | None = None
        self.requested_at: int | None = None

    # -- begin and end of a run ----------------------------------------------------------------

    def open(self) -> None:
        """Find out whether ``--save`` can be written to, and claim it for this run.

        Raises:
            CheckpointError: On every rank, when it cannot, or when another job saves there.
        """
        cfg = self._cfg
        if cfg.save is None:
            return
        check_save(cfg, self._mesh, self._say)
        self._cares[PERSISTENT] = self._care(path_of(cfg.save), self._retention())
        if not cfg.non_persistent_save_interval:
            return
        if cfg.non_persistent_ckpt_type == "global":
            root = finding.global_root(cfg, cfg.save)
            self._peers.decide(lambda: root.mkdir(parents=True, exist_ok=True))
            self._cares["global"] = self._care(root, Retention(root, 1))
        elif cfg.non_persistent_ckpt_type == "local":
            # Two, because a crash may find some ranks before a save's end and others behind it.
            retention = Retention(finding.local_root(cfg, self._mesh), 2)
            self._cares["local"] = io.Care(None, retention, cfg.verify_checkpoint, alone=True)

    def prepare(self) -> None:
        """Do ahead of the first save what later ones need not do again. Collective.

        With ``--async-save``: agree on who writes what, and make room for the copy.

        Raises:
            CheckpointError: On every rank, when the memory does not suffice on one.
        """
        cfg = self._cfg
        # Sums of residuals are made in place, which only a save may do.
        if not (cfg.async_save and self._cares) or cfg.ckpt_grad_residual == "sum":
            return
        for alone in sorted({care.alone for care in self._cares.values()}, reverse=True):
            found = self._collect(alone)
            peers, plans = self._planners(alone)
            agreed = plans.agree(found.tensors, found.blobs, self._root(PERSISTENT), _nothing)
            self._peers.attempt(partial(self._buffers.reserve, found.tensors, agreed.part))

    def close(self) -> None:
        """Let other jobs save there. Not collective."""
        if self._pending is not None:
            self._pending.saving.wait_for_commit()
        for lock in self._held:
            lock.release()
        self._held.clear()

    def loaded(self, place: str, iteration: int) -> None:
        """Take note of where the run comes from."""
        self.last = self.last_good = place
        folder, save = path_of(place).resolve(), self._cfg.save
        if save and path_of(save).resolve() in (folder, folder.parent):
            own = path_of(save) / directory_name(iteration)
            self.saved_at = iteration if self._peers.decide(lambda: is_committed(own)) else None

    def _retention(self) -> Retention | None:
        cfg = self._cfg
        if not (cfg.keep_last or cfg.keep_every):
            return None
        return Retention(path_of(cfg.save), cfg.keep_last or 1, cfg.keep_every)

    def _care(self, root: Path, retention: Retention | None) -> io.Care:
        """Claim a directory; only the first rank has the lock."""

        def claim() -> None:
            self._held.append(locks.take(root, self._job))

        self._peers.decide(claim)
        lock = self._held[-1] if self._peers.leads else None
        return io.Care(lock, retention, self._cfg.verify_checkpoint)

    # -- saving --------------------------------------------------------------------------------

    def due(self, iteration: int) -> str | None:
        """Return the kind of checkpoint that an iteration should have, None for none."""
        cfg = self._cfg
        if cfg.save and cfg.save_interval and iteration % cfg.save_interval == 0:
            return PERSISTENT
        often = cfg.non_persistent_save_interval
        return cfg.non_persistent_ckpt_type if often and iteration % often == 0 else None

    def request(self, iteration: int, kind: str, good: bool, still: bool = False) -> None:
        """Save the present state; with ``--async-save`` it is complete later.

        Args:
            iteration: The run's iteration.
            kind: `PERSISTENT`, ``"global"`` or ``"local"``.
            good: Whether the weights are known to be sound.
            still: Whether nothing changes the tensors any more: they are written in the background
                without a copy, and the caller waits.

        Raises:
            CheckpointError: On every rank, when this or the save before fails on one.
        """
        self.finish()
        self._drop_newer(iteration)
        cfg, care = self._cfg, self._cares[kind]
        root = self._root(kind)
        if self._peers.leads:
            self._say(saving_line(iteration, root, cfg.ckpt_format))
        if care.retention is not None:
            care.retention.protected = {path_of(self.last_good)} if self.last_good else set()
        start = time.monotonic()
        found = self._collect(care.alone)
        peers, plans = self._planners(care.alone)

        def begin() -> io.Saving:
            return io.Saving(
                root, iteration, found.tensors, found.blobs, peers, found.assets, care, plans
            )

        saving = self._peers.attempt(begin) if care.alone else begin()
        if care.retention is not None and good:
            care.retention.protected.clear()  # once this one is complete, it is the last good one
        if still:
            saving.write_behind(None)
        elif cfg.async_save:
            self._copy(saving, care.alone)
        else:
            saving.write()
        self._pending = _OnItsWay(saving, iteration, kind, root, good, care.alone)
        self.requested_at = iteration
        if kind == PERSISTENT:
            self.saved_at = iteration
        if not (cfg.async_save or still):
            self.finish()
        elif self._peers.leads and not still:
            seconds = time.monotonic() - start
            self._say(
                f"  scheduled an async checkpoint save at iteration {iteration:7d} to {root} "
                f"(copied {self._buffers.num_bytes / 1e6:.1f} MB on this rank in {seconds:.3f} s)"
            )

    def _planners(self, alone: bool) -> tuple[Peers, Plans]:
        """Return the ranks that save together, and what they have agreed on."""
        peers = Peers(Axis.single("world")) if alone else self._peers
        return peers, self._plans.setdefault(alone, Plans(peers, alone))

    def _copy(self, saving: io.Saving, alone: bool) -> None:
        if alone:
            self._peers.attempt(lambda: saving.write_behind(self._buffers))
        else:
            saving.write_behind(self._buffers)

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way."""
        return self._pending is not None

    def poll(self) -> None:
        """Go on with the save that is on its way, as far as that needs no waiting. Collective then.

        When all ranks have written, the first one completes the checkpoint in the background, and
        when that is done, all learn of it.

        Raises:
            CheckpointError: On every rank, when it failed on one.
        """
        if self._pending is None:
            return
        saving = self._pending.saving
        ready = saving.committed if saving.handed_in else saving.written
        if self._all_agree(ready, lambda: None) != "ready":
            return
        if saving.handed_in:
            self.finish()
        else:
            saving.hand_in()

    def finish(self) -> None:
        """Wait for the save that is on its way and complete it.

        Raises:
            CheckpointError: On every rank, when it failed on one.
        """
        if self._pending is None:
            return
        one, self._pending = self._pending, None
        finish = one.saving.finish
        saved = self._peers.attempt(finish) if one.alone else finish()
        self._slowest_s = max(self._slowest_s, saved.seconds)
        if self._peers.leads:
            self._say(saved_line(one.iteration, one.root, saved, self._mesh))
            if saved.warning:
                self._say(saved.warning)
        if one.kind == PERSISTENT:
            self.last = str(saved.directory)
            if one.good:
                self.last_good = self.last
            self._bus.emit(CheckpointSaved(one.iteration, self.last))

    def save_within(self, iteration: int, clock: Clock, save: Callable[[bool], None]) -> None:
        """Save as the last thing a run does, and not longer than a deadline allows.

        What does not become complete in time is given up: the next run does not see it.

        Args:
            iteration: The run's iteration.
            clock: How long it may take.
            save: Requests the save.
        """
        if self._cfg.save is None:
            return
        if clock.seconds_left() is None:
            save(False)
            self.finish()
            return
        if not self._finish_within(clock):
            return
        left = self._agreed(clock)
        if left < self._slowest_s:
            self._warn(
                f"no checkpoint at iteration {iteration}: {left:.0f} s are left and one takes "
                f"{self._slowest_s:.0f} s (--exit-signal-deadline). Last checkpoint: "
                f"{self.last or 'none'}"
            )
            return
        save(True)
        self._finish_within(clock)

    def _finish_within(self, clock: Clock) -> bool:
        """Complete the save on its way, or give it up when the time is over."""
        one = self._pending
        while one is not None:
            one.saving.wait(_LOOK_S)
            state = self._all_agree(one.saving.written, clock.seconds_left)
            if state == "ready":
                self.finish()
                return True
            if state == "late":
                self._pending = None
                self._warn(
                    f"the checkpoint of iteration {one.iteration} is given up: it is not written "
                    f"in time (--exit-signal-deadline). Last checkpoint: {self.last or 'none'}"
                )
                return False
        return True

    def _all_agree(self, ready: bool, seconds_left: Callable[[], float | None]) -> str:
        """Find out whether all ranks are ready, and whether it is too late for it."""
        left = seconds_left()
        late = left is not None and left <= 0
        flags = torch.tensor([float(not ready), float(late)], device=self._device)
        waiting, over = numbers(all_reduce_(flags, self._mesh.world, "max", CONTROL))
        if not waiting:
            return "ready"
        return "late" if over else "waiting"

    def _agreed(self, clock: Clock) -> float:
        left = clock.seconds_left()
        flag = torch.tensor([float("inf") if left is None else left], device=self._device)
        return float(all_reduce_(flag, self._mesh.world, "min", CONTROL).item())

    def _root(self, kind: str) -> Path:
        cfg = self._cfg
        if kind == PERSISTENT:
            return path_of(cfg.save)
        if kind == "global":
            return finding.global_root(cfg, cfg.save)
        return finding.local_root(cfg, self._mesh)

    def _drop_newer(self, iteration: int) -> None:
        """Remove non-persistent checkpoints of a run that this one does not continue."""
        if self._dropped_newer:
            return
        self._dropped_newer = True
        if "global" in self._cares:
            self._peers.decide(lambda: drop_newer(self._root("global"), iteration))
        if "local" in self._cares:
            self._peers.attempt(lambda: drop_newer(self._root("local"), iteration))

    def _say(self, text: str) -> None:
        self._bus.emit(Message(text))

    def _warn(self, text: str) -> None:
        if self._peers.leads:
            self._bus.emit(Incident(text))
