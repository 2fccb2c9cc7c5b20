r"""Convert model weights between HuggingFace directories and checkpoints of this project.

Examples::

    python tools/checkpoint/convert.py --model-type GPT --loader huggingface --saver megatron \
        --load-dir Llama-3.2-1B --save-dir ckpt
    python tools/checkpoint/convert.py --model-type GPT --loader megatron --saver huggingface \
        --load-dir ckpt --save-dir my-llama --target-dtype bf16

One process, no GPU, no process group. The result is compared with its source (tensors bitwise,
logits in fp32) before the tool says that it is done.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's folder first, and inspect.py in it is not the `inspect` that others mean.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
sys.path.insert(0, os.path.dirname(os.path.dirname(_HERE)))

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402

from megatron.config import ConfigError  # noqa: E402
from megatron.config.tool_flags import ToolParser, run_tool  # noqa: E402
from megatron.core.dist_checkpointing.store import StorePath, given_path  # noqa: E402
from megatron.core.errors import CheckpointError, MegatronError, complaint  # noqa: E402
from megatron.training import (  # noqa: E402
    hf_convert,
    hf_files,
    hf_quantization,
    hf_tokenizer,
    hf_verify,
    megatron_convert,
)

_ALIASES = {
    "mcore": "megatron",
    "core": "megatron",
    "hf": "huggingface",
    "llama_mistral": "huggingface",
    "mixtral_hf": "huggingface",
}
_FORMATS = ("megatron", "huggingface")
# What Megatron's tool asks for and nothing here needs: flag -> number of values.
_NOT_NEEDED = {
    "--model-size": 1,
    "--megatron-path": 1,
    "--loader-transformer-impl": 1,
    "--max-queue-size": 1,
    "--no-checking": 0,
}
_WHOLE_MODEL = 50_000_000  # parameters; larger models are compared layer by layer
_LAYOUT = ("tensor", "pipeline", "expert")
_SIZES = {f"target_{name}_parallel_size" for name in _LAYOUT} | {
    f"target_decoder_{end}_pipeline_num_layers" for end in ("first", "last")
}


def _format(name: str) -> str:
    return _ALIASES.get(name, name)


def _loader(name: str) -> str:
    return "megatron" if name == "torch" else _format(name)  # which of the two is seen


def parser() -> ToolParser:
    """Build the command line."""
    p = ToolParser(description=__doc__)
    p.add_argument("--model-type", required=True, choices=("GPT",))
    megatron_convert.add_arguments(p)
    p.add_argument("--loader", type=_loader, choices=_FORMATS, default="megatron")
    p.add_argument("--saver", type=_format, choices=(*_FORMATS, "torch"), default="megatron")
    p.add_argument(
        "--load-dir", type=given_path, required=True,
        help="HuggingFace directory, save directory, or one iter_XXXXXXX directory",
    )  # fmt: skip
    p.add_argument("--save-dir", type=given_path, required=True)
    p.add_argument(
        "--target-dtype", choices=(*hf_convert.DTYPES, hf_convert.FP8),
        help="type of the written weights (default: that of the source); fp8: codes and scales in "
        "the layout of compressed-tensors, to HuggingFace only",
    )  # fmt: skip
    p.add_argument(
        "--fp8-weights", choices=hf_quantization.STRATEGIES,
        help="a scale for every output of a weight, or one for all of it (default: channel, or as "
        "the weights were imported)",
    )  # fmt: skip
    p.add_argument(
        "--fp8-activations", choices=hf_quantization.ACTIVATIONS,
        help="inputs are measured when the model runs, or have the scales of delayed scaling "
        "(default: dynamic, or as the weights were imported)",
    )  # fmt: skip
    p.add_argument(
        "--true-vocab-size", type=int, help="vocabulary without padding, if unknown to the source"
    )
    for name in _LAYOUT:
        p.add_argument(
            f"--target-{name}-parallel-size", type=int, default=None,
            help="layout to write, with --saver torch; other formats do not depend on it",
        )  # fmt: skip
    p.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=None,
        help="compare logits with transformers' (default: if that library is installed)",
    )  # fmt: skip
    _add_megatron_spellings(p)
    return p


def _add_megatron_spellings(p: ToolParser) -> None:
    group = p.add_argument_group("spellings of Megatron's tool")
    group.add_argument(
        "--checkpoint-type", choices=("meta", "hf"), default="hf",
        help="of --loader llama_mistral; Meta's own files are refused",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer-model", type=Path,
        help="tokenizer file or directory that travels along (default: that of the source)",
    )  # fmt: skip
    dtype = group.add_mutually_exclusive_group()
    for name in ("bf16", "fp16"):
        dtype.add_argument(f"--{name}", action="store_true", help=f"--target-dtype {name}")
    for flag, values in _NOT_NEEDED.items():
        action = {"action": "store_true"} if values == 0 else {}
        group.add_argument(flag, help="accepted and not needed", **action)  # type: ignore[arg-type]


def _target_dtype(args: argparse.Namespace) -> str | None:
    short = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    if short and args.target_dtype not in (None, short):
        problem = f"--target-dtype is {args.target_dtype}"
        raise CheckpointError(complaint(f"--{short}", "set", problem, "Remove one of them"))
    asked: str | None = args.target_dtype or short
    return asked


def _heed_megatron_spellings(args: argparse.Namespace) -> None:
    """Refuse what cannot be read, and say what is not needed.

    Raises:
        CheckpointError: Meta's own files were announced.
    """
    if args.checkpoint_type == "meta":
        why = "Meta's own files (consolidated.00.pth) name and order their tensors in another way"
        fix = "Download the same model in HuggingFace format and use --checkpoint-type hf"
        raise CheckpointError(complaint("--checkpoint-type", "meta", why, fix))
    for flag in _NOT_NEEDED:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value:
            print(f"NOTE: {flag} is not needed: the files say what the model is")


def _stores(args: argparse.Namespace) -> None:
    """Refuse a format other than this project's own in an object store.

    Raises:
        CheckpointError: Says which of the two directories must be on a disk.
    """
    for flag, place, kind in (
        ("--load-dir", args.load_dir, args.loader), ("--save-dir", args.save_dir, args.saver)
    ):  # fmt: skip
        if kind != "megatron" and isinstance(place, StorePath):
            why = f"The format {kind} is read and written on a disk only"
            raise CheckpointError(complaint(flag, place, why, "Give a directory, and copy it"))


def _between_megatrons(args: argparse.Namespace) -> str | None:
    """Return the type to write, and say or refuse what only a HuggingFace directory can have.

    Raises:
        CheckpointError: It was asked for.
    """
    dtype = _target_dtype(args)
    for flag, value in (
        ("--target-dtype", dtype if dtype == hf_convert.FP8 else None),
        ("--fp8-weights", args.fp8_weights),
        ("--fp8-activations", args.fp8_activations),
    ):
        if value is not None:
            why = "Megatron's formats hold weights in bf16, fp16 or fp32"
            raise CheckpointError(complaint(flag, value, why, "Use --saver huggingface"))
    for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"):
        value = getattr(args, f"target_{name}_parallel_size")
        if value is not None and value < 1:
            flag = f"--target-{name.replace('_', '-')}-parallel-size"
            raise CheckpointError(complaint(flag, value, "It is a count", "Use 1 or more"))
    if args.tokenizer_model is not None:
        print("NOTE: --tokenizer-model travels with HuggingFace directories only")
    if args.verify:
        print(
            "NOTE: --verify compares logits with a HuggingFace directory's; there is none written"
        )
    return dtype


def _should_verify(asked: bool | None, request: hf_convert.Request) -> bool:
    """Decide, and say so when the check is left out."""
    if request.loader == request.saver:
        if asked:
            print("NOTE: --verify compares two formats; both ends have the same one")
        return False
    if asked is not None:
        if not asked:
            print("NOTE: the logits are not compared (--no-verify)")
        return asked
    try:
        hf_verify.import_transformers()
    except MegatronError:
        print("NOTE: the logits are not compared: transformers is not installed")
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, verify, report."""
    args = parser().parse_args(argv)
    sizes = any(value for name, value in vars(args).items() if name in _SIZES)
    if sizes and args.saver != "torch":
        print("NOTE: checkpoints do not depend on the layout; the target sizes are not needed")
    try:
        _stores(args)
        _heed_megatron_spellings(args)
        if args.saver == "torch" or args.loader == args.saver == "megatron":
            args.target_dtype = _between_megatrons(args)
            return megatron_convert.run(args)
        request = hf_convert.Request(
            args.loader, args.saver, args.load_dir, args.save_dir, _target_dtype(args),
            args.true_vocab_size, args.fp8_weights, args.fp8_activations,
        )  # fmt: skip
        source = hf_convert.open_source(request)
        if args.tokenizer_model is not None:
            source.tokenizer |= hf_files.tokenizer_at(args.tokenizer_model)
        numel = hf_convert.count_elements(source)
        print(
            f"converting {args.load_dir} ({source.model_type}, {numel / 1e6:.1f} M parameters, "
            f"{args.loader}) to {args.saver}"
        )
        dtype = hf_convert.target_dtype(request, source)
        check = None
        if _should_verify(args.verify, request):
            check = partial(_verify, request, source, dtype, numel > _WHOLE_MODEL)
        result = hf_convert.convert(request, source, check)
    except (MegatronError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"done: {result} ({request.dtype or dtype})")
    return 0


def _verify(
    request: hf_convert.Request,
    source: hf_convert.HfSource | hf_convert.MegatronSource,
    dtype: str,
    streamed: bool,
    result: Path,
) -> None:
    """Compare the finished files with their source."""
    ours, theirs = source.directory, result
    if request.loader == "huggingface":
        ours, theirs = result, source.directory
    report = hf_verify.verify(
        ours, theirs, dtype, request.vocab_size,
        fp8=hf_convert.exporter(request, source), streamed=streamed,
    )  # fmt: skip
    print(f"verified: all tensors equal; {report.line()}")
    if request.saver != "huggingface":
        return
    tokenizer = hf_tokenizer.of_run(source, say=lambda _: None)  # the conversion has said it
    if tokenizer is not None:
        print(hf_tokenizer.compare(result, tokenizer, hf_verify.import_transformers()))


if __name__ == "__main__":
    run_tool(main)
