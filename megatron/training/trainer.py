"""A training run from the first line of its log to the last."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from datetime import datetime

from megatron.config import RunConfig
from megatron.core.datasets.cache import decisions
from megatron.core.datasets.mixed import Ledger
from megatron.core.datasets.source import Source, Sources
from megatron.core.errors import TrainingError, complaint, on_every_rank
from megatron.core.fp8 import PrecisionRow
from megatron.core.mesh import MeshSizes
from megatron.observe.bus import Bus
from megatron.observe.events import (
    EvalEnd,
    Incident,
    Message,
    RunEnd,
    RunStart,
    StepEnd,
)
from megatron.observe.lines import stamp
from megatron.observe.sinks import build_sinks
from megatron.training import fp8_watch, precision
from megatron.training.checkpointing import Entries, collect, load_checkpoint
from megatron.training.descriptions import Descriptions
from megatron.training.flops import flops_per_iteration
from megatron.training.guards import Guards
from megatron.training.initialize import Runtime
from megatron.training.memory import measure, theoretical_bytes
from megatron.training.non_finite import trace
from megatron.training.progress import Progress
from megatron.training.providers import (
    Parts,
    count_parameters,
    setup_model,
    setup_sources,
    vocabulary_notices,
    with_tokenizer,
)
from megatron.training.saver import PERSISTENT, Saver
from megatron.training.signals import ExitWatch
from megatron.training.step import StepOutcome, TrainStep, evaluate, parameters_are_finite

# A run whose loss or gradients are not finite this many times in a row does not recover.
MAX_BAD_STEPS = 3


class Trainer:
    """Trains one model.

    Args:
        runtime: The started process.
        notices: Lines about the configuration that the user should see once.
    """

    def __init__(self, runtime: Runtime, notices: tuple[str, ...] = ()) -> None:
        self._runtime, self._tokenizer = with_tokenizer(runtime)
        self.config: RunConfig = self._runtime.config
        self.mesh = runtime.mesh
        self.progress = Progress()
        self._notices = (*notices, *vocabulary_notices(self.config, self._tokenizer))
        self._bad_steps = 0
        self._batches = self.config.batches()
        self._last_iteration = int(self.config.train_iters)
        self._parts: Parts | None = None
        self._step: TrainStep | None = None
        self._ledger: Ledger | None = None
        self._guards: Guards | None = None
        sinks, incidents = build_sinks(self.config, self.mesh.rank)
        self.bus = Bus(
            sinks,
            log_interval=self.config.log_interval,
            world=self.mesh.world,
            device=runtime.device,
        )
        for incident in incidents:
            self.bus.emit(incident)
        self._saver = Saver(self._runtime, self._entries, self.bus)
        self._described = Descriptions()

    @property
    def parts(self) -> Parts:
        """Model, optimizer and the rest.

        Raises:
            TrainingError: `setup` has not been called.
        """
        if self._parts is None:
            raise TrainingError(complaint("Trainer", "no model", "It is not set up", "Call run()"))
        return self._parts

    @property
    def guards(self) -> Guards:
        """What watches over the run, made at its first use."""
        if self._guards is None:
            cfg, runtime = self.config, self._runtime
            self._guards = Guards(cfg, runtime, self.parts, self.progress, self.bus)
        return self._guards

    def where(self) -> str:
        """Return this rank and its place in the run, for messages about failures."""
        place = self.mesh.label()
        if self._step is not None:
            place += f", iteration {self._step.iteration}"
            if self._step.current:
                place += f", {self._step.current}"
        return place

    def run(self) -> None:
        """Set up, and train to the end or to a reason to stop.

        Raises:
            MegatronError: The run cannot start or cannot go on.
        """
        watch = ExitWatch(self.config, self.mesh.world, self._runtime.device, self._runtime.started)
        try:
            with watch, self._collected_by_hand():
                sources = self._setup()
                try:
                    self._train(sources, watch)
                finally:
                    sources.close()
        finally:
            self._saver.close()
            self.bus.close()

    # -- before the first step ------------------------------------------------------------------

    def _setup(self) -> Sources:
        cfg, runtime = self.config, self._runtime
        for notice in self._notices:
            self._say(f"NOTE: {notice}")
        sizes = MeshSizes.from_config(cfg, cfg.world_size)
        layout = sizes.text(experts=cfg.num_experts is not None)
        self._say(f"using world size: {cfg.world_size}, {layout}")
        if self._batches.constant:
            self._say(f"setting number of microbatches to constant {cfg.num_microbatches}")
        else:
            self._say(f"global batch size: {self._batches.text()}")
        self._saver.open()
        self._parts = setup_model(cfg, runtime)
        self._parts.fp8.stats = fp8_watch.collector(runtime)
        if cfg.load is not None:
            loaded = load_checkpoint(
                cfg,
                self.mesh,
                model=self._parts.model,
                optimizer=self._parts.optimizer,
                scheduler=self._parts.scheduler,
                fp8=self._parts.fp8,
                progress=self.progress,
                residual=self._parts.residual(cfg, self.mesh),
                guards=self.guards,
                say=self._say,
                warn=lambda text: self.bus.emit(Incident(text)),
            )
            if loaded:
                self._saver.loaded(str(cfg.load), self.progress.iteration)
        if self.progress.consumed_train_samples and not self.progress.data:
            self._say(
                "NOTE: the checkpoint does not say which data it was trained on; this run's are "
                "taken for the same"
            )
        if cfg.train_samples is not None:
            done = self.progress.trained_samples
            left = self._batches.steps(done, cfg.train_samples)
            self._last_iteration = self.progress.iteration + left
        self.parts.fp8.begin(self.progress.iteration)
        self._describe()
        self._stamp("after model, optimizer, and learning rate scheduler are built")
        with decisions(self._say):
            sources = setup_sources(cfg, self._tokenizer, runtime, self.progress)
        self._ledger = sources.ledger
        self._describe_data(sources)
        self._stamp("after dataloaders are built")
        self._saver.prepare()
        self._say("done with setup ...")
        return sources

    def _describe(self) -> None:
        """Show the settings, the memory estimate and the precision of every layer."""
        cfg, parts, runtime = self.config, self.parts, self._runtime
        self.bus.emit(
            RunStart(
                config=cfg.to_dict(),
                world_size=self.mesh.world.size,
                device=str(self._runtime.device.type),
                backend=self._runtime.backend.name,
                backend_reason=self._runtime.backend_reason,
                parameters=count_parameters(parts.model, self.mesh),
                flops_per_iteration=flops_per_iteration(self.config),
                iteration=self.progress.iteration,
            )
        )
        if runtime.tp_overlap:
            self._say(f"tensor-parallel overlap: {runtime.tp_overlap}")
        weights, activations = (n / 2**20 for n in theoretical_bytes(cfg))
        self._say(
            f"Theoretical memory footprints: weight and optimizer={weights:.2f} MB, "
            f"activation={activations:.2f} MB, total={weights + activations:.2f} MB"
        )
        rows = self._show_precision()
        if parts.fp8.is_warming_up:
            count = cfg.fp8_warmup_iters
            self._say(f"FP8 starts at iteration {count + 1} (--fp8-warmup-iters {count})")
        notes = precision.device_notes(cfg, parts.fp8, self._runtime.backend.name)
        for note in filter(None, (*notes, precision.resting_note(cfg, parts.ddp))):
            self._say(note)
        if not cfg.fp8_allow_fallback:
            precision.refuse_fallback(rows)
        else:
            self._warn_of_fallback(rows)

    def _warn_of_fallback(self, rows: list[PrecisionRow]) -> None:
        """Say once what does not run as asked."""
        fallback = self._runtime.fallback
        warning = fallback.warning if fallback is not None else precision.fallback_warning(rows)
        if warning:
            self.bus.emit(Incident(warning, shared=True))

    def _show_precision(self) -> list[PrecisionRow]:
        """Show and return the precision of every layer of the model."""
        rows = precision.of_all_stages(self.parts.model.named_precision_rows(), self.mesh.pp)
        self.bus.emit(precision.summarize(rows, cfg=self.config))
        return rows

    def _switch_fp8(self, iteration: int) -> None:
        """At the end of ``--fp8-warmup-iters`` switch FP8 on, and show what runs from here on."""
        if self.parts.fp8.begin(iteration):
            with self.bus.paused():
                self._say(f"FP8 starts: iteration {iteration} is the first one with it")
                self._show_precision()

    def _describe_data(self, sources: Sources) -> None:
        lines = [" > datasets target sizes (minimum size):"]
        for source in sources.all():
            lines += [f"    {line}" for line in source.report().splitlines()]
        self._say("\n".join(lines))

    @contextlib.contextmanager
    def _collected_by_hand(self) -> Iterator[None]:
        """With ``--manual-gc``, let Python collect garbage only where all ranks do."""
        if not self.config.manual_gc:
            yield
            return
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()

    # -- the loop -------------------------------------------------------------------------------

    def _train(self, sources: Sources, watch: ExitWatch) -> None:
        cfg, progress = self.config, self.progress
        if sources.train is None:
            raise TrainingError(
                complaint("data", "no training split", "There is nothing to train on", "Give one")
            )
        self._step = TrainStep(cfg, self._runtime, self.parts, sources.train)
        fp8 = fp8_watch.Fp8Watch(self._runtime, self.parts.fp8, self.bus.emit, progress.iteration)
        self._say("training ...")
        self._stamp("before the start of training step")
        self.parts.ddp.train()
        self.bus.start()
        self.guards.start()
        first, available = progress.iteration, len(sources.train)
        if first >= self._last_iteration:
            self._say(
                f"NOTE: nothing is left to train: the checkpoint is at iteration {first}, and "
                f"--train-iters is {self._last_iteration}"
            )
        while progress.iteration < self._last_iteration:
            self._switch_fp8(progress.iteration + 1)
            size = self._next_batch(self._step)
            samples = progress.next_samples(available, size, sources.train.begin)
            outcome = self._step.run(progress.iteration + 1, samples)
            self._account(outcome, size)
            self._saver.poll()
            fp8.after_step()
            self._report_memory(progress.iteration - first)
            self._explain_bad_step(outcome, sources.train, samples, size)
            if self.guards.after_step(outcome, self._saver.last_good):
                continue
            self._stop_when_hopeless(outcome)
            if cfg.eval_interval and progress.iteration % cfg.eval_interval == 0:
                self._evaluate_valid(sources, f"iteration {progress.iteration}", watch)
            if cfg.manual_gc_interval and progress.iteration % cfg.manual_gc_interval == 0:
                gc.collect()
            reason = watch.reason(progress.iteration)
            if reason is not None:
                self._leave_early(reason, watch)
                return
            kind = self._saver.due(progress.iteration)
            if kind is not None:
                self._save(kind)
            self.guards.end_iteration(saved=self._saver.requested_at == progress.iteration)
        self._finish(sources, watch)

    def _next_batch(self, step: TrainStep) -> int:
        """Return the size of the next global batch; say so if it changes."""
        done = self.progress.trained_samples
        size = self._batches.size(done)
        if step.use_batch(size) and not self._batches.constant:
            at = self.progress.iteration + 1
            self._say(f"global batch size is {size} from iteration {at}, sample {done}")
        return size

    def _account(self, outcome: StepOutcome, size: int) -> None:
        """Advance the counters by a step of `size` samples and report it."""
        cfg, progress, update = self.config, self.progress, outcome.update
        progress.iteration += 1
        flops = flops_per_iteration(cfg, size)
        progress.consumed_train_samples += size
        progress.floating_point_operations_so_far += flops
        nan = not update.success and not outcome.loss_is_finite
        progress.skipped_iterations += not update.success
        progress.nan_iterations += nan
        iteration = progress.iteration
        due = self.bus.is_due(iteration) or cfg.tensorboard_dir is not None
        wants_norm = cfg.log_params_norm and due
        self.bus.emit(
            StepEnd(
                iteration=iteration,
                train_iters=self._last_iteration,
                consumed_samples=progress.consumed_train_samples,
                losses={"lm loss": outcome.loss, **outcome.moe.losses} if update.success else {},
                learning_rate=self.parts.scheduler.learning_rate(),
                global_batch_size=size,
                tokens=size * cfg.seq_length,
                flops=flops,
                loss_scale=self.parts.optimizer.loss_scale.value,
                grad_norm=update.grad_norm if update.success else None,
                num_zeros=update.num_zeros,
                params_norm=self.parts.optimizer.params_norm() if wants_norm else None,
                skipped=not update.success,
                nan=nan,
                figures=outcome.moe.figures,
            )
        )

    def _report_memory(self, steps: int) -> None:
        """Show the memory of one replica after the first two steps; log it regularly if asked."""
        cfg, iteration = self.config, self.progress.iteration
        first_two = steps <= 2 and self.mesh.dp.rank == 0
        logged = cfg.log_memory_to_tensorboard and iteration % cfg.tensorboard_log_interval == 0
        if first_two or logged:
            routine = not first_two
            self.bus.emit(measure(self.mesh.rank, iteration, self._runtime.device, routine))

    def _explain_bad_step(
        self, outcome: StepOutcome, source: Source, consumed: int, size: int
    ) -> None:
        """Say where the numbers of the first of several bad steps went wrong."""
        if outcome.update.success or self._bad_steps or self.config.fp16:
            return
        with self.bus.paused():
            stage = self.config.with_batch(size)
            where = trace(stage, self._runtime, self.parts, source, consumed)
        what = f"iteration {self.progress.iteration} is not finite: {where}."
        self.bus.emit(Incident(what, shared=True))

    def _stop_when_hopeless(self, outcome: StepOutcome) -> None:
        """Count steps in a row that could not be taken and stop after a few.

        With a dynamic loss scale, gradients that overflow are part of the search for the scale;
        only a loss that is not finite counts there.

        Raises:
            TrainingError: Too many in a row; on every rank, because all see the same figures.
        """
        searching = self.config.fp16 and outcome.loss_is_finite
        if outcome.update.success or searching:
            self._bad_steps = 0
            return
        self._bad_steps += 1
        if self._bad_steps < MAX_BAD_STEPS:
            return
        self._saver.finish()
        what = "loss" if not outcome.loss_is_finite else "gradient norm"
        last = self._saver.last_good
        text = complaint(
            what,
            "nan or inf",
            f"Iterations {self.progress.iteration - MAX_BAD_STEPS + 1} to "
            f"{self.progress.iteration} were not finite and were skipped. "
            f"Last good checkpoint: {last or 'none'}",
            f"{'Resume from it' if last else 'Start again'} with a lower learning rate or "
            "another precision",
        )
        raise on_every_rank(TrainingError(text))

    def _evaluate_valid(self, sources: Sources, prefix: str, watch: ExitWatch) -> None:
        """Evaluate the validation sets and show the results."""
        cfg, progress = self.config, self.progress
        if not sources.valid:
            return
        collect = cfg.manual_gc and cfg.manual_gc_eval
        if collect:
            gc.collect()
        losses: dict[str, float] = {}
        with self.bus.paused():
            for name, source in sources.valid.items():
                done = progress.consumed_valid_samples
                run = (cfg, self._runtime, self.parts, source, done, watch.interrupted)
                loss = evaluate(*run)
                if loss is None:
                    break
                losses[name] = loss
        if collect:
            gc.collect()
        if len(losses) == len(sources.valid):
            progress.consumed_valid_samples += cfg.eval_iters * cfg.global_batch_size
            for name, loss in losses.items():
                self._report_evaluation(prefix, loss, name)

    def _report_evaluation(self, prefix: str, loss: float, name: str = "") -> None:
        done, losses = self.progress, {"lm loss": loss}
        event = EvalEnd(prefix, done.iteration, losses, done.consumed_train_samples, name)
        self.bus.emit(event)

    # -- the end --------------------------------------------------------------------------------

    def _save(self, kind: str = PERSISTENT, still: bool = False) -> None:
        """Save unless this iteration has a checkpoint already.

        Args:
            kind: Which kind of checkpoint.
            still: Whether this is the last thing that the run does.
        """
        if not self.config.save or self._saver.saved_at == self.progress.iteration:
            return
        parts = self.parts
        parts.ddp.finish_param_sync()
        if self._bad_steps and not parameters_are_finite(parts, self.mesh.world):
            last = self._saver.last_good or "none"
            self._say(
                f"WARNING: no checkpoint at iteration {self.progress.iteration}: the weights are "
                f"not finite. Last good checkpoint: {last}"
            )
            return
        if self._ledger is not None:
            consumed = self.progress.consumed_train_samples
            self.progress.data = self._ledger.record(consumed).to_dict()
        with self.bus.paused():
            self._saver.request(self.progress.iteration, kind, not self._bad_steps, still)

    def _entries(self, alone: bool) -> Entries:
        """Describe the present state for a checkpoint."""
        parts = self.parts
        return collect(
            self.config,
            self.mesh,
            model=parts.model,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            fp8=parts.fp8,
            progress=self.progress,
            residual=parts.residual(self.config, self.mesh),
            guards=self.guards,
            alone=alone,
            described=self._described,
        )

    def _leave_early(self, reason: str, watch: ExitWatch) -> None:
        with self.bus.paused():
            self._saver.save_within(
                self.progress.iteration, watch, lambda still: self._save(still=still)
            )
        self._stamp(reason)
        self.bus.emit(RunEnd(self.progress.iteration, reason, self._saver.last))

    def _finish(self, sources: Sources, watch: ExitWatch) -> None:
        """Save, then evaluate validation and test data a last time."""
        cfg, progress = self.config, self.progress
        self._stamp("after training is done")
        self._save()
        if cfg.eval_interval and cfg.eval_iters:
            place = f"iteration {progress.iteration} on"
            self._evaluate_valid(sources, f"{place} validation set", watch)
            if sources.test is not None:
                loss = evaluate(cfg, self._runtime, self.parts, sources.test, 0)
                if loss is not None:
                    self._report_evaluation(f"{place} test set", loss)
        self._saver.finish()
        self.bus.emit(RunEnd(progress.iteration, "done", self._saver.last))

    # -- words ----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.bus.emit(Message(text))

    def _stamp(self, stage: str) -> None:
        self._say(stamp(stage, datetime.now()))
