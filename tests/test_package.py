"""How the package hangs together: exports, import directions, import cost, size of files."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import daskinfer as di

FOLDER = Path(di.__file__).parent


def dotted(path):
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# By their names below the package, whose own is left out.
FILES = {dotted(path): path for path in sorted(FOLDER.rglob("*.py")) if dotted(path)}
# What runs on a cluster; the rest works without one.
MAY_IMPORT_DISTRIBUTED = {"bench", "clusters", "dashboard", "dispatch", "runner", "station"}
LONGEST = 500


def syntax(module):
    return ast.parse(FILES[module].read_text())


def for_type_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def run_by(tree):
    """Nodes that run, also inside functions."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if not for_type_checkers(node):
            yield node
            todo.extend(ast.iter_child_nodes(node))


def named_by(module, node):
    """Full names that an import statement imports; of names out of a module, both are told."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        parts = ["daskinfer", *module.split(".")]
        # A package is its own folder, a module lies in one.
        up = node.level - (FILES[module].name == "__init__.py")
        base = ".".join([*parts[: len(parts) - up], *base.split(".")]).rstrip(".")
    return {base} | {f"{base}.{alias.name}" for alias in node.names}


def imports(module):
    """Full names that a module imports when it runs, also inside functions."""
    return set().union(*(named_by(module, node) for node in run_by(syntax(module))))


def own_modules(names):
    """Modules of this package among full names, and the packages in which they lie."""
    own = {name.removeprefix("daskinfer.") for name in names if name.startswith("daskinfer.")}
    parents = {name.rpartition(".")[0] for name in own & FILES.keys()}
    return (own | parents) & FILES.keys()


def in_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- exports --------------------------------------------------------------------------------------


def test_all_is_sorted_and_what_dir_shows():
    assert di.__all__ == sorted(set(di.__all__))
    assert dir(di) == di.__all__


def test_every_exported_name_resolves_and_is_documented():
    for name in di.__all__:
        value = getattr(di, name)
        assert name == "__version__" or value.__doc__, name
        assert name == "__version__" or value.__name__ == name


def test_type_checkers_see_the_exported_names():
    root = ast.parse(Path(di.__file__).read_text())
    block = next(node for node in root.body if for_type_checkers(node))
    seen = {alias.asname or alias.name for line in block.body for alias in line.names}
    assert seen | {"__version__"} == set(di.__all__)


def test_every_exported_name_comes_from_a_modules_own_exports():
    for name in set(di.__all__) - {"__version__"}:
        home = sys.modules[getattr(di, name).__module__]
        assert name in home.__all__


@pytest.mark.parametrize("name", ["device.Device", "monitor.progress", "wrappers.TimeSteps"])
def test_what_is_told_by_its_module_needs_no_import_of_it(name):
    assert in_new_process(f"import daskinfer; print(callable(daskinfer.{name}))") == "True"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'daskinfer' has no attribute 'nonsense'"):
        _ = di.nonsense


@pytest.mark.parametrize("module", [name for name in FILES if name != "__main__"])
def test_what_a_module_exports_is_in_it(module):
    imported = importlib.import_module(f"daskinfer.{module}")
    exported = getattr(imported, "__all__", [])
    assert len(exported) == len(set(exported))
    assert [name for name in exported if not hasattr(imported, name)] == []
    assert imported.__doc__


# --- import directions ----------------------------------------------------------------------------


def test_no_module_imports_the_package_root():
    exported = {f"daskinfer.{name}" for name in di.__all__} - {
        f"daskinfer.{name}" for name in FILES
    }
    assert {module for module in FILES if imports(module) & exported} == set()


def test_imports_go_in_one_direction():
    graph = {module: own_modules(imports(module)) for module in FILES}
    # A module runs after the package it lies in, which may have begun with it.
    for module, below in graph.items():
        graph[module] = {name for name in below if not module.startswith(f"{name}.")} - {module}
    # Take away what imports nothing that is left; what remains imports each other.
    while leaves := {module for module, below in graph.items() if not below & graph.keys()}:
        graph = {module: below for module, below in graph.items() if module not in leaves}
    assert graph == {}


def test_only_what_runs_on_a_cluster_imports_distributed():
    importing = {
        module.split(".")[0]
        for module in FILES
        if any(name.split(".")[0] in ("distributed", "dask_jobqueue") for name in imports(module))
        or "dask.distributed" in imports(module)
    }
    assert importing <= MAY_IMPORT_DISTRIBUTED


@pytest.mark.parametrize("module", ["tiling", "actor", "errors", "display", "ledger", "events"])
def test_the_plain_modules_need_no_heavy_package(module):
    heavy = {"torch", "dask", "distributed", "rasterio", "xarray", "rioxarray"}
    below, todo = set(), {module}
    while todo:
        name = todo.pop()
        below.add(name)
        names = set().union(*(named_by(name, node) for node in syntax(name).body))
        assert {full.split(".")[0] for full in names} & heavy == set()
        todo |= own_modules(names) - below


# --- import cost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["import daskinfer", "import daskinfer.cli"])
def test_importing_imports_nothing_heavy(code):
    heavy = ("torch", "distributed", "dask", "xarray", "rasterio", "rioxarray", "numpy")
    assert in_new_process(f"{code}, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_opening_a_raster_imports_no_torch():
    code = "import sys, daskinfer; daskinfer.open_raster; print('torch' in sys.modules)"
    assert in_new_process(code) == "False"


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [Path(di.__file__), *FILES.values()], ids=str)
def test_a_file_can_be_read_in_one_sitting(path):
    assert path.read_text().count("\n") <= LONGEST
