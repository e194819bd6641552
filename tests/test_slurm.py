"""On a real SLURM: ``scripts/start_slurm.sh`` starts one of one node on the loopback.

The environment variable ``SLURM_CONF`` names its configuration; ``pytest -m slurm`` runs these.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rasterio
import yaml
from rio_cogeo.cogeo import cog_validate

import daskinfer as di
from daskinfer.cli import main
from daskinfer.demo import demo_model_path, demo_path
from daskinfer.monitor import ChunkDone
from survivors import Job

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("sbatch") is None, reason="needs scripts/start_slurm.sh"),
]

HERE = Path(__file__).parent
PATIENCE = 120
WORKER = {"cores": 1, "memory": "1GB", "queue": "main", "interface": "lo", "walltime": "00:10:00"}


def told(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def until(there, what, patience=PATIENCE):
    stop = time.monotonic() + patience
    while not (found := there()):
        if time.monotonic() > stop:
            raise TimeoutError(f"after {patience} s still no {what}; {told('squeue')}")
        time.sleep(0.2)
    return found


def state(number):
    shown = told("scontrol", "show", "job", number)
    return dict(word.partition("=")[::2] for word in shown.split())


def jobs_of_workers():
    return told("squeue", "-h", "-n", "daskinfer-worker", "-t", "R", "-o", "%i").split()


@pytest.fixture(autouse=True)
def _leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # jobs need the tests' models
    monkeypatch.chdir(tmp_path)
    yield
    subprocess.run(["scancel", "--user", str(os.getuid())], check=False)
    until(lambda: not told("squeue", "-h"), "end of all jobs")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The demo, run here."""
    path = tmp_path_factory.mktemp("here") / "clouds.tif"
    with di.cluster("local", dashboard_address=":0", set_as_default=False) as client:
        di.run(demo_path(), demo_model_path(), path, client=client)
    return pixels(path)


def pixels(path):
    with rasterio.open(path) as dataset:
        return dataset.read()


def written(folder, **submit):
    path = folder / "slurm.yaml"
    job = {"cores": 1, "memory": "1G", "walltime": "00:10:00", "queue": "main"} | submit
    path.write_text(
        yaml.safe_dump({"cluster": "slurm", "arguments": WORKER | {"jobs": 2}, "submit": job})
    )
    return str(path)


def test_workers_in_jobs_run_the_demo(tmp_path, expected):
    with di.cluster("slurm", jobs=2, dashboard_address=":0", set_as_default=False,
                    **WORKER) as client:  # fmt: skip
        client.wait_for_workers(2, timeout=PATIENCE)
        assert len(jobs_of_workers()) == 2
        assert set(client.nthreads().values()) == {3}
        assert di.run(demo_path(), demo_model_path(), "clouds.tif", client=client).complete
    assert cog_validate("clouds.tif", strict=True)[0]
    assert np.array_equal(pixels("clouds.tif"), expected)
    until(lambda: not jobs_of_workers(), "end of the workers")


def test_a_cancelled_worker_is_survived_and_replaced(tmp_path):
    job = Job(tmp_path, seconds=0.05).prepare()
    first, cancelled, seen = [], [], set()

    def cancel(event):
        if isinstance(event, ChunkDone):
            seen.add(event.worker)
            if len(first) < 30:
                first.append(event.chunk)
            elif not cancelled:
                cancelled.append(jobs_of_workers()[0])
                told("scancel", cancelled[0])

    with di.cluster("slurm", jobs=2, dashboard_address=":0", set_as_default=False,
                    **WORKER) as client:  # fmt: skip
        client.wait_for_workers(2, timeout=PATIENCE)
        report = job.run(client=client, callbacks=[cancel])
        assert cancelled
        until(lambda: len(set(jobs_of_workers()) - set(cancelled)) == 2, "job in its place")
    assert report.complete
    assert len(seen) >= 2
    # What was written is not computed again, but for what was on its way.
    assert sum(job.computed().values()) < 1.2 * 256
    job.assert_finished()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"queue": "nonsense"}, "invalid partition"), ({"gpus": 1}, "generic resource|gres"),
     ({"cores": 500}, "not available|CPU count")],
)  # fmt: skip
def test_what_slurm_does_not_have_is_refused_with_what_it_offers(wrong, message):
    with pytest.raises(ValueError, match=rf"(?is)SLURM would not run a worker: .*({message}).*"
                       r"It offers\n.*main\* 1 nodes, \d+ cores"):  # fmt: skip
        di.cluster("slurm", **WORKER | wrong)
    assert told("squeue", "-h") == ""


def submitted(capsys, *arguments):
    """Number of the job that the command submits, and its log."""
    assert main(["submit", *arguments]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    number, log = line.removeprefix("job ").split(", which writes ")
    return number, Path(log)


def test_a_submitted_run_makes_the_demo(tmp_path, expected, capsys):
    number, log = submitted(
        capsys, written(tmp_path), demo_path(), demo_model_path(), "clouds.tif", "--halo", "48"
    )
    until(lambda: state(number)["JobState"] in ("COMPLETED", "FAILED"), "end of the job", 180)
    assert state(number)["ExitCode"] == "0:0", log.read_text()
    assert log == tmp_path / f"clouds.tif.{number}.log"
    assert "daskinfer ended with 0" in log.read_text()
    assert cog_validate("clouds.tif", strict=True)[0]
    assert np.array_equal(pixels("clouds.tif"), expected)


def factory_in(job):
    """A module with the model of a job, which workers import."""
    (job.folder / "nets_of_job.py").write_text(
        f"from survivors import Logged\n\ndef make():\n    return Logged({str(job.log)!r}, 0.08)\n"
    )
    return "nets_of_job:make"


def slow_job(tmp_path, monkeypatch, capsys, **submit):
    """A submitted run of 256 chunks of 0.08 s, of which 20 are written."""
    job = Job(tmp_path).prepare()
    model = factory_in(job)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    number, log = submitted(
        capsys, written(tmp_path, **submit), job.source, model, job.output, "--output", "values",
        "--tile", "32", "--chunk", "32", "--batch-size", "1",
    )  # fmt: skip
    sys.modules.pop("nets_of_job", None)
    until(lambda: job.log.exists() and job.log.read_text().count("\n") >= 20, "chunks")
    return job, number, log


def test_a_job_that_runs_out_of_walltime_goes_on_in_the_next(tmp_path, monkeypatch, capsys):
    job, number, log = slow_job(tmp_path, monkeypatch, capsys)
    # As SLURM sends it before the walltime ends.
    told("scancel", "--batch", "--signal=USR1", number)
    until(lambda: int(state(number)["Restarts"]) == 1, "restart")
    until(lambda: state(number)["JobState"] in ("COMPLETED", "FAILED"), "end of the job", 180)
    assert state(number)["ExitCode"] == "0:0", log.read_text()
    text = log.read_text()
    assert "daskinfer ended with 143" in text
    assert "daskinfer ended with 0" in text
    # The second went on where the first was stopped.
    assert max(job.computed().values()) <= 2
    assert sum(job.computed().values()) < 1.1 * 256
    with rasterio.open(job.output) as dataset:
        assert np.array_equal(dataset.read(), job.expected)


def test_a_cancelled_job_stops_and_does_not_come_back(tmp_path, monkeypatch, capsys):
    job, number, _ = slow_job(tmp_path, monkeypatch, capsys)
    told("scancel", number)
    until(lambda: state(number)["JobState"] == "CANCELLED", "end of the job")
    until(lambda: not told("squeue", "-h"), "end of all jobs")
    assert state(number)["Restarts"] == "0"
    assert len(job.written()) >= 20
    assert not Path(job.output).exists()
