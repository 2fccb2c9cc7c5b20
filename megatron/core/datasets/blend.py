"""Several corpora as one: the ``--data-path`` grammar and the order in which they take turns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.config.mix_words import MixError, read_mix
from megatron.core.datasets.cache import Arrays, cached_arrays
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.errors import DataError, complaint

# A dataset of a blend is built this much larger than its share, because turn-taking may draw
# a little more from it than its share rounded up.
SURPLUS = 0.005
MAX_DATASETS = np.iinfo(np.int16).max

# Importing numba and compiling cost some seconds, which is what plain Python needs for this many.
_COMPILE_FROM = 1_000_000

_ARRAYS = ("dataset_index", "dataset_sample_index")


@dataclass(frozen=True)
class BlendSpec:
    """What ``--data-path`` says.

    Attributes:
        prefixes: The corpora.
        weights: Their shares of the samples, adding up to 1; None if none were given.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def read_once(self) -> bool:
        """Whether the corpora are not repeated: several without weights."""
        return self.weights is None and len(self.prefixes) > 1


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> BlendSpec:
    """Read ``prefix ...`` or ``weight prefix weight prefix ...``.

    Raises:
        DataError: Nothing was given, weights and prefixes do not pair up, or a weight is not
            positive.
    """
    if not words:
        raise DataError(complaint(flag, "nothing", "There is no corpus to read", "Name a prefix"))
    try:
        prefixes, weights = read_mix(words)
    except MixError as error:
        raise DataError(complaint(flag, " ".join(words), error.why, error.fix)) from None
    return BlendSpec(prefixes, None if weights is None else tuple(normalized(weights)))


def normalized(weights: Sequence[float]) -> list[float]:
    """Scale weights to a sum of 1."""
    values = np.array(weights, dtype=np.float64)
    scaled: list[float] = (values / values.sum()).tolist()
    return scaled


def dataset_targets(weights: Sequence[float], size: int) -> list[int]:
    """Return how many of `size` samples each dataset has to supply, rounded up."""
    return [math.ceil(size * weight) for weight in weights]


def with_surplus(target: int) -> int:
    """Return the size to build a dataset of a blend with."""
    return math.ceil(target * (1 + SURPLUS))


def _take_turns(
    weights: npt.NDArray[np.float64],
    dataset: npt.NDArray[np.int16],
    sample: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> None:
    for i in range(dataset.size):
        wanted = float(max(i, 1))
        best, most = 0, weights[0] * wanted - counts[0]
        for d in range(1, weights.size):
            lag = weights[d] * wanted - counts[d]
            if lag > most:
                best, most = d, lag
        dataset[i] = best
        sample[i] = counts[best]
        counts[best] += 1


def blending_indices(
    weights: Sequence[float], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Let the dataset that lags furthest behind its share supply the next sample.

    At sample ``i`` that is the one with the largest ``weight * max(i, 1) - count``, the first of
    equals. No dataset is ever a whole sample ahead of its share.

    Args:
        weights: Shares, adding up to 1.
        size: Number of samples.

    Returns:
        For every sample the dataset's number, and the sample's number within that dataset.
    """
    shares = np.array(weights, dtype=np.float64)
    dataset = np.zeros(size, dtype=np.int16)
    sample = np.zeros(size, dtype=np.int64)
    counts = np.zeros(shares.size, dtype=np.int64)
    compiled = _compiled() if size >= _COMPILE_FROM else None
    if compiled is not None:
        compiled(shares, dataset, sample, counts)
    else:
        _take_turns_plainly(shares.tolist(), dataset, sample)
    return dataset, sample


def _compiled() -> Callable[..., None] | None:
    try:
        import numba  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        return None
    compile_: Any = numba.njit
    loop: Callable[..., None] = compile_(_take_turns)
    return loop


def _take_turns_plainly(
    shares: list[float], dataset: npt.NDArray[np.int16], sample: npt.NDArray[np.int64]
) -> None:
    # Scalars of numpy arrays are slow in a Python loop; the arithmetic on floats is the same.
    counts = [0] * len(shares)
    numbers = range(len(shares))
    turns, positions = [], []
    for i in range(dataset.size):
        wanted = float(max(i, 1))
        best = max(numbers, key=lambda d: shares[d] * wanted - counts[d])
        turns.append(best)
        positions.append(counts[best])
        counts[best] += 1
    dataset[:], sample[:] = turns, positions


class BlendedDataset:
    """Samples of several datasets in the proportions of their weights.

    Args:
        datasets: The parts.
        weights: One positive weight each.
        size: Number of samples.
        name: ``train``, ``valid`` or ``test``.
        cache_path: Folder for index files; None builds them in memory.

    Raises:
        DataError: The parts are too small for this size, or there are too many of them.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int,
        name: str,
        cache_path: str | None = None,
    ) -> None:
        if len(datasets) >= MAX_DATASETS:
            raise DataError(
                complaint(
                    "--data-path",
                    f"{len(datasets)} corpora",
                    f"A blend numbers its parts in 16 bits, up to {MAX_DATASETS}",
                    "Merge some of them",
                )
            )
        self.datasets, self.name, self.size = tuple(datasets), name, size
        self.weights = normalized(weights)
        if any(part.config.planned for part in self.datasets):
            self.counts = dataset_targets(self.weights, size)
            return
        build: Callable[[], Arrays] = self._build
        arrays = (
            build()
            if cache_path is None
            else cached_arrays(
                Path(cache_path), type(self).__name__, name, self.description(), _ARRAYS, build
            )
        )
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self.counts = np.bincount(self.dataset_index, minlength=len(datasets)).tolist()
        self._check_supply()

    def _build(self) -> Arrays:
        return dict(zip(_ARRAYS, blending_indices(self.weights, self.size), strict=True))

    def _check_supply(self) -> None:
        for dataset, count in zip(self.datasets, self.counts, strict=True):
            if count > len(dataset):
                raise DataError(
                    complaint(
                        f"--data-path {dataset.corpus.prefix}",
                        f"{len(dataset)} samples",
                        f"The {self.name} blend of {self.size} samples takes {count} of it",
                        "Lower its weight or train on fewer samples",
                    )
                )

    def description(self) -> dict[str, Any]:
        """Return everything that determines the order, for the cache key."""
        return {
            "class": type(self).__name__,
            "datasets": [dataset.description() for dataset in self.datasets],
            "split": self.name,
            "weights": self.weights,
            "size": self.size,
        }

    def fingerprint(self) -> str:
        """Return a hash of the parts and the order, to compare between ranks."""
        parts = [dataset.fingerprint() for dataset in self.datasets]
        digest = hashlib.blake2b(repr((parts, self.weights)).encode(), digest_size=16)
        for array in (self.dataset_index, self.dataset_sample_index):
            digest.update(np.ascontiguousarray(array[:1024]).tobytes())
            digest.update(np.ascontiguousarray(array[-1024:]).tobytes())
        return digest.hexdigest()

    def report(self) -> str:
        """Say in words what each part supplies."""
        lines = [f"{self.name}: blend of {len(self.datasets)} corpora, {self.size} samples"]
        for dataset, weight, count in zip(self.datasets, self.weights, self.counts, strict=True):
            epochs = count * dataset.config.sequence_length / dataset.tokens_per_epoch
            lines.append(f"  {weight:.4f} {count} samples, {epochs:.2f} epochs; {dataset.report()}")
        return "\n".join(lines)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size} in the {self.name} blend")
        part = self.datasets[int(self.dataset_index[index])]
        return part[int(self.dataset_sample_index[index])]
