"""A trained model out of a checkpoint, in one process, for tools that only run it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config import RunConfig, make_config
from megatron.config.data import TOKENIZER_FIELDS
from megatron.config.schema import SPECS
from megatron.config.tool_flags import add_tokenizer_flags
from megatron.core.datasets.tokenizers import Tokenizer, build_tokenizer
from megatron.core.dist_checkpointing.store import path_of
from megatron.core.errors import CheckpointError, complaint
from megatron.core.fp8 import Fp8State
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import Launch, Runtime, start
from megatron.training.progress import Progress
from megatron.training.providers import build_gpt, saved_config

# What a model is and what it reads; how it was trained does not matter here.
_SECTIONS = ("model", "moe", "fp8")
# The layer backend is a matter of this machine, the padding one of this layout.
_LEFT_OUT = ("transformer_impl", "padded_vocab_size", "fp8_warmup_iters")
# Experts with a capacity drop tokens because of other tokens, later ones and those of other
# sequences included, which training can afford. A tool's result depends on the text alone.
_CAPACITY = (
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
)


@dataclass(frozen=True)
class Restored:
    """A model that is ready to run, and what belongs to it.

    Attributes:
        config: The checkpoint's model, precision and tokenizer, for one process.
        runtime: Mesh, backend and device.
        model: In evaluation mode; its parameters need no gradient.
        fp8: FP8 state, with the checkpoint's scales.
        tokenizer: The one the model was trained with.
        iteration: Training steps behind it.
    """

    config: RunConfig
    runtime: Runtime
    model: GPTModel
    fp8: Fp8State
    tokenizer: Tokenizer
    iteration: int


def restore(
    load: str,
    *,
    step: int | None = None,
    device: str = "auto",
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Restored:
    """Build the model of a checkpoint and load its weights, whatever layout they were saved in.

    Args:
        load: A checkpoint folder, or one of its `iter_XXXXXXX` folders.
        step: Iteration to load instead of the newest.
        device: `auto`, `cpu` or `cuda`.
        settings: Fields to change, such as the tokenizer's; None values are left out.
        say: Receives the lines that loading has to say.

    Raises:
        CheckpointError: There is no checkpoint, or it is unusable.
        ConfigError: The result cannot work.
        DataError: The tokenizer cannot be built.
    """
    saved = saved_config(load, step)
    if saved is None:
        why, fix = "There is no checkpoint", "Name a folder that --save wrote"
        if (path_of(load) / "config.json").is_file():
            why = "It is a HuggingFace directory, which this program does not read"
            fix = "Convert it with tools/checkpoint/convert.py --loader huggingface"
        raise CheckpointError(complaint("--load", load, why, fix))
    config = _config(saved, load, step, device, settings or {})
    tokenizer = build_tokenizer(config.data)
    if config.vocab_size is None:
        config = config.replace(vocab_size=tokenizer.vocab_size)
    runtime = start(config, Launch())
    model, fp8, _ = build_gpt(config, runtime)
    fp8.warmup_iters = int(saved.get("fp8_warmup_iters") or 0)
    progress = Progress()
    load_checkpoint(
        config,
        runtime.mesh,
        model=model,
        optimizer=None,
        scheduler=None,
        fp8=fp8,
        progress=progress,
        say=say,
    )
    fp8.begin(progress.iteration)
    model.eval().requires_grad_(requires_grad=False)
    return Restored(config, runtime, model, fp8, tokenizer, progress.iteration)


def _config(
    saved: Mapping[str, Any],
    load: str,
    step: int | None,
    device: str,
    settings: Mapping[str, Any],
) -> RunConfig:
    kept = {
        name: value
        for name, value in saved.items()
        if value is not None
        and not SPECS[name].setting.derived
        and (SPECS[name].section in _SECTIONS or name in TOKENIZER_FIELDS)
        and name not in (*_LEFT_OUT, *_CAPACITY)
    }
    if not kept.get("group_query_attention"):
        kept.pop("num_query_groups", None)
    if saved.get("fp8_policy_text"):
        kept["fp8_policy"] = saved["fp8_policy_text"]  # its file may be gone
    changed = {name: value for name, value in settings.items() if value is not None}
    if changed.get("tokenizer_type") not in (None, kept.get("tokenizer_type")):
        of_another = set(TOKENIZER_FIELDS) - {"vocab_size"}  # that one is the model's
        kept = {name: value for name, value in kept.items() if name not in of_another}
    fixed = {
        "micro_batch_size": 1,
        "train_iters": 1,
        "mock_data": True,
        "load": load,
        "ckpt_step": step,
        "device": device,
        "no_load_optim": True,
        "no_load_rng": True,
        "fp8_allow_fallback": True,  # on a machine without the backend it was trained with
    }
    return make_config(1, **{**kept, **changed, **fixed})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which checkpoint to run, and where."""
    parser.add_argument("--load", required=True, help="checkpoint folder, or one of its iter_*")
    parser.add_argument("--ckpt-step", type=int, help="iteration instead of the newest")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_tokenizer_flags(parser.add_argument_group("tokenizer (default: the checkpoint's)"))


def restore_from(args: argparse.Namespace) -> Restored:
    """Do what the flags of `add_flags` say; what loading has to say goes to standard error."""
    return restore(
        args.load,
        step=args.ckpt_step,
        device=args.device,
        settings={name: getattr(args, name) for name in TOKENIZER_FIELDS},
        say=lambda line: print(line, file=sys.stderr),  # noqa: T201 - tools only
    )
