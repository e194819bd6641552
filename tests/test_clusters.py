"""Clusters of every kind: started, reached, prepared for inference, and asked what they have."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import types

import dask
import numpy as np
import pytest
import rasterio
import yaml
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer.clusters import cuda, preload, workers
from daskinfer.clusters.check import check_versions, check_workers
from daskinfer.clusters.options import cluster_options
from daskinfer.clusters.slurm import import_cluster, jobqueue_options, seconds_of, slurm_cluster
from daskinfer.clusters.spec import read_spec, started, yaml_value
from daskinfer.clusters.workers import WorkerSettings, keep_nannies, neighbours, prepare_workers
from daskinfer.source import source_of
from handmade import Handmade, names, until

JOB = {"tile": 32, "chunk": 32}


def environment(*variables):
    return {name: os.environ.get(name) for name in variables}


def pixels(path):
    with rasterio.open(path) as dataset:
        return dataset.read()


# --- kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nonsense", "", "local ", "cuda:0"])
def test_an_unknown_kind_is_refused_with_those_that_there_are(kind):
    with pytest.raises(ValueError, match="pass 'local', 'processes', 'cuda', 'slurm', a scheduler"):
        di.cluster(kind)


def test_a_kind_is_a_word():
    with pytest.raises(TypeError, match="must be a word or an address"):
        di.cluster(2)


def test_processes_have_the_settings_of_inference(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GDAL_CACHEMAX"):
        monkeypatch.delenv(name, raising=False)
    with di.cluster(
        "processes", n_workers=2, dashboard_address=":0", set_as_default=False
    ) as client:
        told = client.run(environment, "OMP_NUM_THREADS", "GDAL_CACHEMAX")
        share = str(max(1, CPU_COUNT // 2))
        assert list(told.values()) == [{"OMP_NUM_THREADS": share, "GDAL_CACHEMAX": "64"}] * 2
        assert set(client.nthreads().values()) == {3}
        # Two processes on the same cores.
        assert list(neighbours(client).values()) == [2]
        # Imported meanwhile, in a thread.
        until(lambda: all(client.run(has_module, "daskinfer.station").values()), "import")
    assert client.cluster.status.name == "closed"


def has_module(name):
    return name in sys.modules


def test_what_the_user_sets_stays(monkeypatch):
    monkeypatch.setenv("GDAL_CACHEMAX", "512")
    assert "GDAL_CACHEMAX" not in WorkerSettings().environment
    options = {"threads_per_worker": 1, "env": {"OMP_NUM_THREADS": "7"}, "n_workers": 1}
    options["preload"] = []
    with di.cluster("processes", dashboard_address=":0", set_as_default=False, **options) as client:
        told = client.run(environment, "OMP_NUM_THREADS", "GDAL_CACHEMAX")
        assert list(told.values()) == [{"OMP_NUM_THREADS": "7", "GDAL_CACHEMAX": "512"}]
        assert list(client.nthreads().values()) == [1]


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "visible", "asked", "expected"),
    [
        (2, None, None, ["0", "1"]),
        (2, "4,5", None, ["4", "5"]),
        (4, None, 2, ["0", "1"]),
        (4, None, [3, 1], ["3", "1"]),
        (2, "GPU-aa,GPU-bb", None, ["GPU-aa", "GPU-bb"]),
        (1, None, ["GPU-0123"], ["GPU-0123"]),
    ],
)
def test_devices_are_those_that_are_seen(monkeypatch, count, visible, asked, expected):
    monkeypatch.setattr(cuda, "cuda_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda.visible_devices(asked) == expected


@pytest.mark.parametrize(
    ("count", "asked", "message"),
    [
        (0, None, r"torch .* sees no CUDA device.*pass 'processes'"),
        (2, 3, r"with devices=3: torch .* sees devices 0, 1"),
        (2, [0, 7], r"with devices=\[0, 7\]: torch .* sees devices 0, 1"),
        (2, 0, "with devices=0"),
    ],
)
def test_devices_that_there_are_not_are_refused(monkeypatch, count, asked, message):
    monkeypatch.setattr(cuda, "cuda_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {} if asked is None else {"devices": asked}
    with pytest.raises(ValueError, match=message):
        di.cluster("cuda", **options)


def test_each_device_has_a_process_that_keeps_it(monkeypatch):
    monkeypatch.setattr(cuda, "cuda_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {"dashboard_address": ":0", "set_as_default": False, "preload": []}
    with di.cluster("cuda", **options) as client:
        client.wait_for_workers(2)
        seen = client.run(environment, "CUDA_VISIBLE_DEVICES")
        assert sorted(told["CUDA_VISIBLE_DEVICES"] for told in seen.values()) == ["0", "1"]
        info = client.scheduler_info()["workers"].values()
        assert [worker["resources"] for worker in info] == [{"GPU": 3.0}] * 2
        pids = client.run(os.getpid)
        first = min(pids)
        os.kill(pids[first], signal.SIGKILL)

        def replaced():
            # The scheduler may list the dead one for a while, which does not answer.
            now = set(client.run(os.getpid, on_error="ignore").values())
            return len(now) == 2 and pids[first] not in now

        until(replaced, "new worker")
        again = client.run(environment, "CUDA_VISIBLE_DEVICES")
        assert sorted(told["CUDA_VISIBLE_DEVICES"] for told in again.values()) == ["0", "1"]
        made = client.cluster
    assert made.status.name == "closed"


LOST = "distributed.deploy.lost-worker-timeout"


def test_a_worker_that_is_away_when_dask_looks_comes_back(monkeypatch):
    monkeypatch.setattr("daskinfer.clusters.workers._LOST_DEFAULT", "100 ms")
    # Sooner than any process can start.
    with (
        dask.config.set({LOST: "100 ms"}),
        di.cluster("processes", n_workers=1, dashboard_address=":0", set_as_default=False) as own,
    ):
        killed = next(iter(own.run(os.getpid).values()))
        nannies = list(own.cluster.workers)
        os.kill(killed, signal.SIGKILL)
        until(lambda: set(own.run(os.getpid, on_error="ignore").values()) - {killed}, "new worker")
        # One that is given up may start a last one first.
        assert list(own.cluster.workers) == nannies


def test_how_long_a_worker_may_be_away_is_what_the_user_set():
    with dask.config.set({LOST: "7s"}):
        keep_nannies()
        assert dask.config.get(LOST) == "7s"


def test_dask_cuda_is_used_where_it_is_installed(monkeypatch):
    told = {}

    def local_cuda_cluster(**options):
        told.update(options)
        return LocalCluster(n_workers=0, processes=False, dashboard_address=":0")

    fake = types.ModuleType("dask_cuda")
    fake.LocalCUDACluster = local_cuda_cluster
    fake.__spec__ = types.SimpleNamespace(name="dask_cuda")
    monkeypatch.setitem(sys.modules, "dask_cuda", fake)
    monkeypatch.setattr(cuda, "cuda_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with di.cluster("cuda", devices=1, set_as_default=False, dashboard_address=":0"):
        assert told == {
            "CUDA_VISIBLE_DEVICES": ["0"],
            "threads_per_worker": 3,
            "resources": {"GPU": 3},
            "dashboard_address": ":0",
        }


@pytest.mark.parametrize(
    ("name", "visible", "expected"),
    [("job-0", "2,3", "2"), ("job-1", "2,3", "3"), ("job-0-1", "a,b", "b"), ("tcp", "0,1", "0,1")],
)
def test_workers_of_a_job_keep_to_one_device_each(monkeypatch, name, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(preload, "_warm", lambda: None)
    preload.dask_setup(types.SimpleNamespace(name=name))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(("count", "expected"), [(0, {}), (1, {"GPU": 2.0})])
def test_workers_that_see_a_device_say_so_also_late_ones(monkeypatch, count, expected):
    monkeypatch.setattr(workers, "cuda_count", lambda: count)
    options = {"processes": False, "n_workers": 1, "threads_per_worker": 2}
    with Client(dashboard_address=":0", set_as_default=False, **options) as client:
        prepare_workers(client)
        client.cluster.scale(2)
        client.wait_for_workers(2)

        def declared():
            info = client.scheduler_info()["workers"].values()
            return [worker["resources"] for worker in info] == [expected] * 2

        until(declared, "resources")


def test_a_device_that_no_worker_has_is_refused_with_what_they_offer(tmp_path, one_worker):
    source = write_raster(tmp_path / "a.tif", noise(2, 32, 32))
    for device in ("cuda", "cuda:1"):
        with pytest.raises(
            ValueError,
            match=rf"device '{device}': no worker has it(.|\n)*3 threads, resources none, torch "
            ".* sees no CUDA devices",
        ):
            di.run(source, seeded(N3), tmp_path / "o.tif", device=device, client=one_worker)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tif"]


# --- files that name a cluster --------------------------------------------------------------------


def written(folder, **told):
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(told))
    return str(path)


def test_a_file_names_any_class(tmp_path):
    file = written(
        tmp_path,
        cluster="distributed:LocalCluster",
        arguments={"n_workers": 0, "processes": False, "dashboard_address": ":0"},
        scale=2,
    )
    with di.cluster(file, set_as_default=False) as client:
        client.wait_for_workers(2)
        assert set(client.nthreads()) <= set(client.scheduler_info()["workers"])
        made = client.cluster
    assert made.status.name == "closed"


def test_a_file_names_a_kind_whose_arguments_options_replace(tmp_path):
    file = written(tmp_path, cluster="local", arguments={"threads_per_worker": 1})
    for options, threads in (({}, 1), ({"threads_per_worker": 2}, 2)):
        with di.cluster(file, dashboard_address=":0", set_as_default=False, **options) as client:
            assert list(client.nthreads().values()) == [threads]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"cluster": "local", "argument": {}}, "unknown key 'argument'; known: cluster, arguments"),
        ({"arguments": {}}, "no key 'cluster'"),
        ({"cluster": 4}, "cluster must be a word"),
        ({"cluster": "cluster.yaml"}, "names a cluster, not another file"),
        ({"cluster": "a.b:C", "scale": 1, "adapt": {"minimum": 1}}, "not both"),
        ({"cluster": "a.b:C", "scale": "all"}, "scale must be a number"),
        ({"cluster": "a.b:C", "arguments": [1]}, "arguments must be names and values"),
        ({"cluster": "slurm", "scale": 3}, "has no scale or adapt.*jobs for 'slurm'"),
        ({"cluster": "no_such_package:C"}, "no module named 'no_such_package': install"),
        ({"cluster": "distributed:NoCluster"}, "distributed has no 'NoCluster'"),
    ],
)
def test_what_a_file_gets_wrong_is_said(tmp_path, told, message):
    with pytest.raises(ValueError, match=message):
        di.cluster(written(tmp_path, **told))


@pytest.mark.parametrize("text", ["cluster: [", "- local", "local", ""])
def test_what_is_no_yaml_of_names_is_refused(tmp_path, text):
    path = tmp_path / "cluster.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not YAML|no key 'cluster'"):
        di.cluster(str(path))


def test_code_in_a_file_is_not_run(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"cluster: !!python/object/apply:os.mkdir [{tmp_path}/ran]")
    with pytest.raises(ValueError, match="is not YAML"):
        read_spec(path)
    assert not (tmp_path / "ran").exists()


def test_a_class_that_is_no_cluster_is_refused(tmp_path):
    file = written(tmp_path, cluster="builtins:dict")
    with pytest.raises(TypeError, match="made dict, no Dask cluster"):
        di.cluster(file)


@pytest.mark.parametrize("name", ["no.yaml", "no.json"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        di.cluster(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1:30:00", "1:30:00"), ("12:00", "12:00"), ("7", 7), ("-2", -2), ("0.5", 0.5), ("1e3", 1e3),
     ("true", True), ("{a: [1, b]}", {"a": [1, "b"]}), ("16GB", "16GB"), ("", None)],
)  # fmt: skip
def test_times_stay_text_and_numbers_are_numbers(text, value):
    assert yaml_value(text) == value
    assert type(yaml_value(text)) is type(value)


def test_classes_of_other_batch_systems_get_the_settings_of_workers(tmp_path):
    file = written(
        tmp_path,
        cluster="dask_jobqueue:PBSCluster",
        arguments={"cores": 4, "memory": "2GB", "walltime": "01:00:00",
                   "scheduler_options": {"dashboard_address": ":0"}},
    )  # fmt: skip
    made = started(read_spec(file))
    try:
        script = made.job_script()
    finally:
        made.close()
    assert "--nthreads 3 --preload daskinfer.clusters.preload --lifetime" in script
    assert "export GDAL_CACHEMAX=64" in script


# --- SLURM, as far as it goes without one ---------------------------------------------------------


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("30", 1800), ("02:30", 150), ("01:00:00", 3600), ("1-0", 86400), ("1-02:03", 93780),
     ("1-02:03:04", 93784)],
)  # fmt: skip
def test_walltimes_are_read_as_slurm_reads_them(walltime, seconds):
    assert seconds_of(walltime) == seconds


@pytest.mark.parametrize("walltime", ["", "1h", "1:2:3:4", "-1", "UNLIMITED"])
def test_other_walltimes_are_refused(walltime):
    with pytest.raises(ValueError, match="write minutes"):
        seconds_of(walltime)


def test_workers_end_before_their_job_does():
    options = jobqueue_options({"cores": 8, "processes": 2}, walltime="01:00:00", gpu=True)
    line = options["worker_extra_args"]
    after = {name: line[line.index(name) + 1] for name in line if name.startswith("--")}
    life, stagger = (int(after[name][:-1]) for name in ("--lifetime", "--lifetime-stagger"))
    assert 3600 - 360 <= life - stagger < life + stagger < 3600
    assert after["--resources"] == "GPU=3"
    assert options["processes"] == 2


@pytest.mark.parametrize("drain", [0, 3600, -1])
def test_a_drain_lies_within_the_walltime(drain):
    with pytest.raises(ValueError, match="less than the walltime of 3600 s"):
        jobqueue_options({}, walltime="01:00:00", drain=drain)


@pytest.mark.parametrize("jobs", [0, (2, 1), (-1, 3), (0, 0)])
def test_jobs_are_a_number_or_a_range(jobs):
    with pytest.raises(ValueError, match="jobs must be a number"):
        slurm_cluster(jobs=jobs, cores=1, memory="1GB")


def test_without_slurm_the_error_says_where_to_start(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="no sbatch on this machine"):
        di.cluster("slurm", cores=1, memory="1GB")


def test_ctrl_c_is_left_as_it_was_by_what_is_imported(tmp_path, monkeypatch):
    (tmp_path / "grabs.py").write_text(
        "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    assert import_cluster("grabs").__name__ == "grabs"
    assert signal.getsignal(signal.SIGINT) is before
    for name in [name for name in sys.modules if name.partition(".")[0] == "dask_jobqueue"]:
        monkeypatch.delitem(sys.modules, name)
    assert import_cluster("dask_jobqueue").SLURMCluster
    assert signal.getsignal(signal.SIGINT) is before


def test_without_dask_jobqueue_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(ImportError, match=r"pip install 'daskinfer\[slurm\]'"):
        di.cluster("slurm", cores=1, memory="1GB")


def test_cores_are_those_that_a_job_was_given(monkeypatch):
    worker = types.SimpleNamespace(ip="10.0.0.1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    place, cores, process = workers.cores_of_worker(worker)
    assert (cores, process) == (CPU_COUNT, os.getpid())
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    of_job, cores, _ = workers.cores_of_worker(worker)
    assert cores == 1
    assert of_job != place
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert workers.cores_of_worker(worker)[0] not in (of_job, place)


# --- by address -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handmade(tmp_path_factory):
    """A scheduler and two workers in other folders, with other settings."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("one", "two"):
        (folder / name).mkdir()
    with contextlib.closing(Handmade(folder)) as made:
        made.worker("one", cwd=folder / "one", GDAL_CACHEMAX="32")
        made.worker("two", cwd=folder / "two", nanny=True)
        yield made


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A raster and a folder to work in; the model's classes of all of it, run here."""
    monkeypatch.chdir(tmp_path)
    write_raster("scene.tif", noise(2, 70, 90))
    di.run("scene.tif", seeded(N3), "expected.tif", **JOB)
    return "scene.tif"


@pytest.mark.parametrize("named", ["address", "file", "host"])
def test_workers_in_other_folders_find_relative_paths(handmade, scene, named):
    kind = {"address": handmade.address, "file": str(handmade.file)}
    kind["host"] = handmade.address.partition("://")[2]
    with di.cluster(kind[named], set_as_default=False) as client:
        assert {"one", "two"} <= set(names(client))
        told = client.run(environment, "GDAL_CACHEMAX", workers=[names(client)["one"]])
        # What the worker's own environment says stays.
        assert list(told.values()) == [{"GDAL_CACHEMAX": "32"}]
        report = di.run(scene, seeded(N3), "o.tif", client=client, **JOB)
    assert (report.complete, report.output, report.chunks) == (True, "o.tif", 4)
    assert np.array_equal(pixels("o.tif"), pixels("expected.tif"))


def test_lazy_predictions_find_relative_paths_too(handmade, scene):
    with di.cluster(handmade.address, set_as_default=False) as client:
        lazy = di.predict(di.open_raster(scene), seeded(N3), **JOB)
        classes = client.compute(lazy.data).result()
    assert np.array_equal(classes, pixels("expected.tif"))


def test_a_closed_client_leaves_a_cluster_that_it_only_reached(handmade):
    for _ in range(2):
        with di.cluster(handmade.address, set_as_default=False) as client:
            assert len(client.nthreads()) >= 2


@pytest.mark.parametrize("kind", ["tcp://127.0.0.1:1", "scheduler.json"])
def test_options_of_a_start_are_refused_where_nothing_is_started(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scheduler.json").write_text("{}")
    with pytest.raises(TypeError, match="takes no 'n_workers'; known: asynchronous"):
        di.cluster(kind, n_workers=2)


def test_a_worker_that_joins_late_is_prepared_too(handmade):
    with di.cluster(handmade.address, set_as_default=False) as client:
        process = handmade.worker("late")
        late = names(client)["late"]
        told = client.run(environment, "GDAL_CACHEMAX", workers=[late])
        assert told == {late: {"GDAL_CACHEMAX": "64"}}
        handmade.stop(process)


@pytest.mark.parametrize(
    ("content", "message"),
    [("__version__ = '0.0.1'", "has daskinfer 0.0.1 and this process "),
     ("raise ImportError", "has no daskinfer .*: install ")],
)  # fmt: skip
def test_a_worker_with_another_daskinfer_is_refused(handmade, scene, tmp_path, content, message):
    package = tmp_path / "other" / "daskinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text(content)
    process = handmade.worker("other", PYTHONPATH=str(package.parent))
    try:
        with handmade.client() as client:
            address = names(client)["other"]
            with pytest.raises(ValueError, match=rf"worker {address} {message}"):
                di.run(scene, seeded(N3), "o.tif", client=client, **JOB)
        with pytest.raises(ValueError, match=message):
            di.cluster(handmade.address)
    finally:
        handmade.stop(process)
    assert sorted(path.name for path in tmp_path.glob("o.tif*")) == []


# --- what workers lack ----------------------------------------------------------------------------


def test_a_file_that_a_worker_does_not_have_is_named(tmp_path, one_worker):
    source = source_of(write_raster(tmp_path / "a.tif", noise(1, 8, 8)))
    check_workers(one_worker, source, "cpu", bytecode=True)
    os.utime(tmp_path / "a.tif", ns=(0, 0))
    with pytest.raises(ValueError, match=r"worker inproc.* has another file .*a\.tif.*cp -p"):
        check_workers(one_worker, source, "cpu", bytecode=True)
    os.unlink(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"worker inproc.* has no file .*a\.tif \(it works in "):
        check_workers(one_worker, source, "cpu", bytecode=True)


def test_a_remote_file_that_a_worker_cannot_open_is_named(tmp_path, one_worker, monkeypatch):
    path = write_raster(tmp_path / "a.tif", noise(1, 8, 8))
    os.symlink(tmp_path, tmp_path / "link")
    source = source_of(f"/vsisubfile/0,{path}")
    check_workers(one_worker, source, "auto", bytecode=False)
    os.unlink(path)
    with pytest.raises(ValueError, match=r"cannot open /vsisubfile/0,.*a\.tif"):
        check_workers(one_worker, source, "auto", bytecode=False)


def test_a_worker_that_is_lost_meanwhile_is_none_to_refuse():
    class Losing:
        """A client with a worker that is gone, and one more."""

        def run(self, function, *_, on_error):
            return {"tcp://a": OSError("gone"), "tcp://b": self.answer}

    client = Losing()
    client.answer = (di.__version__, sys.version_info[:2], sys.executable)
    check_versions(client)
    client.answer = TypeError("cannot be loaded")
    with pytest.raises(ValueError, match=r"^worker tcp://b cannot tell .*cannot be loaded"):
        check_versions(client)
    client.answer = (di.__version__, (3, 0), sys.executable)
    check_versions(client)
    with pytest.raises(ValueError, match=r"has Python 3\.0 and this process 3\.\d+: a model in"):
        check_versions(client, bytecode=True)


def test_workers_without_the_file_are_refused_before_any_work(handmade, scene, tmp_path):
    """Another mount namespace: on this worker the folder is empty."""
    hide = f'mount -t tmpfs none {tmp_path} && exec "$@"'
    wrap = ["unshare", "-m", "sh", "-c", hide, "sh"]
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mount namespaces")
    process = handmade.worker("apart", wrap=wrap)
    try:
        with handmade.client() as client:
            address = names(client)["apart"]
            with pytest.raises(
                ValueError, match=rf"^worker {address} has no file {tmp_path / 'scene.tif'} \(it"
            ):
                di.run(scene, seeded(N3), "o.tif", client=client, **JOB)
    finally:
        handmade.stop(process)
    assert sorted(path.name for path in tmp_path.glob("o.tif*")) == []


@pytest.fixture
def other_network():
    """A network namespace with a link to this one; the addresses here and there."""
    name, here, there = "daskinfer-test", "10.213.77.1", "10.213.77.2"
    commands = [
        f"ip netns add {name}",
        f"ip link add dinfer0 type veth peer name dinfer1 netns {name}",
        f"ip addr add {here}/30 dev dinfer0",
        "ip link set dinfer0 up",
        f"ip netns exec {name} ip addr add {there}/30 dev dinfer1",
        f"ip netns exec {name} ip link set dinfer1 up",
        f"ip netns exec {name} ip link set lo up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"this machine does not allow network namespaces: {error}")
        yield name, here, there
    finally:
        for command in (f"ip netns del {name}", "ip link del dinfer0"):
            with contextlib.suppress(OSError):
                subprocess.run(command.split(), check=False, capture_output=True)


@pytest.mark.slow
def test_workers_in_another_network_namespace(other_network, scene, tmp_path):
    name, here, there = other_network
    (tmp_path / "made").mkdir()
    with contextlib.closing(Handmade(tmp_path / "made", host=here)) as made:
        made.worker("away", "--host", there, wrap=["ip", "netns", "exec", name])
        with di.cluster(made.address, set_as_default=False) as client:
            assert next(iter(client.nthreads())).startswith(f"tcp://{there}:")
            assert di.run(scene, seeded(N3), "o.tif", client=client, **JOB).complete
    assert np.array_equal(pixels("o.tif"), pixels("expected.tif"))


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["gpus", "=1", "a b=1"])
def test_options_of_the_command_line_are_names_and_values(word):
    with pytest.raises(ValueError, match="write NAME=VALUE"):
        cluster_options("slurm", None, [word])


@pytest.mark.parametrize(("kind", "name"), [("processes", "n_workers"), ("cuda", "devices")])
def test_workers_are_named_as_the_kind_names_them(kind, name):
    assert cluster_options(kind, 3, []) == {name: 3}


def test_the_command_line_takes_a_file(scene, tmp_path, monkeypatch, factory, capsys):
    from daskinfer.cli import main

    file = written(tmp_path, cluster="local", arguments={"threads_per_worker": 2})
    option = ["--cluster-option", "dashboard_address=:0"]
    assert main(["run", scene, factory, "o.tif", "--cluster", file, *option]) == 0
    assert pixels("o.tif").shape == (1, 70, 90)
    capsys.readouterr()
    assert main(["run", scene, factory, "p.tif", "--cluster", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
