"""A cluster of Dask Gateway, whose workers are processes of this machine, named in a file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio
import yaml

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from handmade import HERE, end, until

PACKAGES = ("dask_gateway", "dask_gateway_server", "sqlalchemy")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in PACKAGES),
        reason="needs: pip install dask-gateway 'dask-gateway-server[local]'",
    ),
]

# In a process of its own: warnings of its client at the end are none of ours.
RUN = """
import sys
import daskinfer as di
from conftest import N3, seeded

if __name__ == "__main__":
    spec, scene, output = sys.argv[1:]
    with di.cluster(spec) as client:
        client.wait_for_workers(1, timeout=90)
        print(next(iter(client.nthreads())))
        print(di.run(scene, seeded(N3), output, client=client, tile=32, chunk=32).complete)
"""

CONFIG = """
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.Proxy.address = "127.0.0.1:{web}"
c.Proxy.tcp_address = "127.0.0.1:{tcp}"
c.UnsafeLocalBackend.clusters_directory = "{folder}"
c.ClusterConfig.scheduler_cmd = ["{python}", "-m", "dask", "scheduler"]
c.ClusterConfig.worker_cmd = ["{python}", "-m", "dask", "worker"]
c.ClusterConfig.environment = {{"PYTHONPATH": "{tests}"}}
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def accepts(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture
def spec(tmp_path):
    """A file that names a cluster of a gateway that runs."""
    web, tcp, folder = free_port(), free_port(), tmp_path / "gateway"
    folder.mkdir()
    (folder / "config.py").write_text(
        CONFIG.format(web=web, tcp=tcp, folder=folder, python=sys.executable, tests=HERE)
    )
    server = subprocess.Popen(
        [str(Path(sys.executable).parent / "dask-gateway-server"), "-f", str(folder / "config.py")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until(lambda: server.poll() is not None or (accepts(web) and accepts(tcp)), "gateway")
        path = tmp_path / "cluster.yaml"
        addresses = {"address": f"http://127.0.0.1:{web}",
                     "proxy_address": f"gateway://127.0.0.1:{tcp}"}  # fmt: skip
        told = {"cluster": "dask_gateway:GatewayCluster", "arguments": addresses, "scale": 1}
        path.write_text(yaml.safe_dump(told))
        yield str(path)
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        end(server)


def test_a_cluster_of_a_gateway_runs_a_run(spec, tmp_path):
    scene = write_raster(tmp_path / "scene.tif", noise(2, 70, 90))
    di.run(scene, seeded(N3), tmp_path / "expected.tif", tile=32, chunk=32)
    command = [sys.executable, "-c", RUN, spec, scene, str(tmp_path / "o.tif")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    address, complete = done.stdout.split()
    assert address.startswith("tls://")
    assert complete == "True"
    with rasterio.open(tmp_path / "o.tif") as one, rasterio.open(tmp_path / "expected.tif") as two:
        assert np.array_equal(one.read(), two.read())
