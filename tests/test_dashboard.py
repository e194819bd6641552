"""The page on Dask's dashboard: what it shows of a run, and that a run never depends on it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from bokeh.client import pull_session
from bokeh.document import Document

import daskinfer as di
from browser import CHROMIUM, opened
from conftest import N3, noise, seeded, write_raster
from daskinfer.dashboard.backdrop import backdrop
from daskinfer.dashboard.feed import Feed
from daskinfer.dashboard.page import _Page
from daskinfer.dashboard.plugin import PagePlugin
from daskinfer.dashboard.states import (
    COLORS,
    DONE,
    FAILED,
    MISSING,
    RESUMED,
    RUNNING,
    SKIPPED,
    ChunkMap,
)
from daskinfer.dashboard.view import RunView, Snapshot
from daskinfer.monitor import ChunkDone, RunFinished, RunStarted
from daskinfer.raster import describe
from daskinfer.source import source_of
from held import BAD, CHUNK, PATIENCE, gated_plan, held, numbers, released


def address(client, page):
    return f"{client.dashboard_link.removesuffix('status')}{page}"


def fetched(client, page):
    with urllib.request.urlopen(address(client, page), timeout=PATIENCE) as answer:
        return answer.read().decode()


class Seen:
    """A page as a browser gets it: texts by name without their tags, and what figures show."""

    def __init__(self, client, page="daskinfer"):
        # A page that cannot be made is an error here, where Bokeh's client would wait for ever.
        fetched(client, page)
        session = pull_session(url=address(client, page))
        try:
            document = session.document
            self.title = document.title
            self.text = {
                name: re.sub(r"<[^>]*>", "|", document.select_one({"name": name}).text)
                for name in ("head", "numbers", "legend", "failures")
            }
            source = document.select_one({"name": "cells"})
            self.cells = np.array(source.data["image"][0]) if source.data["image"] else None
            self.workers = dict(document.select_one({"name": "workers"}).data)
        finally:
            session.close()


def seen_when(client, true):
    """The page as soon as that is true of it."""
    stop = time.monotonic() + PATIENCE
    while not true(seen := Seen(client)):
        assert time.monotonic() < stop, vars(seen)
    return seen


# --- during a run ---------------------------------------------------------------------------------


def test_the_page_shows_a_run_while_it_is_at_work(tmp_path, one_worker):
    done = []
    plan = gated_plan(tmp_path)
    with held(
        plan, one_worker, [lambda event: isinstance(event, ChunkDone) and done.append(event)]
    ):
        seen = seen_when(one_worker, lambda seen: "running 1" in seen.text["legend"])
        seen = seen_when(one_worker, lambda seen: "skipped 11" in seen.text["legend"])
        assert len(done) == 11
        assert f"|{plan.output}|" in seen.text["head"]
        assert "|running|" in seen.text["head"]
        assert "11 of 12 chunks" in seen.text["head"]
        assert seen.title == "92% running - daskinfer"
        expected = np.full(12, SKIPPED)
        expected[CHUNK] = RUNNING
        assert np.array_equal(seen.cells.ravel(), expected)
        assert len(seen.workers["name"]) == 1
        assert "1 chunk at work" in seen.workers["text"][0]
    assert seen_when(one_worker, lambda seen: "|complete|" in seen.text["head"]).title.startswith(
        "100%"
    )


def test_the_page_ends_with_the_numbers_of_the_report(tmp_path, one_worker):
    raw = numbers(c0=1, c1=2, c2=BAD, c6=3, c7=4)
    plan = gated_plan(tmp_path, raw=raw, on_error="nodata")

    def stop(event):
        if isinstance(event, ChunkDone) and event.chunk == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        di.run(plan, client=one_worker, callbacks=[stop])
    assert "|stopped|" in Seen(one_worker).text["head"]
    report = di.run(plan, client=one_worker)
    seen = Seen(one_worker)
    shown = seen.text["numbers"]
    for name, value in {
        "speed": f"{report.speed:.2f} Mpx/s",
        "device busy": f"{report.device_busy:.1%}",
        "batches": f"{report.batch_fill:.0%} full",
        "queue": f"{report.queue_depth:.1f} tiles",
        "retries": str(report.retries),
        "failed": str(len(report.failures)),
    }.items():
        assert f"|{name}||{value}|" in shown
    assert f"{report.tiles} tiles" in shown
    assert "|incomplete|" in seen.text["head"]
    assert f"11 of 12 chunks, {report.resumed} from an earlier run" in seen.text["head"]
    assert [failure.chunk for failure in report.failures] == [2]
    assert "|2||(0, 64, 32, 32)|" in seen.text["failures"]
    assert "thirteen &lt;at&gt; once" in seen.text["failures"]
    cells = seen.cells.ravel()
    assert cells[2] == FAILED
    assert np.count_nonzero(cells == RESUMED) == report.resumed >= 1
    assert {int(state) for state in cells} <= {DONE, SKIPPED, RESUMED, FAILED}
    assert np.array_equal(cells, report.chunk_map.array().ravel())


def test_the_page_is_in_the_navigation_and_listed_for_jupyterlab_once(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    for name in ("a.tif", "b.tif"):
        di.run(source, seeded(N3), tmp_path / name, client=one_worker)
    status = fetched(one_worker, "status")
    assert status.count('href="daskinfer"') == 1
    assert status.count('href="individual-daskinfer"') == 1
    plots = json.loads(fetched(one_worker, "individual-plots.json"))
    assert plots["Individual Daskinfer"] == "/individual-daskinfer"
    assert "Individual Task Stream" in plots
    for page in ("daskinfer", "individual-daskinfer"):
        assert str(tmp_path / "b.tif") in Seen(one_worker, page).text["head"]


def test_an_earlier_run_can_be_looked_at_again(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    events = []
    for name in ("a.tif", "b.tif"):
        output = tmp_path / name
        di.run(source, seeded(N3), output, client=one_worker, callbacks=[events.append])
    document = Document()
    page = _Page(one_worker.cluster.scheduler.plugins[PagePlugin.name], document)
    page.update()
    choice, head = (document.select_one({"name": name}) for name in ("choice", "head"))
    assert choice.visible
    assert str(tmp_path / "b.tif") in head.text
    choice.value = events[0].run
    page.update()
    assert (choice.value, f"{tmp_path / 'a.tif'}, complete") in choice.options
    assert str(tmp_path / "a.tif") in head.text


def test_the_run_says_where_its_page_is(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    events = []
    di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker, callbacks=[events.append])
    assert events[0].dashboard == address(one_worker, "daskinfer")


def test_tasks_are_called_by_their_chunk(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 60, 60))
    page = tmp_path / "dask.html"
    report = di.run(
        source, seeded(N3), tmp_path / "o.tif", client=one_worker, tile=32, chunk=32,
        performance_report=page,
    )  # fmt: skip
    names = one_worker.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.task_prefixes))
    assert "daskinfer-chunk" in names
    written = page.read_text()
    assert "daskinfer-chunk" in written
    assert report.complete


def test_dasks_report_is_written_of_a_run_that_fails_too(tmp_path, one_worker):
    page = tmp_path / "dask.html"
    with pytest.raises(di.InferenceError, match="thirteen"):
        di.run(
            gated_plan(tmp_path, raw=numbers(c2=BAD)), client=one_worker, performance_report=page
        )
    assert "daskinfer-chunk" in page.read_text()


# --- without a page -------------------------------------------------------------------------------


def test_a_scheduler_that_cannot_have_the_page_is_warned_of_and_the_run_goes_on(
    tmp_path, one_worker, monkeypatch
):
    async def start(self, scheduler):
        raise ModuleNotFoundError("No module named 'bokeh'")

    monkeypatch.setattr(PagePlugin, "start", start)
    monkeypatch.setattr(PagePlugin, "name", "another page")
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    with pytest.warns(UserWarning, match="No module named 'bokeh'") as caught:
        report = di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker)
    assert report.complete
    assert len(caught) == 1
    assert di.run(
        source, seeded(N3), tmp_path / "p.tif", client=one_worker, dashboard=False
    ).complete


@contextlib.contextmanager
def by_hand(folder, before="pass"):
    """A client of a scheduler, which runs `before`, and a worker in processes of their own."""
    file = folder / "scheduler.json"
    scheduler = f"import sys; {before}; from distributed.cli.dask_scheduler import main; "
    worker = "import sys; from distributed.cli.dask_worker import main; "
    options = {
        scheduler: ["--port", "0"],
        worker: ["--nthreads", "2", "--no-nanny"],
    }
    with contextlib.ExitStack() as stack:
        for code, words in options.items():
            words = [*words, "--dashboard-address", ":0", "--scheduler-file", str(file)]
            command = [sys.executable, "-c", f"{code} main(sys.argv[1:])", *words]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        client = stack.enter_context(di.cluster(scheduler_of(file), set_as_default=False))
        client.wait_for_workers(1, timeout=PATIENCE)
        yield client


@pytest.mark.slow
def test_a_scheduler_without_bokeh_serves_the_run_all_the_same(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    with (
        by_hand(tmp_path, "sys.modules['bokeh'] = None") as client,
        pytest.warns(UserWarning, match="environment needs bokeh"),
    ):
        report = di.run(source, torch.nn.Conv2d(2, 3, 1), tmp_path / "o.tif", client=client)
    assert report.complete


@pytest.mark.slow
def test_a_scheduler_of_its_own_has_the_page_too(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    with by_hand(tmp_path) as client:
        report = di.run(source, torch.nn.Conv2d(2, 3, 1), tmp_path / "o.tif", client=client)
        seen = Seen(client)
    assert "|complete|" in seen.text["head"]
    assert f"|speed||{report.speed:.2f} Mpx/s|" in seen.text["numbers"]
    assert np.array_equal(seen.cells, report.chunk_map.array())


def scheduler_of(file):
    """Address in a scheduler's file, once it is there."""
    stop = time.monotonic() + PATIENCE
    while time.monotonic() < stop:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads(file.read_text())["address"]
    raise TimeoutError(file)


def test_messages_of_a_million_chunks_are_small_and_few():
    tiling = SimpleNamespace(shape=(2_048_000, 2_048_000), grid=(1000, 1000))
    plan = SimpleNamespace(tiling=tiling, output="o.tif", source=None)
    sent, view = [], RunView()
    rng = np.random.default_rng(0)
    started = RunStarted(plan, 1_000_000, 0, "", "run")
    with Feed(sent.append, view, every=60) as feed:
        for event in (started, *(_done(number) for number in rng.permutation(1_000_000)[:50_000])):
            view(event)
            feed(event)
    assert 2 <= len(sent) <= 3
    # As bad as it gets: chunks done anywhere.
    assert len(msgpack.dumps(sent[-1])) < 100_000
    last = Snapshot.from_message(msgpack.loads(msgpack.dumps(sent[-1])))
    assert last.done == last.chunk_map.count("done") == 50_000
    assert max(last.chunk_map.shape) <= 512


def _done(number):
    return ChunkDone(int(number), (0, 0, 2048, 2048), 16, 1.0, "w")


# --- pieces ---------------------------------------------------------------------------------------


def test_a_map_with_several_chunks_to_a_cell_shows_the_worst():
    states = np.full((1100, 700), DONE, np.uint8)
    states[4, 4] = FAILED
    states[7, 1:3] = MISSING, RESUMED
    states[1098:, 698:] = SKIPPED
    chunk_map = ChunkMap.of(states)
    assert chunk_map.step == 3
    assert chunk_map.shape == (367, 234)
    cells = chunk_map.array()
    assert cells[1, 1] == FAILED
    assert cells[2, 0] == MISSING
    assert cells[-1, -1] == SKIPPED
    assert cells[-1, -2] == DONE
    assert chunk_map.count("skipped") == 4
    assert ChunkMap.from_message(chunk_map.message()) == chunk_map


def test_a_picture_is_read_by_gdal_as_it_was_drawn(tmp_path):
    chunk_map = ChunkMap.of(np.array([[DONE, FAILED, MISSING]], np.uint8))
    (tmp_path / "map.png").write_bytes(chunk_map.picture())
    with rasterio.open(tmp_path / "map.png") as dataset:
        drawn = dataset.read()
    expected = [(*COLORS[state], 255) for state in (DONE, FAILED, MISSING)]
    assert np.array_equal(drawn[:, 0].T, expected)


def test_the_source_is_shown_in_its_colours_and_its_orientation(tmp_path):
    raw = np.zeros((4, 30, 60), np.uint16)
    raw[2, :, 30:] = 900  # red, on the right
    path = write_raster(tmp_path / "s.tif", raw, descriptions=["B02", "B03", "B04", "B08"])
    picture = backdrop(describe(path))
    assert picture.shape == (30, 60, 3)
    assert np.array_equal(picture[0, 0], [0, 0, 0])
    assert np.array_equal(picture[0, 59], [255, 0, 0])


def test_a_large_source_is_shown_only_from_overviews(tmp_path):
    raw = np.ones((1, 2100, 2100), np.uint8)
    raw[0, :1000] = 200
    path = write_raster(tmp_path / "s.tif", raw)
    assert backdrop(describe(path)) is None
    with rasterio.open(path, "r+") as dataset:
        dataset.build_overviews([4, 16])
    picture = backdrop(describe(path))
    assert picture.shape[0] <= 384
    assert picture[0, 0, 0] == 255
    assert picture[-1, 0, 0] == 0


def test_a_lazy_array_is_not_computed_for_a_picture():
    def fail(block):
        raise AssertionError("computed")

    scene = xr.DataArray(noise(1, 50, 50), dims=("band", "y", "x")).chunk(-1)
    lazy = scene.map_blocks(fail, template=scene)
    assert backdrop(source_of(lazy)) is None
    assert backdrop(source_of(scene.compute())).shape == (50, 50, 3)


# --- in a browser ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_shows_the_numbers_during_a_run_and_those_of_the_report(tmp_path, one_worker):
    events = []
    plan = gated_plan(tmp_path)
    with (
        held(plan, one_worker, [events.append]) as reports,
        opened(address(one_worker, "daskinfer")) as page,
    ):
        text = page.text_with("running 1\\b")
        assert "11 of 12 chunks" in text
        page.screenshot(tmp_path / "during.png")
        released.set()
        text = page.text_with("^(?![^]*running 1)[^]*complete")
        page.screenshot(tmp_path / "after.png")
        title = page.title()
    report = reports[0]
    assert isinstance(events[-1], RunFinished)
    assert title == "100% complete - daskinfer"
    for value in (
        f"{report.speed:.2f} Mpx/s",
        f"{report.device_busy:.1%}",
        f"of the whole run {report.busy_whole:.1%}",
        f"{report.batch_fill:.0%} full",
        f"{report.queue_depth:.1f} tiles",
        f"{report.tiles} tiles",
    ):
        assert value in text
    with rasterio.open(tmp_path / "during.png") as a, rasterio.open(tmp_path / "after.png") as b:
        during, after = a.read(), b.read()
    # The chunk that was at work is amber in the first and green, over black, in the second.
    amber = (np.abs(during[:3].astype(int) - [[[250]], [[178]], [[40]]]).max(axis=0) < 40).sum()
    still = (np.abs(after[:3].astype(int) - [[[250]], [[178]], [[40]]]).max(axis=0) < 40).sum()
    assert amber > still + 5_000
