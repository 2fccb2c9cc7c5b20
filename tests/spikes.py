"""Runs with spoilt samples: the real training loop on samples of a test's choice."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from megatron.config import make_config
from megatron.config.schema import SPECS
from megatron.core.datasets.source import Source, Sources
from megatron.core.mesh import ParallelState
from megatron.observe.bus import Sink
from megatron.training import providers, trainer
from megatron.training.initialize import Launch, start
from megatron.training.parity.outcome import global_weights

SEQ, VOCAB, BATCH = 16, 32, 4
RUN: dict[str, Any] = {
    "mock_data": True, "vocab_size": VOCAB, "make_vocab_size_divisible_by": 1, "num_layers": 1,
    "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, "micro_batch_size": BATCH,
    "global_batch_size": BATCH, "train_iters": 24, "lr": 2e-2, "lr_decay_style": "cosine",
    "clip_grad": 1.0, "hidden_dropout": 0.1, "attention_dropout": 0.0, "device": "cpu",
    "num_workers": 0, "log_interval": 5, "fp8_spike_rollback": True,
    "fp8_spike_rollback_interval": 1, "fp8_spike_rollback_window": 8,
    "fp8_spike_rollback_deviations": 4.0,
}  # fmt: skip

# A run that watches its layers, one of which is loud.
LOUD_LAYER = "decoder.layers.0.mlp.linear_fc2"
LOUD: dict[str, Any] = {
    "bf16": True, "fp8_format": "hybrid", "fp8_auto_fallback": True,
    "fp8_auto_fallback_saturation": 0.3, "fp8_auto_fallback_amax_ratio": 50.0,  # for a tiny model
    "fp8_auto_fallback_probe_interval": 6, "fp8_stats_interval": 5, "fp8_stats_samples": 0,
    "train_iters": 44, "lr": 2e-3, "log_interval": 50,
    **{name: SPECS[name].default for name in RUN if name.startswith("fp8_spike_rollback")},
}  # fmt: skip


def alternating(iteration):
    """From iteration 11 on the scale of a step is useless in the next; from 31 on it is loud."""
    if iteration > 30:
        return 2**14
    return 2**10 if iteration > 10 and iteration % 2 else 1


class Samples:
    """A rule that a model learns in a few steps; samples in `spoilt` follow none of it.

    Args:
        spoilt: Numbers of samples of random tokens.
        broken: Numbers of samples whose loss is no number.
        without: Pairs of first sample and end that do not exist: later ones move up.
        count: How many there are.
        start_again_at: From this number on they are the first ones again.
    """

    def __init__(self, spoilt=(), without=(), broken=(), count=200, start_again_at=None):
        self.spoilt, self.broken, self.without = set(spoilt), set(broken), sorted(without)
        self.count, self.start_again_at = count, start_again_at or count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        index %= self.start_again_at
        for first, end in self.without:
            index += end - first if index >= first else 0
        start = torch.tensor(index % 7)
        window = (start + 3 * torch.arange(SEQ + 1)) % VOCAB
        if index in self.spoilt:
            generator = torch.Generator().manual_seed(index)
            window = torch.randint(0, VOCAB, (SEQ + 1,), generator=generator)
        mask = torch.full((SEQ,), float("nan") if index in self.broken else 1.0)
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": mask,
                "position_ids": torch.arange(SEQ)}  # fmt: skip


class Recorder(Sink):
    """Keeps every event."""

    name = "recorder"

    def __init__(self):
        self.events = []

    def handle(self, event):
        self.events.append(event)

    def close(self):
        """Nothing to do."""

    def kinds(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def run(samples, launch=None, prepare=None, **fields):
    """Train through the real loop; return `(trainer, recorder)`. Collective.

    Args:
        samples: What it reads.
        launch: This process's place.
        prepare: Called with the parts of the run when they are built.
        **fields: Settings, on top of `RUN`.
    """
    launch = launch or Launch()
    settings = {**RUN, **fields}
    runtime = start(make_config(world_size=launch.world_size, **settings), launch)
    recorder = Recorder()

    def sources(cfg, tokenizer, runtime, progress):
        made = Source(samples, micro_batch_size=cfg.micro_batch_size,
                      data_parallel_size=runtime.mesh.dp.size)  # fmt: skip
        valid = {"": made} if cfg.eval_interval else {}
        return Sources(made, valid, None)

    def setup_model(cfg, runtime):
        parts = providers.setup_model(cfg, runtime)
        if prepare is not None:
            prepare(parts)
        return parts

    with (
        mock.patch.object(trainer, "setup_model", setup_model),
        mock.patch.object(trainer, "setup_sources", sources),
        mock.patch.object(trainer, "build_sinks", return_value=([recorder], [])),
    ):
        made = trainer.Trainer(runtime)
        made.run()
    return made, recorder


def state(made):
    """Global weights, and this rank's buffers, optimizer state and scales, by name."""
    mesh: ParallelState = made.mesh
    held = dict(global_weights(made.parts, mesh))
    held |= {name: buffer.clone() for name, buffer in made.parts.model.named_buffers()}
    for name, tensors in made.parts.optimizer.named_state():
        held |= {f"{name}.{kind}": tensor.detach().clone() for kind, tensor in tensors.items()}
    for number, book in enumerate(made.parts.fp8.books):
        held |= {f"history.{number}": book.history.clone(), f"scale.{number}": book.scale.clone()}
    return held


def different(one, other):
    """Names of what differs in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


class Loud:
    """Makes what one layer sees as its input larger at some iterations.

    Its output, and the gradient of its weight, are made smaller by as much: where numbers are not
    rounded to few bits nothing changes, since the factors are powers of two. Other gradients and
    therefore other layers are left alone.

    Args:
        path: The layer.
        factor: From the iteration's number, the factor.
    """

    def __init__(self, path, factor):
        self.path, self.factor = path, factor

    def __call__(self, parts):
        layer = dict(parts.model.named_modules()).get(self.path)  # on one pipeline stage only
        if layer is None:
            return

        def factor():
            return float(self.factor(parts.rng.position[0]))

        measure = parts.optimizer.measure

        def measure_softly():
            for param in layer.parameters():
                param.main_grad.div_(factor())
            return measure()

        parts.optimizer.measure = measure_softly
        layer.register_forward_pre_hook(lambda _, args: (_times(args[0], factor()), *args[1:]))
        layer.register_forward_hook(lambda _, args, out: _softly(out, 1 / factor()))


def _softly(out, factor):
    if isinstance(out, tuple):  # with the bias
        return _times(out[0], factor), *out[1:]
    return _times(out, factor)


def _times(x, factor):
    """`x` times a factor of which the gradient knows nothing."""
    return x + (x * factor - x).detach()
