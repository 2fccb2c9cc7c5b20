"""A covering subset of the parity matrix: every two choices of a layout occur together.

`make parity` runs the whole list.
"""

from __future__ import annotations

import dataclasses

import pytest
from parity_matrix import MAX_RANKS, Case, all_cases, covering, measure, pairs

ALL = all_cases()
CHOSEN = covering(ALL)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_one_process_and_a_layout_agree(case):
    errors = measure(case)
    assert errors.inside, str(errors)


def test_the_list_is_whole():
    """Every combination of the axes in 1 and 2 on up to eight ranks, and 4 along each of them."""
    sizes = {(c.tp, c.pp, c.cp, c.dp) for c in ALL if c.model == "tied"}
    assert len(sizes) == 2**4 - 1 + 4
    assert len(set(ALL)) == len(ALL) == len({case.name for case in ALL})
    assert all(case.ranks <= MAX_RANKS for case in ALL)
    full = [c for c in ALL if (c.model, c.tp, c.pp, c.cp, c.dp) == ("untied", 2, 2, 1, 2)]
    # Three kinds of pipeline; sequence parallelism, distributed optimizer, recomputation or not.
    assert len(full) == 3 * 2**3


def test_the_subset_has_every_pair():
    assert set().union(*map(pairs, CHOSEN)) == set().union(*map(pairs, ALL))
    assert len(CHOSEN) < len(ALL) / 8


def test_the_matrix_can_fail():
    """A layout that trains another model, here by its seed, is outside."""

    @dataclasses.dataclass(frozen=True)
    class Other(Case):
        def settings(self):
            return super().settings() | {"seed": 5}

    errors = measure(Other("tied"))
    assert not errors.inside
    assert min(errors.loss, errors.gradient, errors.weight, errors.start) > 1e-4
