"""Gathering through a torch store: values in order, nobody waits for ever, and the missing rank is named."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from nxd_ckpt import CheckpointError, list_checkpoints, load, save
from nxd_ckpt.store_coordinator import StoreCoordinator


def on_threads(function, world_size, timeout=60.0):
    """What each rank returned or raised; a rank is a thread of its own, over one store."""
    store = dist.HashStore()
    outcomes = [None] * world_size

    def run(rank):
        try:
            outcomes[rank] = function(StoreCoordinator(store, rank, world_size, prefix="test", timeout=timeout))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, store


def test_gather_gives_every_rank_all_values_in_order_round_after_round():
    large = os.urandom(9 * 2**20)  # more than a store takes at once

    def value(rank, i):
        return rank, i, large if (rank, i) == (1, 0) else b""

    outcomes, _ = on_threads(lambda ranks: [ranks.all_gather_object(value(ranks.rank, i)) for i in range(3)], 3)

    assert outcomes == [[[value(rank, i) for rank in range(3)] for i in range(3)]] * 3


def test_gather_leaves_only_the_last_rounds_keys_in_the_store():
    def count_keys(num_rounds):
        def gather(ranks):
            for i in range(num_rounds):
                ranks.all_gather_object(i)

        return on_threads(gather, 2)[1].num_keys()

    assert count_keys(2) == count_keys(9)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_gather_rank_that_does_not_answer_is_named_by_all_others(absent):
    def gather(ranks):
        return None if ranks.rank == absent else ranks.all_gather_object("here")

    outcomes, _ = on_threads(gather, 3, timeout=0.3)

    present = [outcome for rank, outcome in enumerate(outcomes) if rank != absent]
    assert all(isinstance(outcome, CheckpointError) for outcome in present)
    assert {str(outcome) for outcome in present} == {
        f"no answer within 0.3 seconds from rank {absent} of 3; it is stopped, gone, or needs longer than timeout="
    }


def test_gather_rank_that_comes_too_late_raises_the_same():
    others_gave_up = threading.Event()

    def gather(ranks):
        if ranks.rank == 1:
            others_gave_up.wait()
        try:
            return ranks.all_gather_object("here")
        finally:
            others_gave_up.set()

    outcomes, _ = on_threads(gather, 2, timeout=0.3)

    assert str(outcomes[0]) == str(outcomes[1])
    assert "from rank 1 of 2" in str(outcomes[1])


def test_gather_after_a_session_that_a_rank_left_halfway_is_in_step_again():
    def gather(ranks):
        ranks.begin(0.3)
        if ranks.rank == 0:
            with pytest.raises(CheckpointError, match="from rank 1 of 2"):
                ranks.all_gather_object("first")
        ranks.begin(60.0)
        return ranks.all_gather_object(f"second {ranks.rank}")

    outcomes, _ = on_threads(gather, 2)

    assert outcomes == [["second 0", "second 1"]] * 2


def test_gather_value_that_cannot_be_sent_raises_on_all_ranks():
    def gather(ranks):
        return ranks.all_gather_object(threading.Lock() if ranks.rank == 1 else 1)

    outcomes, _ = on_threads(gather, 2, timeout=0.3)

    assert "rank 1 of 2 lost contact with the other ranks: cannot pickle" in str(outcomes[1])
    assert isinstance(outcomes[0], CheckpointError)


def _save_then_stop(rank, folder, results, stop_signal, timeout):
    """Both save and load once together; then rank 1 stops or kills itself in the midst of a save."""
    store = dist.TCPStore("localhost", int(folder.joinpath("port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    whole = torch.arange(8.0)
    save(folder / "root", "before", {"w": whole}, step=1)
    load(folder / "root", into={"w": torch.zeros(8)})
    write = os.write

    def stop_at_write(fd, content):
        os.kill(os.getpid(), stop_signal)
        return write(fd, content)

    if rank == 1:
        os.write = stop_at_write
    try:
        save(folder / "root", "after", {"w": whole, f"own{rank}": whole}, step=2, timeout=timeout)
    except CheckpointError as error:
        results.put((rank, str(error)))
    os._exit(0)


@pytest.mark.parametrize(
    ("stop_signal", "timeout", "message"),
    [
        (signal.SIGSTOP, 1.0, "no answer within 1 seconds from rank 1 of 2; it is stopped, gone, or needs longer"),
        (signal.SIGKILL, 3600.0, "rank 1 of 2 is gone: its process has ended"),
    ],
)
def test_save_with_a_stopped_or_killed_process_raises_on_the_other_and_names_it(
    tmp_path, stop_signal, timeout, message
):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    processes = [
        spawn.Process(target=_save_then_stop, args=(rank, tmp_path, results, stop_signal, timeout)) for rank in range(2)
    ]
    for process in processes:
        process.start()

    rank, error = results.get()

    processes[0].join()
    processes[1].kill()
    processes[1].join()
    assert rank == 0
    assert error.startswith(message)
    assert [info.tag for info in list_checkpoints(tmp_path / "root")] == ["before"]
    assert os.listdir(tmp_path / "root" / ".staging") == ["lock"]
