"""A configuration that is still being filled in: what was given, and what follows from it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.config import compat, data_mix, fp8_policy
from megatron.config.batch_size import schedule_of
from megatron.config.fp8 import published_format
from megatron.config.placement import PlacementError, virtual_size_of
from megatron.config.problems import Problem
from megatron.config.retired import REFUSED_VALUES
from megatron.config.schema import SPECS
from megatron.config.values import coerce, coerce_problem, nearest

DEFAULT_MODEL = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
DEFAULT_SEQ_LENGTH = 1024
DEFAULT_TRAIN_ITERS = 500
DEFAULT_LR = 1.5e-4
DEFAULT_VOCAB_SIZE = 50257
DEFAULT_SPLIT = "969, 30, 1"
# Rules and plans keep a list with an entry for each of these.
MOST_LISTED = {"num_layers": 100_000, "fake_world_size": 1_000_000}


class Draft:
    """All fields by name, mutable until the rules have agreed.

    Attributes:
        given: What the user set, typed.
        values: Every field; starts as defaults plus ``given``.
        problems: Mistakes found while reading the input.
        notices: Lines the user should see.
        broken: Names whose value was refused; rules about them stay silent.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        world_size: int,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.origins = dict(origins or {})
        self.given: dict[str, Any] = {}
        self.values: dict[str, Any] = {name: spec.default for name, spec in SPECS.items()}
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.broken: set[str] = set()
        for name, value in fields.items():
            self._take(name, value)
        self.values.update(self.given)
        fake = self.values["fake_world_size"] if self.values["dry_run"] else None
        self.values["world_size"] = fake if fake is not None and fake > 0 else world_size

    def _take(self, name: str, value: Any) -> None:
        spec = SPECS.get(name)
        if spec is None or spec.setting.derived:
            self._take_undeclared(name, value)
            return
        try:
            taken = coerce(spec, value)
            if taken is not None and taken > MOST_LISTED.get(name, taken):
                raise ValueError(f"There can be at most {MOST_LISTED[name]}")
            self.given[name] = taken
        except ValueError as error:
            self.broken.add(name)
            self.problems.append(self._refused_value(name, value, str(error)))

    def _refused_value(self, name: str, value: Any, why: str) -> Problem:
        items = value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if (name, str(item)) in REFUSED_VALUES:
                return Problem((SPECS[name].flag,), item, *REFUSED_VALUES[name, str(item)])
        return coerce_problem(SPECS[name], value, why, self._origin(name))

    def _origin(self, name: str) -> str:
        origin = self.origins.get(name, "command line")
        return "" if origin == "command line" else f" in {origin}"

    def _take_undeclared(self, name: str, value: Any) -> None:
        """Judge a name that no field has as the command line judges the flag of that name."""
        flag = "--" + name.replace("_", "-")
        if name in SPECS or compat.arity(flag) is None:
            self.problems.append(unknown_name(name, value, self._origin(name)))
            return
        values = [] if value is True else [str(value)]
        verdict = compat.judge(flag, values, known=())
        if isinstance(verdict, Problem):
            self.problems.append(verdict)
            return
        self.notices.append(verdict.notice)
        if isinstance(verdict, compat.Rewritten):
            target = verdict.tokens[0][2:].replace("-", "_")
            self._take(target, " ".join(verdict.tokens[1:]))

    def __getattr__(self, name: str) -> Any:
        """Return a field's current value."""
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def was_given(self, *names: str) -> bool:
        """Return whether the user set any of these fields to something."""
        return any(self.given.get(name) is not None for name in names)

    def counts(self, *names: str) -> bool:
        """Return whether all these fields hold positive numbers."""
        return all(isinstance(self.values[n], int) and self.values[n] > 0 for n in names)

    def start(self, ranks: int) -> str:
        """Return the advice to run on a multiple of so many processes."""
        if self.values["dry_run"]:
            return f"Set --fake-world-size to a multiple of {ranks}"
        launcher = " with torchrun" if self.values["world_size"] == 1 else ""
        return f"Start a multiple of {ranks} processes{launcher}"

    def fill(self, name: str, value: Any) -> None:
        """Set a field that the user left open."""
        if self.values[name] is None:
            self.values[name] = value


def unknown_name(name: str, value: Any, origin: str = "") -> Problem:
    """Build the problem for a name that is no setting (or one that only ``finalize`` sets)."""
    got = f"{value!r}{origin}"
    if name in SPECS:
        return Problem((name,), got, "It follows from other settings", "Leave it out")
    settable = [n for n, spec in SPECS.items() if not spec.setting.derived]
    guess = nearest(name, settable)
    fix = f"Did you mean {guess}?" if guess else "docs/flags.md lists every name"
    return Problem((name,), got, "There is no setting of this name", fix)


def pad_vocabulary(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Return the number of embedding rows: the next multiple of ``divisible_by * tp_size``."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def _derive_shape(c: Draft) -> None:
    if not c.was_given(*DEFAULT_MODEL) and not c.broken & set(DEFAULT_MODEL):
        c.values.update(DEFAULT_MODEL)
        sizes = ", ".join(f"--{k.replace('_', '-')} {v}" for k, v in DEFAULT_MODEL.items())
        if c.load is None:
            c.notices.append(f"no model size was given: using {sizes}")
        else:
            # Whoever builds the model takes its shape from there.
            c.values["use_checkpoint_args"] = True
            if c.lr is None and not (c.override_opt_param_scheduler or c.finetune):
                c.values["use_checkpoint_opt_param_scheduler"] = True
            c.notices.append(
                f"no model size was given: using that of the checkpoint in {c.load}; if there is"
                f" none, {sizes}"
            )
    elif c.use_checkpoint_args and c.load is not None:
        for name, value in DEFAULT_MODEL.items():
            c.fill(name, value)  # until the checkpoint's values replace them
    if c.counts("hidden_size"):
        wide = 4 * c.hidden_size
        c.fill("ffn_hidden_size", int((wide * 2 / 3) / 64) * 64 if c.swiglu else wide)
    if c.counts("hidden_size", "num_attention_heads"):
        c.fill("kv_channels", c.hidden_size // c.num_attention_heads)
    if c.group_query_attention:
        c.fill("num_query_groups", 1)
    else:
        c.values["num_query_groups"] = c.num_attention_heads
    c.fill("seq_length", c.max_position_embeddings or DEFAULT_SEQ_LENGTH)
    c.fill("max_position_embeddings", c.seq_length)
    if c.add_bias_linear:
        c.values["add_qkv_bias"] = True
    if c.bf16 or c.fp16:
        c.values["params_dtype"] = "bfloat16" if c.bf16 else "float16"


def _derive_mesh(c: Draft) -> None:
    if c.counts(
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
    ):
        replica = (
            c.tensor_model_parallel_size * c.pipeline_model_parallel_size * c.context_parallel_size
        )
        c.values["data_parallel_size"] = max(1, c.world_size // replica)
    with contextlib.suppress(PlacementError, ZeroDivisionError, TypeError):  # a rule says it
        c.values["virtual_pipeline_model_parallel_size"] = virtual_size_of(c)
    if c.tensor_model_parallel_size == 1:
        c.values["sequence_parallel"] = False


def _derive_experts(c: Draft) -> None:
    c.fill("expert_tensor_parallel_size", c.tensor_model_parallel_size)
    if c.num_experts is not None:
        c.fill("moe_ffn_hidden_size", c.ffn_hidden_size)
    factor = c.moe_expert_capacity_factor
    if factor is not None and factor < 0:
        c.values["moe_expert_capacity_factor"] = None  # Megatron's spelling of: drop nothing


def _derive_batches(c: Draft, step: int) -> None:
    """Fill the global batch: the last one, of a run in which it changes."""
    asked = c.global_batch_size
    with contextlib.suppress(ValueError, TypeError):  # a rule says it
        if c.step_batch_size_schedule is not None and asked is None:
            c.values["global_batch_size"] = schedule_of(c).sizes[-1]
        elif asked is not None and asked >= step and c.decrease_batch_size_if_needed:
            c.values["global_batch_size"] = asked // step * step
    c.fill("global_batch_size", step)
    if asked is not None and c.global_batch_size != asked:
        c.notices.append(
            f"decreasing --global-batch-size from {asked} to {c.global_batch_size}, a multiple of"
            f" what {c.data_parallel_size} replicas read at once"
        )


def _derive_duration(c: Draft) -> None:
    if c.counts("micro_batch_size"):
        step = c.micro_batch_size * c.data_parallel_size
        _derive_batches(c, step)
        c.values["num_microbatches"] = max(1, c.global_batch_size // step)
    if c.train_samples is None:
        if c.train_iters is None:
            c.notices.append(f"no duration was given: using --train-iters {DEFAULT_TRAIN_ITERS}")
        c.fill("train_iters", DEFAULT_TRAIN_ITERS)
        c.fill("lr_decay_iters", c.train_iters)
    else:
        if c.counts("global_batch_size"):
            c.fill("train_iters", _steps_in(c, c.train_samples))
        c.fill("lr_decay_samples", c.train_samples)
    if c.lr is None:
        c.values["lr"] = DEFAULT_LR
        c.notices.append(f"no learning rate was given: using --lr {DEFAULT_LR}")
    if c.recompute_activations:
        c.fill("recompute_granularity", "selective")
    if c.fp16 and c.loss_scale is None:
        # Overflow is how dynamic loss scaling finds its scale: it must not stop the run.
        c.values["check_for_nan_in_loss_and_grad"] = False


def _steps_in(c: Draft, samples: int) -> int:
    if c.counts("micro_batch_size", "seq_length"):
        with contextlib.suppress(ValueError, ZeroDivisionError, TypeError):  # a rule says it
            return schedule_of(c).steps(0, samples)
    return int(samples // c.global_batch_size)


def _notice_early_end(c: Draft) -> None:
    decays = c.lr_decay_style != "constant" and c.counts("train_iters", "lr_decay_iters")
    if decays and c.lr_decay_iters < c.train_iters:
        c.notices.append(
            f"the learning rate stays at --min-lr {c.min_lr} after step {c.lr_decay_iters} of"
            f" {c.train_iters}, where its schedule ends"
        )


def _derive_corpora(c: Draft) -> None:
    """Read the files that name corpora."""
    for name, read in (
        ("data_args_path", lambda path: {"data_path": data_mix.read_list(path)}),
        ("per_split_data_args_path", data_mix.read_splits),
    ):
        path = c.values[name]
        if path is None:
            continue
        try:
            c.values.update({n: v for n, v in read(path).items() if not c.given.get(n)})
        except ValueError as error:
            fix = "Check the path; it is relative to the current folder"
            c.problems.append(Problem((SPECS[name].flag,), path, str(error), fix))
            c.broken.add(name)


def _derive_data(c: Draft) -> None:
    _derive_corpora(c)
    corpora = data_mix.corpora_flag(c)
    unread = c.broken & {"data_args_path", "per_split_data_args_path"}
    if not corpora and not c.mock_data and not unread:
        c.values["mock_data"] = True
        c.notices.append(
            "NO TRAINING DATA WAS GIVEN: training on synthetic sequences, as with --mock-data"
        )
    if c.split is None and not data_mix.per_split(c):
        c.values["split"] = DEFAULT_SPLIT
        if c.data_path:
            c.notices.append(f"no split was given: using --split '{DEFAULT_SPLIT}'")
    if c.tokenizer_type is None and not c.broken & {"tokenizer_type", "tokenizer_model"}:
        if c.vocab_file:
            c.values["tokenizer_type"] = "GPT2BPETokenizer"
        elif (c.tokenizer_model or "").endswith(".model"):
            c.values["tokenizer_type"] = "SentencePieceTokenizer"
        elif not c.tokenizer_model:
            c.values["tokenizer_type"] = "NullTokenizer"
    if c.tokenizer_type == "NullTokenizer" and c.vocab_size is None:
        c.values["vocab_size"] = DEFAULT_VOCAB_SIZE
        c.notices.append(
            "no vocabulary was given: using --tokenizer-type NullTokenizer"
            f" --vocab-size {DEFAULT_VOCAB_SIZE}"
        )
    if c.counts("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size"):
        padded = pad_vocabulary(
            c.vocab_size, c.make_vocab_size_divisible_by, c.tensor_model_parallel_size
        )
        c.fill("padded_vocab_size", padded)


def _derive_replicas(c: Draft) -> None:
    c.fill("grad_reduce_dtype", "bf16" if c.grad_reduce_in_bf16 else "fp32")


def _notice_gradient_format(c: Draft) -> None:
    for recipe in fp8_policy.hybrid_recipes(c):
        if published_format(recipe) != "e4m3":
            continue
        c.notices.append(
            f"--fp8-format hybrid with --fp8-recipe {recipe}: gradients are E5M2, which have"
            " a bit less precision; with scales for blocks E4M3 has range enough, and this recipe"
            " is published with --fp8-format e4m3"
        )


def _derive_fp8_policy(c: Draft) -> None:
    if c.fp8_policy is None or "fp8_policy" in c.broken:
        return
    try:
        c.values["fp8_policy_text"] = fp8_policy.load(c.fp8_policy)
    except ValueError as error:
        fix = "Check the path; it is relative to the current folder"
        c.problems.append(Problem((fp8_policy.FLAG,), c.fp8_policy, str(error), fix))


_STEPS: tuple[Callable[[Draft], None], ...] = (
    _derive_fp8_policy,
    _derive_shape,
    _derive_mesh,
    _derive_experts,
    _derive_duration,
    _derive_replicas,
    _notice_early_end,
    _notice_gradient_format,
    _derive_data,
)


def derive(draft: Draft) -> None:
    """Fill every field that follows from others; tolerates values the rules will refuse."""
    for step in _STEPS:
        step(draft)


def own_world_size(fields: Mapping[str, Any]) -> int:
    """Return the smallest number of processes on which a run's own layout fits.

    Args:
        fields: Settings as they are written, see `cli.read_settings`.
    """
    values = Draft(fields, 1).values

    def size(name: str) -> int:
        value = values.get(name)
        return value if isinstance(value, int) and value > 0 else 1

    tp, pp = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    dense = tp * size("context_parallel_size")
    etp = size("expert_tensor_parallel_size") if fields.get("expert_tensor_parallel_size") else tp
    ep = size("expert_model_parallel_size")
    replica = pp * (math.lcm(dense, etp * ep) if ep > 1 else dense)
    return replica * size("num_distributed_optimizer_instances")
