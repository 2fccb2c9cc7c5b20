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

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.config import ConfigError  # noqa: E402
from megatron.config.tool_flags import ToolParser  # noqa: E402
from megatron.core.errors import MegatronError  # noqa: E402
from megatron.training import hf_convert, hf_quantization, hf_verify, megatron_convert  # noqa: E402

_ALIASES = {
    "mcore": "megatron",
    "core": "megatron",
    "hf": "huggingface",
    "llama_mistral": "huggingface",
}
_FORMATS = ("megatron", "huggingface")
_WHOLE_MODEL = 50_000_000  # parameters; larger models are compared layer by layer
_LAYOUT = ("tensor", "pipeline", "expert")


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
        "--load-dir", type=Path, required=True,
        help="HuggingFace directory, save directory, or one iter_XXXXXXX directory",
    )  # fmt: skip
    p.add_argument("--save-dir", type=Path, required=True)
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
    return p


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
    sizes = any(getattr(args, f"target_{name}_parallel_size") for name in _LAYOUT)
    if sizes and args.saver != "torch":
        print("NOTE: checkpoints do not depend on the layout; the target sizes are not needed")
    if args.saver == "torch" or args.loader == args.saver == "megatron":
        return megatron_convert.run(args)
    request = hf_convert.Request(
        args.loader, args.saver, args.load_dir, args.save_dir, args.target_dtype,
        args.true_vocab_size, args.fp8_weights, args.fp8_activations,
    )  # fmt: skip
    try:
        source = hf_convert.open_source(request)
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
    print(f"done: {result} ({dtype})")
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


if __name__ == "__main__":
    sys.exit(main())
