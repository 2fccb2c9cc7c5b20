"""Rules about the model's shape, its precision and FP8."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.alignment import misaligned
from megatron.config.draft import DEFAULT_MODEL, Draft
from megatron.config.fp8 import published_format, recipe_of
from megatron.config.fp8_policy import recipes_in_use
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of

_ON_HOPPER = ("delayed", "tensorwise", "blockwise")  # recipes that Hopper has products for
_AT_LEAST_ONE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "seq_length",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "vocab_size",
    "padded_vocab_size",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "fp8_amax_history_len",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "exit_interval",
    "exit_duration_in_mins",
    "eval_interval",
    "loss_scale_window",
    "hysteresis",
    "recompute_num_layers",
    "save_interval",
    "ckpt_step",
    "log_interval",
    "tensorboard_log_interval",
    "tensorboard_queue_size",
)
_AT_LEAST_ZERO = (
    "fp8_warmup_iters",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "eval_iters",
    "lr",
    "min_lr",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_init",
    "weight_decay",
    "clip_grad",
    "num_workers",
    "seed",
    "manual_gc_interval",
    "init_method_std",
)
_ABOVE_ZERO = (
    "distributed_timeout_minutes",
    "norm_epsilon",
    "rope_scaling_factor",
    "adam_eps",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
)
_AT_MOST = {"distributed_timeout_minutes": 1_000_000}  # clocks do not count further
_BELOW_ONE = ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "sgd_momentum")


def _range_problem(name: str, value: object, wanted: str) -> Problem:
    meaning = SPECS[name].setting.help.rstrip(".")
    return Problem((flag_of(name),), value, f"It must be {wanted}", f"Correct it. It is: {meaning}")


@rule
def numbers_are_in_range(c: Draft) -> Iterator[Problem]:
    """Counts are at least 1, rates and intervals are not negative, probabilities are below 1."""
    for name in _AT_LEAST_ONE:
        value = c.values[name]
        # What was derived from a wrong value is not a second mistake.
        if value is not None and value < 1 and name in c.given:
            yield _range_problem(name, value, "at least 1")
    for name in _AT_LEAST_ZERO:
        value = c.values[name]
        if value is not None and value < 0:
            yield _range_problem(name, value, "0 or more")
    for name in _ABOVE_ZERO:
        value = c.values[name]
        if value is not None and value <= 0:
            yield _range_problem(name, value, "above 0")
    for name, most in _AT_MOST.items():
        value = c.values[name]
        if value is not None and value > most:
            yield _range_problem(name, value, f"at most {most}")
    for name in _BELOW_ONE:
        value = c.values[name]
        if not 0 <= value < 1:
            yield _range_problem(name, value, "at least 0 and below 1")


@rule
def model_size_is_whole(c: Draft) -> Iterator[Problem]:
    """Layers, width and heads are given together, or none of them (then a default model runs)."""
    missing = [flag_of(name) for name in DEFAULT_MODEL if c.values[name] is None]
    present = [flag_of(name) for name in DEFAULT_MODEL if c.values[name] is not None]
    if missing and not c.broken & set(DEFAULT_MODEL):
        yield Problem(
            tuple(missing),
            "nothing",
            f"{' and '.join(present)} alone do not make a model",
            f"Give {' and '.join(missing)} as well",
        )


@rule
def heads_divide_hidden_size(c: Draft) -> Iterator[Problem]:
    """The hidden size is a multiple of the heads unless --kv-channels says how wide a head is."""
    if not c.counts("hidden_size", "num_attention_heads") or c.was_given("kv_channels"):
        return
    if c.hidden_size % c.num_attention_heads:
        yield Problem(
            ("--hidden-size", "--num-attention-heads"),
            f"{c.hidden_size} and {c.num_attention_heads}",
            "A head's width is hidden size / heads, which is not a whole number",
            "Choose a number of heads that divides the hidden size, or set --kv-channels",
        )


@rule
def query_groups_divide_heads(c: Draft) -> Iterator[Problem]:
    """Query groups divide the heads, and are given only with --group-query-attention."""
    groups = c.given.get("num_query_groups")
    if not c.group_query_attention:
        if groups not in (None, c.num_attention_heads):
            yield Problem(
                ("--num-query-groups",),
                groups,
                "Without --group-query-attention every head has its own keys and values",
                "Add --group-query-attention, or remove --num-query-groups",
            )
        return
    if c.counts("num_attention_heads", "num_query_groups") and (
        c.num_attention_heads % c.num_query_groups
    ):
        yield Problem(
            ("--num-query-groups", "--num-attention-heads"),
            f"{c.num_query_groups} and {c.num_attention_heads}",
            "Each group serves the same number of heads",
            "Choose a number of groups that divides the heads",
        )


@rule
def positions_cover_the_sequence(c: Draft) -> Iterator[Problem]:
    """A sequence is not longer than the positions the model can represent."""
    if not c.counts("seq_length", "max_position_embeddings"):
        return
    if c.seq_length > c.max_position_embeddings:
        yield Problem(
            ("--seq-length", "--max-position-embeddings"),
            f"{c.seq_length} and {c.max_position_embeddings}",
            "The model has no embedding for the positions at the end",
            f"Set --max-position-embeddings {c.seq_length}, or shorten the sequence",
        )


_ROTARY = (
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
)


@rule
def rotary_settings_fit(c: Draft) -> Iterator[Problem]:
    """Rotary settings belong to --position-embedding-type rope and rotate an even width."""
    if c.position_embedding_type != "rope":
        for name in _ROTARY:
            if c.values[name] != SPECS[name].default:
                yield Problem(
                    (flag_of(name),),
                    c.values[name],
                    f"Positions are {c.position_embedding_type}, nothing is rotated",
                    f"Add --position-embedding-type rope, or remove {flag_of(name)}",
                )
        return
    if not 0 < c.rotary_percent <= 1:
        yield Problem(
            ("--rotary-percent",),
            c.rotary_percent,
            "It is a share of each head's channels",
            "Give a number above 0 and at most 1",
        )
    elif c.counts("kv_channels") and int(c.kv_channels * c.rotary_percent) % 2:
        yield Problem(
            ("--kv-channels", "--rotary-percent"),
            f"{c.kv_channels} and {c.rotary_percent}",
            "Channels are rotated in pairs, and the rotated width is odd",
            "Choose an even head width",
        )
    if c.rope_scaling_factor != SPECS["rope_scaling_factor"].default and not c.use_rope_scaling:
        yield Problem(
            ("--rope-scaling-factor",),
            c.rope_scaling_factor,
            "It is read only with --use-rope-scaling",
            "Add --use-rope-scaling, or remove --rope-scaling-factor",
        )


@rule
def one_activation(c: Draft) -> Iterator[Problem]:
    """--swiglu and --squared-relu exclude each other."""
    if c.swiglu and c.squared_relu:
        yield Problem(
            ("--swiglu", "--squared-relu"),
            "both",
            "An MLP has one activation",
            "Remove one of them",
        )


@rule
def padded_vocabulary_fits(c: Draft) -> Iterator[Problem]:
    """An explicit --padded-vocab-size holds the vocabulary and splits over TP ranks."""
    padded, tp = c.given.get("padded_vocab_size"), c.tensor_model_parallel_size
    if padded is None or padded < 1 or tp < 1:
        return
    if padded % tp:
        yield Problem(
            ("--padded-vocab-size", "--tensor-model-parallel-size"),
            f"{padded} and {tp}",
            "Each rank holds the same number of rows",
            f"Set --padded-vocab-size {-(-padded // tp) * tp}, or leave it out",
        )
    if c.vocab_size is not None and padded < c.vocab_size:
        yield Problem(
            ("--padded-vocab-size", "--vocab-size"),
            f"{padded} and {c.vocab_size}",
            "The embedding has fewer rows than the vocabulary has tokens",
            "Leave --padded-vocab-size out",
        )


@rule
def one_half_precision(c: Draft) -> Iterator[Problem]:
    """--fp16 and --bf16 exclude each other."""
    if c.fp16 and c.bf16:
        yield Problem(
            ("--fp16", "--bf16"), "both", "Parameters have one type", "Remove one of them"
        )


@rule
def fp8_settings_need_fp8(c: Draft) -> Iterator[Problem]:
    """FP8 settings are given only when --fp8-format switches FP8 on; some also with FP4."""
    if c.fp8_format is not None or c.broken & {"fp8_format", "fp4_format"}:
        return
    names: tuple[str, ...] = ("fp8_recipe", "fp8_emulate_accumulation")
    if "delayed" not in recipes_in_use(c):
        names = (*names, "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
    if recipe_of(c) is None:
        names = (*names, "fp8_wgrad", "first_last_layers_bf16", "fp8_warmup_iters", "fp8_policy")
    asked = tuple(flag_of(n) for n in names if _asks_for_fp8(c, n))
    if asked:
        yield Problem(
            asked,
            "no --fp8-format",
            "Without --fp8-format nothing runs in FP8",
            f"Add --fp8-format {published_format(c.fp8_recipe)}, or remove the other FP8 flags",
        )


def _asks_for_fp8(c: Draft, name: str) -> bool:
    """Whether a setting was given, were it to its default, and not beside `fp8_format: null`."""
    if c.values[name] != SPECS[name].default:
        return True
    switched_off = "fp8_format" in c.given  # in words: a file that lists every setting
    nothing = name == "fp8_warmup_iters" or isinstance(c.given.get(name), bool)
    return c.was_given(name) and not switched_off and not nothing


@rule
def one_low_precision(c: Draft) -> Iterator[Problem]:
    """--fp8-format and --fp4-format exclude each other."""
    if c.fp8_format is not None and c.fp4_format is not None:
        yield Problem(
            ("--fp8-format", "--fp4-format"),
            f"{c.fp8_format} and {c.fp4_format}",
            "The operands of a product have one format",
            "Remove one of them; --first-last-layers-bf16 goes with both",
        )


@rule
def history_belongs_to_delayed_scaling(c: Draft) -> Iterator[Problem]:
    """Margin and amax history are given only with --fp8-recipe delayed, or a layer that has it."""
    if c.fp8_format is None or "delayed" in (c.fp8_recipe, *recipes_in_use(c)):
        return
    names = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
    changed = [n for n in names if c.values[n] != SPECS[n].default]
    if changed:
        flags = tuple(flag_of(n) for n in changed)
        yield Problem(
            (*flags, "--fp8-recipe"),
            ", ".join(str(c.values[n]) for n in (*changed, "fp8_recipe")),
            f"The recipe {c.fp8_recipe} measures each tensor as it is cast and keeps no history",
            f"Remove {' and '.join(flags)}, or use --fp8-recipe delayed",
        )


@rule
def emulated_sums_are_those_of_hopper(c: Draft) -> Iterator[Problem]:
    """Hopper's accumulation is emulated on the native backend, for recipes that Hopper has."""
    if c.fp8_emulate_accumulation != "hopper" or c.fp8_format is None:
        return
    flag = "--fp8-emulate-accumulation"
    others = sorted({c.fp8_recipe, *recipes_in_use(c)} - {*_ON_HOPPER})
    if others and "fp8_recipe" not in c.broken:
        yield Problem(
            (flag, "--fp8-recipe"),
            f"hopper and {' and '.join(others)}",
            "Hopper has no products for this recipe",
            f"Use --fp8-recipe {', '.join(_ON_HOPPER[:-1])} or {_ON_HOPPER[-1]}",
        )
    if c.transformer_impl == "transformer_engine":
        yield Problem(
            (flag, "--transformer-impl"),
            "hopper and transformer_engine",
            "Transformer Engine's products run on FP8 hardware and are not emulated",
            "Use --transformer-impl native",
        )
    if c.given.get("fp8_emulation") == "fast":
        yield Problem(
            (flag, "--fp8-emulation"),
            "hopper and fast",
            "A fast product leaves the order of the sums to a library",
            "Remove --fp8-emulation",
        )


@rule
def high_precision_layers_fit(c: Draft) -> Iterator[Problem]:
    """The layers that --first-last-layers-bf16 exempts exist, and are counted only with it."""
    start, end = c.num_layers_at_start_in_bf16, c.num_layers_at_end_in_bf16
    if not c.first_last_layers_bf16:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if c.values[name] != SPECS[name].default:
                yield Problem(
                    (flag_of(name),),
                    c.values[name],
                    "It is read only with --first-last-layers-bf16",
                    f"Add --first-last-layers-bf16, or remove {flag_of(name)}",
                )
        return
    if c.counts("num_layers") and start + end > c.num_layers:
        yield Problem(
            ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16", "--num-layers"),
            f"{start}, {end} and {c.num_layers}",
            "More layers are exempt from FP8 than there are",
            "Lower one of them",
        )


@rule
def fp8_extents_align(c: Draft) -> Iterator[Problem]:
    """In FP8 and FP4 on Transformer Engine, sizes of each rank are multiples of 16 (mxfp8: 32)."""
    if c.transformer_impl == "transformer_engine":
        yield from misaligned(c)
