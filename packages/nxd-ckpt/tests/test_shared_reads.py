"""`load(share_reads=True)`: what several ranks want alike is read once among them, and all get the same bits."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
from nxd_ckpt import CheckpointError, Shard, ShardedTensor, load, save
from nxd_ckpt.boxes import Box
from nxd_ckpt.shared_reads import assign_reads
from nxd_ckpt.testing import run_on_threads

WORLD_SIZE = 4


def saved_state():
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(5000, 1000, generator=generator),  # more than one message
        "rows": torch.randn(64, 40, generator=generator),
        "half": torch.randn(33, 3, generator=generator).to(torch.bfloat16),
        "flags": torch.randn(35, generator=generator) > 0,
        "phase": torch.randn(10, 7, generator=generator, dtype=torch.complex64),
        "small": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "twice": torch.arange(6),
        "converted": torch.randn(9, generator=generator),
        "own": torch.randn(WORLD_SIZE, 50, generator=generator),
    }


def destinations(rank):
    """Two replicas of two shards of "rows", one tensor of one's own, all else wanted by all ranks."""
    state = saved_state()
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    into["large"] = torch.zeros(1000, 5000).t()
    into["phase"] = torch.zeros(10, 7, dtype=torch.complex64).conj()
    into["half"] = torch.nn.Parameter(into["half"])
    into["converted"] = into["converted"].double()
    half = rank % 2
    expected = state | {"rows": state["rows"][32 * half : 32 * half + 32], "own": state["own"][rank : rank + 1]}
    into["rows"] = torch.zeros(32, 40)
    into["own"] = torch.zeros(1, 50)
    again = torch.zeros(6, dtype=torch.int64)
    wanted = into | {
        "rows": ShardedTensor((64, 40), [Shard(into["rows"], (32 * half, 0))]),
        "own": ShardedTensor((WORLD_SIZE, 50), [Shard(into["own"], (rank, 0))]),
        "twice": ShardedTensor((6,), [Shard(into["twice"], (0,)), Shard(again, (0,))]),
    }
    return wanted, into | {"again": again}, expected | {"again": state["twice"]}


def _join(rank, folder):
    store = dist.TCPStore("localhost", int((folder / "port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)


def _load(rank, folder, results):
    _join(rank, folder)
    preadv, bytes_read = os.preadv, []
    os.preadv = lambda *args: (bytes_read.append(preadv(*args)), bytes_read[-1])[1]
    wanted, filled, expected = destinations(rank)
    load(folder / "root", "good", into=wanted, convert_dtype=True, share_reads=True, verify=False)
    differing = [
        name for name in filled if not torch.equal(filled[name].detach(), expected[name].to(filled[name].dtype))
    ]
    reversed_group = dist.new_group([3, 1])  # its rank 0 is rank 1 of all
    try:
        group = reversed_group if rank in (1, 3) else dist.new_group([0, 2], use_local_synchronization=True)
        alone = torch.zeros(35, dtype=torch.bool)
        load(folder / "root", "good", into={"flags": alone}, strict=False, share_reads=True, process_group=group)
        differing += [] if torch.equal(alone, expected["flags"]) else ["flags in a group"]
        with pytest.raises(CheckpointError) as error:
            load(folder / "root", "bad", into={"w": torch.zeros(10)}, share_reads=True)
        results.put((rank, sum(bytes_read), differing, str(error.value)))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def results_of_ranks(tmp_path):
    save(tmp_path / "root", "good", saved_state())
    save(tmp_path / "root", "bad", {"w": torch.zeros(10)})
    (damaged,) = (tmp_path / "root" / "bad" / "data").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    processes = [spawn.Process(target=_load, args=(rank, tmp_path, results)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * WORLD_SIZE
    return sorted(results.get() for _ in processes)


def test_load_shared_reads_every_byte_once_and_gives_every_rank_the_same_bits(results_of_ranks):
    total = sum(tensor.nbytes for tensor in saved_state().values())

    assert [differing for _, _, differing, _ in results_of_ranks] == [[]] * WORLD_SIZE
    by_rank = [num_bytes for _, num_bytes, _, _ in results_of_ranks]
    assert total <= sum(by_rank) < total + 10_000, by_rank  # and the small loads after it
    errors = {error for *_, error in results_of_ranks}
    assert len(errors) == 1
    assert "failed on 1 of 4 ranks\n  rank 0: data file" in errors.pop()


def test_share_out_reads_gives_all_holders_about_the_same_to_read():
    box = Box((0,), (100,))
    names = [f"w{i}" for i in range(12)]
    wants = [dict.fromkeys(names, (torch.float32, [box])) for _ in range(3)]
    wants[2] = wants[2] | {"own": (torch.float32, [Box((0,), (400,))])}

    shared = assign_reads(wants)

    assert [sum(one.reader == rank for one in shared) for rank in range(3)] == [6, 5, 1]
    assert {one.name for one in shared} == set(names)


def test_load_share_reads_without_a_process_group_is_refused_but_for_one_rank(tmp_path):
    save(tmp_path, "a", {"w": torch.ones(4)})
    loaded = torch.zeros(4)

    load(tmp_path, into={"w": loaded}, share_reads=True)

    assert torch.equal(loaded, torch.ones(4))
    with pytest.raises(ValueError, match="so process_group must be a torch process group"):
        run_on_threads(lambda ranks: load(tmp_path, into={}, share_reads=True, process_group=ranks), 2)
