"""``bench feed`` at toy size: the simulated device, the designs' pixels, and what is counted."""

from __future__ import annotations

import argparse
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import rasterio
from affine import Affine

from daskinfer.bench import feed
from daskinfer.bench.command import add_bench, run_bench
from daskinfer.bench.rivals import Work, naive_loop, reader_queue
from daskinfer.bench.simulated import SimulatedDevice, TimedDevice, Timeline, classes_of
from daskinfer.bench.synthetic import decode_seconds, mirrored_scene, scene_raster, warm
from daskinfer.demo import demo_path
from daskinfer.tiling import AxisTiling, Tiling

HANG = 60.0
# Toy sizes: cores of 32 px, batches of 4, 36 batches of 1 ms.
TOY = ["--tile=48", "--halo=8", "--chunk=128", "--batch=4", "--service=1", "--seconds=0.036"]


class FakeTime:
    """A clock that stands still but for those who wait."""

    def __init__(self, slack=0.0):
        self.now = 100.0
        self.waits = []
        self._slack = slack

    def clock(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        # Sleeping may end a little early or late.
        self.now += seconds - self._slack
        self._slack = 0.0


def timed_device(tmp_path, time, service=2.0):
    log = str(tmp_path / "log")
    return TimedDevice(service, log, clock=time.clock, wait=time.wait), log


def batch(count=3, side=8):
    return np.stack([mirrored_scene(range(n, n + side), range(side)) for n in range(count)])


def asked(*words):
    parser = argparse.ArgumentParser()
    feed.add_options(parser)
    return parser.parse_args([*TOY, *words])


# --- the device -----------------------------------------------------------------------------------


def test_a_batch_takes_the_service_time(tmp_path):
    time = FakeTime()
    device, log = timed_device(tmp_path, time)
    result = device.run(batch())
    assert time.now == 102.0
    np.testing.assert_array_equal(result, classes_of(batch()))
    [(_, start, stop, tiles)] = Timeline.read(log).batches
    assert (start, stop, tiles) == (100.0, 102.0, 3)


def test_waiting_goes_on_until_the_deadline(tmp_path):
    time = FakeTime(slack=0.25)
    device, _ = timed_device(tmp_path, time)
    device.run(batch())
    assert time.waits == [2.0, 0.25]
    assert time.now == 102.0


def test_the_device_is_exclusive(tmp_path):
    """A second batch does not start before the first one's time is over."""
    inside, gate = threading.Event(), threading.Event()
    time = FakeTime()

    def wait(seconds):
        inside.set()
        assert gate.wait(HANG)
        time.wait(seconds)

    log = str(tmp_path / "log")
    device = TimedDevice(2.0, log, clock=time.clock, wait=wait)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(device.run, batch(1))
        assert inside.wait(HANG)
        inside.clear()
        second = pool.submit(device.run, batch(2))
        gate.set()
        first.result(HANG)
        second.result(HANG)
    timeline = Timeline.read(log)
    times = sorted((start, stop) for _, start, stop, _ in timeline.batches)
    assert times == [(100, 102), (102, 104)]
    assert not timeline.overlaps()


def test_a_factory_can_be_hashed_and_makes_devices_of_their_own(tmp_path):
    factory = SimulatedDevice(0.001, str(tmp_path / "log"))
    assert hash(factory) == hash(SimulatedDevice(0.001, str(tmp_path / "log")))
    devices = factory(None), factory(None)
    for device in devices:
        device.run(batch(2))
    timeline = Timeline.read(factory.log)
    assert len(timeline.devices) == 2
    assert timeline.tiles == 4


def test_classes_follow_each_pixel_of_the_first_band():
    raw = mirrored_scene(range(200), range(300))
    expected = np.array([[[value // 512 % 16 for value in row] for row in raw[0]]])
    got = classes_of(raw)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, expected)
    # A shift by a pixel would show.
    for axis in (1, 2):
        assert (np.roll(got, 1, axis) != got).any()


# --- what is counted ------------------------------------------------------------------------------


def test_busy_of_one_device():
    timeline = Timeline((("a", 1.0, 2.0, 4), ("a", 2.0, 3.0, 4), ("a", 4.0, 5.0, 2)))
    assert timeline.whole(service=1.0, wall=6.0) == pytest.approx(3 / 6)
    assert timeline.steady(service=1.0) == pytest.approx(3 / 4)
    assert timeline.fill(4) == pytest.approx(10 / 12)


def test_busy_of_two_devices_is_that_of_both():
    timeline = Timeline((("a", 0.0, 1.0, 4), ("b", 0.0, 1.0, 4), ("a", 1.0, 2.0, 4)))
    assert timeline.whole(service=1.0, wall=3.0, devices=2) == pytest.approx(3 / 6)
    assert timeline.steady(service=1.0) == pytest.approx(1.0)
    assert not timeline.overlaps()


def test_time_beyond_the_service_is_not_busy():
    timeline = Timeline((("a", 0.0, 4.0, 1), ("a", 4.0, 8.0, 1)))
    assert timeline.steady(service=1.0) == pytest.approx(2 / 8)


def test_batches_at_once_are_noticed():
    assert Timeline((("a", 0.0, 2.0, 1), ("a", 1.0, 3.0, 1))).overlaps()


def test_no_log_is_no_batch(tmp_path):
    assert Timeline.read(str(tmp_path / "none")).batches == ()


# --- the raster -----------------------------------------------------------------------------------


def test_the_mirrored_scene_has_no_seams():
    with rasterio.open(demo_path()) as dataset:
        scene = dataset.read()
    _, height, width = scene.shape
    both = np.concatenate([scene, scene[:, ::-1]], axis=1)
    whole = np.concatenate([both, both[:, :, ::-1]], axis=2)
    np.testing.assert_array_equal(mirrored_scene(range(2 * height), range(2 * width)), whole)
    # And so on, for ever.
    again = mirrored_scene(range(2 * height, 2 * height + 5), range(7))
    np.testing.assert_array_equal(again, scene[:, :5, :7])


def test_the_raster_is_made_once(tmp_path):
    path = scene_raster(tmp_path, 80, 100, block=32)
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(), mirrored_scene(range(80), range(100)))
        assert dataset.block_shapes[0] == (32, 32)
        assert dataset.profile["compress"] == "deflate"
    made = (tmp_path / "scene-80x100-32.tif").stat().st_mtime_ns
    assert scene_raster(tmp_path, 80, 100, block=32) == path
    assert (tmp_path / "scene-80x100-32.tif").stat().st_mtime_ns == made
    assert len(list(tmp_path.iterdir())) == 1


def test_warming_reads_the_whole_file(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes((1 << 24) + 5))
    assert warm(str(path)) == (1 << 24) + 5


def test_decoding_costs_something(tmp_path):
    assert decode_seconds(scene_raster(tmp_path, 64, 64, block=32)) > 0


# --- the rivals -----------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path):
    tiling = Tiling(AxisTiling(96, tile=48, halo=8), AxisTiling(160, tile=48, halo=8))
    source = scene_raster(tmp_path, 96, 160, block=32)
    return Work(source, str(tmp_path / "out.tif"), tiling, batch=4)


def result_of(work):
    with rasterio.open(work.output) as dataset:
        return dataset.read()


DESIGNS = {
    "naive": naive_loop,
    "one reader": lambda work, device: reader_queue(work, device, 1),
    "five readers": lambda work, device: reader_queue(work, device, 5),
}


@pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS.keys())
def test_a_rival_gives_the_classes_of_the_raster(design, work, tmp_path):
    device, log = timed_device(tmp_path, FakeTime())
    design(work, device)
    expected = classes_of(mirrored_scene(range(96), range(160)))
    np.testing.assert_array_equal(result_of(work), expected)
    timeline = Timeline.read(log)
    # 3 x 5 tiles in batches of 4.
    assert [tiles for *_, tiles in timeline.batches] == [4, 4, 4, 3]


def test_tiles_cover_the_raster_once(work):
    covered = np.zeros(work.tiling.shape, int)
    for tile in work.tiles:
        covered[tile.core.slices()] += 1
        assert tile.window.clip(tile.core) == tile.core
    assert (covered == 1).all()


def test_rivals_write_georeferenced_blocks(work, tmp_path):
    naive_loop(work, timed_device(tmp_path, FakeTime())[0])
    with rasterio.open(work.output) as dataset, rasterio.open(work.source) as source:
        assert dataset.crs == source.crs
        assert dataset.transform == source.transform == Affine(20, 0, 330000, 0, -20, 5822040)
        assert dataset.block_shapes == [(32, 32)]


@pytest.mark.parametrize("readers", [1, 4])
def test_an_error_of_the_device_ends_the_readers(work, readers):
    class Broken(TimedDevice):
        def forward(self, loaded):
            raise ZeroDivisionError("device")

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="device"):
        reader_queue(work, Broken(1.0, "none"), readers)
    assert threading.active_count() == before


def test_an_error_of_a_reader_reaches_the_loop(work, tmp_path):
    data = bytearray((tmp_path / "scene-96x160-32.tif").read_bytes())
    # The header comes first: this is the second half of the blocks, their own headers included.
    half = len(data) // 2
    data[half:] = bytes(len(data) - half)
    (tmp_path / "scene-96x160-32.tif").write_bytes(data)
    before = threading.active_count()
    with pytest.raises(rasterio.errors.RasterioIOError):
        reader_queue(work, timed_device(tmp_path, FakeTime())[0], 2)
    assert threading.active_count() == before


# --- the benchmark --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """All designs, two runs."""
    options = asked("--readers=1,2")
    folder = str(tmp_path_factory.mktemp("feed"))
    return run_bench(feed.BENCH, {"": options}, 2, folder)


def test_every_design_is_measured(result):
    names = ["naive loop", "queue, 1 reader", "queue, 2 readers", "actor alone", "run"]
    assert result.cases() == names
    keys = {column.key for column in result.columns}
    for name in names:
        runs = result.values["", name]
        assert len(runs) == 2
        assert all(set(run) == keys for run in runs)


def test_the_numbers_of_a_design_agree(result):
    # 12 x 12 tiles: a whole number of chunks for 36 batches of 4.
    batches, pixels = 12 * 12 / 4, (12 * 32) ** 2
    for (_, name), runs in result.values.items():
        for run in runs:
            assert 0 < run["busy"] <= run["steady"] <= 1
            assert run["speed"] == pytest.approx(pixels / 1e6 / run["wall"])
            # Slots that are not filled take batches more.
            more = run["busy"] * run["wall"] / 0.001 / batches
            assert more == pytest.approx(1 / run["fill"]), name


def test_run_is_compared_with_the_best_queue(result):
    best = max(
        ("queue, 1 reader", "queue, 2 readers"),
        key=lambda name: result.spread(name, "busy").median,
    )
    told = "\n".join(result.notes)
    assert f"bounded queue's best setting ({best})" in told
    assert "their pixels were compared and are equal" in told
    # The time per batch was given, not measured.
    assert "processor time of one thread" not in told


def test_designs_that_disagree_are_refused(tmp_path, monkeypatch):
    def shifted(work, device):
        naive_loop(work, device)
        with rasterio.open(work.output, "r+") as dataset:
            dataset.write(np.roll(dataset.read(), 1, axis=2))

    monkeypatch.setattr("daskinfer.bench.rivals.naive_loop", shifted)
    [case] = feed.cases(asked("--designs=naive"), tmp_path)
    with pytest.raises(RuntimeError, match="not those of the raster"):
        case.once()


def test_a_design_that_skips_tiles_is_refused(tmp_path, monkeypatch):
    def lazy(work, device):
        naive_loop(work, device)
        log = tmp_path / "batches.log"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))

    monkeypatch.setattr("daskinfer.bench.rivals.naive_loop", lazy)
    [case] = feed.cases(asked("--designs=naive"), tmp_path)
    with pytest.raises(RuntimeError, match="ran 140 tiles of 144"):
        case.once()


def test_decoding_is_timed_anew_each_time(tmp_path, monkeypatch):
    path = scene_raster(tmp_path, 64, 64, block=32)
    # Nine reads of 1 s each, then nine of 2 s.
    ticks = iter([t for seconds in (1, 2) for _ in range(9) for t in (0, seconds)])
    monkeypatch.setattr("daskinfer.bench.synthetic.time.thread_time", lambda: next(ticks))
    assert [decode_seconds(path) * 64 * 64 for _ in range(2)] == [1, 2]


def test_each_run_has_the_decoding_time_of_its_moment(tmp_path, monkeypatch):
    pixels = 4 * 48 * 48
    costs = iter([1e-3, 2e-3, 3e-3, 5e-3])
    monkeypatch.setattr(
        "daskinfer.bench.synthetic.decode_seconds", lambda path: next(costs) / pixels
    )
    options = argparse.Namespace(**vars(asked("--designs=actor,run")) | {"service": None})
    actor, run = feed.cases(options, tmp_path)
    for case, service in ((actor, 2e-3), (run, 3e-3), (actor, 5e-3)):
        assert case.once()["service"] == pytest.approx(service * 1e3)
        took = [
            stop - start for _, start, stop, _ in Timeline.read(tmp_path / "batches.log").batches
        ]
        assert np.min(took) >= service - 1e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--halo=10"], "leaves 28 px, which must be a multiple of 16: pass --tile 52"),
        (["--tile=16"], "leaves 0 px"),
        (["--service=0"], "service must be positive"),
        (["--seconds=0"], "must be positive"),
        (["--workers=0"], "must be positive"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        feed.cases(asked(*words), tmp_path)


def test_an_unknown_design_is_refused(capsys):
    with pytest.raises(SystemExit):
        asked("--designs=naive,magic")
    assert "known designs: naive, queue, actor, run" in capsys.readouterr().err


def test_the_command_compares_batch_sizes(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(required=True), feed.BENCH)
    path = tmp_path / "feed.json"
    words = ["--runs=1", "--designs=actor", f"--json={path}", "--compare", "batch=2", "batch=4"]
    arguments = parser.parse_args(["feed", *TOY, *words])
    assert arguments.command(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["setting"], row["case"]) for row in rows] == [
        ("batch=2", "actor alone"),
        ("batch=4", "actor alone"),
    ]
    assert "batch=4 / batch=2" in capsys.readouterr().out


@pytest.mark.slow
def test_two_worker_processes_have_a_device_each(tmp_path):
    [case] = feed.cases(asked("--workers=2"), tmp_path)
    assert case.name == "run, 2 worker processes"
    values = case.once()
    assert 0 < values["busy"] <= 1
    timeline = Timeline.read(str(tmp_path / "batches.log"))
    assert len(timeline.devices) == 2
    for device in timeline.devices:
        times = sorted(stop for name, _, stop, _ in timeline.batches if name == device)
        assert all(later - earlier >= 0.001 for earlier, later in pairwise(times))
