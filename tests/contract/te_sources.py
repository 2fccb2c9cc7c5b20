"""Signature tables of Transformer Engine releases, read from the Python sources in its PyPI wheel.

The wheel `transformer-engine` is pure Python and about 1 MB; it holds the sources of every module
the backend calls, without the compiled parts. Nothing is imported from it: the files are parsed.
A table keeps names, kinds and defaults' presence only, which are facts about the interface.

Regenerate with `python tests/contract/te_sources.py [VERSION ...]` (needs a package index).
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parents[1] / "golden" / "te_signatures"
RELEASES = ("2.2.0", "2.7.0", "2.8.0", "2.9.0", "2.14.1", "2.18.0", "2.20.2")
PACKAGE = "transformer_engine"

CALLABLES = {
    "pytorch": {
        "Linear": ("__init__", "forward", "init_fp8_metadata"),
        "LayerNormLinear": ("__init__", "forward", "init_fp8_metadata"),
        "GroupedLinear": ("__init__", "forward", "init_fp8_metadata"),
        "LayerNorm": ("__init__", "forward"),
        "RMSNorm": ("__init__", "forward"),
        "DotProductAttention": ("__init__", "forward", "init_fp8_metadata"),
        "fp8_autocast": (),
        "autocast": (),
        "initialize_ub": (),
        "destroy_ub": (),
        "UserBufferQuantizationMode": (),
    },
    "common.recipe": {
        "DelayedScaling": ("__init__",),
        "Float8CurrentScaling": ("__init__",),
        "Float8BlockScaling": ("__init__",),
        "MXFP8BlockScaling": ("__init__",),
        "NVFP4BlockScaling": ("__init__",),
        "QParams": ("__init__",),
        "Format": (),
    },
    "manager": {
        "FP8GlobalStateManager": (
            "is_fp8_available",
            "is_fp8_block_scaling_available",
            "is_mxfp8_available",
            "is_nvfp4_available",
            "is_first_fp8_module",
        ),
        "DelayedScalingRecipeState": ("make_quantizers",),
    },
    "pytorch.tensor.float8_tensor": {"Float8Quantizer": ("__init__",)},
}
# Attributes that the backend reads or writes on modules, looked for as `self.NAME = ...`, as
# `self.register_parameter("NAME", ...)` or as a class variable.
_MODULE = ("fp8_meta", "fuse_wgrad_accumulation", "_fp8_workspaces", "quantizers")
_SCALE_OPTIONS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
ATTRIBUTES = {
    "Linear": _MODULE,
    "LayerNormLinear": _MODULE,
    "GroupedLinear": (*_MODULE, "num_gemms", "_offsets"),
    "DotProductAttention": ("fp8_meta", "quantizers"),
    "Float8CurrentScaling": _SCALE_OPTIONS,
    "Float8BlockScaling": _SCALE_OPTIONS,
    "Format": ("HYBRID", "E4M3"),
    "UserBufferQuantizationMode": ("FP8", "NONE"),
    "DelayedScalingRecipeState": ("scale", "amax_history"),
    "Float8Quantizer": ("scale", "amax"),
}


@dataclass(frozen=True)
class Found:
    """A definition and the file that holds it, relative to the package."""

    node: ast.AST
    module: str


@dataclass
class Sources:
    """The parsed files of one release; names are followed through imports to their definition."""

    root: Path
    trees: dict[str, ast.Module] = field(default_factory=dict)

    def path_of(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def tree(self, module: str) -> ast.Module:
        if module not in self.trees:
            path = self.path_of(module)
            if path is None:
                raise KeyError(f"No module {module} under {self.root}.")
            self.trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        return self.trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """The class or function that `name` means inside `module`."""
        path = self.path_of(module)
        if path is None:
            return None
        for node in statements(self.tree(module).body):
            if (
                isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name == name
            ):
                return Found(node, module)
            if isinstance(node, ast.ImportFrom):
                found = self.imported(node, module, name)
                if found is not None:
                    return found
        return None

    def imported(self, node: ast.ImportFrom, module: str, name: str) -> Found | None:
        path = self.path_of(module)
        target = absolute(node, module, path is not None and path.name == "__init__.py")
        if target is None:
            return None
        for alias in node.names:
            if alias.name == "*":
                found = self.find(target, name)
            elif (alias.asname or alias.name) == name:
                found = self.find(target, alias.name)
            else:
                continue
            if found is not None:
                return found
        return None

    def bases(self, found: Found) -> Iterator[Found]:
        for base in getattr(found.node, "bases", []):
            if isinstance(base, ast.Name):
                above = self.find(found.module, base.id)
                if above is not None:
                    yield above

    def method(self, found: Found, name: str) -> tuple[ast.FunctionDef, Found] | None:
        """A method of a class, looked up through its bases."""
        for node in getattr(found.node, "body", []):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node, found
        for above in self.bases(found):
            inherited = self.method(above, name)
            if inherited is not None:
                return inherited
        return None

    def has_attribute(self, found: Found, name: str) -> bool:
        for node in ast.walk(found.node):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = list(node.targets)
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr == name:
                    return True
                if isinstance(target, ast.Name) and target.id == name:
                    return True
        return any(self.has_attribute(above, name) for above in self.bases(found))


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, including those under `if` and `try`."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from statements(getattr(node, block, []))


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str | None:
    """Module that a `from ... import` names, relative to the package; None outside of it."""
    if node.level:
        parts = module.split(".")
        keep = len(parts) - node.level + (1 if is_package else 0)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])
    if node.module and node.module.startswith(PACKAGE + "."):
        return node.module[len(PACKAGE) + 1 :]
    return None


def parameters_of(function: ast.FunctionDef, drop_first: bool) -> list[list[Any]]:
    """`[name, kind, has default]` of each parameter, in order."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    rows: list[list[Any]] = []
    for index, argument in enumerate(positional):
        kind = "positional_only" if index < len(arguments.posonlyargs) else "positional_or_keyword"
        rows.append([argument.arg, kind, index >= first_default])
    rows = rows[1:] if drop_first else rows
    if arguments.vararg:
        rows.append([arguments.vararg.arg, "var_positional", False])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        rows.append([argument.arg, "keyword_only", default is not None])
    if arguments.kwarg:
        rows.append([arguments.kwarg.arg, "var_keyword", False])
    return rows


def dataclass_parameters(node: ast.ClassDef) -> list[list[Any]]:
    """Constructor parameters of a dataclass: its annotated fields."""
    return [
        [item.target.id, "positional_or_keyword", item.value is not None]
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def is_static_free(function: ast.FunctionDef) -> bool:
    names = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
    return "staticmethod" not in names


def describe(sources: Sources, found: Found, method: str | None) -> dict[str, Any] | None:
    """Table entry of a function, or of one method of a class."""
    if method is None and isinstance(found.node, ast.FunctionDef):
        return {"source": found.module, "parameters": parameters_of(found.node, False)}
    method = method or "__init__"
    located = sources.method(found, method)
    if located is None:
        if method == "__init__" and isinstance(found.node, ast.ClassDef):
            return {"source": found.module, "parameters": dataclass_parameters(found.node)}
        return None
    function, owner = located
    rows = parameters_of(function, is_static_free(function))
    entry: dict[str, Any] = {"source": owner.module, "parameters": rows}
    if any(kind == "var_keyword" for _, kind, _ in rows):
        for above in sources.bases(owner):
            inherited = describe(sources, above, method)
            if inherited is not None:
                own = {name for name, _, _ in rows}
                extra = [row[0] for row in inherited["parameters"] if row[0] not in own]
                entry["kwargs"] = sorted(extra)
    return entry


def extract(root: Path, version: str) -> dict[str, Any]:
    """Build the table of one unpacked release; `root` is its `transformer_engine` folder."""
    sources = Sources(root)
    minor = tuple(int(part) for part in version.split(".")[:2])
    manager = "pytorch.quantization" if minor >= (2, 9) else "pytorch.fp8"
    table: dict[str, Any] = {"version": version, "symbols": {}, "attributes": {}}
    for module, wanted in CALLABLES.items():
        place = manager if module == "manager" else module
        for name, methods in wanted.items():
            found = sources.find(place, name)
            if found is None:
                continue
            for method in methods or (None,):
                key = f"{place}.{name}" + (f".{method}" if method else "")
                entry = describe(sources, found, method)
                if entry is not None:
                    table["symbols"][key] = entry
            table["attributes"].update(
                {
                    f"{place}.{name}.{attribute}": sources.has_attribute(found, attribute)
                    for attribute in ATTRIBUTES.get(name, ())
                }
            )
    return table


def fetch(version: str, folder: Path) -> Path:
    """Download and unpack the pure-Python wheel of a release; returns its package folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"transformer-engine=={version}"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    wheel = next(folder.glob(f"transformer_engine-{version}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / version)
    return folder / version / PACKAGE


def load_table(version: str) -> dict[str, Any]:
    return json.loads((TABLES / f"{version}.json").read_text(encoding="utf-8"))


def dump_table(table: dict[str, Any]) -> str:
    """A table as JSON with one symbol a line."""
    lines = [f'  "version": {json.dumps(table["version"])}']
    for part in ("symbols", "attributes"):
        rows = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table[part].items())]
        lines.append(f"  {json.dumps(part)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def signature(table: dict[str, Any], symbol: str) -> inspect.Signature:
    """The signature of a symbol, with known keywords in place of `**kwargs`.

    Where a constructor hands `**kwargs` to its base class, the names that the base class takes
    replace it, so that a misspelt keyword does not bind.
    """
    entry = table["symbols"][symbol]
    kinds = {kind.name.lower(): kind for kind in inspect._ParameterKind}
    parameters = []
    for name, kind, has_default in entry["parameters"]:
        if kind == "var_keyword" and "kwargs" in entry:
            parameters += [
                inspect.Parameter(known, inspect.Parameter.KEYWORD_ONLY, default=None)
                for known in entry["kwargs"]
            ]
            continue
        default = None if has_default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kinds[kind], default=default))
    return inspect.Signature(parameters)


def main(versions: list[str]) -> None:
    TABLES.mkdir(parents=True, exist_ok=True)
    for version in versions or list(RELEASES):
        with tempfile.TemporaryDirectory() as folder:
            table = extract(fetch(version, Path(folder)), version)
        (TABLES / f"{version}.json").write_text(dump_table(table), encoding="utf-8")
        print(f"{version}: {len(table['symbols'])} symbols")


if __name__ == "__main__":
    main(sys.argv[1:])
