"""The layers of the project, its size limits and its import rules, enforced on the source."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80


def levels_of(table):
    """The level of each name in the table of CONTRIBUTING.md."""
    found = {"megatron": 0, "megatron.core": 0}  # packages that are empty
    for level, cell in re.findall(r"^\| (\d) \| ([^|]*) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            start, _, members = name.rstrip("}").partition("{")
            for member in members.split(","):
                path = f"{start}{member}"
                prefix = "megatron." if (ROOT / "megatron" / path.split(".")[0]).exists() else ""
                found[prefix + path] = int(level)
    return found


LEVELS = levels_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
# Level-5 packages are joined by `training`, not by each other.
SIBLINGS = [name for name, level in LEVELS.items() if level == 5]
# Third-party names and the only files that may import them.
ONLY_IN = {
    "transformer_engine": {"megatron/core/backends/te.py"},
    "transformer_engine_torch": {"megatron/core/backends/te.py"},
    "tensorboard": {"megatron/observe/sinks.py"},
    "wandb": {"megatron/observe/sinks.py"},
    "torch.utils.tensorboard": {"megatron/observe/sinks.py"},
}
NO_TORCH = (
    "megatron/config/",
    "megatron/core/pipeline_parallel/schedule.py",
    "megatron/core/pipeline_parallel/simulate.py",
)
MAY_IMPORT_YAML = {"megatron/config/yaml_text.py"}
STDLIB_ONLY_EXCEPTIONS = {"megatron", "yaml"}


def sources(*roots):
    found = []
    for root in roots or ("megatron", "tools", "scripts", "pretrain_gpt.py"):
        path = ROOT / root
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in found if "__pycache__" not in path.parts]


def relative(path):
    return path.relative_to(ROOT).as_posix()


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def level(module):
    """Return the layer of a module, by the longest prefix that the table knows."""
    name = module
    while name not in LEVELS and "." in name:
        name = name.rpartition(".")[0]
    return LEVELS.get(name)


def sibling(module):
    if level(module) == 7:
        return None
    return next((name for name in SIBLINGS if module.startswith(name)), None)


def typing_only(node):
    """Whether an ``if`` guards imports for annotations only."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(path):
    """Yield (line, module, is guarded by try, is inside a function) of every import."""

    def visit(node, guarded, local):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, guarded, local
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if is_module(full) else base, guarded, local
        inside = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        tried = guarded or isinstance(node, ast.Try)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, tried, inside)

    yield from visit(tree(path), False, False)


def is_module(name):
    base = ROOT / Path(*name.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file() or base.is_dir()


PATHS = sources()


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_imports_point_downwards(path):
    module = module_name(path)
    own = level(module)
    assert own is not None, f"{module} is in no layer"
    for line, target, _, _ in imports(path):
        if target.split(".")[0] not in ("megatron", "tools", "scripts", "pretrain_gpt"):
            continue
        theirs = level(target)
        where = f"{relative(path)}:{line} imports {target}"
        assert theirs is not None, f"{where}, which is in no layer"
        assert theirs <= own, f"{where}: layer {own} may not see layer {theirs}"
        mine, other = sibling(module), sibling(target)
        if own == 5 and other is not None:
            assert mine == other, f"{where}: level-5 packages do not import each other"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_transformer_sees_only_the_backend_contract(path):
    module = module_name(path)
    if not module.startswith(("megatron.core.transformer", "megatron.core.models")):
        return
    for line, target, _, _ in imports(path):
        if target.startswith("megatron.core.backends"):
            assert target.startswith("megatron.core.backends.contract"), f"{relative(path)}:{line}"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_restricted_packages_stay_in_their_file(path):
    for line, target, _, _ in imports(path):
        for package, allowed in ONLY_IN.items():
            if target == package or target.startswith(f"{package}."):
                assert relative(path) in allowed, f"{relative(path)}:{line} imports {target}"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_torch_stays_out_of_plain_modules(path):
    if not relative(path).startswith(NO_TORCH):
        return
    for line, target, _, _ in imports(path):
        assert target.split(".")[0] != "torch", f"{relative(path)}:{line}"


def test_config_needs_only_the_standard_library():
    import sys

    allowed = set(sys.stdlib_module_names) | {"megatron"}
    for path in sources("megatron/config"):
        for line, target, _, _ in imports(path):
            top = target.split(".")[0]
            if top == "yaml":
                assert relative(path) in MAY_IMPORT_YAML
            else:
                assert top in allowed, f"{relative(path)}:{line} imports {target}"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_environment_is_read_in_one_place(path):
    if not relative(path).startswith("megatron/") or relative(path) in (
        "megatron/training/initialize.py",
    ):
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            raise AssertionError(f"{relative(path)}:{node.lineno} touches the environment")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            assert not names & {"environ", "getenv", "putenv"}, f"{relative(path)}:{node.lineno}"


# Names of torch.distributed that move nothing between ranks, or only while ranks meet.
NO_TRANSFER = {
    "DebugLevel",
    "DistError",
    "FileStore",
    "ProcessGroup",
    "ReduceOp",
    "barrier",
    "destroy_process_group",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "new_group",
    "set_debug_level",
}


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_every_transfer_goes_through_one_file(path):
    if not relative(path).startswith("megatron/") or relative(path) == "megatron/core/wire.py":
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "dist",
            "torch.distributed",
        ):
            assert node.attr in NO_TRANSFER, f"{relative(path)}:{node.lineno} {node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            names = {alias.name for alias in node.names}
            assert names <= NO_TRANSFER, f"{relative(path)}:{node.lineno} {names - NO_TRANSFER}"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_own_modules_are_imported_at_the_top(path):
    for line, target, guarded, local in imports(path):
        if local and target.split(".")[0] == "megatron":
            # They read their flags before they pay for torch.
            allowed = ("pretrain_gpt.py", "tools/show.py")
            assert relative(path) in allowed, f"{relative(path)}:{line} imports {target}"
        optional = any(target.startswith(package) for package in ONLY_IN)
        if local and not (guarded or optional) and relative(path).startswith("megatron/"):
            raise AssertionError(f"{relative(path)}:{line} imports {target} inside a function")


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_nothing_in_the_project_imports_the_facade_of_global_state(path):
    if level(module_name(path)) in (7, 8) or relative(path) == "megatron/training/initialize.py":
        return
    for line, target, _, _ in imports(path):
        assert target != "megatron.core.parallel_state", f"{relative(path)}:{line}"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_files_and_functions_stay_small(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", PATHS, ids=relative)
def test_no_stubs_and_no_swallowed_errors(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(stmt, ast.Pass) for stmt in node.body)
            assert not (broad and silent), f"{relative(path)}:{node.lineno} swallows every error"
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            raise AssertionError(f"{relative(path)}:{node.lineno} is a stub")


class TestTheWalkItself:
    """The checks above would see a violation."""

    def test_levels(self):
        assert level("megatron.config.rules") == 0
        assert level("megatron.core.fp8.kernels.compiled") == 2
        assert level("megatron.core.tensor_parallel.layers") == 3
        assert level("megatron.core.backends.contract") == 2
        assert level("megatron.observe.events") == 1
        assert level("megatron.observe.anything") == 6
        assert level("numpy") is None
        assert level("tools.show") == 8

    def test_the_table_names_what_there_is(self):
        assert sorted(set(LEVELS.values())) == list(range(9))
        assert [name for name in LEVELS if not is_module(name)] == []

    def test_imports_are_found_everywhere(self, tmp_path):
        file = tmp_path / "x.py"
        file.write_text(
            "import torch\n"
            "from megatron.core import mesh\n"
            "def f():\n    import numpy as np\n"
            "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
        )
        found = {(target, guarded, local) for _, target, guarded, local in imports(file)}
        assert found == {
            ("torch", False, False),
            ("megatron.core.mesh", False, False),
            ("numpy", False, True),
            ("wandb", True, False),
        }

    def test_siblings(self):
        assert sibling("megatron.core.optimizer.lr") == "megatron.core.optimizer"
        assert sibling("megatron.core.tensor_parallel.layers") is None
        assert sibling("megatron.core.pipeline_parallel.schedules") is None


def test_files_of_tests_have_names_of_their_own():
    """Pytest imports them by name: two of one name cannot be collected in one run."""
    names = sorted(p.name for p in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 100
    assert [name for name, after in itertools.pairwise(names) if name == after] == []
