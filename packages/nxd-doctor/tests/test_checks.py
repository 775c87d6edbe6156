"""Each check with faked findings: what is right, what is wrong, and that it says how to mend it."""

import resource
import socket
import sys
from pathlib import Path

import pytest
from nxd_cli.installation import installed_versions
from nxd_doctor.installation import (
    Devices,
    Kernels,
    check_devices,
    check_import_name,
    check_kernels,
    check_neuron,
    check_own_packages,
    check_torch,
    check_torch_import,
    check_transformers,
    check_xla,
    ok,
    torch_import_failure,
)
from nxd_doctor.machine import (
    check_clock,
    check_collective,
    check_environment,
    check_locked_memory,
    check_loopback,
    check_open_files,
    check_rendezvous,
    check_shared_memory,
    check_writable_folder,
    seconds_for_ranks,
)

OWN = Path("/site/neuronx_distributed")
UNLIMITED = resource.RLIM_INFINITY
GIB = 1 << 30

CHECKS = {
    "no torch": (check_torch({}), "wrong", "pip install 'torch>="),
    "old torch": (check_torch({"torch": "2.1.2"}), "wrong", "pip install -U torch"),
    "new torch": (check_torch({"torch": "2.15.0+cpu"}), "ok", ""),
    "torch that is newer than tested": (check_torch({"torch": "2.16.0"}), "warning", "pip install 'torch==2."),
    "torch without a version": (check_torch({"torch": "(unknown version)"}), "wrong", "pip install -U torch"),
    "torch that works": (check_torch_import(""), "ok", ""),
    "torch that lacks a library": (check_torch_import("OSError: libcudart"), "wrong", "--force-reinstall torch"),
    "source tree": (check_own_packages({"torch": "2.9.1"}), "ok", ""),
    "one release": (check_own_packages({"nxd-state": "0.1.0", "nxd-ckpt": "0.1.4"}), "ok", ""),
    "two releases": (check_own_packages({"nxd-state": "0.1.0", "nxd-ckpt": "0.2.0"}), "wrong", "nxd-state nxd-ckpt"),
    "no xla": (check_xla({"torch": "2.9.1"}), "ok", ""),
    "xla of this torch": (check_xla({"torch": "2.9.1+cpu", "torch-xla": "2.9.0"}), "ok", ""),
    "xla of another torch": (check_xla({"torch": "2.10.0", "torch-xla": "2.9.0"}), "wrong", "'torch==2.9.*'"),
    "no neuron": (check_neuron({"torch": "2.9.1"}, has_device=False), "ok", ""),
    "neuron without compiler": (
        check_neuron({"torch": "2.9.1", "torch-neuronx": "2.9.0"}, has_device=True),
        "wrong",
        "install neuronx-cc from AWS's package index",
    ),
    "neuron of another torch": (
        check_neuron({"torch": "2.9.1", "torch-neuronx": "2.8.0", "neuronx-cc": "2.20"}, has_device=True),
        "wrong",
        "minor release",
    ),
    "no transformers": (check_transformers({}), "ok", ""),
    "old transformers": (check_transformers({"transformers": "4.30.2"}), "warning", "pip install -U transformers"),
    "our import name": (check_import_name(None, OWN, OWN), "ok", ""),
    "two owners": (check_import_name("neuronx-distributed 0.9", OWN, OWN), "wrong", "pip uninstall"),
    "shadowed": (check_import_name(None, Path("/home/neuronx_distributed"), OWN), "wrong", str(OWN)),
    "cpu": (check_devices(Devices("cpu", "", (), 0, ("gloo",))), "ok", ""),
    "asks for what is not there": (check_devices(Devices("", "no CUDA device", (), 0, ("gloo",))), "wrong", "unset"),
    "no gloo": (check_devices(Devices("cpu", "", (), 0, ())), "wrong", "distributed support"),
    "cuda without nccl": (check_devices(Devices("cuda", "", ("H200",), 0, ("gloo",))), "wrong", "NXD_DEVICE=cpu"),
    "cuda": (check_devices(Devices("cuda", "", ("H200",) * 8, 0, ("gloo", "nccl"))), "ok", ""),
    "idle neuron": (check_devices(Devices("cpu", "", (), 16, ("gloo",))), "warning", "torch-neuronx"),
    "few files": (check_open_files(256, 1 << 20), "wrong", "ulimit -n 4096"),
    "few files at most": (check_open_files(256, 256), "wrong", "hard limit must be at least 4096"),
    "some files": (check_open_files(1024, UNLIMITED), "warning", "ulimit -n 4096"),
    "many files": (check_open_files(UNLIMITED, UNLIMITED), "ok", ""),
    "container's shared memory": (check_shared_memory(63 << 20), "wrong", "--shm-size"),
    "little shared memory": (check_shared_memory(512 << 20), "warning", "--shm-size"),
    "no shared memory": (check_shared_memory(None), "warning", "mount"),
    "much shared memory": (check_shared_memory(16 * GIB), "ok", ""),
    "locked memory without RDMA": (check_locked_memory(64 << 10, 64 << 10, []), "ok", ""),
    "locked memory of a login": (check_locked_memory(64 << 10, UNLIMITED, ["mlx5_0"]), "warning", "ulimit -l"),
    "locked memory of a container": (check_locked_memory(64 << 10, 64 << 10, ["mlx5_0"]), "warning", "IPC_LOCK"),
    "all memory locked": (check_locked_memory(UNLIMITED, UNLIMITED, ["mlx5_0"]), "ok", ""),
    "time": (check_clock(1.8e9, (1.0, 1.1)), "ok", ""),
    "time before us": (check_clock(0.0, (1.0, 1.1)), "wrong", "set-ntp"),
    "time runs back": (check_clock(1.8e9, (2.0, 1.0)), "wrong", "restart"),
    "rendezvous left to torchrun": (check_rendezvous({}), "ok", ""),
    "half a rendezvous": (check_rendezvous({"MASTER_ADDR": "localhost"}), "wrong", "set MASTER_PORT"),
    "no port": (check_rendezvous({"MASTER_ADDR": "localhost", "MASTER_PORT": "http"}), "wrong", "from 1024"),
    "no host": (
        check_rendezvous({"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}),
        "wrong",
        "every host can reach",
    ),
    "ranks that add": (check_collective(0, ""), "ok", ""),
    "ranks that wait": (check_collective(None, ""), "wrong", "wait for each other"),
    "ranks that wait long": (
        check_collective(None, "", seconds_for_ranks({"NXD_TIMEOUT": "600"})),
        "wrong",
        "NXD_TIMEOUT=6000",
    ),
    "ranks that fail": (check_collective(1, "x\nRuntimeError: no route\nChildFailedError"), "wrong", "--show-output"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check_judges_and_says_how_to_mend(name):
    finding, status, mend = CHECKS[name]

    assert finding.status == status
    assert mend in finding.mend
    assert bool(finding.mend) == (status != "ok")
    assert finding.found


@pytest.mark.parametrize(
    ("kernels", "found"),
    [
        (
            Kernels("cuda", True, True, ("bfloat16",)),
            "on cuda: attention of cut sequences by flash, memory-efficient, flex; products of experts grouped in "
            "bfloat16",
        ),
        (
            Kernels("cuda", False, True, ()),
            "on cuda: attention of cut sequences by memory-efficient, flex; products of experts one by one",
        ),
        (
            Kernels("neuron", False, False, ()),
            "on neuron: attention of cut sequences by products of matrices; products of experts one by one",
        ),
    ],
)
def test_kernels_are_listed(kernels, found):
    assert check_kernels(kernels) == ok("kernels", found)


def test_failed_ranks_first_error_is_shown():
    assert check_collective(1, "x\n  RuntimeError: no route\n").found == "failed: RuntimeError: no route"


@pytest.mark.parametrize(
    ("environment", "statuses"),
    [
        ({}, ["ok"]),
        ({"NXD_DEVICE": "cpu", "NXD_CPU_MODE": "1"}, ["ok"]),
        ({"NXD_DEVICE": "cuda", "NXD_CPU_MODE": "1"}, ["wrong"]),
        ({"NXD_DEVICE": "", "NXD_CPU_MODE": "1"}, ["ok"]),
        ({"XLA_USE_BF16": "1", "NEURON_EXTRACT_GRAPHS_ONLY": "1"}, ["warning", "warning"]),
        ({"XLA_USE_BF16": "0", "NEURON_CC_FLAGS": ""}, ["ok"]),
        ({"NEURON_RT_NUM_CORES": "2", "NEURON_RT_VISIBLE_CORES": "0-1"}, ["warning"]),
    ],
)
def test_each_surprising_variable_has_a_finding(environment, statuses):
    assert [finding.status for finding in check_environment(environment)] == statuses


def test_port_in_use_on_this_host_is_wrong():
    assert check_loopback().status == "ok"
    with socket.create_server(("", 0)) as server:
        taken = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}

        assert "in use" in check_rendezvous(taken).found

    assert check_rendezvous(taken).status == "ok"


def test_folder_is_tried_and_left_as_it_was(tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    assert check_writable_folder(tmp_path / "checkpoints", free=100 * GIB).status == "ok"
    assert check_writable_folder(tmp_path, free=GIB).status == "warning"
    assert check_writable_folder(file).found == f"{file} is not a folder"
    assert sorted(tmp_path.iterdir()) == [file]


def test_folder_that_cannot_be_made_or_is_none_of_this_host_is_not_called_good(tmp_path):
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")

    assert check_writable_folder(dangling / "run").found == f"{dangling} is not a folder"
    assert "name too long" in check_writable_folder(tmp_path / ("a" * 300)).found
    assert check_writable_folder("s3://bucket/run").mend == "try it: nxd-ckpt list s3://bucket/run"


def test_folder_whose_parent_does_not_exist_is_wrong(tmp_path):
    finding = check_writable_folder(tmp_path / "unmounted" / "run")

    assert (finding.status, finding.found) == ("wrong", f"{tmp_path / 'unmounted'} does not exist")
    assert f"mkdir -p {tmp_path / 'unmounted'}" in finding.mend


def test_variables_of_the_ranks_are_listed():
    [finding] = check_environment({"RANK": "3", "MASTER_ADDR": "node1"})

    assert finding.found == "RANK=3, MASTER_ADDR=node1"


def test_folder_of_a_server_whose_clock_is_off_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("nxd_doctor.machine.time.time", lambda: 1.0e9)

    assert "s ahead of this host's" in check_writable_folder(tmp_path).found


def test_folder_that_refuses_a_file_is_wrong(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only file system")

    monkeypatch.setattr("os.replace", refuse)

    assert check_writable_folder(tmp_path).found == "cannot be written: read-only file system"


def test_half_an_installation_has_no_version_and_its_import_fails_with_a_reason(tmp_path, monkeypatch):
    (tmp_path / "half_installed-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)

    assert installed_versions(["half-installed"]) == {"half-installed": "(unknown version)"}
    assert torch_import_failure().startswith("ModuleNotFoundError: ")
