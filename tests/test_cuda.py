"""What only a CUDA device can show; skipped, with the reason, where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer.actor import InferenceActor
from daskinfer.forward import Forward
from models import in_new_process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = (2, 64, 64)


def devices(**spec):
    from daskinfer.cuda import CudaForward

    model = di.load_model(seeded(N3), scale=1e-4, output="values", **spec)
    return Forward(model), CudaForward(model, device="cuda:0")


def test_cuda_equals_the_cpu():
    on_cpu, on_cuda = devices()
    batch = noise(4, *SHAPE)
    valid = np.random.default_rng(1).random((4, 64, 64)) > 0.1
    np.testing.assert_allclose(on_cuda.run(batch, valid), on_cpu.run(batch, valid), atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32", "float32", "float64"])
def test_batches_of_every_dtype_are_collected_in_pinned_memory(dtype):
    on_cpu, on_cuda = devices()
    batch = on_cuda.allocate((2, *SHAPE), dtype)
    batch[:] = noise(2, *SHAPE, dtype=dtype)
    np.testing.assert_allclose(on_cuda.run(batch), on_cpu.run(batch), atol=1e-5)


def test_batches_that_overlap_on_the_device_come_back_as_their_own():
    on_cpu, on_cuda = devices()
    tiles = noise(64, *SHAPE)
    with InferenceActor(on_cuda, SHAPE, "uint16", batch_size=4) as actor:
        with actor.producer():
            futures = [actor.submit(tile) for tile in tiles]
        results = np.stack([future.result() for future in futures])
        metrics = actor.metrics
    np.testing.assert_allclose(results, on_cpu.run(tiles), atol=1e-5)
    assert 0 < metrics.busy <= metrics.elapsed


def test_a_batch_beyond_the_devices_memory_is_run_in_parts():
    _, on_cuda = devices()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (total - free + 2e9) / total))
    shape = (2, 2048, 2048)
    try:
        with InferenceActor(on_cuda, shape, "uint16", batch_size=32) as actor:
            with actor.producer():
                futures = [actor.submit(noise(*shape, seed=n)) for n in range(32)]
            results = [future.result() for future in futures]
            assert actor.metrics.shrunk
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert np.isfinite(results[0]).all()


def test_the_client_does_not_touch_cuda_in_a_run_on_processes(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 128, 128))
    told = in_new_process(
        """
        import sys, torch, daskinfer as di
        if __name__ == "__main__":
            net = torch.nn.Conv2d(2, 3, 3, padding=1)
            with di.cluster("processes", n_workers=1, dashboard_address=":0") as client:
                di.run(sys.argv[1], net, sys.argv[2], client=client)
            print(torch.cuda.is_initialized())
        """,
        source,
        tmp_path / "o.tif",
    )
    assert told.splitlines()[-1] == "False"
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.read().max() < 3
