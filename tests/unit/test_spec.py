"""Module specifications are data: built, walked, printed, compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from torch import nn

from megatron.core.transformer.spec_utils import (
    ModuleSpec,
    build_module,
    describe,
    import_module,
    walk,
)


class Leaf(nn.Module):
    def __init__(self, size, *, build, scale=1.0):
        super().__init__()
        self.size, self.path, self.scale = size, build.path, scale


@dataclass(frozen=True)
class Parts:
    first: ModuleSpec
    rest: tuple[ModuleSpec, ...] = ()
    optional: ModuleSpec | None = None


class Whole(nn.Module):
    def __init__(self, *, build, submodules):
        super().__init__()
        self.first = build_module(submodules.first, 3, build=build)
        self.rest = nn.ModuleList(build_module(one, 4, build=build) for one in submodules.rest)


def spec():
    return ModuleSpec(
        Whole,
        submodules=Parts(ModuleSpec(Leaf, {"scale": 2.0}), (ModuleSpec(Leaf), ModuleSpec(Leaf))),
    )


def test_build_passes_sizes_params_and_submodules():
    whole = build_module(spec(), build=SimpleNamespace(path="model"))
    assert (whole.first.size, whole.first.scale, whole.first.path) == (3, 2.0, "model")
    assert [leaf.scale for leaf in whole.rest] == [1.0, 1.0]


def test_a_class_stands_for_its_own_spec_and_params_beat_the_caller():
    build = SimpleNamespace(path="")
    assert build_module(Leaf, 1, build=build, scale=5.0).scale == 5.0
    assert build_module(ModuleSpec(Leaf, {"scale": 2.0}), 1, build=build, scale=5.0).scale == 2.0


def test_walk_names_every_place_and_skips_absent_ones():
    assert [path for path, _ in walk(spec())] == ["", "first", "rest.0", "rest.1"]


def test_walk_reads_mappings_and_bare_classes():
    tree = ModuleSpec(Whole, submodules={"first": Leaf})
    assert [(path, place.module) for path, place in walk(tree)] == [("", Whole), ("first", Leaf)]


def test_describe_prints_one_place_a_line():
    assert describe(spec()).splitlines() == [
        "Whole",
        "  first: Leaf(scale=2.0)",
        "    0: Leaf",
        "    1: Leaf",
    ]


def test_specs_compare_by_value_and_are_edited_by_replacement():
    changed = replace(spec(), submodules=replace(spec().submodules, first=ModuleSpec(nn.Identity)))
    assert spec() == spec()
    assert changed != spec()
    assert [place.module for _, place in walk(changed)][1] is nn.Identity


def test_import_module_by_name_and_its_refusal():
    found = import_module(("megatron.core.transformer.spec_utils", "ModuleSpec"))
    assert found is ModuleSpec
    with pytest.raises(ImportError, match="has no Missing"):
        import_module(("megatron.core.transformer.spec_utils", "Missing"))
