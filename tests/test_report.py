"""The saved report: one file that needs nothing else, with the numbers of the run."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from rasterio.io import MemoryFile

import daskinfer as di
from conftest import noise, write_raster
from daskinfer import display
from daskinfer.cli import main
from daskinfer.dashboard.states import COLORS
from held import BAD, gated_plan, numbers

REFUSED = 2


class Outline(HTMLParser):
    """Text in order, tags that are left open, and what is fetched from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.words, self.open, self.fetched = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.fetched += [
            value for name, value in attrs if name in ("src", "href") and value[:5] != "data:"
        ]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style" and data.strip():
            self.words.append(data.strip())


@pytest.fixture(scope="module")
def saved(tmp_path_factory, one_worker):
    """A report with a chunk that failed, and what was saved of it."""
    folder = tmp_path_factory.mktemp("report")
    plan = gated_plan(folder, raw=numbers(c0=1, c1=2, c2=BAD, c6=3), on_error="nodata")
    report = di.run(plan, client=one_worker)
    report.save(folder / "report.html")
    return report, (folder / "report.html").read_text()


def test_the_page_holds_the_reports_numbers(saved):
    report, page = saved
    outline = Outline(page)
    words = outline.words
    assert outline.open == outline.fetched == []
    for name, value in {
        "speed": f"{report.speed:.2f} Mpx/s",
        "device busy": f"{report.device_busy:.1%}",
        "batches": f"{report.batch_fill:.0%} full",
        "queue": f"{report.queue_depth:.1f} tiles",
        "chunks": str(report.chunks),
        "retries": str(report.retries),
        "failed": "1",
        "pixels": "96 x 128",
    }.items():
        assert words[words.index(name) + 1] == value
    for note in report.diagnosis:
        assert note in words
    # All that the text says.
    for name, value in report._rows():
        assert name.strip() in words
        assert value in words


def test_the_page_lists_failures_and_stages(saved):
    report, page = saved
    words = Outline(page).words
    at = words.index("(0, 64, 32, 32)")
    assert words[at - 1] == "2"
    assert words[at + 1] == report.failures[0].worker
    assert "ArithmeticError: thirteen <at> once" in words[at + 2]
    total = sum(times.total for times in report.stages.values())
    for name, times in report.stages.items():
        at = words.index(name, words.index("p99"))
        assert words[at + 1 : at + 7] == [
            f"{times.total / total:.1%}",
            display.seconds_text(times.total),
            *(display.seconds_text(times.quantile(share)) for share in (0.5, 0.95, 0.99)),
            str(times.count),
        ]


def test_the_page_shows_what_became_of_each_chunk(saved):
    report, page = saved
    (picture,) = re.findall(r"data:image/png;base64,([^']+)", page)
    with MemoryFile(base64.b64decode(picture)) as file, file.open() as dataset:
        pixels = np.moveaxis(dataset.read(), 0, -1)[..., :3]
    expected = np.array(COLORS)[report.chunk_map.array()]
    assert np.array_equal(pixels, expected)
    assert report.chunk_map.counts[:4] == (0, 3, 8, 1)


@pytest.mark.parametrize(
    ("name", "error"),
    [("report.pdf", ValueError), ("nowhere/report.html", FileNotFoundError)],
)
def test_a_report_that_cannot_be_saved_there_is_refused(saved, tmp_path, name, error):
    with pytest.raises(error, match=r"\.html|make it first"):
        saved[0].save(tmp_path / name)
    with pytest.raises(error, match="performance_report"):
        di.run(gated_plan(tmp_path), performance_report=tmp_path / name)
    assert not (tmp_path / "o.tif.partial").exists()


def test_the_command_saves_both_reports(factory, tmp_path, capsys):
    source = write_raster(tmp_path / "scene.tif", noise(2, 120, 120))
    output, ours, dasks = (str(tmp_path / name) for name in ("o.tif", "r.html", "dask.html"))
    options = ["--report", ours, "--performance-report", dasks, "--tile", "32", "--chunk", "64"]
    assert main(["run", source, factory, output, *options]) == 0
    words = Outline((tmp_path / "r.html").read_text()).words
    assert words[words.index("chunks") + 1] == "4"
    assert f"{output} - daskinfer report" in words
    assert "daskinfer-chunk" in (tmp_path / "dask.html").read_text()
    assert "Report\n" in capsys.readouterr().out


def test_the_command_refuses_a_report_of_another_kind_before_any_work(factory, tmp_path, capsys):
    source = write_raster(tmp_path / "scene.tif", noise(2, 120, 120))
    for option in ("--report", "--performance-report"):
        arguments = ["run", source, factory, str(tmp_path / "o.tif"), option, "report.txt"]
        assert main(arguments) == REFUSED
        assert "name it .html, got 'report.txt'" in capsys.readouterr().err
        assert not (tmp_path / "o.tif.partial").exists()
    sys.modules.pop("nets_of_users", None)
