r"""Look into checkpoints, compare two, and make copies with other names or less in them.

Examples::

    python tools/checkpoint/inspect.py list ckpt
    python tools/checkpoint/inspect.py tensors ckpt --step 1000 --only 'linear_fc1'
    python tools/checkpoint/inspect.py verify ckpt/iter_0001000
    python tools/checkpoint/inspect.py diff ckpt_tp2 ckpt_tp4 --weights
    python tools/checkpoint/inspect.py config ckpt > run.yaml
    python tools/checkpoint/inspect.py config ckpt other_ckpt
    python tools/checkpoint/inspect.py fp8 ckpt
    python tools/checkpoint/inspect.py rename ckpt renamed --map '^decoder\.' 'backbone.'
    python tools/checkpoint/inspect.py prune ckpt small --drop optimizer rng
    python tools/checkpoint/inspect.py prune ckpt --keep-last 3 --dry-run

One process, no GPU; nothing in a checkpoint is executed. Checkpoints of this project and of
Megatron-Core (torch_dist; the older torch format is read only). Exit code: 0 equal or sound, 1
different or damaged, 2 it could not be done.
"""

from __future__ import annotations

import os
import sys

# Python puts a script's folder first, and this file is not the `inspect` that its imports mean.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
sys.path.insert(0, os.path.dirname(os.path.dirname(_HERE)))

import argparse  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import yaml  # noqa: E402

from megatron.config.tool_flags import BAD_ARGUMENTS, ToolParser, run_tool  # noqa: E402
from megatron.core.dist_checkpointing import directory as place  # noqa: E402
from megatron.core.dist_checkpointing import schema  # noqa: E402
from megatron.core.dist_checkpointing.mp_reader import open_reader  # noqa: E402
from megatron.core.dist_checkpointing.store import given_path  # noqa: E402
from megatron.core.errors import CheckpointError, MegatronError, complaint  # noqa: E402
from megatron.training.checkpoint_config import read_common, saved_settings  # noqa: E402
from megatron.training.inspection import fp8_figures, rewrite  # noqa: E402
from megatron.training.inspection.compare import (  # noqa: E402
    TensorDifference,
    compare,
    settings_differences,
)

DIFFERENT = 1


def parser() -> ToolParser:
    """Build the command line."""
    p = ToolParser(description=__doc__)
    actions = p.add_subparsers(dest="what", required=True, metavar="|".join(_ACTIONS))
    for name, (run, _) in _ACTIONS.items():
        text = (run.__doc__ or "").splitlines()[0]
        own = actions.add_parser(name, help=text, description=text)
        own.add_argument("directory", type=given_path, help="save directory, or one checkpoint's")
        _ACTIONS[name][1](own)
        own.add_argument("--json", action="store_true", help="print one JSON object")
    return p


def _step(p: argparse.ArgumentParser) -> None:
    p.add_argument("--step", type=int, help="iteration instead of the latest")


def _only(p: argparse.ArgumentParser) -> None:
    _step(p)
    p.add_argument("--only", type=_pattern, help="regular expression of keys")
    p.add_argument("--weights", action="store_true", help="the model's tensors alone")


def _diff_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("other", type=given_path, help="what to compare with")
    p.add_argument("--other-step", type=int, help="its iteration instead of the latest")
    _only(p)
    p.add_argument("--atol", type=_tolerance, default=0.0, help="absolute difference that is none")
    p.add_argument("--rtol", type=_tolerance, default=0.0, help="the same over the larger value")


def _config_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("other", type=given_path, nargs="?", help="show what is set differently there")
    p.add_argument("--other-step", type=int, help="its iteration instead of the latest")
    _step(p)


def _rename_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("output", type=given_path, help="new save directory")
    p.add_argument(
        "--map", nargs=2, action="append", required=True, metavar=("PATTERN", "REPLACEMENT"),
        help="regular expression and what takes its place in every key; may be repeated",
    )  # fmt: skip
    _step(p)


def _prune_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "output", type=given_path, nargs="?", help="new save directory for a smaller copy"
    )
    p.add_argument(
        "--drop", nargs="+", choices=rewrite.DROPPABLE, help="what the copy does without"
    )
    _step(p)
    p.add_argument("--keep-last", type=int, help="delete all but so many of the newest iterations")
    p.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from error


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance: it is 0 or more")
    return value


def _find(directory: Path, step: int | None) -> Path:
    found = place.find(directory, step)
    if found is None:
        raise CheckpointError(
            complaint("directory", directory, f"It has no {place.TRACKER_FILE}", "Check the path")
        )
    for note in found.notes:
        print(note, file=sys.stderr)
    return found.directory


def _size(directory: Path) -> int:
    return sum(place.sizes_of(directory).values())


def _print(args: argparse.Namespace, values: Any, lines: Sequence[str]) -> None:
    print(json.dumps(values) if args.json else "\n".join(lines))


def _wanted(args: argparse.Namespace) -> Callable[[str], bool]:
    def wanted(key: str) -> bool:
        if args.weights and not schema.is_model_key(key):
            return False
        return args.only is None or args.only.search(key) is not None

    return wanted


def list_checkpoints(args: argparse.Namespace) -> int:
    """Print every complete checkpoint, marking the one that a run would load."""
    root = args.directory
    if not root.is_dir():
        why = "There is no such directory"
        raise CheckpointError(complaint("directory", root, why, "Check the path"))
    latest = place.find(root)
    entries = [(str(i), d) for i, d in place.committed(root)]
    if place.is_committed(root / place.RELEASE):
        entries.append((place.RELEASE, root / place.RELEASE))
    if not entries:
        fix = "Name the directory that --save was given"
        raise CheckpointError(complaint("directory", root, "It holds no complete checkpoint", fix))
    values, lines = [], []
    for name, path in entries:
        problems = place.verify(path, contents=False)
        loaded = latest is not None and latest.directory == path
        state = "damaged: " + "; ".join(problems) if problems else "complete"
        lines.append(f"{'*' if loaded else ' '} {name:>9}  {_size(path) / 1e6:10.1f} MB  {state}")
        values.append(
            {"iteration": name, "bytes": _size(path), "latest": loaded, "problems": problems}
        )
    _print(args, values, lines)
    return 0


def print_tensors(args: argparse.Namespace) -> int:
    """Print key, shape and type of every tensor."""
    reader, wanted = open_reader(_find(args.directory, args.step)), _wanted(args)
    tensors = {
        key: {"shape": list(entry.shape), "dtype": str(entry.dtype).removeprefix("torch.")}
        for key, entry in sorted(reader.tensors.items())
        if wanted(key)
    }
    blobs = {}
    if not args.weights:
        blobs = {k: len(reader.read_blob(k)) for k in sorted(reader.blobs) if wanted(k)}
    lines = [f"{key}  {entry['shape']}  {entry['dtype']}" for key, entry in tensors.items()]
    lines += [f"{key}  {size} bytes" for key, size in blobs.items()]
    _print(args, {"tensors": tensors, "blobs": blobs}, lines)
    return 0


def print_config(args: argparse.Namespace) -> int:
    """Print the settings of the run that saved it as YAML for --config, or what differs."""
    common = read_common(open_reader(_find(args.directory, args.step)))
    if args.other is None:
        if args.other_step is not None:
            fix = "Name the other directory too"
            raise CheckpointError(complaint("--other-step", args.other_step, "Of which?", fix))
        given = common.get("given")
        settings = dict(given) if given else saved_settings(common)
        if args.json:
            print(json.dumps(settings))
        else:
            print(yaml.safe_dump(settings, sort_keys=True), end="")
        return 0
    other = read_common(open_reader(_find(args.other, args.other_step)))
    found = settings_differences(saved_settings(common), saved_settings(other))
    _print(args, found, [f"{n}: {a!r} and {b!r}" for n, (a, b) in found.items()] or ["the same"])
    return DIFFERENT if found else 0


def verify(args: argparse.Namespace) -> int:
    """Compare every file with the size and checksum that the save recorded."""
    directory = _find(args.directory, args.step)
    records = place.read_manifest(directory)
    problems = place.verify(directory)
    reader = open_reader(directory)
    missing = sorted(reader.files() - place.sizes_of(directory, reader.files()).keys())
    problems += [f"{directory / n} is missing" for n in missing if records is None]
    lines = list(problems)
    if records is None:
        lines.append("no manifest: sizes and checksums are unknown")
    elif not problems:
        lines.append(f"{directory}: {len(records)} files, {len(reader.tensors)} tensors, sound")
    _print(args, {"problems": problems, "manifest": records is not None}, lines)
    if problems:
        return DIFFERENT
    return 0 if records is not None else BAD_ARGUMENTS


def diff(args: argparse.Namespace) -> int:
    """Compare the values of two checkpoints, whatever layouts saved them."""
    first = open_reader(_find(args.directory, args.step))
    second = open_reader(_find(args.other, args.other_step))
    found = compare(first, second, _wanted(args), args.atol, args.rtol)
    if not found.tensors and not found.missing and not found.extra:
        fix = "Look at the keys with the action 'tensors'"
        pattern = None if args.only is None else args.only.pattern
        raise CheckpointError(complaint("--only", pattern, "It leaves nothing to compare", fix))
    lines = [f"only in {first.directory}: {name}" for name in found.missing]
    lines += [f"only in {second.directory}: {name}" for name in found.extra]
    lines += [line for t in found.tensors if (line := _difference(t))]
    equal = sum(t.equal for t in found.tensors)
    lines.append(f"{equal} tensors are equal, {len(found.tensors) - equal} differ")
    values = {"equal": found.equal, "missing": found.missing, "extra": found.extra}
    _print(args, {**values, "tensors": [asdict(t) for t in found.tensors]}, lines)
    return 0 if found.equal else DIFFERENT


def _difference(found: TensorDifference) -> str:
    types = "" if found.dtypes is None else f" ({found.dtypes[0]} and {found.dtypes[1]})"
    if found.shapes is not None:
        return f"{found.name}{types}: shapes {found.shapes[0]} and {found.shapes[1]}"
    if found.equal:
        return f"{found.name}{types}: the same values" if types else ""
    return (
        f"{found.name}{types}: {found.different} of {found.elements} elements differ, by up to "
        f"{found.max_abs:.3e} (relative {found.max_rel:.3e}), most in {found.worst}"
    )


def print_fp8(args: argparse.Namespace) -> int:
    """Print what it knows of FP8: settings, scales and amax histories by layer."""
    reader = open_reader(_find(args.directory, args.step))
    common = read_common(reader)
    state = common.get("fp8") or {}
    settings = fp8_figures.fp8_settings(saved_settings(common))
    layers = fp8_figures.fp8_layers(reader, state)
    values = {
        "recipe": state.get("recipe"),
        "format": state.get("format"),
        "suspended": state.get("suspended") or [],
        "settings": settings,
        "layers": layers,
    }
    lines = [f"recipe {values['recipe']}, format {values['format']}"]
    lines += [f"{name}: {value}" for name, value in settings.items()]
    lines += [f"left FP8 by itself: {name}" for name in values["suspended"]]
    for name, figures in layers.items():
        lines += [name, *(f"  {part}: {_shown(value)}" for part, value in figures.items())]
    if not layers:
        lines.append("no scales: only delayed scaling has any from step to step")
    _print(args, values, lines)
    return 0


def _shown(value: Any) -> str:
    """Scales as they are; of a history its length and the largest amax of each tensor."""
    if not isinstance(value, list) or not value:
        return str(value)
    if isinstance(value[0], list) and value[0] and isinstance(value[0][0], float):
        largest = [max(column) for column in zip(*value, strict=True)]
        return f"largest of {len(value)}: {_shown(largest)}"
    if isinstance(value[0], float):
        return ", ".join(f"{number:g}" for number in value)
    return json.dumps(value)


def rename(args: argparse.Namespace) -> int:
    """Write a new checkpoint whose tensors have other keys."""
    reader = open_reader(_find(args.directory, args.step))
    keys = [*reader.tensors, *(k for k in reader.blobs if "_extra_state/" in k)]
    names = rewrite.renaming(
        [(a, b) for a, b in args.map], keys, [k for k in reader.blobs if k not in keys]
    )
    saved = rewrite.copy(reader, args.output, lambda key: names.get(key, key))
    changed = {old: new for old, new in names.items() if old != new and old in reader.tensors}
    lines = [f"{old} -> {new}" for old, new in changed.items()]
    lines.append(f"{saved.directory}: {len(changed)} of {len(reader.tensors)} tensors renamed")
    _print(args, {"directory": str(saved.directory), "renamed": changed}, lines)
    return 0


def prune(args: argparse.Namespace) -> int:
    """Write a smaller copy without some parts, or delete old iterations."""
    copying, deleting = args.output is not None or args.drop, args.keep_last is not None
    if bool(copying) == deleting or (copying and not (args.drop and args.output)):
        fix = "Give an output directory and --drop, or --keep-last"
        got = f"output {args.output}, --drop {args.drop}, --keep-last {args.keep_last}"
        raise CheckpointError(complaint("prune", got, "It makes a copy or deletes", fix))
    if copying:
        if args.dry_run:
            fix = "Leave it out"
            raise CheckpointError(complaint("--dry-run", "set", "A copy deletes nothing", fix))
        return _smaller(args)
    if args.keep_last < 1 or args.step is not None:
        fix = "Give --keep-last 1 or more, and no --step"
        got = f"{args.keep_last}, --step {args.step}"
        raise CheckpointError(complaint("--keep-last", got, "It counts iterations", fix))
    doomed = rewrite.old_checkpoints(args.directory, args.keep_last)
    sizes = {str(path): _size(path) for path in doomed}
    if doomed and not args.dry_run:
        rewrite.delete(args.directory, doomed)
    verb = "would be deleted" if args.dry_run else "deleted"
    lines = [f"{path}  {size / 1e6:.1f} MB  {verb}" for path, size in sizes.items()]
    lines.append(f"{len(doomed)} checkpoints, {sum(sizes.values()) / 1e6:.1f} MB {verb}")
    _print(args, {"deleted": not args.dry_run, "checkpoints": sizes}, lines)
    return 0


def _smaller(args: argparse.Namespace) -> int:
    reader = open_reader(_find(args.directory, args.step))
    saved = rewrite.copy(reader, args.output, drop=args.drop)
    before = _size(reader.directory)
    after = _size(saved.directory)
    values = {"directory": str(saved.directory), "bytes": after, "bytes_before": before}
    line = f"{saved.directory}: {after / 1e6:.1f} MB of {before / 1e6:.1f} MB"
    _print(args, values, [line])
    return 0


_ACTIONS: dict[
    str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None]]
] = {
    "list": (list_checkpoints, lambda p: None),
    "tensors": (print_tensors, _only),
    "config": (print_config, _config_flags),
    "verify": (verify, _step),
    "diff": (diff, _diff_flags),
    "fp8": (print_fp8, _step),
    "rename": (rename, _rename_flags),
    "prune": (prune, _prune_flags),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first argument says."""
    args = parser().parse_args(argv)
    try:
        return _ACTIONS[args.what][0](args)
    except MegatronError as error:
        print(error, file=sys.stderr)
        return BAD_ARGUMENTS


if __name__ == "__main__":
    run_tool(main)
