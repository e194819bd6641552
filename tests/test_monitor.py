"""What the displays of a run say on a terminal, in a log and in a notebook."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
import rasterio
from rasterio.io import MemoryFile
from rich.console import Console

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer import monitor
from daskinfer.dashboard.states import COLORS, DONE, FAILED, MISSING, SKIPPED
from daskinfer.dashboard.widget import NotebookProgress, in_notebook
from daskinfer.events import describe
from daskinfer.monitor import (
    ChunkDone,
    ChunkFailed,
    ChunkRetried,
    ProgressBar,
    ProgressLines,
    RunFinished,
    RunFinishing,
    RunStarted,
    RunStopped,
    RunStopping,
    progress,
)
from daskinfer.pace import Pacer
from held import BAD, CHUNK, entered, gated_plan, numbers, released


class Handle:
    """Of a display in a notebook."""

    def __init__(self, first):
        self.shown = [first._repr_html_()]

    def update(self, what):
        self.shown.append(what._repr_html_())


class Screen:
    """Where a notebook's displays appear."""

    def __call__(self, what):
        self.handle = Handle(what)
        return self.handle


def text_of(html):
    return re.sub(r"<[^>]*>", "|", html)


def chunk_states(html):
    """States of the chunk map in a piece of HTML, read by GDAL."""
    picture = re.findall(r"data:image/png;base64,([^']+)", html)[-1]
    with MemoryFile(base64.b64decode(picture)) as file, file.open() as dataset:
        pixels = np.moveaxis(dataset.read(), 0, -1)[..., :3]
    return np.array([[COLORS.index(tuple(int(n) for n in p)) for p in row] for row in pixels])


# --- pace -----------------------------------------------------------------------------------------


def test_the_time_left_follows_the_pace_of_the_last_minutes():
    now = 0.0
    pacer = Pacer(lambda: now)
    assert pacer.left(5_000_000) is None
    for second in range(1, 1001):
        now = float(second)
        # Ten times as fast from half-way on.
        pacer.add(1_000_000 if second > 500 else 100_000)
    assert pacer.speed == pytest.approx(550 / 1000)
    assert pacer.left(60_000_000) == pytest.approx(60, rel=0.02)
    assert pacer.text(60_000_000) == "0.55 Mpx/s, 1 min 0 s left"


def test_a_pacer_keeps_a_bounded_past():
    now = 0.0
    pacer = Pacer(lambda: now)
    for number in range(20_000):
        now = number / 100
        pacer.add(1)
    assert len(pacer._past) < 200


# --- a run ----------------------------------------------------------------------------------------


def test_all_displays_tell_of_a_run_to_its_end(tmp_path, one_worker, capsys):
    raw = numbers(c0=1, c1=1, c2=BAD, c6=3)
    plan = gated_plan(tmp_path, raw=raw, on_error="nodata")
    screen, terminal, events = Screen(), io.StringIO(), []
    displays = [ProgressLines(), NotebookProgress(display=screen), events.append]
    report = di.run(plan, client=one_worker, callbacks=displays)

    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"dashboard {events[0].dashboard}"
    assert sum("trying again: " in line for line in lines) == 2
    assert any("chunk 2 (rows 0-32, columns 64-96) failed: " in line for line in lines)
    assert any(line.startswith("11 of 12 chunks, ") for line in lines)
    assert lines[-1] == "all chunks are in; finishing the file"

    # By itself: a bar takes the lines of others above it.
    bar = ProgressBar(Console(file=terminal, force_terminal=True, width=140))
    for event in events:
        bar(event)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "chunk 2 (rows 0-32, columns 64-96) failed: " in drawn
    assert "finishing" in drawn

    last = screen.handle.shown[-1]
    shown = text_of(last)
    assert "|incomplete|" in shown
    assert f"|speed||{report.speed:.2f} Mpx/s|" in shown
    assert f"|device busy||{report.device_busy:.1%}|" in shown
    assert f"|batches||{report.batch_fill:.0%} full|" in shown
    assert f"|queue||{report.queue_depth:.1f} tiles|" in shown
    assert "|failed||1|" in shown
    assert "dashboard" not in shown
    assert "dashboard" in text_of(screen.handle.shown[0])
    expected = np.full((3, 4), SKIPPED)
    expected.flat[[0, 1, 6]] = DONE
    expected.flat[2] = FAILED
    assert np.array_equal(chunk_states(last), expected)
    assert "http" not in re.sub(r"data:[^']*", "", last)


def test_events_come_in_order(tmp_path, one_worker):
    events = []
    plan = gated_plan(tmp_path, raw=numbers(c2=BAD), on_error="nodata")
    di.run(plan, client=one_worker, callbacks=[events.append])
    kinds = [type(event) for event in events if not isinstance(event, monitor.Metered)]
    assert kinds[0] is RunStarted
    assert kinds[-2:] == [RunFinishing, RunFinished]
    failures = [kind for kind in kinds if kind in (ChunkRetried, ChunkFailed)]
    assert failures == [ChunkRetried, ChunkRetried, ChunkFailed]
    assert not events[0].finished.any()
    assert events[0].finished.size == events[0].chunks == 12
    failed = next(event for event in events if isinstance(event, ChunkFailed))
    assert failed.worker.startswith("inproc://")


# --- a run that is stopped ------------------------------------------------------------------------


def test_a_run_that_is_stopped_says_what_it_waits_for(tmp_path, one_worker, capsys):
    events, screen = [], Screen()

    def interrupt(event):
        if isinstance(event, ChunkDone) and event.chunk != CHUNK and not released.is_set():
            assert entered.wait(60)
            raise KeyboardInterrupt
        if isinstance(event, RunStopping):
            released.set()

    displays = [ProgressLines(), NotebookProgress(display=screen), events.append, interrupt]
    with pytest.raises(KeyboardInterrupt):
        di.run(gated_plan(tmp_path), client=one_worker, callbacks=displays)
    stopping = [event for event in events if isinstance(event, RunStopping)]
    # Others that are about to end may be at work too.
    assert CHUNK in stopping[0].chunks
    assert stopping[0].seconds == 20
    assert stopping[-1].chunks == ()
    assert isinstance(events[-1], RunStopped)
    assert isinstance(events[-1].error, KeyboardInterrupt)
    assert CHUNK in [event.chunk for event in events if isinstance(event, ChunkDone)]
    text = describe(stopping[0]).removeprefix("stopping: ")
    assert text.startswith("waits up to 20 s for ")
    assert f"stopping: {text}" in capsys.readouterr().err.splitlines()
    assert any(f"|stopping|| {text}|" in text_of(html) for html in screen.handle.shown)
    assert "|stopped|| KeyboardInterrupt|" in text_of(screen.handle.shown[-1])


def test_a_second_interrupt_ends_the_wait(tmp_path, one_worker):
    events = []

    def interrupt(event):
        events.append(event)
        if isinstance(event, ChunkDone) and not released.is_set():
            assert entered.wait(60)
            raise KeyboardInterrupt
        if isinstance(event, RunStopping):
            # What stands still is let go only after this: the wait itself ends here.
            released.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        di.run(gated_plan(tmp_path), client=one_worker, callbacks=[interrupt])
    assert sum(isinstance(event, RunStopping) for event in events) == 1
    assert isinstance(events[-1], RunStopped)


def test_a_display_that_fails_when_a_run_stops_does_not_hide_why(tmp_path, one_worker):
    def broken(event):
        if isinstance(event, RunStopped):
            raise RuntimeError("the display")

    plan = gated_plan(tmp_path, raw=numbers(c2=BAD))
    with pytest.raises(di.InferenceError, match="thirteen"):
        di.run(plan, client=one_worker, callbacks=[broken])


def test_many_chunks_at_work_are_told_of_in_few_lines(capsys):
    lines = ProgressLines()
    for waiting in range(64, -1, -1):
        lines(RunStopping(tuple(range(waiting)), 10))
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("stopping: waits up to 10 s for 64 chunks at work (0, 1, 2, 3,")
    assert printed[0].count(",") <= 9
    assert len(printed) <= 8


# --- which display --------------------------------------------------------------------------------


def test_what_is_no_terminal_gets_lines_and_a_terminal_a_bar(monkeypatch):
    assert not in_notebook()
    assert isinstance(progress(), ProgressLines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(progress(), ProgressBar)


def test_a_notebook_gets_a_widget(monkeypatch):
    import IPython

    class Shell:
        kernel = object()

    monkeypatch.setattr(IPython, "get_ipython", Shell)
    assert isinstance(progress(), NotebookProgress)


def test_a_bar_leaves_the_terminal_in_order_when_a_run_fails(tmp_path, one_worker):
    terminal = io.StringIO()
    bar = ProgressBar(Console(file=terminal, force_terminal=True, width=120))
    plan = gated_plan(tmp_path, raw=numbers(c2=BAD))
    with pytest.raises(di.InferenceError):
        di.run(plan, client=one_worker, callbacks=[bar])
    # The cursor is shown again.
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_a_resumed_run_counts_from_where_it_was(tmp_path, one_worker, capsys):
    source = write_raster(tmp_path / "scene.tif", noise(2, 100, 100))
    plan = di.plan(source, seeded(N3), tmp_path / "o.tif", tile=32, chunk=32)

    def stop(event):
        if isinstance(event, ChunkDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        di.run(plan, client=one_worker, callbacks=[stop])
    events, screen = [], Screen()
    report = di.run(
        plan, client=one_worker,
        callbacks=[ProgressLines(), events.append, NotebookProgress(display=screen)],
    )  # fmt: skip
    resumed = int(events[0].finished.sum())
    assert events[0].done == resumed >= 1
    total = report.chunks
    assert f"{total} of {total} chunks, {resumed} from an earlier run" in screen.handle.shown[-1]
    assert f"{total} of {total} chunks, " in capsys.readouterr().err
    assert (chunk_states(screen.handle.shown[0]) == MISSING).sum() == total - resumed
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert (dataset.read(1) != 255).all()
