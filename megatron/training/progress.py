"""How far a run has come: the counters that a checkpoint carries and a resume continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass
class Progress:
    """Counters of one run.

    The data order depends on `consumed_train_samples` alone, so restoring this object restores
    the position in the data.

    Attributes:
        iteration: Optimizer steps tried, skipped ones included.
        consumed_train_samples: Training sequences read so far, over all ranks.
        consumed_valid_samples: Validation sequences read so far, over all ranks.
        skipped_train_samples: Sequences of iterations that were asked to be left out.
        skipped_iterations: Iterations without an update because of non-finite gradients.
        nan_iterations: Skipped iterations whose loss itself was not finite.
        floating_point_operations_so_far: Model FLOPs of all iterations (see `flops.py`).
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    floating_point_operations_so_far: float = 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Return the counters as plain numbers."""
        return asdict(self)

    def update(self, values: Mapping[str, int | float]) -> None:
        """Take over the counters that `values` has; names it does not have keep their value."""
        for field in fields(self):
            if field.name in values:
                kind = float if field.name == "floating_point_operations_so_far" else int
                setattr(self, field.name, kind(values[field.name]))
