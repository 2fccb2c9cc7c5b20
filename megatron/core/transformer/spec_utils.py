"""A model as data: which class stands at which place, with which arguments.

A specification holds no weights and runs nothing. It can be printed, walked, compared and edited
before a single parameter exists; `build_module` turns it into modules.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megatron.core.build import Build


@dataclass(frozen=True)
class ModuleSpec:
    """One place in a model: the class, its extra arguments and what stands below it.

    Attributes:
        module: A class or factory; called as `module(*args, build=..., **params, **kwargs)`.
        params: Keyword arguments that belong to this place.
        submodules: A dataclass or mapping whose values are specifications, classes, lists of
            them, or None; passed on as `submodules=`. None when the module is a leaf.
    """

    module: Callable[..., nn.Module]
    params: Mapping[str, Any] = field(default_factory=dict)
    submodules: Any = None


def build_module(
    spec: ModuleSpec | Callable[..., nn.Module], *args: Any, build: Build, **kwargs: Any
) -> nn.Module:
    """Construct the module that a specification describes.

    Args:
        spec: A specification, or the class itself where nothing has to be added.
        *args: Positional arguments of the class, such as the sizes of a linear layer.
        build: Everything a module needs from outside; its path names the module.
        **kwargs: Keyword arguments from the caller; the specification's `params` win.

    Returns:
        The module.
    """
    if not isinstance(spec, ModuleSpec):
        spec = ModuleSpec(spec)
    arguments = {**kwargs, **spec.params}
    if spec.submodules is not None:
        arguments["submodules"] = spec.submodules
    return spec.module(*args, build=build, **arguments)


def children(spec: Any) -> list[tuple[str, Any]]:
    """The named entries directly below a specification, in order."""
    below = spec.submodules if isinstance(spec, ModuleSpec) else spec
    if below is None:
        return []
    if isinstance(below, Mapping):
        entries = list(below.items())
    elif dataclasses.is_dataclass(below):
        entries = [(f.name, getattr(below, f.name)) for f in dataclasses.fields(below)]
    else:
        return []
    found: list[tuple[str, Any]] = []
    for name, entry in entries:
        if isinstance(entry, (list, tuple)):
            found += [(f"{name}.{i}", one) for i, one in enumerate(entry)]
        else:
            found.append((name, entry))
    return found


def walk(spec: ModuleSpec, path: str = "") -> Iterator[tuple[str, ModuleSpec]]:
    """Yield every place of a specification with its dotted path, parents first."""
    yield path, spec
    for name, entry in children(spec):
        below = f"{path}.{name}" if path else name
        if isinstance(entry, ModuleSpec):
            yield from walk(entry, below)
        elif entry is not None:
            yield below, ModuleSpec(entry)


def describe(spec: ModuleSpec) -> str:
    """A specification as an indented tree, one place a line."""
    lines = []
    for path, place in walk(spec):
        depth = path.count(".") + 1 if path else 0
        label = path.rsplit(".", 1)[-1] + ": " if path else ""
        params = ", ".join(f"{key}={value!r}" for key, value in place.params.items())
        called = f"({params})" if params else ""
        lines.append(f"{'  ' * depth}{label}{name_of(place.module)}{called}")
    return "\n".join(lines)


def name_of(module: Callable[..., nn.Module]) -> str:
    """The name under which a class or factory is known."""
    return getattr(module, "__qualname__", repr(module))


def import_module(module_path: tuple[str, str]) -> Any:
    """Fetch an object from `(module, name)`, the form that `--spec` takes.

    Raises:
        ImportError: There is no such module, or it has no such name.
    """
    module, name = module_path
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ImportError(f"{module} has no {name}.") from error
