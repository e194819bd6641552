"""The script of a batch job: what is in it, and what it does when it is run and signalled.

SLURM itself is played by commands of the same names; tests/test_slurm.py has a real one.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import noise, write_raster
from daskinfer.cli import main
from daskinfer.submit import BatchJob, batch_job, log_of, submit
from handmade import until


def spec(folder, **told):
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"cluster": "processes", "submit": told}))
    return str(path)


def directives(script):
    """Options of sbatch, as it reads them."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]
    return dict(word.partition("=")[::2] for word in words)


def command(script):
    """Words of the command that runs daskinfer, as the shell reads them."""
    (line,) = [line for line in script.splitlines() if " -m daskinfer run " in line]
    return shlex.split(line.removesuffix("&"))


# --- what is in it --------------------------------------------------------------------------------


def test_paths_are_absolute_and_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my scene's.tif", "unet $1.pt2"):
        (tmp_path / name).touch()
    options = ["--class-names", "clear sky,cloud;rm -rf", "--halo", "48"]
    script = batch_job(spec(tmp_path), "my scene's.tif", "unet $1.pt2", "a b.tif", options)
    assert command(script) == [
        sys.executable, "-m", "daskinfer", "run",
        str(tmp_path / "my scene's.tif"), str(tmp_path / "unet $1.pt2"), str(tmp_path / "a b.tif"),
        "--cluster", str(tmp_path / "cluster.yaml"), *options,
    ]  # fmt: skip
    told = directives(script)
    assert told["--output"] == str(tmp_path / "a b.tif.%j.log")
    assert told["--chdir"] == str(tmp_path)
    assert log_of(script, "17") == str(tmp_path / "a b.tif.17.log")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    "name", ["s3://bucket/scene.tif", "/vsizip/a.zip/b.tif", "nets:make", "https://host/scene.tif"]
)
def test_what_is_no_file_stays_as_it_is(tmp_path, name):
    script = batch_job(spec(tmp_path), name, name, "s3://bucket/map.tif")
    assert command(script)[4:7] == [name, name, "s3://bucket/map.tif"]
    assert directives(script)["--output"] == str(Path.cwd() / "map.tif.%j.log")


def test_the_job_is_what_the_file_says(tmp_path):
    told = {"walltime": "2-00", "cores": 4, "memory": "8G", "queue": "long", "account": "maps",
            "notice": 300, "name": "clouds", "log": str(tmp_path / "log.txt"),
            "directives": ["--qos=high", "--mail-type=END"], "setup": ["module load gdal"],
            "python": "/opt/venv/bin/python"}  # fmt: skip
    script = batch_job(spec(tmp_path, **told), "a.tif", "m:f", "o.tif")
    expected = {
        "--time": "2-00", "--cpus-per-task": "4", "--mem": "8G", "--partition": "long",
        "--account": "maps", "--signal": "B:USR1@300", "--job-name": "clouds", "--qos": "high",
        "--mail-type": "END", "--output": str(tmp_path / "log.txt"), "--requeue": "",
        "--open-mode": "append",
    }  # fmt: skip
    assert expected.items() <= directives(script).items()
    assert "\nmodule load gdal\n" in script
    assert command(script)[0] == "/opt/venv/bin/python"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"wall": 1}, "submit: unknown key 'wall'; known: walltime, cores, memory"),
        ({"setup": "module load gdal"}, "setup must be a list of lines"),
        ({"directives": [1]}, "directives must be a list of lines"),
        ({"queue": "a\n#SBATCH --exclusive"}, "queue must be one line"),
        ({"name": 'a"b'}, "sbatch takes no quotes"),
    ],
)
def test_what_the_file_gets_wrong_is_said(tmp_path, told, message):
    with pytest.raises(ValueError, match=message):
        batch_job(spec(tmp_path, **told), "a.tif", "m:f", "o.tif")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--cluster", "local"], "a job takes its cluster"), (["--cluster=cuda"], "takes its cluster"),
     (["--overwrite"], "would begin anew each time")],
)  # fmt: skip
def test_options_that_a_job_cannot_have_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        batch_job(spec(tmp_path), "a.tif", "m:f", "o.tif", options)


def test_a_file_without_the_key_makes_a_job_all_the_same(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: processes")
    told = directives(batch_job(path, "a.tif", "m:f", "o.tif"))
    assert told["--time"] == BatchJob().walltime
    assert "--partition" not in told


# --- what it does ---------------------------------------------------------------------------------


def executable(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


RUN = """#!/usr/bin/env bash
trap 'echo TERM >> {told}; exit {stopped}' TERM
echo started >> {told}
[ {code} = wait ] || exit {code}
while :; do read -rt 0.05 <> <(:); done
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Runs the script of a job whose run ends with `code`, or waits to be stopped."""
    folder = tmp_path / "bin"
    folder.mkdir()
    told = tmp_path / "told"
    executable(folder / "scontrol", f"#!/bin/sh\necho scontrol $* >> {told}\n")
    # It is SLURM that ends the job.
    executable(folder / "sleep", "#!/bin/sh\n")

    def play(code, stopped=143, signals=()):
        run = executable(tmp_path / "run", RUN.format(told=told, code=code, stopped=stopped))
        script = batch_job(spec(tmp_path, python=run), "a.tif", "m:f", "o.tif")
        path = f"{folder}:{os.environ['PATH']}"
        job = subprocess.Popen(
            ["bash", "-c", script], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PATH": path, "SLURM_JOB_ID": "17"},
        )  # fmt: skip
        until(lambda: told.exists() and "started" in told.read_text(), "start of the run")
        for number in signals:
            job.send_signal(number)
        out, _ = job.communicate(timeout=60)
        return job.returncode, told.read_text().split("\n")[1:-1], out

    return play


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_code_of_the_run_is_that_of_the_job(played, code):
    assert played(code) == (code, [], f"daskinfer ended with {code}\n")


def test_before_the_walltime_ends_the_run_is_stopped_and_the_job_queued_again(played):
    code, told, _ = played("wait", signals=[signal.SIGUSR1])
    assert (code, told) == (143, ["TERM", "scontrol requeue 17"])


def test_a_cancelled_job_is_stopped_and_not_queued_again(played):
    code, told, _ = played("wait", signals=[signal.SIGTERM])
    assert (code, told) == (143, ["TERM"])


def test_a_run_that_was_complete_when_it_was_stopped_is_not_queued_again(played):
    code, told, _ = played("wait", stopped=0, signals=[signal.SIGUSR1])
    assert (code, told) == (0, ["TERM"])


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def ready(tmp_path, factory, monkeypatch):
    """Arguments of a run that is possible."""
    monkeypatch.chdir(tmp_path)
    write_raster("scene.tif", noise(2, 40, 40))
    return [spec(tmp_path), "scene.tif", factory, "o.tif"]


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_dry_run_prints_the_script_and_submits_nothing(ready, place, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    dry, options = ["--dry-run"], ["--halo", "8"]
    arguments = [*dry, *ready, *options] if place == "first" else [*ready, *options, *dry]
    assert main(["submit", *arguments]) == 0
    assert capsys.readouterr().out == batch_job(*ready, options)


def sbatch(folder, monkeypatch, text):
    folder.mkdir()
    executable(folder / "sbatch", f"#!/bin/sh\n{text}\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_job_is_submitted_and_its_log_named(ready, tmp_path, monkeypatch, capsys):
    sbatch(
        tmp_path / "bin", monkeypatch, f"echo $* > {tmp_path}/told; cat > {tmp_path}/got; echo 42"
    )
    assert main(["submit", *ready]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"job 42, which writes {tmp_path}/o.tif.42.log"
    assert "receptive field" in out
    assert (tmp_path / "told").read_text() == "--parsable\n"
    assert (tmp_path / "got").read_text() == batch_job(*ready)


def test_what_slurm_says_against_a_job_is_passed_on(tmp_path, monkeypatch):
    sbatch(tmp_path / "bin", monkeypatch, "cat > /dev/null; echo no such partition >&2; exit 1")
    with pytest.raises(ValueError, match="SLURM does not take the job: no such partition"):
        submit("#!/bin/sh\n")


def test_without_slurm_nothing_is_submitted(ready, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", *ready]) == 2
    assert "no sbatch on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(0, "no.yaml", "no.yaml"), (1, "no.tif", "no.tif"), (3, "no/o.tif", "does not exist")],
)
def test_what_cannot_run_is_not_submitted(
    ready, place, value, message, tmp_path, monkeypatch, capsys
):
    sbatch(tmp_path / "bin", monkeypatch, f"touch {tmp_path}/submitted; echo 42")
    ready[place] = value
    assert main(["submit", *ready]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "submitted").exists()


def test_options_are_those_of_run(ready, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["submit", *ready, "--no-such-option"])
    assert stop.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err
