"""Which device is picked, by environment and by what is installed."""

import importlib.util
import types
from importlib.machinery import ModuleSpec

import nxd_state
import pytest
import torch
from nxd_state import device


@pytest.fixture
def machine(monkeypatch):
    """Sets what this machine seems to have: nothing but a CPU, unless said otherwise."""
    for name in ("NXD_DEVICE", "NXD_CPU_MODE", "PJRT_DEVICE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def has(*, accelerator=None, count=1, torch_xla=False, neuron=False):
        found = None if accelerator is None else types.SimpleNamespace(type=accelerator)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        spec = ModuleSpec("torch_xla", None, origin="torch_xla/__init__.py") if torch_xla else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch_xla" else None)
        monkeypatch.setattr(device.Path, "exists", lambda path: neuron and str(path) == "/dev/neuron0")
        return monkeypatch

    has()
    return has


@pytest.mark.parametrize(
    ("has", "environment", "expected"),
    [
        ({}, {}, "cpu"),
        ({"accelerator": "cuda"}, {}, "cuda"),
        ({"accelerator": "cuda"}, {"NXD_DEVICE": "cpu"}, "cpu"),
        ({"accelerator": "cuda"}, {"NXD_CPU_MODE": "1"}, "cpu"),
        ({"accelerator": "cuda"}, {"NXD_CPU_MODE": "0"}, "cuda"),
        ({"accelerator": "cuda", "torch_xla": True}, {"PJRT_DEVICE": "CPU"}, "xla"),
        ({"accelerator": "cuda", "torch_xla": True}, {"NXD_DEVICE": "cuda", "PJRT_DEVICE": "CPU"}, "cuda"),
        ({"torch_xla": True}, {}, "cpu"),
        ({"torch_xla": True}, {"NXD_DEVICE": "xla"}, "xla"),
        ({"torch_xla": True, "neuron": True}, {}, "xla"),
        ({"torch_xla": True, "neuron": True}, {"NXD_CPU_MODE": "1"}, "cpu"),
        ({"neuron": True}, {}, "cpu"),
        ({"accelerator": "mps"}, {}, "cpu"),
        ({"accelerator": "neuron", "neuron": True}, {}, "neuron"),
        ({"accelerator": "neuron"}, {"NXD_DEVICE": "neuron"}, "neuron"),
        ({"accelerator": "neuron", "torch_xla": True, "neuron": True}, {}, "xla"),
    ],
)
def test_device_type_follows_environment_then_what_is_there(machine, has, environment, expected):
    monkeypatch = machine(**has)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert nxd_state.device_type() == expected


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"NXD_DEVICE": "tpu"}, ValueError, "unknown NXD_DEVICE='tpu'; use one of cpu, cuda, neuron, xla"),
        ({"NXD_DEVICE": "cuda"}, RuntimeError, "torch sees no CUDA device; check the driver or use NXD_DEVICE=cpu"),
        ({"NXD_DEVICE": "neuron"}, RuntimeError, "NXD_DEVICE=neuron needs the native torch-neuronx .*NXD_DEVICE=cpu"),
        ({"NXD_DEVICE": "xla"}, RuntimeError, "NXD_DEVICE=xla needs torch-xla; install torch_xla"),
        ({"PJRT_DEVICE": "NEURON"}, RuntimeError, "PJRT_DEVICE=NEURON asks for torch-xla, .*unset PJRT_DEVICE"),
    ],
)
def test_device_that_is_not_there_raises_what_to_do(machine, environment, error, message):
    monkeypatch = machine()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(error, match=message):
        nxd_state.device_type()


def test_get_device_on_cpu_is_the_cpu(machine):
    assert nxd_state.get_device() == torch.device("cpu")


@pytest.mark.parametrize(("count", "index"), [(8, 3), (1, 0)])
def test_get_device_on_an_accelerator_is_that_of_the_local_rank_or_the_only_one(machine, count, index):
    machine(accelerator="cuda", count=count).setenv("LOCAL_RANK", "3")

    assert nxd_state.get_device() == torch.device("cuda", index)


def test_get_device_of_a_rank_too_many_says_how_many_fit(machine):
    machine(accelerator="cuda", count=2).setenv("LOCAL_RANK", "2")

    with pytest.raises(RuntimeError, match="this host has 2 cuda devices; start at most 2 ranks on it"):
        nxd_state.get_device()


def test_xla_device_and_step_boundary_come_from_torch_xla(machine, monkeypatch):
    machine(torch_xla=True).setenv("NXD_DEVICE", "xla")
    boundaries = []
    torch_xla = types.SimpleNamespace(device=lambda: "xla:0", sync=lambda: boundaries.append("sync"))
    monkeypatch.setitem(__import__("sys").modules, "torch_xla", torch_xla)

    found = nxd_state.get_device()
    nxd_state.step_boundary()

    assert found == torch.device("xla", 0)
    assert boundaries == ["sync"]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (torch.device("xla", 0), True),
        ("xla", True),
        (torch.device("cpu"), False),
        (torch.device("cuda", 1), False),
        ("meta", False),
        (torch.ones(1), False),
        (torch.nn.Parameter(torch.ones(1, device="meta")), False),
    ],
)
def test_is_lazy_device_is_true_of_xla_only(what, expected):
    assert nxd_state.is_lazy_device(what) is expected


def test_is_lazy_device_without_argument_is_asked_of_the_device_of_this_process(machine):
    machine(torch_xla=True)
    assert not nxd_state.is_lazy_device()

    machine(torch_xla=True).setenv("NXD_DEVICE", "xla")
    assert nxd_state.is_lazy_device()


@pytest.mark.parametrize(("kind", "expected"), [("cpu", True), ("cuda", True), ("xla", False)])
def test_float64_is_computed_everywhere_but_on_xla(kind, expected):
    assert nxd_state.has_float64(torch.device(kind)) is expected


@pytest.mark.parametrize(("kind", "expected"), [("cpu", torch.float64), ("meta", torch.float32)])
def test_widest_float_is_float64_where_it_is_computed(kind, expected):
    assert nxd_state.widest_float(torch.device(kind)) is expected


@pytest.mark.parametrize(("what", "expected"), [(torch.ones(1), True), ("cpu", True), (torch.device("meta"), False)])
def test_is_cpu_is_true_of_the_cpu_only(what, expected):
    assert nxd_state.is_cpu(what) is expected


def test_autocast_devices_are_those_on_which_it_is_enabled():
    assert nxd_state.autocast_devices() == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nxd_state.autocast_devices() == ("cpu",)


def test_peak_memory_of_the_cpu_is_not_counted_by_torch():
    assert nxd_state.peak_memory_bytes(torch.device("cpu")) is None


def test_step_boundary_on_cpu_does_nothing(machine):
    assert nxd_state.step_boundary() is None
