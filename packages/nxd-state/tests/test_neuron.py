import importlib.util
import os
import sys
from pathlib import Path

import pytest
from nxd_state.neuron import (
    compiler_flags,
    computes_on_neuron,
    extracting_graphs,
    neuron_settings,
    prepare_neuron,
    visible_cores,
)

ONE = {"PATH": "/bin"}
TORCHRUN = {
    "RANK": "37",
    "WORLD_SIZE": "64",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "32",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}


def test_one_process_needs_the_device_and_the_compilers_model_type():
    assert neuron_settings(ONE) == {"PJRT_DEVICE": "NEURON", "NEURON_CC_FLAGS": "--model-type=transformer"}


def test_ranks_of_torchrun_meet_at_its_first_host_and_get_their_cores_from_torch_xla():
    assert neuron_settings(TORCHRUN) == {
        "PJRT_DEVICE": "NEURON",
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.7:62182",
        "NEURON_CC_FLAGS": "--model-type=transformer",
    }


def test_ipv6_addresses_are_bracketed():
    settings = neuron_settings(TORCHRUN | {"MASTER_ADDR": "fd00::7"})

    assert settings["NEURON_RT_ROOT_COMM_ID"] == "[fd00::7]:62182"


def test_other_launchers_are_made_known_to_torch_xla():
    slurm = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}

    assert neuron_settings(slurm)["TORCHELASTIC_RUN_ID"] == "nxd"


def test_what_a_user_has_set_stays():
    given = TORCHRUN | {
        "PJRT_DEVICE": "NEURON",
        "NEURON_RT_ROOT_COMM_ID": "10.0.0.9:41000",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "1",
        "NEURON_COMPILE_CACHE_URL": "s3://bucket/mine",
        "NEURON_CC_FLAGS": "-O1 --model-type unet-inference",
        "FI_PROVIDER": "tcp",
    }

    settings = neuron_settings(given, compile_cache="/other", async_requests=7, efa=True)

    assert settings == {"FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}


def test_cache_requests_and_network_are_set_where_asked():
    settings = neuron_settings(TORCHRUN, compile_cache="/fsx/my cache", async_requests=3, efa=True)

    assert settings["NEURON_CC_FLAGS"] == "--model-type=transformer --cache_dir='/fsx/my cache'"
    assert settings["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "3"
    assert settings["FI_PROVIDER"] == "efa"


def test_one_host_needs_no_network_between_hosts():
    settings = neuron_settings(TORCHRUN | {"WORLD_SIZE": "32"}, efa=True)

    assert not any(name.startswith("FI_") for name in settings)


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", "--model-type=transformer --cache_dir=/c"),
        (" -O1 ", "-O1 --model-type=transformer --cache_dir=/c"),
        ("--model-type=generic", "--model-type=generic --cache_dir=/c"),
        ("--model-type generic --cache_dir /mine", "--model-type generic --cache_dir /mine"),
        ("--internal='--model-type=x'", "--internal='--model-type=x' --model-type=transformer --cache_dir=/c"),
    ],
)
def test_compiler_flags_are_added_and_never_replaced(given, flags):
    assert compiler_flags(given, model_type="transformer", compile_cache="/c") == flags


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"PJRT_DEVICE": "CPU"}, "PJRT_DEVICE=CPU asks for another device"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=64 without MASTER_ADDR; start the ranks with torchrun"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE=many must be an integer above 0"),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, "are 4 cores for LOCAL_WORLD_SIZE=32 ranks"),
        ({"NEURON_RT_VISIBLE_CORES": "0-7,4-11"}, "lists a core twice"),
        ({"NEURON_RT_VISIBLE_CORES": "all"}, "is not a list of cores"),
        ({"NEURONCORE_NUM_DEVICES": "32"}, "NEURONCORE_NUM_DEVICES=32 is not for processes that a launcher starts"),
        ({"NEURON_RT_ROOT_COMM_ID": "10.0.0.7"}, "is not host:port"),
        ({"NEURON_RT_ROOT_COMM_ID": "10.0.0.7:29500"}, "has the port of torchrun's own rendezvous"),
    ],
)
def test_what_would_fail_or_hang_on_the_device_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        neuron_settings(TORCHRUN | wrong)


def test_all_mistakes_come_in_one_error():
    wrong = TORCHRUN | {"PJRT_DEVICE": "TPU", "NEURON_RT_NUM_CORES": "2", "NEURON_RT_VISIBLE_CORES": "0,1"}

    with pytest.raises(ValueError, match=r"PJRT_DEVICE=TPU.*2 cores for.*NEURON_RT_NUM_CORES=2"):
        neuron_settings(wrong)


def test_cores_are_read_as_lists_and_ranges():
    assert visible_cores("0-2, 8,12-12") == (0, 1, 2, 8, 12)


@pytest.mark.parametrize(("value", "extracting"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_graph_extraction_is_noticed(value, extracting):
    assert extracting_graphs({} if value is None else {"NEURON_EXTRACT_GRAPHS_ONLY": value}) == extracting


@pytest.mark.parametrize(
    ("environment", "on_neuron"),
    [
        ({"PJRT_DEVICE": "NEURON"}, True),
        ({"PJRT_DEVICE": "CPU"}, False),
        ({"PJRT_DEVICE": "NEURON", "NXD_DEVICE": "cpu"}, False),
        ({"PJRT_DEVICE": "NEURON", "NXD_CPU_MODE": "1"}, False),
        ({}, Path("/dev/neuron0").exists() and importlib.util.find_spec("torch_xla") is not None),
    ],
)
def test_device_of_the_process_is_known_from_its_environment(environment, on_neuron):
    assert computes_on_neuron(environment) == on_neuron


@pytest.fixture
def own_environment(monkeypatch):
    """The process's environment without what these settings are made of; put back afterwards."""
    for name in (*TORCHRUN, "PJRT_DEVICE", "NEURON_CC_FLAGS", "NEURON_RT_ROOT_COMM_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_preparing_sets_the_process_environment(own_environment, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)

    added = prepare_neuron(model_type=None)

    assert added == {"PJRT_DEVICE": "NEURON"}
    assert os.environ["PJRT_DEVICE"] == "NEURON"
    assert prepare_neuron(model_type=None) == {}


def test_preparing_after_torch_xla_is_imported_is_refused(own_environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", sys)

    with pytest.raises(RuntimeError, match="would not see NEURON_CC_FLAGS, PJRT_DEVICE; call prepare_neuron"):
        prepare_neuron()
    assert "PJRT_DEVICE" not in os.environ
