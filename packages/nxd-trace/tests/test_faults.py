"""Dying workers, dying callers and scripts without a main guard: an error within seconds, and no process remains."""

import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import nxd_trace
import pytest
import torch
import traced_models as models
from nxd_testing import deadline

pytestmark = pytest.mark.sample(4)  # each takes its time

PROGRAMS = Path(__file__).parent / "programs"
X = torch.randn(2, models.IN, dtype=torch.float64)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; a zombie counts as ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ended, f"process {pid} is still there"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAMS / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=deadline(300),
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )


def test_worker_killed_during_a_call_raises_and_the_model_restarts(trace):
    weights = models.logical_weights()
    model = trace(models.mlp, X, tp_degree=2, weights=weights)
    first, second = model.worker_pids
    os.kill(second, signal.SIGSTOP)  # so that the call is under way for sure
    errors: list[BaseException] = []

    def call() -> None:
        try:
            model(X)
        except nxd_trace.WorkerError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    os.kill(second, signal.SIGKILL)
    caller.join(30)

    assert "rank 1 of 2 in a call: the worker was killed by SIGKILL" in str(errors[0])
    assert not is_running(first)
    assert model.worker_pids == []
    with pytest.raises(nxd_trace.WorkerError, match=r"have ended.*call restart\(\) to start new ones"):
        model(X)
    model.restart()
    torch.testing.assert_close(model(X), models.plain_mlp(weights, X))


def test_worker_that_is_stopped_is_named_and_ended_and_the_model_restarts(trace):
    weights = models.logical_weights()
    model = trace(models.mlp, X, tp_degree=2, weights=weights)
    first, second = model.worker_pids
    os.kill(second, signal.SIGSTOP)

    with pytest.raises(nxd_trace.WorkerError) as raised:
        model(X)

    assert f"rank 1 of 2 in a call: the worker, process {second}, was stopped by a signal" in str(raised.value)
    assert not is_running(first)
    assert not is_running(second)
    model.restart()
    torch.testing.assert_close(model(X), models.plain_mlp(weights, X))


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "was killed by"), (signal.SIGSTOP, "was stopped by")])
def test_check_workers_names_a_dead_or_stopped_worker(trace, number, how):
    model = trace(models.mlp, X, tp_degree=2, weights=models.logical_weights())
    model.check_workers()
    os.kill(model.worker_pids[1], number)

    def look_until_it_is_seen():
        while True:  # a killed process may take a moment to end
            model.check_workers()

    with pytest.raises(nxd_trace.WorkerError, match=f"rank 1 of 2 in checking the workers: the worker.* {how}"):
        look_until_it_is_seen()


@pytest.fixture
def interruptible():
    """Make an interrupt raise KeyboardInterrupt, even if a shell started this process in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_during_a_call_ends_the_workers_and_the_model_restarts(trace):
    weights = models.logical_weights()
    model = trace(models.mlp, X, tp_degree=2, weights=weights)
    first, second = model.worker_pids
    os.kill(second, signal.SIGSTOP)  # so that the call does not end by itself
    main = threading.main_thread().ident

    def interrupt_once_it_waits() -> None:
        while not any(frame.name == "_collect" for frame in traceback.extract_stack(sys._current_frames()[main])):
            pass
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_it_waits)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        model(X)
    interrupter.join()

    assert not is_running(first)
    assert not is_running(second)
    model.restart()
    torch.testing.assert_close(model(X), models.plain_mlp(weights, X))


def test_error_of_every_rank_in_a_call_leaves_the_model_usable(trace):
    rows = torch.ones(1, 8, dtype=torch.float64)
    model = trace(models.cache, (rows, torch.tensor([0])), tp_degree=2)

    with pytest.raises(nxd_trace.WorkerError, match=r"rank 0, 1 of 2 in a call: IndexError(.|\n)*Traceback"):
        model(rows, torch.tensor([99]))

    assert model(rows, torch.tensor([1]))[0] == 3.0


def test_calls_of_several_threads_run_one_after_the_other(trace):
    weights = models.logical_weights()
    model = trace(models.mlp, X, tp_degree=2, weights=weights)
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(20):
            if not torch.allclose(model(X + number), models.plain_mlp(weights, X + number)):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_closing_and_garbage_end_the_workers(trace):
    model = trace(models.mlp, X, tp_degree=2, weights=models.logical_weights())
    pids = model.worker_pids
    model.close()
    assert not any(map(is_running, pids))
    assert model.worker_pids == []

    settings = {"compiler": "export", "progress": False, "weights": models.logical_weights()}
    dropped = nxd_trace.parallel_model_trace(models.mlp, X, **settings)
    pids, folder = dropped.worker_pids, dropped.folder
    del dropped
    assert not any(map(is_running, pids))
    assert not folder.exists()


def test_weights_that_cannot_be_written_are_an_error_without_traceback(trace):
    with pytest.raises(OSError, match=r"^\[Errno 27\] File too large: '\S*/tp_rank_0\d/weights.safetensors'$"):
        trace(models.mlp_that_fills_the_disk, X, tp_degree=2, weights=models.logical_weights())


@pytest.mark.sample(1)
@pytest.mark.usefixtures("fresh_interpreter")  # whose children are its own, and hear of its death
@pytest.mark.parametrize(
    "stopped", [[], ["rank 1"], ["rank 0", "rank 1", "fork server"]], ids=["none", "one worker", "all"]
)
def test_workers_end_when_the_caller_is_killed_also_those_that_are_stopped(stopped):
    result = run_script("script_with_guard.py", *stopped)

    assert result.returncode == -signal.SIGKILL
    [pids] = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("processes:")]
    assert len(pids) == 3
    wait_until_gone(list(map(int, pids)))


def test_missing_main_guard_is_named():
    result = run_script("script_without_guard.py")

    assert result.returncode == 1
    assert "put the script's main code under" in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr
