"""Devices: names, the plain stages, and torch on the CPU as one."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import daskinfer as di
from conftest import N3, noise, seeded
from daskinfer.device import Device, FunctionDevice, best_device, check_device
from daskinfer.forward import Forward


def test_names_of_torch_devices_are_taken():
    for name in ("auto", "cpu", "cuda", "cuda:3", "mps"):
        assert check_device(name) == name


def test_the_best_device_is_cuda_where_there_is_one():
    assert best_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert best_device("cuda:1") == "cuda:1"
    assert best_device(lambda inference: Device()) == "cpu"


def test_a_maker_that_cannot_be_hashed_is_refused():
    class Maker:
        __hash__ = None

        def __call__(self, inference):
            return Device()

    with pytest.raises(TypeError, match="unhashable"):
        check_device(Maker())


def test_results_of_a_function_are_in_memory_of_their_own():
    batch = noise(2, 1, 4, 4)
    result = FunctionDevice(lambda batch, valid: batch).run(batch)
    assert np.array_equal(result, batch)
    assert not np.may_share_memory(result, batch)


class Flattens(torch.nn.Module):
    """Uses `view`, which the channels-last layout does not allow."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 1)

    def forward(self, x):
        scores = self.conv(x)
        return scores.view(len(x), -1).view(scores.shape)


def test_networks_that_need_the_plain_layout_get_it():
    net = seeded(Flattens)
    batch = noise(2, 2, 8, 8, dtype="float32")
    with torch.inference_mode():
        expected = net(torch.from_numpy(batch)).numpy()
    forward = Forward(di.load_model(net, output="values"))
    for _ in range(2):
        np.testing.assert_allclose(forward.run(batch), expected, rtol=1e-5)


class Full(torch.nn.Module):
    """Raises what torch raises where memory ends."""

    def __init__(self, kind, text):
        super().__init__()
        self.kind, self.text = kind, text

    def forward(self, x):
        raise self.kind(self.text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 GiB"),
        (
            RuntimeError,
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
        ),
    ],
)
def test_torchs_ways_to_run_out_of_memory_are_memory_errors(kind, text):
    forward = Forward(di.load_model(Full(kind, text), output="values"))
    with pytest.raises(MemoryError, match="allocate"):
        forward.run(np.ones((1, 1, 4, 4), np.float32))


def test_other_errors_of_torch_stay_what_they_are():
    forward = Forward(di.load_model(Full(RuntimeError, "mat1 and mat2"), output="values"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        forward.run(np.ones((1, 1, 4, 4), np.float32))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_gives_the_same():
    net = seeded(N3)
    batch = noise(2, 2, 32, 32)
    plain, compiled = (
        Forward(di.load_model(net, scale=1e-4, output="values", compile=compile))
        for compile in (False, True)
    )
    np.testing.assert_allclose(compiled.run(batch), plain.run(batch), atol=1e-5)


def test_compile_is_on_or_off():
    with pytest.raises(ValueError, match="compile must be one of"):
        di.load_model(seeded(N3), compile="always")
