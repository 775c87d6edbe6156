import os

import pytest
import torch
from nxd_cli.output import show_count, show_duration, show_memory
from nxd_trainer.report import Throughput, peak_memory_bytes, progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: `clock["now"] = 5.0`."""
    time = {"now": 100.0}
    monkeypatch.setattr(progress, "perf_counter", lambda: time["now"])
    return time


def test_lap_counts_sequences_and_tokens_since_the_lap_before(clock):
    throughput = Throughput()
    throughput.add(8, 300)
    throughput.add(8, 300)
    clock["now"] += 2
    first = throughput.lap()
    throughput.add(8, 100)
    clock["now"] += 4

    assert (first, throughput.lap()) == ((8.0, 300.0), (2.0, 25.0))
    assert throughput.seconds == 6.0


def test_lap_leaves_out_pauses_but_seconds_do_not(clock):
    throughput = Throughput()
    throughput.add(4, 100)
    clock["now"] += 1
    with throughput.paused():
        clock["now"] += 9
    clock["now"] += 1

    assert throughput.lap() == (2.0, 50.0)
    assert throughput.seconds == 11.0


def test_pause_ends_when_its_block_raises(clock):
    throughput = Throughput()
    throughput.add(1, 10)

    def fail_while_paused():
        with throughput.paused():
            clock["now"] += 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_paused()
    clock["now"] += 1

    assert throughput.lap() == (1.0, 10.0)


def test_peak_memory_of_the_process_holds_what_it_touched():
    block = torch.ones(64 << 20, dtype=torch.uint8)

    assert (
        block.nbytes < peak_memory_bytes(torch.device("cpu")) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_peak_memory_of_a_cuda_device_is_its_own():
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_bytes(device)
    torch.ones(1 << 20, dtype=torch.uint8, device=device)

    assert peak_memory_bytes(device) - before == 1 << 20


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (360_000, "100:00:00")],
)
def test_duration_is_shown_as_a_clock(seconds, shown):
    assert show_duration(seconds) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 MiB"), (3 << 19, "1.5 MiB"), (1 << 29, "512 MiB"), (1 << 30, "1.0 GiB"), (3 << 29, "1.5 GiB")],
)
def test_memory_is_shown_in_its_unit(num_bytes, shown):
    assert show_memory(num_bytes) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (950, "950"), (12_345, "12.3k"), (4_096_000, "4.10M"), (1.2e9, "1.20B")]
)
def test_count_is_shown_in_its_unit(count, shown):
    assert show_count(count) == shown
