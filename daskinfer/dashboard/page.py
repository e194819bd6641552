"""The page on Dask's dashboard: a Bokeh document that looks at the plugin twice a second.

Runs on the scheduler's event loop, so all it does is to turn what is known into a few hundred
numbers; the picture of chunks is bounded, and is sent to a browser only when it has changed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    Div,
    FactorRange,
    InlineStyleSheet,
    LinearColorMapper,
    NumeralTickFormatter,
    Select,
)
from bokeh.plotting import figure

from . import html
from .samples import Sample
from .states import COLORS, MISSING, RUNNING

if TYPE_CHECKING:
    from distributed import Scheduler

    from .plugin import KnownRun, PagePlugin
    from .view import Snapshot

__all__ = ["ROUTES", "add_page"]

ROUTES = ("/daskinfer", "/individual-daskinfer")
"""For the navigation, and for JupyterLab's extension, which lists what begins like the second."""

_LATEST = "latest"
_EVERY = 500  # ms between looks
_RECENT = 10.0  # seconds over which "busy now" is taken
_WIDE, _HIGH, _LEAST = 620, 520, 60  # CSS px of the map
_EMPTY = "<p style='font-family:system-ui,sans-serif'>No run has been seen by this scheduler.</p>"
# Opacity of the states, in their order: the source is to be seen through what is not at work.
_ALPHAS = (0.55, 0.45, 0.45, 0.95, 0.95, 0.5)


def add_page(scheduler: Scheduler, plugin: PagePlugin) -> None:
    """Add the page to a scheduler that runs; nothing where it has no dashboard.

    Dask has no public way to add a page to a running scheduler. Its own pages are one Bokeh
    application, and JupyterLab's extension is told of the first application only: so ours, which
    holds Dask's pages too, goes before it.
    """
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import applications, template_variables
    from tornado.ioloop import IOLoop

    served = scheduler.http_application.applications
    stock = next((app for app in served if isinstance(app, BokehTornado)), None)
    if stock is None:
        return
    variables = template_variables(scheduler)
    page = functools.partial(_document, plugin)
    app = BokehApplication(
        {**applications, **dict.fromkeys(ROUTES, page)},
        scheduler,
        prefix=stock.prefix,
        template_variables=variables,
    )
    app.initialize(IOLoop.current())
    app.start()
    served.insert(0, app)
    # These lists are shared by all of Dask's pages.
    if "daskinfer" not in variables["pages"]:
        variables["pages"].insert(1, "daskinfer")
        variables["plots"].append({"url": ROUTES[1].strip("/"), "name": "Daskinfer"})


def _document(plugin: PagePlugin, scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Called by Bokeh for each browser that opens the page."""
    from distributed.dashboard.components.scheduler import env

    page = _Page(plugin, doc)
    page.update()
    doc.add_periodic_callback(page.update, _EVERY)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)


class _Page:
    """What one browser sees."""

    def __init__(self, plugin: PagePlugin, doc: Any) -> None:
        self._plugin = plugin
        self._doc = doc
        self._run = ""
        self._drawn: object = None
        self._busy: dict[tuple[Any, ...], deque[tuple[float, float]]] = {}
        self._head, self._numbers, self._legend, self._failures = map(
            _text, ("head", "numbers", "legend", "failures")
        )
        self._choice = Select(name="choice", width=420, value=_LATEST, visible=False)
        self._cells = ColumnDataSource({"image": [], "dw": [], "dh": []}, name="cells")
        self._backdrop = ColumnDataSource({"image": [], "dw": [], "dh": []})
        self._workers = ColumnDataSource({"name": [], "busy": [], "text": []}, name="workers")
        self._speed = ColumnDataSource({"minutes": [], "speed": []}, name="speed")
        self._map = _map_figure(self._cells, self._backdrop)
        self._bars = _worker_figure(self._workers)
        self._line = _speed_figure(self._speed)
        self._body = row(
            column(self._map, self._legend),
            column(self._bars, self._line, sizing_mode="stretch_width"),
            sizing_mode="stretch_width",
        )
        doc.add_root(
            column(
                self._choice, self._head, self._numbers, self._body, self._failures,
                sizing_mode="stretch_width", margin=(8, 16, 8, 16),
            )
        )  # fmt: skip

    def update(self) -> None:
        """Look, and show what has changed."""
        runs = self._plugin.runs()
        self._body.visible, self._choice.visible = bool(runs), len(runs) > 1
        if not runs:
            self._head.text, self._doc.title = _EMPTY, "daskinfer"
            return
        snapshots = {known.snapshot.run: known for known in runs if known.snapshot is not None}
        options = [(_LATEST, "the latest run"), *(_option(known) for known in snapshots.values())]
        if self._choice.options != options:
            self._choice.options = options
        self._show(snapshots.get(self._choice.value, runs[0]))

    def _show(self, known: KnownRun) -> None:
        now = known.now()
        if now is None:
            return
        if now.run != self._run:
            self._begin(known)
        samples = [pair for pair in self._plugin.samples() if pair[1]["run"] == now.run]
        self._doc.title = f"{now.share:.0%} {now.state} - daskinfer"
        self._head.text = html.title(now) + html.bar(now)
        self._numbers.text = html.numbers(now)
        self._failures.text = html.failures(reversed(now.failures), now.failed)
        self._draw_chunks(known, now, [n for _, s in samples for n in s["chunks"]])
        self._draw_workers(samples)
        self._draw_speed(known.history)

    def _begin(self, known: KnownRun) -> None:
        """Another run than before."""
        now = known.snapshot
        if now is None:
            return
        self._run, self._drawn = now.run, None
        self._busy.clear()
        height, width = now.shape
        self._map.x_range.start, self._map.x_range.end = 0, width
        self._map.y_range.start, self._map.y_range.end = height, 0
        scale = min(_WIDE / width, _HIGH / height)
        self._map.frame_width = max(_LEAST, round(width * scale))
        self._map.frame_height = max(_LEAST, round(height * scale))
        self._backdrop.data = {"image": [], "dw": [], "dh": []}

    def _draw_chunks(self, known: KnownRun, now: Snapshot, at_work: list[int]) -> None:
        chunk_map, cols = now.chunk_map, now.grid[1]
        if known.backdrop is not None and not self._backdrop.data["image"]:
            self._backdrop.data = _placed(_rgba(known.backdrop), known)
        cells = chunk_map.array().copy()
        places = {number: _cell(number, cols, chunk_map.step) for number in at_work}
        # Heartbeats are older than what is known of chunks that are done.
        places = {n: at for n, at in places.items() if cells[at] == MISSING and not now.ended}
        if self._drawn == (chunk_map, places):
            return
        self._drawn = chunk_map, places
        counts = list(chunk_map.counts)
        for place in places.values():
            cells[place] = RUNNING
        counts[RUNNING] = len(places)
        counts[MISSING] = max(0, counts[MISSING] - len(places))
        self._cells.data = _placed(cells, known, chunk_map.step)
        self._legend.text = html.legend(counts)

    def _draw_workers(self, samples: list[tuple[str, Sample]]) -> None:
        names, busy, texts = [], [], []
        for name, sample in samples:
            share = self._busy_now(sample)
            # Numbers are what clusters on one machine call their workers.
            called = f"worker {name}" if name.isdigit() else name
            names.append(f"{called} on {sample['process'][0]}"[-40:])
            chunks = len(sample["chunks"])
            busy.append(share)
            texts.append(
                f"{share:.0%}, {sample['mailbox']} tiles queued, {chunks} "
                f"chunk{'s' * (chunks != 1)} at work"
            )
        self._bars.y_range.factors = names[::-1]
        self._bars.height = 80 + 26 * max(1, len(names))
        self._workers.data = {"name": names, "busy": busy, "text": texts}

    def _draw_speed(self, history: Sequence[tuple[float, float]]) -> None:
        """Over some seconds each: what is done comes a chunk at a time."""
        seconds, megapixels = np.array(history).reshape(-1, 2).T
        before = np.maximum(0, np.searchsorted(seconds, seconds - _RECENT, side="right") - 1)
        passed = np.maximum(seconds - seconds[before], 1e-9)
        speed = np.where(passed > 1e-6, (megapixels - megapixels[before]) / passed, 0)
        self._speed.data = {"minutes": seconds / 60, "speed": speed}

    def _busy_now(self, sample: Sample) -> float:
        """Share of the last seconds in which a device was busy."""
        past = self._busy.setdefault((sample["run"], *sample["process"]), deque())
        reading = sample["time"], sample["busy"] + sample["running"]
        if not past or past[-1][0] < reading[0]:
            past.append(reading)
        while len(past) > 2 and reading[0] - past[1][0] > _RECENT:
            past.popleft()
        then, before = past[0] if len(past) > 1 else (sample["start"] or sample["time"], 0.0)
        passed = reading[0] - then
        return min(1.0, max(0.0, (reading[1] - before) / passed)) if passed > 0 else 0.0


def _option(known: KnownRun) -> tuple[str, str]:
    run = known.snapshot
    assert run is not None  # a run that is shown has one
    return run.run, f"{run.output}, {run.state}"


def _text(name: str) -> Any:
    """A piece of HTML as wide as the page; Bokeh would make it as wide as its words."""
    wide = InlineStyleSheet(css=".bk-clearfix { display: block; width: 100% }")
    return Div(name=name, sizing_mode="stretch_width", stylesheets=[wide])


def _cell(number: int, cols: int, step: int) -> tuple[int, int]:
    """Place on the map of a chunk."""
    return number // cols // step, number % cols // step


def _placed(image: Any, known: KnownRun, step: int = 0) -> dict[str, list[Any]]:
    """An image over the whole raster; cells of `step` chunks may reach past its end."""
    snapshot = known.snapshot
    assert snapshot is not None  # a run that is shown has one
    (height, width), (rows, cols) = snapshot.shape, snapshot.grid
    if step:
        height = height * image.shape[0] * step / rows
        width = width * image.shape[1] * step / cols
    return {"image": [image], "dw": [width], "dh": [height]}


def _rgba(picture: Any) -> Any:
    alpha = np.full((*picture.shape[:2], 1), 255, np.uint8)
    pixels = np.ascontiguousarray(np.concatenate([picture, alpha], axis=2))
    return pixels.view(np.uint32).reshape(picture.shape[:2])


def _map_figure(cells: ColumnDataSource, backdrop: ColumnDataSource) -> Any:
    fig = figure(
        title="Chunks",
        x_range=(0, 1),
        y_range=(1, 0),
        tools="pan,wheel_zoom,reset,hover",
        tooltips=[("row", "$y{0}"), ("column", "$x{0}")],
        x_axis_label="column, px",
        y_axis_label="row, px",
    )
    fig.grid.visible = False
    # The y axis runs down: what Bokeh calls the bottom is the top.
    place = {"x": 0, "y": 0, "dw": "dw", "dh": "dh", "origin": "bottom_left"}
    fig.image_rgba(image="image", source=backdrop, **place)
    palette = [
        f"#{red:02x}{green:02x}{blue:02x}{round(alpha * 255):02x}"
        for (red, green, blue), alpha in zip(COLORS, _ALPHAS, strict=True)
    ]
    colors = LinearColorMapper(palette=palette, low=-0.5, high=len(palette) - 0.5)
    fig.image(image="image", source=cells, color_mapper=colors, **place)
    return fig


def _worker_figure(source: ColumnDataSource) -> Any:
    fig = figure(
        title=f"Device busy in each process, last {_RECENT:.0f} s",
        height=110,
        sizing_mode="stretch_width",
        x_range=(0, 1),
        y_range=FactorRange(),
        tools="",
        toolbar_location=None,
    )
    fig.hbar(y="name", right="busy", height=0.7, color="#34a058", alpha=0.6, source=source)
    fig.text(
        x=0.01, y="name", text="text", source=source,
        text_baseline="middle", text_font_size="11px",
    )  # fmt: skip
    fig.xaxis.formatter = NumeralTickFormatter(format="0%")
    return fig


def _speed_figure(source: ColumnDataSource) -> Any:
    fig = figure(
        title=f"Mpx/s, over {_RECENT:.0f} s each",
        height=190,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        x_axis_label="minutes since the start",
    )
    fig.y_range.start = 0
    fig.line(x="minutes", y="speed", color="#2f6db5", line_width=2, source=source)
    return fig
