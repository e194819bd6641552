"""``bench merge`` measures what merges all that it made."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from daskinfer.bench import merge
from daskinfer.bench.command import benches


def test_tiles_report_the_objects_that_they_see_whole():
    rows, tiling = merge.seen_objects(500)
    for row in rows:
        spans = [
            axis.tile_span(int(i))
            for axis, i in zip((tiling.y, tiling.x), row["tile"], strict=True)
        ]
        x1, y1, x2, y2 = row["box"]
        assert spans[0].start - 1 < y1 < y2 < spans[0].stop + 1
        assert spans[1].start - 1 < x1 < x2 < spans[1].stop + 1
    assert 500 < len(rows) < 2000


@pytest.mark.parametrize("way", ["tiles", "nms", "nmm"])
def test_each_object_is_found_about_once(way, tmp_path):
    options = argparse.Namespace(objects=(2000,), ways=(way,))
    [case] = merge.cases(options, tmp_path)
    values = case.once()
    assert set(values) == {column.key for column in merge.COLUMNS}
    assert values["boxes"] > 2000
    # Boxes of objects that lie on each other may be taken for one.
    assert 0.95 * 2000 < values["objects"] <= 2000 * (1.001 if way == "tiles" else 1)


def test_it_is_among_the_benchmarks():
    assert merge.BENCH in benches()
    parser = argparse.ArgumentParser()
    merge.BENCH.add_options(parser)
    assert parser.parse_args(["--objects", "5,6"]).objects == (5, 6)
    assert np.prod(parser.parse_args([]).objects) == 10**15
