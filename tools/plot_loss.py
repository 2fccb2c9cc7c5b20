"""Draw training and validation loss from one or more training logs to a PNG.

    python tools/plot_loss.py run_a.log run_b.log --output loss.png

Reads the console lines that ``pretrain_gpt.py`` prints (the Megatron format), so it also works on
logs that other tools of the field wrote.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.tool_flags import ToolParser, run_tool
from megatron.core.errors import complaint

try:
    from matplotlib.figure import Figure
except ImportError:
    sys.exit(complaint("matplotlib", "nothing", "It is not installed", "Install the 'plot' extra"))

TRAIN = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?lm loss: ([0-9.E+-]+|nan|inf)")
VALID = re.compile(r"validation loss at iteration (\d+).*?lm loss value: ([0-9.E+-]+)")


class Curve(NamedTuple):
    """Points of one log: ``(iteration, loss)`` pairs."""

    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]


def read_log(path: Path) -> Curve:
    """Collect the loss points of a log file.

    Args:
        path: A file with the console output of a run. A resumed run may be appended to it: a later
            line for the same iteration replaces the earlier one.

    Returns:
        The training and validation points, sorted by iteration.
    """
    train: dict[int, float] = {}
    valid: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := TRAIN.search(line):
            train[int(found[1])] = float(found[2])
        elif found := VALID.search(line):
            valid[int(found[1])] = float(found[2])
    return Curve(sorted(train.items()), sorted(valid.items()))


def draw(curves: dict[str, Curve], output: Path, reference: float | None = None) -> None:
    """Write a PNG with one line per log, and a dashed reference line if one is given.

    Args:
        curves: Label to points.
        output: The PNG to write.
        reference: A loss to mark, e.g. the unigram entropy of the corpus, in nats per token.
    """
    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    for label, curve in curves.items():
        (line,) = axes.plot(*zip(*curve.train, strict=True), linewidth=1, alpha=0.7, label=label)
        if curve.valid:
            axes.plot(
                *zip(*curve.valid, strict=True),
                "o-",
                color=line.get_color(),
                markersize=4,
                label=f"{label} (validation)",
            )
    if reference is not None:
        axes.axhline(reference, color="grey", linestyle="--", label="unigram entropy")
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(output)


def main() -> None:
    """Parse the command line and draw."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    parser.add_argument("--reference", type=float, help="loss to mark with a dashed line")
    args = parser.parse_args()
    curves = {}
    for path in args.logs:
        fix = "Give the console log of a run"
        if not path.is_file():
            sys.exit(complaint("logs", path, "There is no such file", fix))
        curve = read_log(path)
        if not curve.train:
            sys.exit(complaint("logs", path, "There are no training lines in it", fix))
        curves[path.stem] = curve
    try:
        draw(curves, args.output, args.reference)
    except (OSError, ValueError) as error:  # the latter for a file ending without a format
        sys.exit(complaint("--output", args.output, f"It cannot be written: {error}", "Name a PNG"))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_tool(main)
