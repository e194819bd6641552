"""The work file and the ledger of a run: made, gone on with, and turned into the output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .area import AreaTally, ClassArea, area_tally, total_areas
from .draft import Work
from .errors import InferenceError, warn_user
from .filelock import FileLock
from .ledger import Failure, Ledger, announced
from .objects.plan import ObjectPlan
from .objectstore import is_object, local_path, upload
from .planner import Plan
from .report import Report
from .zarrwork import is_zarr_output

__all__ = ["Outputs", "reaches", "work_path"]


def work_path(plan: Plan | ObjectPlan) -> str:
    """The file that holds the output while it grows."""
    return f"{_local(plan)}.partial"


def reaches(plan: Plan, run: str) -> bool:
    """Tell whether this process can append to the work file of a run.

    A file of that name may be another's, on another host; the ledger beside it says whose it is.
    And locks may not work where it lies.
    """
    path = work_path(plan)
    if not announced(f"{path}.jsonl", run):
        return False
    if is_zarr_output(_local(plan)):
        # Chunks are files of their own.
        return os.path.isdir(path)
    try:
        with FileLock(path).short():
            return True
    except OSError:
        return False


def _local(plan: Plan | ObjectPlan) -> str:
    """The finished file, before it is sent where the output is an object."""
    return local_path(plan.output) if is_object(plan.output) else plan.output


def _kept_path(path: str) -> str:
    return f"{path}.kept"


def to_go_on(plan: Any) -> str:
    """What to do to go on with a run that ended early."""
    if not plan.overwrite:
        return "run the same call again to go on"
    again = "run the same call without overwrite=True to go on"
    return f"remove {plan.output} and {again}" if os.path.exists(_local(plan)) else again


def _leave_nodata(plan: Plan, work: Work, number: int) -> None:
    window = plan.inference.window(plan.tiling.index_of(number))
    form = plan.inference.form
    # One number in memory, whatever the chunk.
    one = np.asarray(form.nodata, form.dtype)
    nodata = np.broadcast_to(one, (form.bands, *window.shape))
    work.append(plan.draft.encode(nodata, *window.origin))


@dataclass
class Outputs:
    """The work file and the ledger of a run; made by `prepare`."""

    plan: Plan
    work: Work
    ledger: Ledger
    broken: set[int]
    tally: AreaTally | None = None
    areas: tuple[ClassArea, ...] = ()
    shipped: int = 0

    @classmethod
    @contextlib.contextmanager
    def prepare(cls, plan: Plan) -> Iterator[Outputs]:
        """Make them, or go on with those of an earlier run.

        The ledger comes first and goes last, and says what the work file holds: one without the
        other is never gone on with.
        """
        path = work_path(plan)
        if os.path.exists(_kept_path(path)):
            # Killed while the finished output was sent.
            os.replace(_kept_path(path), path)
        with Ledger(f"{path}.jsonl") as ledger:
            if plan.overwrite or not os.path.exists(path):
                plan.draft.discard(path)
                Path(f"{path}.areas").unlink(missing_ok=True)
                ledger.begin(plan.settings())
                with plan.draft.create(path) as work:
                    for number in plan.outside():
                        _leave_nodata(plan, work, number)
            else:
                ledger.go_on(plan.settings(), path)
            broken = {failure.chunk for failure in ledger.failures()}
            with plan.draft.open(path) as work, area_tally(plan, path) as tally:
                yield cls(plan, work, ledger, broken, tally)

    def todo(self, finished: NDArray[np.bool_] | None = None) -> tuple[Iterator[int], int]:
        """Chunks that are not in the work file, or are there as the nodata of a failure.

        Parameters
        ----------
        finished : ndarray of bool, optional
            What `finished` returned, where it is known.

        Returns
        -------
        iterator of int
            Their numbers in the order in which to run them.  A list would grow with the raster.
        int
            How many they are.
        """
        finished = self.finished() if finished is None else finished
        order = (number for number in self._order() if not finished[number])
        return order, int(finished.size - np.count_nonzero(finished))

    def leave_nodata(self, failure: Failure) -> None:
        """Write nodata where a chunk failed for good."""
        _leave_nodata(self.plan, self.work, failure.chunk)

    def take(self, result: Any) -> None:
        """Append the pixels of a chunk whose worker could not and sent them; note its areas.

        Raises
        ------
        InferenceError
            If the disk is full or fails.
        """
        if result.encoded is not None:
            self._append(result.encoded)
        if result.areas is not None and self.tally is not None:
            self.tally.put(result.chunk, result.areas)

    def _append(self, encoded: Any) -> None:
        if not self.shipped:
            folder = os.path.dirname(os.path.abspath(self.work.path))
            warn_user(
                f"workers do not share the folder {folder} with this process: they send it what "
                "they have encoded, and it writes the file"
            )
        self.shipped += 1
        try:
            self.work.append(encoded)
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> InferenceError:
        return InferenceError(
            f"the output cannot be written: {error}. The rest is kept in {self.work.path}: "
            f"{to_go_on(self.plan)}"
        )

    def told(self, report: Report) -> Report:
        """The report, with what the chunks told."""
        return replace(report, areas=self.areas)

    def mended(self, number: int) -> None:
        """Note that a chunk is done, if it had failed in an earlier run."""
        if number in self.broken:
            self.broken.discard(number)
            self.ledger.mended(number)

    def finish(self, failures: Sequence[Failure]) -> int:
        """Turn the work file into the output; returns its bytes.

        Raises
        ------
        InferenceError
            If the disk is full or fails.
        """
        local = _local(self.plan)
        self.areas = total_areas(self.plan, self.tally, failures, work_path(self.plan))
        with self._kept() if is_object(self.plan.output) else contextlib.nullcontext():
            corners = [self._corner(failure) for failure in failures]
            try:
                size = self.work.finish(local, self.plan.layout, failed=corners)
            except OSError as error:
                raise self._unwritten(error) from error
            if is_object(self.plan.output):
                try:
                    upload(local, self.plan.output)
                finally:
                    os.unlink(local)
        # What the output lacks stays written beside it.
        lacking = Path(f"{local}.failed.jsonl")
        if failures:
            os.replace(self.ledger.path, lacking)
        else:
            lacking.unlink(missing_ok=True)
            self.ledger.remove()
        if self.tally is not None:
            self.tally.remove()
        return size

    def _corner(self, failure: Failure) -> tuple[int, int]:
        """First pixel of a chunk in the output."""
        return self.plan.inference.window(self.plan.tiling.index_of(failure.chunk)).origin

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Have the work file back if the output cannot be sent: the next run only sends it then."""
        path = work_path(self.plan)
        kept = _kept_path(path)
        Path(kept).unlink(missing_ok=True)
        os.link(path, kept)
        try:
            yield
        except BaseException:
            os.replace(kept, path)
            raise
        os.unlink(kept)

    def finished(self) -> NDArray[np.bool_]:
        """Whether each chunk is in the work file, in row-major order."""
        inference, tiling = self.plan.inference, self.plan.tiling
        done = self.work.done(
            [inference.window((i, 0)).rows.start for i in range(tiling.grid[0])],
            [inference.window((0, j)).cols.start for j in range(tiling.grid[1])],
        )
        finished = done.ravel()
        finished[list(self.broken)] = False
        return finished

    def _order(self) -> Iterator[int]:
        tiling = self.plan.tiling
        return tiling.order(tiling.grid[1]) if self.plan.source.striped else tiling.order()
