"""Rules about data, tokenizer, checkpoints, logging and the process."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.data import TIKTOKEN_PATTERNS
from megatron.config.data_mix import corpora_flag
from megatron.config.draft import Draft
from megatron.config.problems import Problem, rule
from megatron.config.schema import SPECS, flag_of
from megatron.config.values import split_weights

_MODEL_TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
)


@rule
def one_data_source(c: Draft) -> Iterator[Problem]:
    """Data comes from --data-path or from --mock-data, not from both."""
    if c.data_path and c.given.get("mock_data"):
        yield Problem(
            ("--mock-data", "--data-path"),
            f"both, with {' '.join(c.data_path)}",
            "A run has one source of data",
            "Remove one of them",
        )
    if c.data_path is not None and not c.data_path:
        yield Problem(
            ("--data-path",),
            "nothing",
            "It names at least one dataset",
            "Give the prefix of a .bin/.idx pair, or use --mock-data",
        )


@rule
def split_is_readable(c: Draft) -> Iterator[Problem]:
    """--split holds one to three numbers, not all zero."""
    if c.split is None:
        return
    try:
        split_weights(c.split)
    except ValueError as error:
        yield Problem(("--split",), c.split, str(error), "Write it like 969,30,1")


@rule
def tokenizer_has_its_files(c: Draft) -> Iterator[Problem]:
    """Each tokenizer type comes with the file it reads."""
    kind = c.tokenizer_type
    if c.tokenizer_model and not kind and "tokenizer_type" not in c.broken:
        yield Problem(
            ("--tokenizer-type",),
            f"nothing, with --tokenizer-model {c.tokenizer_model}",
            "The file alone does not say how it is read",
            f"Add --tokenizer-type, one of {', '.join(_MODEL_TOKENIZERS)}",
        )
    if kind in _MODEL_TOKENIZERS and not c.tokenizer_model:
        yield Problem(
            ("--tokenizer-model", "--tokenizer-type"),
            f"nothing and {kind}",
            "This tokenizer is read from a file",
            "Add --tokenizer-model",
        )
    if kind == "TikTokenizer" and not c.tiktoken_pattern:
        yield Problem(
            ("--tiktoken-pattern", "--tokenizer-type"),
            f"nothing and {kind}",
            "Its files do not say how a text is cut into words",
            f"Add --tiktoken-pattern, one of {', '.join(TIKTOKEN_PATTERNS)}",
        )
    if kind == "GPT2BPETokenizer":
        for name in ("vocab_file", "merge_file"):
            if not c.values[name]:
                yield Problem(
                    (flag_of(name), "--tokenizer-type"),
                    f"nothing and {kind}",
                    "This tokenizer is read from a vocabulary and a list of merges",
                    f"Add {flag_of(name)}",
                )
    corpora = corpora_flag(c)
    if corpora and not c.was_given("tokenizer_type", "tokenizer_model", "vocab_file"):
        if c.was_given("vocab_size"):
            return
        yield Problem(
            ("--tokenizer-type", corpora),
            f"nothing and {' '.join(c.data_path or c.train_data_path or ['a corpus'])}",
            "The model's vocabulary follows from the tokenizer that made the data",
            "Name that tokenizer, or give --vocab-size with --tokenizer-type NullTokenizer",
        )


@rule
def saving_has_place_and_time(c: Draft) -> Iterator[Problem]:
    """--save comes with --save-interval."""
    if c.save is not None and c.save_interval is None:
        yield Problem(
            ("--save-interval", "--save"),
            f"nothing and {c.save}",
            "It must be known when to save",
            "Add --save-interval",
        )


@rule
def loading_has_a_place(c: Draft) -> Iterator[Problem]:
    """Settings about loading are given only with --load."""
    if c.load is not None:
        return
    names = ("ckpt_step", "finetune", "exit_on_missing_checkpoint", "use_checkpoint_args")
    for name in names:
        if c.values[name] != SPECS[name].default:
            yield Problem(
                (flag_of(name), "--load"),
                f"{c.values[name]} and nothing",
                "It says how to load a checkpoint, and none is loaded",
                f"Add --load, or remove {flag_of(name)}",
            )


@rule
def one_schedule_wins(c: Draft) -> Iterator[Problem]:
    """The learning-rate schedule is this run's or the checkpoint's, not both."""
    if c.override_opt_param_scheduler and c.use_checkpoint_opt_param_scheduler:
        yield Problem(
            (
                flag_of("override_opt_param_scheduler"),
                flag_of("use_checkpoint_opt_param_scheduler"),
            ),
            "both",
            "One takes this run's schedule and the other the checkpoint's",
            "Remove one of them",
        )


@rule
def fine_tuning_has_its_own_schedule(c: Draft) -> Iterator[Problem]:
    """Fine-tuning starts at step 0, with a schedule of its own."""
    if c.finetune and c.use_checkpoint_opt_param_scheduler:
        yield Problem(
            (flag_of("use_checkpoint_opt_param_scheduler"), "--finetune"),
            "both",
            "One continues the checkpoint's schedule and the other starts a new one",
            "Remove one of them",
        )


@rule
def wandb_run_is_named(c: Draft) -> Iterator[Problem]:
    """Weights & Biases needs a project and a run name together."""
    if c.wandb_project and not c.wandb_exp_name:
        yield Problem(
            ("--wandb-exp-name", "--wandb-project"),
            f"nothing and {c.wandb_project}",
            "A run in a project has a name",
            "Add --wandb-exp-name",
        )
    if not c.wandb_project:
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if c.values[name]:
                yield Problem(
                    (flag_of(name), "--wandb-project"),
                    f"{c.values[name]} and nothing",
                    "Weights & Biases is on only with a project",
                    f"Add --wandb-project, or remove {flag_of(name)}",
                )


@rule
def manual_collection_is_on(c: Draft) -> Iterator[Problem]:
    """Garbage-collection settings are given only with --manual-gc."""
    if c.manual_gc:
        return
    for name in ("manual_gc_interval", "manual_gc_eval"):
        if c.values[name] != SPECS[name].default:
            yield Problem(
                (flag_of(name), "--manual-gc"),
                f"{c.values[name]} and nothing",
                "Python decides when to collect",
                f"Add --manual-gc, or remove {flag_of(name)}",
            )
