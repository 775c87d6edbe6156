"""What shared memory leaves behind, who may use it, and that results do not depend on timing."""

import os
import time
from contextlib import suppress
from pathlib import Path

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import shared_memory_bytes
from nxd_testing import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

SHARED = {"NXD_SHM": "1"}


def shared_group():
    nxd_state.initialize_model_parallel(dist.get_world_size())
    group = nxd_state.get_group("tp")
    assert group.shared_memory is not None
    return group


def descriptors_and_mappings():
    mapped = Path("/proc/self/maps").read_text().count("nxd_state")
    return len(os.listdir("/proc/self/fd")), mapped


def open_files():
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def test_nothing_has_a_name_or_keeps_a_descriptor_open():
    def job():
        files = set(os.listdir("/dev/shm"))
        group = shared_group()
        nxd_state.all_reduce(torch.ones(2**18), group)
        return set(os.listdir("/dev/shm")) - files, sum("memfd:nxd_state" in target for target in open_files())

    for names, descriptors in run_on_ranks(job, 2, env=SHARED):
        assert not names
        assert descriptors == 1  # the event count of the process


def test_repeated_start_and_end_gives_memory_back():
    def job():
        counts = []
        for _ in range(4):
            group = shared_group()
            nxd_state.all_reduce(torch.ones(2**18), group)
            nxd_state.barrier(group)
            del group
            nxd_state.destroy_model_parallel()
            counts.append(descriptors_and_mappings())
        return counts

    for counts in run_on_ranks(job, 2, env=SHARED):
        assert counts[3][1] <= counts[1][1]


def test_memory_of_a_group_is_reported_and_bounded():
    def job():
        return shared_memory_bytes(shared_group())

    assert run_on_ranks(job, 2, env=SHARED)[0] <= 14 * 2**20
    assert run_on_ranks(job, 4, env=SHARED)[0] <= 27 * 2**20
    assert shared_memory_bytes(nxd_state.Group.solo("tp")) == 0


@pytest.mark.parametrize("numel", [1000, 2**20 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_the_same_bits_on_every_rank_and_every_time(dtype, numel):
    def job():
        group = shared_group()
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
        sums = [nxd_state.all_reduce(mine, group) for _ in range(3)]
        parts = nxd_state.reduce_scatter(mine[: numel // 3 * 3], group)
        assert all(torch.equal(sums[0], total) for total in sums)
        return sums[0], nxd_state.all_gather(parts, group)

    (first, scattered), *others = run_on_ranks(job, 3, env=SHARED)

    for other, other_scattered in others:
        assert torch.equal(first, other)
        assert torch.equal(scattered, other_scattered)
    assert torch.equal(first[: len(scattered)], scattered)


def test_half_precision_sums_round_once():
    def job():
        group = shared_group()
        value = torch.full((5,), 1.0 if group.rank == 0 else 2.0**-8, dtype=torch.bfloat16)
        return nxd_state.all_reduce(value, group)[0].item()

    assert run_on_ranks(job, 4, env=SHARED) == [torch.tensor(1 + 3 * 2.0**-8).bfloat16().item()] * 4


def test_begun_operations_go_on_while_the_rank_does_something_else():
    def job():
        group = shared_group()
        store = dist.distributed_c10d._get_default_store()
        large = torch.full((2**22,), float(group.rank))
        if group.rank == 0:
            sent = nxd_state.isend(large, group, destination=1)
            added = nxd_state.all_reduce(large, group, async_op=True)
            store.get("received")  # outside of any collective, until the other rank has all of it
            sent.wait()
            return added.wait().unique().tolist()
        received = nxd_state.recv(torch.empty(2**22), group, source=0)
        added = nxd_state.all_reduce(large, group)
        store.set("received", "yes")
        assert not received.any()
        return added.unique().tolist()

    assert run_on_ranks(job, 2, env=SHARED, timeout=60) == [[1.0], [1.0]]


def test_default_device_of_the_caller_does_not_matter():
    def job():
        group = shared_group()
        with torch.device("meta"):
            mine = torch.full((2,), 1.0 + group.rank, device="cpu")
            results = [nxd_state.broadcast(mine, group, source=1), nxd_state.all_reduce(mine, group)]
            nxd_state.barrier(group)
            return [result.tolist() for result in results], nxd_state.all_gather_object("x", group)

    assert run_on_ranks(job, 2, env=SHARED) == [([[2.0, 2.0], [3.0, 3.0]], ["x", "x"])] * 2


class Recorder(TorchDispatchMode):
    """Names of the operations of torch that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_the_same_whoever_drives_an_operation():
    def job():
        group = shared_group()
        names = []
        for is_late in (False, True):
            with Recorder() as recorder:
                added = nxd_state.all_reduce_(torch.ones(3), group, async_op=True)
                gathered = nxd_state.all_gather(torch.ones(3), group, async_op=True)
                if is_late:  # without a collective, until the thread has done both
                    while not gathered._works[0].done:
                        time.sleep(1e-3)
                results = added.wait(), gathered.wait()
            assert [result.tolist() for result in results] == [[2.0] * 3, [1.0] * 6]
            names.append(recorder.names)
        return names

    for first, second in run_on_ranks(job, 2, env=SHARED, timeout=60):
        assert first == second
        assert not {"aten::add", "aten::copy_", "aten::cat"}.intersection(first)


def test_forked_child_is_told_that_the_group_is_its_parents():
    def job():
        group = shared_group()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                nxd_state.all_reduce(torch.ones(1), group)
            except nxd_state.SharedMemoryError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return os.read(read, 1000).decode(), nxd_state.all_reduce(torch.ones(1), group).item()

    for message, total in run_on_ranks(job, 2, env=SHARED):
        assert "belongs to the process that this one was forked from" in message
        assert total == 2.0


def test_inference_mode_and_gradients_leave_later_calls_alone():
    def job():
        group = shared_group()
        weight = torch.ones(4, requires_grad=True)
        with torch.inference_mode():
            first = nxd_state.all_reduce(torch.ones(4), group).sum().item()
        results = [nxd_state.all_reduce(weight, group), nxd_state.all_gather(weight, group)]
        assert not any(result.requires_grad for result in results)
        return first, (weight * results[0]).sum().item()

    assert run_on_ranks(job, 2, env=SHARED) == [(8.0, 8.0)] * 2
