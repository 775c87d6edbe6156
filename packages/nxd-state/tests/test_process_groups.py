"""Ending torch.distributed with the program that has it, which runs in processes of its own here."""

import socket

import nxd_state
import pytest
from nxd_testing import run_torchrun

ENDS_WITHOUT_DESTROY = """
import atexit, sys
import nxd_state, torch
import torch.distributed as dist

def report():  # registered before the hook of nxd_state, hence called after it
    sys.stdout.write(f"left at exit: {dist.is_initialized()}, {nxd_state.model_parallel_is_initialized()}\\n")

atexit.register(report)
nxd_state.initialize_model_parallel(tensor_model_parallel_size=2)
total = nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group())
sys.stdout.write(f"total: {total.item()}\\n")
"""


def test_program_that_ends_without_destroy_gives_up_its_groups_and_leaves_quietly(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(ENDS_WITHOUT_DESTROY)

    returncode, stdout, stderr = run_torchrun([str(script)], 2)

    assert (returncode, stderr) == (0, "")
    assert stdout.count("total: 2.0") == 2
    assert stdout.count("left at exit: False, False") == 2


FAILS_ON_ONE_RANK = """
import os, sys
import nxd_state, torch
import torch.distributed as dist

class Lost(dist.Store):
    def set(self, key, value):
        raise nxd_state.PeerError("a rank was lost meanwhile")

if os.environ["RANK"] == "1":
    try:
        nxd_state.initialize_model_parallel(store=Lost())
    except nxd_state.PeerError as error:
        sys.stdout.write(f"failed: {error}\\n")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
nxd_state.initialize_model_parallel(store=dist.PrefixStore("second", store))
sys.stdout.write(f"total: {nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group()).item()}\\n")
nxd_state.destroy_model_parallel()
"""


def test_ranks_whose_first_start_has_failed_meet_those_whose_has_not(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_TIMEOUT", "20")
    script = tmp_path / "program.py"
    script.write_text(FAILS_ON_ONE_RANK)

    returncode, stdout, stderr = run_torchrun([str(script)], 2)

    assert (returncode, stderr) == (0, "")
    assert stdout.count("failed: a rank was lost meanwhile") == 1
    assert stdout.count("total: 2.0") == 2


def test_start_with_a_master_port_that_is_taken_names_the_port(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        launch = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0}
        for name, value in launch.items():
            monkeypatch.setenv(name, str(value))

        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is taken on this host; set another one"):
            nxd_state.initialize_mesh(nxd_state.ParallelDegrees())


@pytest.mark.parametrize("host", ["no such host", "a" * 70])
def test_start_with_a_master_address_that_no_name_server_knows_names_it(monkeypatch, host):
    launch = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": 29500, "LOCAL_RANK": 1}
    for name, value in (launch | {"NXD_TIMEOUT": "0.1"}).items():
        monkeypatch.setenv(name, str(value))

    with pytest.raises(ValueError, match=f"MASTER_ADDR={host} has no address on this host: .*; set it to a name"):
        nxd_state.initialize_model_parallel()
