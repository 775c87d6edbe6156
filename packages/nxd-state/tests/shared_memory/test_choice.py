"""Which groups and tensors go through shared memory; all others go over torch.distributed, whatever the reason."""

import errno
import logging.handlers
import os
import sys
from unittest import mock

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state.collectives.choice import eager_transport_of, host_transport_of, transport_of
from nxd_state.shared_memory import connection, memory
from nxd_testing import run_on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore


def shares_and_adds(*axes):
    """Whether the group shares memory, and the sum of a one of each rank."""
    group = nxd_state.get_group(*axes)
    return group.shared_memory is not None, nxd_state.all_reduce(torch.ones(1), group).item()


def logged_while_initializing(tensor_model_parallel_size):
    handler = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("nxd_state")
    logger.addHandler(handler)
    try:
        nxd_state.initialize_model_parallel(tensor_model_parallel_size)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


@pytest.mark.parametrize(("switch", "is_shared"), [(None, True), ("1", True), ("0", False)])
def test_memory_is_shared_unless_switched_off(switch, is_shared):
    def job():
        os.environ.pop("NXD_SHM", None)
        if switch is not None:
            os.environ["NXD_SHM"] = switch
        nxd_state.initialize_model_parallel(2)
        return shares_and_adds("tp")

    assert run_on_ranks(job, 2) == [(is_shared, 2.0)] * 2


def test_switch_of_another_value_raises_and_says_which_there_are():
    def job():
        with pytest.raises(
            ValueError, match=r"unknown NXD_SHM='off'; use 1 to let ranks of one host share memory, or 0"
        ):
            nxd_state.initialize_model_parallel(2)

    run_on_ranks(job, 2, env={"NXD_SHM": "off"})


def test_switched_off_on_one_rank_is_off_on_all():
    def job():
        os.environ["NXD_SHM"] = "0" if dist.get_rank() == 1 else "1"
        nxd_state.initialize_model_parallel(dist.get_world_size())
        return shares_and_adds("tp")

    assert run_on_ranks(job, 3) == [(False, 3.0)] * 3


def test_ranks_whose_memory_is_laid_out_differently_share_none():
    def job():
        other = [0] if dist.get_rank() == 1 else connection.LAYOUT_FORMAT
        with mock.patch.object(connection, "LAYOUT_FORMAT", other):
            nxd_state.initialize_model_parallel(2)
        return shares_and_adds("tp")

    assert run_on_ranks(job, 2, env={"NXD_SHM": "1"}) == [(False, 2.0)] * 2


def test_groups_across_hosts_share_none_and_those_within_one_do():
    def job():
        name = f"host of ranks {dist.get_rank() // 2 * 2} and the next"
        with mock.patch.object(connection, "host_identity", return_value=name):
            lines = logged_while_initializing(2)
        return lines, shares_and_adds("tp"), shares_and_adds("dp"), shares_and_adds("pp", "dp", "cp", "tp")

    assert run_on_ranks(job, 4, env={"NXD_SHM": "1"}) == [([], (True, 2.0), (False, 2.0), (False, 4.0))] * 4


def refuse(*arguments, **keywords):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    "call",
    ["os.memfd_create", "nxd_state.shared_memory.memory._map", "nxd_state.shared_memory.wakeups.futex_wait"],
    ids=["no memory is made", "none is mapped", "none can be slept on"],
)
def test_rank_that_cannot_share_says_so_in_one_line_and_all_go_on_over_gloo(call):
    def job():
        if dist.get_rank() != 1:
            lines = logged_while_initializing(2)
        else:
            with mock.patch(call, refuse):
                lines = logged_while_initializing(2)
        return lines, shares_and_adds("tp"), shares_and_adds("dp")

    by_rank = run_on_ranks(job, 4, env={"NXD_SHM": "1"})

    assert [found[0] for found in by_rank[:1] + by_rank[2:]] == [[]] * 3
    (line,) = by_rank[1][0]
    assert "no memory can be shared here: [Errno 12] Cannot allocate memory. NXD_SHM=0" in line
    assert [found[1][0] for found in by_rank] == [False, False, True, True]  # rank 1's group
    assert [found[2][0] for found in by_rank] == [True, False, True, False]
    assert {found[axis][1] for found in by_rank for axis in (1, 2)} == {2.0}


def test_rank_that_may_not_map_its_peers_says_so_in_one_line_for_all_its_groups():
    def job():
        with mock.patch.object(connection, "map_segment", refuse):
            lines = logged_while_initializing(2)
        return len(lines), shares_and_adds("tp"), shares_and_adds("dp")

    assert run_on_ranks(job, 4, env={"NXD_SHM": "1"}) == [(1, (False, 2.0), (False, 2.0))] * 4


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "x86_64"), ("win32", "AMD64")])
def test_other_systems_share_none(system, machine, monkeypatch):
    monkeypatch.setenv("NXD_SHM", "1")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(memory.platform, "machine", lambda: machine)

    assert memory.host_identity() is None


def test_tensor_goes_through_memory_only_if_it_lies_on_the_cpu_and_has_values():
    def job():
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        with FakeTensorMode():
            fake = torch.ones(2)
        tensors = [torch.ones(2), torch.ones(2, device="meta"), fake]
        return [
            type(choose(tensor, group)).__name__ for choose in (transport_of, eager_transport_of) for tensor in tensors
        ]

    assert run_on_ranks(job, 2, env={"NXD_SHM": "1"}) == [["SharedMemoryTransport", *["C10dTransport"] * 2] * 2] * 2


@pytest.mark.parametrize(("switch", "eager"), [("1", "SharedMemoryTransport"), ("0", "C10dTransport")])
def test_graph_that_torch_compiles_has_its_own_transport_and_messages_and_barriers_do_not(switch, eager):
    def job():
        nxd_state.initialize_model_parallel(2)
        group, tensor = nxd_state.get_group("tp"), torch.ones(2)
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            chosen = transport_of(tensor, group), eager_transport_of(tensor, group), host_transport_of(group)
        return [type(transport).__name__ for transport in chosen]

    assert run_on_ranks(job, 2, env={"NXD_SHM": switch}) == [["FunctionalTransport", eager, eager]] * 2


def test_groups_of_another_backend_than_gloo_share_none(monkeypatch):
    monkeypatch.setenv("NXD_SHM", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        nxd_state.initialize_model_parallel(2)
        assert nxd_state.get_group("tp").shared_memory is None
    finally:
        nxd_state.destroy_model_parallel()
        dist.destroy_process_group()
