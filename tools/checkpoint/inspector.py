r"""Look into checkpoints: which there are, what is in one, its settings, and whether it is sound.

Examples::

    python tools/checkpoint/inspector.py list ckpt
    python tools/checkpoint/inspector.py tensors ckpt --step 1000
    python tools/checkpoint/inspector.py config ckpt > run.yaml
    python tools/checkpoint/inspector.py verify ckpt/iter_0001000

One process, no GPU; nothing in a checkpoint is executed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml  # noqa: E402

from megatron.config.tool_flags import ToolParser, run_tool  # noqa: E402
from megatron.core.dist_checkpointing import directory as place  # noqa: E402
from megatron.core.dist_checkpointing.storage import Reader  # noqa: E402
from megatron.core.errors import CheckpointError, MegatronError, complaint  # noqa: E402
from megatron.training.checkpoint_config import read_common, saved_settings  # noqa: E402


def parser() -> ToolParser:
    """Build the command line."""
    p = ToolParser(description=__doc__)
    p.add_argument("what", metavar="|".join(_ACTIONS), choices=tuple(_ACTIONS))
    p.add_argument("directory", type=Path, help="save directory, or one checkpoint's directory")
    p.add_argument("--step", type=int, help="iteration instead of the latest")
    return p


def _find(directory: Path, step: int | None) -> place.Found:
    found = place.find(directory, step)
    if found is None:
        raise CheckpointError(
            complaint("directory", directory, f"It has no {place.TRACKER_FILE}", "Check the path")
        )
    for note in found.notes:
        print(note, file=sys.stderr)
    return found


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def list_checkpoints(directory: Path, step: int | None) -> int:
    """Print every complete checkpoint, marking the one that a run would load."""
    latest = place.find(directory, step)
    entries = [(str(i), d) for i, d in place.committed(directory)]
    if place.is_committed(directory / place.RELEASE):
        entries.append((place.RELEASE, directory / place.RELEASE))
    for name, path in entries:
        problems = place.verify(path, contents=False)
        mark = "*" if latest is not None and latest.directory == path else " "
        state = "damaged: " + "; ".join(problems) if problems else "complete"
        print(f"{mark} {name:>9}  {_size(path) / 1e6:10.1f} MB  {state}")
    if not entries:
        print(f"no complete checkpoint in {directory}")
    return 0 if entries else 1


def print_tensors(directory: Path, step: int | None) -> int:
    """Print key, shape and type of every tensor."""
    reader = Reader(_find(directory, step).directory)
    for key, entry in sorted(reader.tensors.items()):
        print(f"{key}  {list(entry.shape)}  {str(entry.dtype).removeprefix('torch.')}")
    for key in sorted(reader.blobs):
        print(f"{key}  {len(reader.read_blob(key))} bytes")
    return 0


def print_config(directory: Path, step: int | None) -> int:
    """Print the settings of the run that saved it, as YAML for --config."""
    common = read_common(Reader(_find(directory, step).directory))
    given = common.get("given")
    settings = dict(given) if given else saved_settings(common)
    print(yaml.safe_dump(settings, sort_keys=True), end="")
    return 0


def verify(directory: Path, step: int | None) -> int:
    """Compare every file with the size and checksum that the save recorded."""
    found = _find(directory, step)
    records = place.read_manifest(found.directory)
    problems = place.verify(found.directory)
    reader = Reader(found.directory)
    missing = [n for n in sorted(reader.files()) if not (found.directory / n).is_file()]
    problems += [f"{found.directory / n} is missing" for n in missing if records is None]
    for problem in problems:
        print(problem)
    if records is None:
        print("no manifest: sizes and checksums are unknown")
    elif not problems:
        print(f"{found.directory}: {len(records)} files, {len(reader.tensors)} tensors, sound")
    return 1 if problems else 0


_ACTIONS = {
    "list": list_checkpoints,
    "tensors": print_tensors,
    "config": print_config,
    "verify": verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the first argument says."""
    args = parser().parse_args(argv)
    try:
        return _ACTIONS[args.what](args.directory, args.step)
    except MegatronError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    run_tool(main)
