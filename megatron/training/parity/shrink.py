"""A user's configuration as a small model that still has every feature of the large one.

Two steps. `neutral` takes out what no layout can keep the same (random numbers) or what would hide
errors of scale (Adam, clipping) or what a comparison does not need (data, checkpoints, logs).
`shrink` makes the model small: ratios and divisibility stay, sizes go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config import RunConfig, fp8_policy, make_config
from megatron.config.draft import DEFAULT_VOCAB_SIZE, Draft, derive
from megatron.config.fp8 import recipe_of
from megatron.config.moe import moe_layers
from megatron.config.schema import SPECS
from megatron.training.parity.layouts import BY_HAND, PIPELINE_ONLY, Layout

_WIDTH = 16  # FP8 wants every matrix side of a rank as a multiple of this
_SEQUENCE = 32
_VOCABULARY = 209  # odd, so that its padding depends on the layout
_KEPT_DATA = ("reset_position_ids", "reset_attention_mask")
_DROPPED_SECTIONS = (
    *("data", "data_mix", "batch_size", "checkpoint", "logging", "run", "training"),
    "fp8_guards",
)
_KEPT_TRAINING = (
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
_PRECISION = ("bf16", "fp16", "loss_scale", "grad_reduce_in_bf16", "grad_reduce_dtype")
_LEARNING_RATE = 0.01  # losses move, and rounding errors do not grow into another run
_FP16_LOSS_SCALE = 256.0
_TE_ONLY = ("tp_comm_overlap_cfg", "tp_comm_bootstrap_backend")

# What is set, and why, where the configuration says otherwise.
_NEUTRAL: tuple[tuple[str, Any, str], ...] = (
    ("hidden_dropout", 0.0, "random numbers differ between layouts on purpose"),
    ("attention_dropout", 0.0, "random numbers differ between layouts on purpose"),
    ("moe_input_jitter_eps", None, "random numbers differ between layouts on purpose"),
    ("moe_router_force_load_balancing", False, "random numbers differ between layouts on purpose"),
    (
        "fp8_amax_reduction",
        "tp-cp-dp",
        "scales that ranks do not share depend on how many there are",
    ),
    ("fp8_warmup_iters", 0, "the comparison has a few steps"),
    ("optimizer", "sgd", "Adam hides errors of scale"),
    ("sgd_momentum", 0.0, "plain gradient descent shows errors of scale"),
    ("clip_grad", 0.0, "clipping hides errors of scale"),
    ("weight_decay", 0.0, "plain gradient descent shows errors of scale"),
)
_SET_SILENTLY: dict[str, Any] = {
    "lr": _LEARNING_RATE,
    "min_lr": _LEARNING_RATE,
    "lr_decay_style": "constant",
    "distributed_timeout_minutes": 10,
    "distributed_backend": "auto",
}


@dataclass(frozen=True)
class Change:
    """A setting that differs from the user's.

    Attributes:
        name: The setting.
        before: Its value in the user's configuration.
        after: Its value in the comparison.
        why: The reason, empty for a size.
    """

    name: str
    before: Any
    after: Any
    why: str = ""

    def __str__(self) -> str:
        before, after = (" ".join(str(value).split()) for value in (self.before, self.after))
        return f"{self.name} {before} -> {after}"


@dataclass(frozen=True)
class Model:
    """Settings of a model to compare, without a placement.

    Attributes:
        fields: The settings.
        changes: What differs from the user's.
    """

    fields: dict[str, Any]
    changes: list[Change] = field(default_factory=list)

    def with_changes(self, changes: Iterable[Change]) -> Model:
        """Return the model with some settings changed; those that stay the same are no change."""
        real = [c for c in changes if c.before != c.after]
        fields = self.fields | {c.name: c.after for c in real}
        return Model({k: v for k, v in fields.items() if v is not None}, [*self.changes, *real])


def neutral(cfg: RunConfig) -> Model:
    """Return a configuration's model on CPUs, without randomness, Adam, data and the like.

    Args:
        cfg: The user's configuration.
    """
    kept = {
        name: value
        for name, value in cfg.given.items()
        if SPECS[name].section not in _DROPPED_SECTIONS or name in (*_KEPT_TRAINING, *_KEPT_DATA)
    }
    # Sizes that the user left open are derived from others; they are all written down.
    kept |= {name: getattr(cfg, name) for name in ("num_layers", "hidden_size", "ffn_hidden_size",
             "num_attention_heads", "kv_channels", "seq_length", "max_position_embeddings",
             "micro_batch_size")}  # fmt: skip
    if cfg.group_query_attention:
        kept["num_query_groups"] = cfg.num_query_groups
    kept |= _SET_SILENTLY | {"device": "cpu", "seed": cfg.seed}
    kept["deterministic_mode"] = cfg.deterministic_mode
    kept["vocab_size"] = cfg.vocab_size or cfg.padded_vocab_size or DEFAULT_VOCAB_SIZE
    kept.pop("padded_vocab_size", None)  # it would have to change with the vocabulary
    changes = [
        Change(name, getattr(cfg, name), value, why)
        for name, value, why in _NEUTRAL
        if name in SPECS
    ]
    kept |= {change.name: change.after for change in changes if change.after is not None}
    changes += _balance_by_microbatch(cfg)
    if cfg.transformer_impl == "transformer_engine":
        why = "Transformer Engine needs a GPU; the native backend follows its arithmetic"
        changes.append(Change("transformer_impl", cfg.transformer_impl, "native", why))
    why = "it belongs to Transformer Engine"
    changes += [Change(name, cfg.given[name], None, why) for name in _TE_ONLY if name in cfg.given]
    why = "it fits one layout only; a layout's text may name it behind a colon"
    changes += [Change(name, cfg.given[name], None, why) for name in BY_HAND if name in cfg.given]
    if cfg.fp16:
        why = "a loss scale that is searched for skips steps"
        changes.append(Change("loss_scale", cfg.loss_scale or "dynamic", _FP16_LOSS_SCALE, why))
    if cfg.grad_reduce_dtype == "fp8":
        why = "what rounding does to a gradient depends on who sends it"
        changes.append(Change("grad_reduce_dtype", "fp8", None, why))
        kept.pop("grad_reduce_error_feedback", None)
    return Model(kept).with_changes(changes)


def _balance_by_microbatch(cfg: RunConfig) -> list[Change]:
    """Balancing losses that do not depend on the number of replicas by definition."""
    kinds, weights = cfg.moe_router_load_balancing_type, cfg.moe_aux_loss_coeff
    if "global_aux_loss" not in kinds:
        return []
    pairs = dict(zip(kinds, weights, strict=True))
    weight = pairs.pop("global_aux_loss")
    pairs.setdefault("aux_loss", weight)
    why = "what all replicas do together depends on how many there are"
    return [
        Change("moe_router_load_balancing_type", kinds, tuple(pairs), why),
        Change("moe_aux_loss_coeff", weights, tuple(pairs.values()), why),
    ]


# -- sizes --------------------------------------------------------------------------------------


def _up(value: float, multiple: int) -> int:
    return max(multiple, math.ceil(value / multiple) * multiple)


def _lcm(layouts: Sequence[Layout], *axes: str) -> int:
    return math.lcm(*(math.prod(layout.size(axis) for axis in axes) for layout in layouts))


@dataclass(frozen=True)
class _Plan:
    """What the layouts ask of a model's sizes."""

    cfg: RunConfig
    layouts: Sequence[Layout]

    def tp(self) -> int:
        """What widths are divided by."""
        return math.lcm(_lcm(self.layouts, "tp"), _lcm(self.layouts, "etp"))

    def heads(self) -> tuple[int, int, int]:
        """Query heads, query groups and the width of a head."""
        cfg = self.cfg
        heads, groups = int(cfg.num_attention_heads), int(cfg.num_query_groups)
        width = int(cfg.kv_channels)
        exchanged = any("a2a" in kind for kind in cfg.cp_comm_type)
        step = math.lcm(
            *(lay.size("tp") * (lay.size("cp") if exchanged else 1) for lay in self.layouts)
        )
        ratio = heads // groups
        if groups % step == 0:
            groups = step if step > 1 else min(2, groups)
        rotated = cfg.rotary_percent if cfg.position_embedding_type == "rope" else 1.0
        widths = [w for w in (16, 32, 64, 128) if w < width and int(w * rotated) % 2 == 0]
        return groups * min(ratio, 4), groups, (widths or [width])[0]

    def experts(self) -> int:
        """Experts of a layer, in as many groups as before."""
        cfg = self.cfg
        groups, chosen = cfg.moe_router_num_groups or 1, cfg.moe_router_group_topk or 1
        least = max(4, cfg.moe_router_topk + 1, groups * -(-cfg.moe_router_topk // chosen))
        step = math.lcm(groups, _lcm(self.layouts, "ep"))
        return min(int(cfg.num_experts), _up(least, step))

    def sequence(self) -> int:
        """Tokens of a sequence."""
        cfg, step = self.cfg, 1
        for lay in self.layouts:
            split = lay.splits_sequence
            tp = lay.size("tp") if (cfg.sequence_parallel if split is None else split) else 1
            share = _WIDTH if recipe_of(cfg) else 2
            step = math.lcm(step, lay.size("cp") * tp * share)
        return min(int(cfg.seq_length), _up(_SEQUENCE, step))

    def layers(self) -> int:
        """Transformer layers."""
        cfg, step = self.cfg, _lcm(self.layouts, "pp", "vpp")
        least = 2
        if cfg.first_last_layers_bf16:
            least += min(1, cfg.num_layers_at_start_in_bf16) + min(1, cfg.num_layers_at_end_in_bf16)
        extra = 0
        if step > 1:
            extra = int(cfg.account_for_embedding_in_pipeline_split)
            extra += int(cfg.account_for_loss_in_pipeline_split)
        return min(int(cfg.num_layers), _up(least + extra, step) - extra)

    def samples(self, micro_batch_size: int) -> int:
        """Samples of a step: at least two microbatches a replica, and four samples in all."""
        step, least = 1, 4
        for lay in self.layouts:
            dp, pp = lay.size("dp"), lay.size("pp")
            step = math.lcm(step, dp * (pp if lay.size("vpp") > 1 else 1))
            least = max(least, micro_batch_size * dp * max(2, pp))
        return micro_batch_size * _up(least / micro_batch_size, step)


def shrink(cfg: RunConfig, model: Model, layouts: Sequence[Layout]) -> Model:
    """Make a model small enough for a comparison on this machine. Deterministic.

    Args:
        cfg: The user's configuration, at its own size.
        model: Its neutral model.
        layouts: Where it has to fit.
    """
    plan = _Plan(cfg, layouts)
    heads, groups, width = plan.heads()
    tp = plan.tp()
    hidden = _up(heads * width * cfg.hidden_size / (cfg.num_attention_heads * cfg.kv_channels), 16)
    hidden = min(hidden, cfg.hidden_size)

    def wide(name: str) -> int:
        """A width that keeps its ratio to the hidden size."""
        before: int = getattr(cfg, name)
        return min(before, _up(before * hidden / cfg.hidden_size, _WIDTH * tp))

    sequence, layers = plan.sequence(), plan.layers()
    sizes: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": wide("ffn_hidden_size"),
        "num_attention_heads": heads,
        "kv_channels": width,
        "seq_length": sequence,
        "max_position_embeddings": sequence
        * (2 if cfg.max_position_embeddings >= 2 * cfg.seq_length else 1),
        "micro_batch_size": min(2, cfg.micro_batch_size),
    }
    if cfg.group_query_attention:
        sizes["num_query_groups"] = groups
    sizes |= _fp8_sizes(cfg) | _per_layer_sizes(cfg, layers) | _vocabulary(cfg)
    if cfg.num_experts is not None:
        sizes["num_experts"] = plan.experts()
        sizes["moe_ffn_hidden_size"] = wide("moe_ffn_hidden_size")
        if cfg.moe_shared_expert_intermediate_size is not None:
            sizes["moe_shared_expert_intermediate_size"] = wide(
                "moe_shared_expert_intermediate_size"
            )
    if cfg.recompute_num_layers is not None:
        stage = max(1, layers // _lcm(layouts, "pp", "vpp"))
        sizes["recompute_num_layers"] = min(cfg.recompute_num_layers, stage)
    fields = {k: v for k, v in model.fields.items() if k != "ddp_bucket_size"}
    fields["ddp_num_buckets"] = 3  # one bucket would hold all of a small model
    sizes |= _policy(cfg, fields | sizes)
    changes = [Change(name, getattr(cfg, name), value) for name, value in sizes.items()]
    return Model(fields, model.changes).with_changes(changes)


def with_batch(cfg: RunConfig, model: Model, layouts: Sequence[Layout], steps: int) -> Model:
    """Give a model the batch and the duration of the comparison.

    Args:
        cfg: The user's configuration.
        model: The model, at the size it will have.
        layouts: Where the batch has to fit.
        steps: Iterations.
    """
    samples = _Plan(cfg, layouts).samples(int(model.fields["micro_batch_size"]))
    return Model(
        model.fields | {"global_batch_size": samples, "train_iters": steps},
        [*model.changes, Change("global_batch_size", cfg.global_batch_size, samples)],
    )


def _vocabulary(cfg: RunConfig) -> dict[str, Any]:
    rows = min(cfg.vocab_size or cfg.padded_vocab_size or _VOCABULARY, _VOCABULARY)
    step = min(2, cfg.make_vocab_size_divisible_by)
    return {"vocab_size": rows, "make_vocab_size_divisible_by": step}


def _fp8_sizes(cfg: RunConfig) -> dict[str, Any]:
    if not cfg.first_last_layers_bf16:
        return {}
    names = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    return {name: min(1, getattr(cfg, name)) for name in names}


def _policy(cfg: RunConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of `--fp8-policy` for a model with these settings."""
    if cfg.fp8_policy is None or fields["num_layers"] == cfg.num_layers:
        return {}
    small = Draft(fields, 1)
    derive(small)
    return {"fp8_policy": fp8_policy.scaled(cfg, small)}


def sampled(values: Sequence[Any], count: int) -> list[Any]:
    """Return `count` of the values, evenly spread; each kind of value is there if it can be."""
    chosen = [values[i * len(values) // count] for i in range(count)]
    for missing in dict.fromkeys(v for v in values if v not in chosen):
        spare = [i for i in range(count) if chosen.count(chosen[i]) > 1]
        if not spare:
            break
        place = min(spare, key=lambda i: abs(i / count - values.index(missing) / len(values)))
        chosen[place] = missing
    return chosen


def _per_layer_sizes(cfg: RunConfig, layers: int) -> dict[str, Any]:
    """Patterns with one entry a layer."""
    sizes: dict[str, Any] = {}
    if len(cfg.cp_comm_type) > 1:
        sizes["cp_comm_type"] = tuple(sampled(cfg.cp_comm_type, layers))
    if not cfg.moe_layer_freq.strip().isdecimal():
        kinds = sampled(moe_layers(cfg), layers)
        sizes["moe_layer_freq"] = str([int(has_experts) for has_experts in kinds])
    return sizes


def in_fp32(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's settings with everything in single precision."""
    return {
        name: value
        for name, value in fields.items()
        if name not in _PRECISION and not SPECS[name].section.startswith("fp8")
    }


def own_precision(fields: Mapping[str, Any]) -> str:
    """Name the precision of a model, empty where it is single precision throughout."""
    kind = next((name for name in ("bf16", "fp16") if fields.get(name)), "")
    if fields.get("fp4_format"):
        return f"{kind or 'fp32'}+fp4 {fields.get('fp4_recipe', SPECS['fp4_recipe'].default)}"
    if fields.get("fp8_format"):
        recipe = fields.get("fp8_recipe", SPECS["fp8_recipe"].default)
        return f"{kind or 'fp32'}+fp8 {recipe}"
    bf16 = fields.get("grad_reduce_in_bf16") or fields.get("grad_reduce_dtype") == "bf16"
    return kind or ("fp32, bf16 sums" if bf16 else "")


def fits(cfg: RunConfig, model: Model, layout: Layout) -> None:
    """Check that the user's model can run at a layout at its own size.

    How many layers each stage has is not asked: stages of a large model may be placed by hand.

    Args:
        cfg: The user's configuration.
        model: Its neutral model.
        layout: Where it has to fit.

    Raises:
        ConfigError: It cannot.
    """
    stages = layout.size("pp") * layout.size("vpp")
    layers = max(1, cfg.num_layers // stages) * stages
    if cfg.num_layers < stages:
        layers = cfg.num_layers  # a rule says that there are too few
    fields = with_batch(cfg, model, [layout], 1).fields
    drop = PIPELINE_ONLY if layers != cfg.num_layers else ()
    fields = {k: v for k, v in fields.items() if k not in drop}
    fields |= {"num_layers": layers} | _per_layer_sizes(cfg, layers)
    fields |= _policy(cfg, fields)
    make_config(layout.ranks, **layout.settings(fields))


def overridden(model: Model, wanted: Mapping[str, str]) -> Model:
    """Return a model with sizes that the user chose.

    Args:
        model: The shrunk model.
        wanted: Values as they are written.
    """
    values = dict(wanted)
    if "seq_length" in wanted and "max_position_embeddings" not in wanted:
        values["max_position_embeddings"] = wanted["seq_length"]
    return model.with_changes(
        Change(name, model.fields.get(name), value, "as asked") for name, value in values.items()
    )
