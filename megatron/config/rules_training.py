"""Rules about duration, schedules, the optimizer, loss scaling and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule
from megatron.config.rules_batch import plan_of
from megatron.config.schema import SPECS, flag_of

_BY_ITERS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


@rule
def duration_has_one_unit(c: Draft) -> Iterator[Problem]:
    """Duration, decay and warm-up are all counted in steps, or all in samples."""
    samples = c.was_given("train_samples")
    base = "train_samples" if samples else "train_iters"
    for name in _BY_ITERS if samples else _BY_SAMPLES:
        if not c.given.get(name):
            continue
        other = name.replace("iters", "samples") if samples else name.replace("samples", "iters")
        fix = f"Use {flag_of(other)}, or remove {flag_of(name)}"
        if samples and name == "train_iters":
            fix = "Keep one of the two"
        yield Problem(
            (flag_of(name), flag_of(base)),
            c.given[name],
            f"This run is counted in {'samples (--train-samples)' if samples else 'steps'}",
            fix,
        )


@rule
def seed_fits_the_generators(c: Draft) -> Iterator[Problem]:
    """--seed is below 2^32, which is what the generator of the sample order takes."""
    if c.seed >= 1 << 32:
        yield Problem(
            ("--seed",),
            c.seed,
            "The order of the samples is drawn by a generator that takes 32 bits",
            f"Use at most {(1 << 32) - 1}",
        )


@rule
def samples_make_a_step(c: Draft) -> Iterator[Problem]:
    """--train-samples is at least one global batch, the first one if it changes."""
    plan = plan_of(c)
    first = c.global_batch_size if plan is None else plan.sizes[0]
    if c.counts("train_samples", "global_batch_size") and c.train_samples < first:
        yield Problem(
            ("--train-samples", "--global-batch-size"),
            f"{c.train_samples} and {first}",
            "That is less than one optimizer step",
            f"Set --train-samples to at least {first}",
        )


def _decay_and_warmup(c: Draft) -> tuple[str, str, float, float]:
    """Return the names and lengths of decay and warm-up, in the run's own unit."""
    unit = "samples" if c.train_samples is not None else "iters"
    decay = c.values[f"lr_decay_{unit}"] or 0
    warmup = c.values[f"lr_warmup_{unit}"]
    if c.lr_warmup_fraction is not None:
        return f"lr_decay_{unit}", "lr_warmup_fraction", decay, c.lr_warmup_fraction * decay
    return f"lr_decay_{unit}", f"lr_warmup_{unit}", decay, warmup


@rule
def warmup_is_given_once(c: Draft) -> Iterator[Problem]:
    """Warm-up is a fraction or a count, and shorter than the decay."""
    fraction = c.lr_warmup_fraction
    counted = [n for n in ("lr_warmup_iters", "lr_warmup_samples") if c.values[n]]
    if fraction is not None and counted:
        yield Problem(
            ("--lr-warmup-fraction", *(flag_of(n) for n in counted)),
            f"{fraction} and {', '.join(str(c.values[n]) for n in counted)}",
            "Both say how long the warm-up is",
            "Keep one of them",
        )
    if fraction is not None and not 0 <= fraction <= 1:
        yield Problem(
            ("--lr-warmup-fraction",),
            fraction,
            "It is a share of the decay length",
            "Give a number from 0 to 1",
        )
        return
    decay_name, warmup_name, decay, warmup = _decay_and_warmup(c)
    if warmup > 0 and warmup >= decay:
        yield Problem(
            (flag_of(warmup_name), flag_of(decay_name)),
            f"{c.values[warmup_name]} and {decay}",
            "The warm-up ends before the learning rate starts to decay",
            "Shorten the warm-up or lengthen the decay",
        )


@rule
def learning_rates_are_ordered(c: Draft) -> Iterator[Problem]:
    """--min-lr and --lr-warmup-init are not above --lr."""
    for name in ("min_lr", "lr_warmup_init"):
        if c.values[name] > c.lr >= 0:
            yield Problem(
                (flag_of(name), "--lr"),
                f"{c.values[name]} and {c.lr}",
                "--lr is the peak of the schedule",
                f"Lower {flag_of(name)} or raise --lr",
            )


@rule
def wsd_decay_is_given(c: Draft) -> Iterator[Problem]:
    """The WSD schedule needs the length of its final decay; other schedules have none."""
    unit = "samples" if c.train_samples is not None else "iters"
    name = f"lr_wsd_decay_{unit}"
    length, total = c.values[name], c.values[f"lr_decay_{unit}"]
    if c.lr_decay_style != "WSD":
        for other in ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"):
            if c.values[other] != SPECS[other].default:
                yield Problem(
                    (flag_of(other),),
                    c.values[other],
                    f"The {c.lr_decay_style} schedule has no final decay",
                    f"Add --lr-decay-style WSD, or remove {flag_of(other)}",
                )
        return
    if length is None:
        yield Problem(
            (flag_of(name),),
            "nothing",
            "WSD holds the learning rate and decays it at the end; the length of that is missing",
            f"Add {flag_of(name)}",
        )
    elif not 0 < length <= (total or 0):
        yield Problem(
            (flag_of(name), flag_of(f"lr_decay_{unit}")),
            f"{length} and {total}",
            "The final decay is a part of the whole decay",
            "Give a length above 0 and at most the whole decay",
        )


@rule
def weight_decay_schedule_is_whole(c: Draft) -> Iterator[Problem]:
    """A weight-decay schedule has a start and an end that is not below it; a constant has none."""
    start, end = c.start_weight_decay, c.end_weight_decay
    flags = ("--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style")
    got = f"{start}, {end} and {c.weight_decay_incr_style}"
    if c.weight_decay_incr_style == "constant":
        # A start and end equal to the constant say the same thing twice.
        if any(value not in (None, c.weight_decay) for value in (start, end)):
            yield Problem(
                flags,
                got,
                "A constant weight decay has no start and end",
                "Use --weight-decay alone, or --weight-decay-incr-style linear or cosine",
            )
    elif start is None or end is None:
        yield Problem(flags, got, "A schedule needs both ends", "Give the missing one")
    elif not 0 <= start <= end:
        yield Problem(
            flags, got, "Weight decay grows from start to end", "Order them, neither negative"
        )


@rule
def moments_belong_to_adam(c: Draft) -> Iterator[Problem]:
    """--use-precision-aware-optimizer is for Adam, and types of moments need it."""
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    if c.use_precision_aware_optimizer:
        if c.optimizer != "adam":
            yield Problem(
                ("--use-precision-aware-optimizer", "--optimizer"),
                c.optimizer,
                "It chooses the types of Adam's moments",
                "Use --optimizer adam, or remove --use-precision-aware-optimizer",
            )
        return
    for name in names:
        if c.values[name] != "fp32":
            yield Problem(
                (flag_of(name), "--use-precision-aware-optimizer"),
                c.values[name],
                "Moments are float32 without --use-precision-aware-optimizer",
                f"Add --use-precision-aware-optimizer, or remove {flag_of(name)}",
            )


@rule
def loss_scaling_needs_fp16(c: Draft) -> Iterator[Problem]:
    """Loss-scale settings are given only with --fp16, and are ordered."""
    names = (
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    )
    changed = [n for n in names if c.values[n] != SPECS[n].default]
    if changed and not c.fp16:
        yield Problem(
            tuple(flag_of(n) for n in changed),
            ", ".join(str(c.values[n]) for n in changed),
            "The loss is scaled only for float16 gradients; others have the range they need",
            "Remove them, or add --fp16",
        )
    elif c.initial_loss_scale < c.min_loss_scale:
        yield Problem(
            ("--initial-loss-scale", "--min-loss-scale"),
            f"{c.initial_loss_scale} and {c.min_loss_scale}",
            "The first scale is below the smallest",
            "Raise one or lower the other",
        )


@rule
def recompute_settings_agree(c: Draft) -> Iterator[Problem]:
    """Full recomputation needs a method and a number of layers; selective takes neither."""
    extra = [n for n in ("recompute_method", "recompute_num_layers") if c.values[n] is not None]
    named = tuple(flag_of(n) for n in extra)
    values = ", ".join(str(c.values[n]) for n in extra)
    if c.recompute_activations and c.recompute_granularity == "full":
        yield Problem(
            ("--recompute-activations", "--recompute-granularity"),
            "full",
            "--recompute-activations is short for --recompute-granularity selective",
            "Remove --recompute-activations to recompute whole layers",
        )
    if c.recompute_granularity == "selective" and extra:
        yield Problem(
            named,
            f"{values} with selective recomputation",
            "Selective recomputation covers the attention core of every layer and takes no"
            " method and no number of layers",
            f"Remove {' and '.join(named)}, or use --recompute-granularity full"
            " --recompute-method block to recompute that many whole layers",
        )
    elif c.recompute_granularity is None and extra:
        yield Problem(
            named,
            values,
            "Nothing is recomputed without --recompute-granularity",
            f"Add --recompute-granularity full, or remove {' and '.join(named)}",
        )
    elif c.recompute_granularity == "full" and len(extra) < 2:
        missing = [n for n in ("recompute_method", "recompute_num_layers") if n not in extra]
        yield Problem(
            tuple(flag_of(n) for n in missing),
            "nothing",
            "Full recomputation must know how layers are grouped",
            "Add --recompute-method uniform --recompute-num-layers 1 to checkpoint every layer",
        )


@rule
def recompute_modules_are_read(c: Draft) -> Iterator[Problem]:
    """--recompute-modules belongs to selective recomputation and names at least one module."""
    if not c.recompute_modules:
        yield Problem(
            ("--recompute-modules",), "nothing", "It names modules", "Add core_attn or remove it"
        )
    elif c.was_given("recompute_modules") and c.recompute_granularity == "full":
        yield Problem(
            ("--recompute-modules", "--recompute-granularity"),
            f"{' '.join(c.recompute_modules)} and full",
            "Full recomputation repeats whole layers",
            "Remove --recompute-modules, or use --recompute-granularity selective",
        )
