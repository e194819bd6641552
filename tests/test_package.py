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
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
PACKAGES = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
# What runs on a cluster; the rest works without one.
MAY_IMPORT_DISTRIBUTED = {"dispatch", "station", "runner", "clusters", "dashboard"}
LONGEST = 500
# Longer for now, and no longer than this.
LONG: dict[str, int] = {}


def syntax(module):
    return ast.parse((FOLDER / f"{module}.py").read_text())


def for_type_checkers(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(module):
    """Dotted names that a module imports when it runs, also inside functions."""
    todo = [syntax(module)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"daskinfer.{base}".rstrip(".")
            # `from . import display` imports the module, not the package.
            if base == "daskinfer":
                yield from (f"daskinfer.{alias.name}" for alias in node.names)
            else:
                yield base
        elif not for_type_checkers(node):
            todo.extend(ast.iter_child_nodes(node))


def own_imports(module):
    """Modules of this package that a module imports."""
    names = (name.split(".") for name in imports(module))
    return {name[1] if len(name) > 1 else "" for name in names if name[0] == "daskinfer"}


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
    block = next(node for node in syntax("__init__").body if for_type_checkers(node))
    seen = {alias.asname or alias.name for line in block.body for alias in line.names}
    assert seen | {"__version__"} == set(di.__all__)


def test_every_exported_name_comes_from_a_modules_own_exports():
    for name in set(di.__all__) - {"__version__"}:
        home = sys.modules[getattr(di, name).__module__]
        assert name in home.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'daskinfer' has no attribute 'nonsense'"):
        _ = di.nonsense


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__main__"])
def test_what_a_module_exports_is_in_it(module):
    imported = importlib.import_module(f"daskinfer.{module}")
    exported = getattr(imported, "__all__", [])
    assert len(exported) == len(set(exported))
    assert [name for name in exported if not hasattr(imported, name)] == []
    assert imported.__doc__ or module == "_version"


# --- import directions ----------------------------------------------------------------------------


def test_no_module_imports_the_package_root():
    roots = {module: own_imports(module) - set(MODULES) - PACKAGES for module in MODULES}
    assert {module: names for module, names in roots.items() if names} == {}


def test_imports_go_in_one_direction():
    graph = {module: own_imports(module) & set(MODULES) for module in MODULES}
    # Take away what imports nothing that is left; what remains imports each other.
    while leaves := {module for module, below in graph.items() if not below & graph.keys()}:
        graph = {module: below for module, below in graph.items() if module not in leaves}
    assert graph == {}


def test_only_what_runs_on_a_cluster_imports_distributed():
    importing = {
        module
        for module in MODULES
        if any(name.split(".")[0] in ("distributed", "dask_jobqueue") for name in imports(module))
        or "dask.distributed" in imports(module)
    }
    assert importing <= MAY_IMPORT_DISTRIBUTED


@pytest.mark.parametrize("module", ["tiling", "actor", "errors", "display", "ledger"])
def test_the_plain_modules_need_no_heavy_package(module):
    heavy = {"torch", "dask", "distributed", "rasterio", "xarray", "rioxarray"}
    below, todo = set(), {module}
    while todo:
        name = todo.pop()
        below.add(name)
        top = [node for node in syntax(name).body if not for_type_checkers(node)]
        for node in top:
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & heavy
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] not in heavy
            elif isinstance(node, ast.ImportFrom) and node.module:
                todo |= {node.module} - below


# --- import cost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["import daskinfer", "import daskinfer.cli"])
def test_importing_imports_nothing_heavy(code):
    heavy = ("torch", "distributed", "dask", "xarray", "rasterio", "rioxarray", "numpy")
    assert in_new_process(f"{code}, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_opening_a_raster_imports_no_torch():
    code = "import sys, daskinfer; daskinfer.open_raster; print('torch' in sys.modules)"
    assert in_new_process(code) == "False"


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["__init__", *MODULES])
def test_a_file_can_be_read_in_one_sitting(module):
    lines = (FOLDER / f"{module}.py").read_text().count("\n")
    assert lines <= LONG.get(module, LONGEST)


def test_the_list_of_long_files_is_up_to_date():
    lines = {name: (FOLDER / f"{name}.py").read_text().count("\n") for name in LONG}
    assert {name for name in LONG if lines[name] <= LONGEST} == set()
