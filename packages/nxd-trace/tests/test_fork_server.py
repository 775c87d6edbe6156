"""Workers are forks of one server: they have the caller's environment, and the server may die between models."""

import os
import select
import signal
from pathlib import Path

import pytest
import torch
import traced_models as models

X = torch.zeros(1, models.IN, dtype=torch.float64)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_models_share_a_server_until_a_variable_that_libraries_read_changes(trace, monkeypatch):
    first, second = (trace(models.total, torch.ones(2, 3)) for _ in range(2))
    monkeypatch.setenv("TORCH_NXD_TRACE_TEST", "1")
    third = trace(models.total, torch.ones(2, 3))

    servers = [parent_of(model.worker_pids[0]) for model in (first, second, third)]
    assert servers[0] == servers[1] != servers[2]
    assert os.getpid() not in servers


def test_a_server_that_was_killed_is_replaced_and_its_workers_go_on(trace):
    old = trace(models.total, torch.ones(2, 3))

    server = parent_of(old.worker_pids[0])
    descriptor = os.pidfd_open(server)
    os.kill(server, signal.SIGKILL)
    select.select([descriptor], [], [])
    os.close(descriptor)
    new = trace(models.total, torch.ones(2, 3))

    assert [model(torch.ones(2, 3))[0].tolist() for model in (old, new)] == [[3.0, 3.0]] * 2
    old.close()
    assert old.worker_pids == []


def test_workers_have_the_environment_and_folder_of_the_caller_at_their_start(trace, tmp_path, monkeypatch):
    trace(models.total, torch.ones(2, 3))  # starts the server, if no test before did
    monkeypatch.setenv("GREETING", "hello")
    monkeypatch.chdir(tmp_path)

    model = trace(models.surroundings, X, tp_degree=2)

    greeting, folder, num_threads = (bytes(text.tolist()).decode() for text in model(X))
    assert (greeting, folder) == ("hello", str(tmp_path))
    assert int(num_threads) == int(os.environ.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // 2)))


@pytest.mark.parametrize("stream", [1, 2])
def test_workers_start_where_an_output_is_closed(trace, stream):
    kept = os.dup(stream)
    os.close(stream)
    try:
        model = trace(models.total, torch.ones(2, 3))
    finally:
        os.dup2(kept, stream)
        os.close(kept)

    assert model(torch.ones(2, 3))[0].tolist() == [3.0, 3.0]
