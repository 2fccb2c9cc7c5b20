"""How far a run has come: the counters that a checkpoint carries and a resume continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Where a run is in the data. Going back does not bring these back.
_DATA = ("consumed_train_samples", "skipped_train_samples", "skipped_ranges", "data")


@dataclass
class Progress:
    """Counters of one run.

    The data order depends on `consumed_train_samples` alone, so restoring this object restores
    the position in the data.

    Attributes:
        iteration: Optimizer steps tried, skipped ones included.
        consumed_train_samples: Training sequences read so far, over all ranks.
        consumed_valid_samples: Validation sequences read so far, over all ranks.
        skipped_train_samples: Those of them that no iteration which counts has trained on.
        skipped_ranges: Where these are in the data: pairs of first sample and end.
        skipped_iterations: Iterations without an update because of non-finite gradients.
        nan_iterations: Skipped iterations whose loss itself was not finite.
        floating_point_operations_so_far: Model FLOPs of all iterations (see `flops.py`).
        data: What was read of every corpus until the last checkpoint, see `datasets.history`.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    skipped_ranges: list[list[int]] = field(default_factory=list)
    skipped_iterations: int = 0
    nan_iterations: int = 0
    floating_point_operations_so_far: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def trained_samples(self) -> int:
        """Training sequences that count: what a plan over samples is measured by."""
        return self.consumed_train_samples - self.skipped_train_samples

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return asdict(self)

    def update(self, values: Mapping[str, Any]) -> None:
        """Take over the counters that `values` has; names it does not have keep their value."""
        for one in fields(self):
            if one.name not in values:
                continue
            value = values[one.name]
            if one.name == "skipped_ranges":
                self.skipped_ranges = [[int(first), int(end)] for first, end in value]
            elif one.name == "data":
                self.data = dict(value)
            else:
                kind = float if one.name == "floating_point_operations_so_far" else int
                setattr(self, one.name, kind(value))

    def go_back(self, earlier: Mapping[str, Any]) -> tuple[int, int]:
        """Return to the counters of an earlier moment, but not to its place in the data.

        What was read since then is left out.

        Args:
            earlier: What `to_dict` returned.

        Returns:
            First sample that is left out and the end of them.
        """
        self.update({k: v for k, v in earlier.items() if k not in _DATA})
        first, end = int(earlier["consumed_train_samples"]), self.consumed_train_samples
        if self.skipped_ranges and self.skipped_ranges[-1][0] == first:
            first = self.skipped_ranges[-1][1]  # not the first return to this moment
            self.skipped_ranges[-1][1] = end
        else:
            self.skipped_ranges.append([first, end])
        self.skipped_train_samples += end - first
        return first, end

    def next_samples(self, available: int, batch: int, begin: int = 0) -> int:
        """Return the first sample of the next iteration.

        A dataset is made for the iterations of a run. Of one that left samples out, the last
        iterations read the first ones again.

        Args:
            available: Samples of the dataset.
            batch: Samples of an iteration.
            begin: First sample that the dataset still has.
        """
        start = self.consumed_train_samples
        if not self.skipped_train_samples or start + batch <= available:
            return start
        usable = available - (available - start) % batch
        again = (start - usable) // batch
        for first in range(begin + (usable - begin) % batch, usable, batch):
            if any(begin < first + batch and first < end for begin, end in self.skipped_ranges):
                continue
            if not again:
                return first
            again -= 1
        return start
