#!/usr/bin/env python3
r"""Quantize the weights of a trained model to 8 or 4 bits, for programs that run it.

    python tools/quantize.py --load ckpt --save-dir my-llama-int4 --method gptq \
        --calibration-text train.txt --eval-text held_out.txt
    python tools/quantize.py --load my-llama-bf16 --save-dir my-llama-int8 --method int8

--load is a checkpoint or a HuggingFace directory. The result is a HuggingFace directory in the
compressed-tensors layout (pack-quantized), with tokenizer and configuration. Embeddings, norms,
routers and the output layer stay bf16, and the bf16 model is kept beside it. One transformer layer
is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import ConfigError
from megatron.config.data import TOKENIZER_FIELDS
from megatron.config.problems import Problem
from megatron.config.tool_flags import ToolParser, add_tokenizer_flags, run_tool
from megatron.core.datasets.tokenizers import Tokenizer, TokenizerOptions, build_tokenizer
from megatron.core.dist_checkpointing.store import StorePath, given_path
from megatron.core.errors import DataError, MegatronError, complaint
from megatron.observe.lines import perplexity
from megatron.training import hf_convert, hf_files
from megatron.training.hf_sources import HfSource, MegatronSource, Source
from megatron.training.perplexity import read_corpus, read_text, windows
from megatron.training.quantization import packed
from megatron.training.quantization.gptq import Gptq
from megatron.training.quantization.grid import Grid
from megatron.training.quantization.model import check_model, quantize_model
from megatron.training.quantization.streaming import LayerStream

Model = HfSource | MegatronSource
METHODS = ("int8", "int4-rtn", "gptq")
_GROUP_SIZE, _DAMPING, _SAMPLES = 128, 0.01, 128
_LONGEST = 2048  # tokens of a window, unless --seq-length says otherwise
_CALIBRATION = ("act_order", "damping", "calibration_samples", "calibration_text",
                "calibration_data_path")  # fmt: skip
REPORT = "quantization_report.json"


def make_parser() -> ToolParser:
    """Return the command line."""
    p = ToolParser(description=__doc__)
    p.add_argument(
        "--load", type=Path, required=True,
        help="checkpoint (save directory or iter_*) or HuggingFace directory",
    )  # fmt: skip
    p.add_argument(
        "--save-dir", type=given_path, required=True, help="new directory for the result"
    )
    p.add_argument(
        "--bf16-dir", type=given_path,
        help="where the bf16 model is kept (default: SAVE_DIR-bf16, or --load if it is one)",
    )  # fmt: skip
    p.add_argument(
        "--method", choices=METHODS, required=True,
        help="int8: one scale a row, rounded to nearest; int4-rtn: 4 bits, rounded to nearest; "
        "gptq: 4 bits, errors made up for on a calibration text",
    )  # fmt: skip
    p.add_argument(
        "--group-size", type=int,
        help=f"of 4-bit methods: inputs that share a scale (default {_GROUP_SIZE}; -1: all)",
    )  # fmt: skip
    _add_texts(p)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_tokenizer_flags(p.add_argument_group("tokenizer (default: what the model brings along)"))
    return p


def _add_texts(p: ToolParser) -> None:
    group = p.add_argument_group("GPTQ")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--calibration-text", type=Path, help="text file, best of training data")
    what.add_argument("--calibration-data-path", help="prefix of a .bin/.idx pair instead")
    group.add_argument(
        "--calibration-samples", type=int,
        help=f"windows, spread evenly over the text (default {_SAMPLES})",
    )  # fmt: skip
    group.add_argument(
        "--act-order", action="store_true", default=None,
        help="round columns with large inputs first",
    )  # fmt: skip
    group.add_argument(
        "--damping", type=float,
        help=f"share of the mean square input that is added to all (default {_DAMPING})",
    )  # fmt: skip
    group = p.add_argument_group("perplexity before and after")
    held_out = group.add_mutually_exclusive_group()
    held_out.add_argument("--eval-text", type=Path, help="held-out text file")
    held_out.add_argument("--eval-data-path", help="prefix of a .bin/.idx pair instead")
    group.add_argument("--eval-tokens", type=int, help="stop after so many tokens")
    p.add_argument(
        "--seq-length", type=int,
        help=f"tokens of a window (default: the model's positions, at most {_LONGEST})",
    )  # fmt: skip
    p.add_argument("--micro-batch-size", type=int, default=8, help="windows that run at once")


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself, all of it at once.

    Raises:
        DataError: Lists every problem.
    """
    problems: list[Problem] = []
    gptq = args.method == "gptq"
    for name in _CALIBRATION:
        if not gptq and getattr(args, name) is not None:
            fix = "Leave it out, or choose --method gptq"
            why = f"--method {args.method} needs no calibration"
            problems.append(Problem((_flag(name),), getattr(args, name), why, fix))
    if gptq and args.calibration_text is None and args.calibration_data_path is None:
        flags = ("--calibration-text", "--calibration-data-path")
        problems.append(Problem(flags, "nothing", "GPTQ looks at the inputs of layers", "Give one"))
    if args.method == "int8" and args.group_size is not None:
        why, fix = "INT8 has one scale a row", "Leave it out, or choose a 4-bit method"
        problems.append(Problem(("--group-size",), args.group_size, why, fix))
    for name in ("calibration_samples", "eval_tokens", "seq_length", "micro_batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            problems.append(Problem((_flag(name),), value, "It is a count", "Use at least 1"))
    problems += _out_of_range(args)
    for flag, directory in (("--save-dir", args.save_dir), ("--bf16-dir", args.bf16_dir)):
        if isinstance(directory, StorePath):
            why, fix = "A model is written to a file system", "Name a local directory and copy it"
            problems.append(Problem((flag,), directory, why, fix))
        elif directory is not None and directory.exists() and _in_use(directory):
            problems.append(Problem((flag,), directory, "It is in use", "Name a new directory"))
    if problems:
        raise DataError("\n".join(str(problem) for problem in problems))


def _out_of_range(args: argparse.Namespace) -> Iterator[Problem]:
    if args.group_size is not None and args.group_size != -1 and args.group_size < 1:
        why, fix = "It is a number of columns", "Use at least 1, or -1 for whole rows"
        yield Problem(("--group-size",), args.group_size, why, fix)
    if args.damping is not None and not 0 <= args.damping < math.inf:
        why = "It is a share of the mean square input"
        yield Problem(("--damping",), args.damping, why, "Use 0.01 or so")
    if args.eval_tokens is not None and args.eval_text is None and args.eval_data_path is None:
        why, fix = "There is no text to measure on", "Give --eval-text or --eval-data-path"
        yield Problem(("--eval-tokens",), args.eval_tokens, why, fix)


def _in_use(directory: Path) -> bool:
    return not directory.is_dir() or any(directory.iterdir())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def open_model(args: argparse.Namespace) -> tuple[hf_convert.Request, Model]:
    """Open the model, and say how a bf16 HuggingFace directory would be made of it."""
    is_hf = (args.load / "config.json").is_file()
    format_name = "huggingface" if is_hf else "megatron"
    target = args.bf16_dir or args.save_dir.with_name(args.save_dir.name + "-bf16")
    request = hf_convert.Request(format_name, "huggingface", args.load, target, "bf16")
    return request, hf_convert.open_source(request, _tell)


def bf16_source(args: argparse.Namespace, request: hf_convert.Request, source: Model) -> HfSource:
    """Return the model as a bf16 HuggingFace directory, which is made unless it is one."""
    plain = isinstance(source, HfSource) and source.kept.get("quantization_config") is None
    if plain and source.dtype == torch.bfloat16 and args.bf16_dir is None:
        _tell(f"the bf16 model is {args.load}")
        return source
    if request.save.resolve() == args.save_dir.resolve():
        why = "Two models need two directories"
        raise DataError(complaint("--bf16-dir", request.save, why, "Name another one"))
    if request.save.exists() and _in_use(request.save):
        why = "It is in use, perhaps by an earlier try"
        fix = f"Go on from what it left with --load {request.save}, or name a new directory"
        raise DataError(complaint("--bf16-dir", request.save, why, fix))
    hf_convert.convert(request, source)
    _tell(f"the bf16 model is kept in {request.save}")
    opened = HfSource(request.save)
    _note_tokenizer(opened)
    return opened


def _note_tokenizer(source: HfSource) -> None:
    if not any(name.startswith("tokenizer") or name == "vocab.json" for name in source.tokenizer):
        _tell("NOTE: the checkpoint's tokenizer was not found; copy its files beside the weights")


def tokenizer_for(args: argparse.Namespace, source: Model) -> Tokenizer:
    """Build the tokenizer that the flags name, else the one among the model's files.

    Raises:
        DataError: There is none.
    """
    if any(getattr(args, name) is not None for name in TOKENIZER_FIELDS):
        return build_tokenizer(TokenizerOptions.of(args))
    files = source.tokenizer
    if "tokenizer.json" in files:
        kind, model = "HuggingFaceTokenizer", str(files["tokenizer.json"].parent)
    elif "tokenizer.model" in files:
        kind, model = "SentencePieceTokenizer", str(files["tokenizer.model"])
    else:
        raise DataError(
            complaint(
                "--tokenizer-type",
                "nothing",
                f"A text is to be read, and {source.directory} has no tokenizer",
                "Name it with --tokenizer-type and --tokenizer-model",
            )
        )
    return build_tokenizer(TokenizerOptions(tokenizer_type=kind, tokenizer_model=model))


def _tokens(
    args: argparse.Namespace, source: Model, what: str, limit: int | None
) -> np.ndarray | None:
    """Read the tokens of the calibration or the held-out text, None without one."""
    text, prefix = getattr(args, f"{what}_text"), getattr(args, f"{what}_data_path")
    if text is not None:
        tokenizer = tokenizer_for(args, source)
        ids = tokenizer.tokenize(read_text(text, f"--{what}-text"))
        tokens = np.asarray(ids, dtype=np.int64)[:limit]
    elif prefix is not None:
        tokens = read_corpus(prefix, limit)
    else:
        return None
    if len(tokens) < 2 or int(tokens.max()) >= source.fields["vocab_size"]:
        got = f"{len(tokens)} tokens" if len(tokens) < 2 else f"token {tokens.max()}"
        raise DataError(
            complaint(
                f"--{what}-text" if text is not None else f"--{what}-data-path",
                got,
                f"At least two are needed, each below {source.fields['vocab_size']}",
                "Give a longer text, tokenized for this model",
            )
        )
    return tokens


def calibration_windows(
    tokens: np.ndarray, length: int, samples: int, rows: int
) -> list[torch.Tensor]:
    """Take windows of a text, spread evenly over it.

    Args:
        tokens: The text.
        length: Tokens of a window; a shorter text is one window.
        samples: How many at most.
        rows: Windows of a batch.

    Returns:
        Token ids ``[b, s]``.
    """
    length = min(length, len(tokens))
    whole = np.stack(np.split(tokens[: len(tokens) // length * length], len(tokens) // length))
    count = min(samples, len(whole))
    chosen = whole[np.arange(count) * len(whole) // count].astype(np.int64)
    return list(torch.split(torch.from_numpy(chosen), rows))


def measured(
    source: Source, text: Sequence[torch.Tensor], device: torch.device
) -> dict[str, float]:
    """Return loss and perplexity of a model on windows ``[b, s + 1]``."""
    total, count = LayerStream(source, device).total_loss(text)
    return {"lm loss": total / count, "ppl": perplexity(total / count)}


def _compared(
    args: argparse.Namespace,
    source: HfSource,
    grid: Grid,
    device: torch.device,
    text: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Measure the bf16 model, simpler methods, and the files that were written."""
    four_bits = Grid(4, grid.group_size)
    models: dict[str, Source] = {"bf16": source, "int8": packed.RoundedSource(source, Grid(8))}
    if args.method != "int8":
        models["int4-rtn"] = packed.RoundedSource(source, four_bits)
    models[args.method] = packed.PackedSource(source, args.save_dir, grid)
    found = {}
    for name, model in models.items():
        found[name] = measured(model, text, device)
        _tell(f"perplexity, {name}: {found[name]['ppl']:.4f}")
    predicted = sum(window[:, 1:].numel() for window in text)
    return {"tokens": predicted, "seq_length": text[0].shape[1] - 1, "models": found}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Quantize, measure, and return the report."""
    check_arguments(args)
    grid = Grid(8) if args.method == "int8" else Grid(4, _group_size(args))
    device = torch.device(_device(args.device))
    request, model = open_model(args)
    check_model(model, grid)
    length = _length(args, model.fields["max_position_embeddings"])
    gptq, calibration, held_out = None, [], []
    tokens = _tokens(args, model, "calibration", None)
    if tokens is not None:
        damping = _DAMPING if args.damping is None else args.damping
        gptq = Gptq(grid, damping, bool(args.act_order))
        samples = args.calibration_samples or _SAMPLES
        calibration = calibration_windows(tokens, length, samples, args.micro_batch_size)
    tokens = _tokens(args, model, "eval", args.eval_tokens)
    if tokens is not None:
        held_out = list(windows(tokens, length, args.micro_batch_size))
    source = bf16_source(args, request, model)
    written = quantize_model(
        source, args.save_dir, grid, device=device, gptq=gptq, windows=calibration, say=_tell
    )
    report = {
        "load": str(args.load),
        "bf16": str(source.directory),
        "method": args.method,
        "bits": grid.bits,
        "group_size": grid.group_size,
        **_gptq_settings(gptq, calibration),
        "bits_per_weight": written.bits_per_weight,
        "bytes": packed.file_bytes(args.save_dir),
        "bf16_bytes": packed.file_bytes(source.directory),
        "not_quantized": written.kept,
        "weights": written.to_dict()["weights"],
        "perplexity": _compared(args, source, grid, device, held_out) if held_out else {},
    }
    hf_files.write_json(args.save_dir / REPORT, report)
    return report


def _length(args: argparse.Namespace, positions: int) -> int:
    """How many tokens a window has."""
    length = int(args.seq_length or min(positions, _LONGEST))
    if length > positions:
        why, fix = f"The model has {positions} positions", f"Use at most {positions}"
        raise DataError(complaint("--seq-length", length, why, fix))
    return length


def _gptq_settings(gptq: Gptq | None, text: Sequence[torch.Tensor]) -> dict[str, Any]:
    if gptq is None:
        return {}
    tokens = sum(window.numel() for window in text)
    return {"act_order": gptq.act_order, "damping": gptq.damping, "calibration_tokens": tokens}


def _group_size(args: argparse.Namespace) -> int | None:
    size = _GROUP_SIZE if args.group_size is None else args.group_size
    return None if size == -1 else int(size)


def _device(name: str) -> str:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        fix = "Use --device cpu, or a torch built for CUDA"
        raise DataError(complaint("--device", name, "torch sees no GPU", fix))
    return "cuda" if name != "cpu" and available else "cpu"


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report as lines to read."""
    rows = report["weights"]
    width = max(len(row["name"]) for row in rows)
    yield f"{'weight':{width}}  rounding  error of weight  of output  rounded to nearest"
    for row in rows:
        errors = [row["output_error"], row["nearest_output_error"]]
        shown = ["-" if e is None else f"{e:.3%}" for e in errors]
        yield (
            f"{row['name']:{width}}  {row['rounding']:8}  {row['weight_error']:15.3%}  "
            f"{shown[0]:>9}  {shown[1]:>18}"
        )
    yield f"kept in bf16: {', '.join(report['not_quantized'])}"
    share = report["bytes"] / report["bf16_bytes"]
    yield (
        f"{report['bits_per_weight']:.3f} bits a weight; files {report['bytes'] / 1e6:.1f} MB, "
        f"{share:.0%} of bf16's {report['bf16_bytes'] / 1e6:.1f} MB"
    )
    found = report["perplexity"]
    if found:
        base = found["models"]["bf16"]["ppl"]
        yield f"perplexity of {found['tokens']} tokens in windows of {found['seq_length']}:"
        for name, figures in found["models"].items():
            yield f"  {name:9} {figures['ppl']:12.4f}  {figures['ppl'] / base - 1:+.2%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 after a message about what is wrong."""
    args = make_parser().parse_args(argv)
    try:
        report = run(args)
    except (MegatronError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(table(report)))
    return 0


if __name__ == "__main__":
    run_tool(main)
