"""Dead workers are named and replaced, and the server shuts down by a deadline."""

import json
import os
import queue
import signal
import threading
import time

import pytest
from nxd_trace.generation import SamplingSettings
from nxd_trace.serving import RequestError, RestartPolicy, ScheduledPrompt, Scheduler
from tiny_server import TinyServer

pytestmark = pytest.mark.sample(3)  # each takes its time

GREEDY = {"prompt": "once upon", "max_tokens": 12, "temperature": 0}


class FailingEngine:
    """An engine whose steps and restarts wait, and then fail a given number of times."""

    batch_size = 1
    max_length = 40

    def __init__(self, num_failures):
        self.num_failures = num_failures
        self.num_free = 1
        self.go_on = threading.Event()
        self.joined = threading.Event()
        self.restarted = threading.Event()

    def add(self, prompt, settings, cache_salt, inputs):
        self.num_free = 0
        return object()

    def clear(self):
        pass

    def check_workers(self):
        pass

    def step(self):
        self.joined.set()
        assert self.go_on.wait(60)
        self._fail()

    def restart(self):
        self._fail()
        self.num_free = 1
        self.restarted.set()

    def _fail(self):
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("a worker died")


class CountingEngine:
    """An engine whose sequences never finish; `joined` has the first token of each prompt that got a row."""

    batch_size = 1
    max_length = 40

    def __init__(self):
        self.num_free = 1
        self.joined = []
        self.joining = threading.Semaphore(0)
        self._room = threading.Semaphore(0)

    def add(self, prompt, settings, cache_salt, inputs):
        self.num_free -= 1
        self.joined.append(prompt[0])
        self.joining.release()
        return object()

    def make_room(self, number):
        self._room.release(number)

    def step(self):
        if self._room.acquire(timeout=60):
            self.num_free += 1
        return []

    def remove(self, sequence):
        pass

    def clear(self):
        pass

    def check_workers(self):
        pass


def wait_until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up


def job_for(delivered):
    return ScheduledPrompt([1], SamplingSettings(), delivered.put)


def test_a_full_queue_refuses_and_a_failure_ends_all_that_wait():
    engine = FailingEngine(num_failures=1)
    delivered = queue.Queue()
    with Scheduler(engine, max_waiting=1, restarts=RestartPolicy(first_delay=7.5)) as scheduler:
        scheduler.submit([job_for(delivered)])
        assert engine.joined.wait(60)
        scheduler.submit([job_for(delivered)])
        with pytest.raises(RequestError, match="the queue is full"):
            scheduler.submit([job_for(delivered)])
        engine.go_on.set()

        assert [str(delivered.get(timeout=60)) for _ in range(2)] == ["a worker died"] * 2
        with pytest.raises(RequestError, match="is not running: a worker died; try again later") as refused:
            scheduler.submit([job_for(delivered)])
        assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "8"})


def test_rows_go_to_the_client_and_the_request_that_have_the_fewest():
    delivered = queue.Queue()
    engine = CountingEngine()
    with Scheduler(engine, max_waiting=6) as scheduler:
        scheduler.submit([ScheduledPrompt([0], SamplingSettings(), delivered.put)])
        assert engine.joining.acquire(timeout=60)
        greedy = [
            ScheduledPrompt([10 * request + text], SamplingSettings(), delivered.put, ("greedy", "", request))
            for request in (1, 2)
            for text in range(3)
        ]
        scheduler.submit(greedy[:3])
        scheduler.submit(greedy[3:])
        with pytest.raises(RequestError, match="the queue is full \\(6 prompts wait\\)"):
            scheduler.submit([ScheduledPrompt([19], SamplingSettings(), delivered.put, ("greedy", "", 1))])
        scheduler.submit([ScheduledPrompt([90], SamplingSettings(), delivered.put, ("modest", "", 9))])
        engine.make_room(3)
        assert all(engine.joining.acquire(timeout=60) for _ in range(3))
        scheduler.end_requests()
        engine.make_room(9)

    # The first of the two clients' first requests, then the client without a row, then the request without one.
    assert sorted(engine.joined[1:4]) == [10, 20, 90]


def test_a_model_that_failed_is_restarted_until_it_runs_and_then_takes_prompts(caplog):
    engine = FailingEngine(num_failures=3)
    delivered = queue.Queue()
    with Scheduler(engine, restarts=RestartPolicy(max_restarts=3, first_delay=0.0)) as scheduler:
        engine.go_on.set()
        scheduler.submit([job_for(delivered)])
        assert engine.restarted.wait(60)
        wait_until(lambda: scheduler.failure is None)
        scheduler.submit([])

    lines = [record.getMessage() for record in caplog.records if record.name == "nxd_trace.serving"]
    assert lines[:3] == [f"a worker died; starting new workers in 0 s (restart {n} of 3)" for n in (1, 2, 3)]
    assert not scheduler.has_given_up


def test_a_model_that_fails_too_often_is_given_up(caplog):
    engine = FailingEngine(num_failures=3)
    scheduler = Scheduler(engine, restarts=RestartPolicy(max_restarts=2, first_delay=0.0))
    engine.go_on.set()
    scheduler.submit([job_for(queue.Queue())])
    wait_until(lambda: scheduler.has_ended)

    assert scheduler.has_given_up
    assert "a worker died; giving up after 2 restarts in 600 s" in caplog.text
    with pytest.raises(RequestError, match="is not running: a worker died"):
        scheduler.submit([job_for(queue.Queue())])


def test_delays_between_restarts_double_up_to_the_longest(caplog):
    engine = FailingEngine(num_failures=6)
    delays = RestartPolicy(max_restarts=5, first_delay=0.001, longest_delay=0.004)
    scheduler = Scheduler(engine, restarts=delays)
    engine.go_on.set()
    scheduler.submit([job_for(queue.Queue())])
    wait_until(lambda: scheduler.has_ended)

    lines = [record.args[1] for record in caplog.records if "starting" in record.msg]
    assert lines == [0.001, 0.002, 0.004, 0.004, 0.004]


def events_of(answer):
    return [json.loads(line[6:]) for line in answer.read().decode().split("\n\n") if line and "[DONE]" not in line]


def first_event(answer):
    line = answer.readline()
    answer.readline()
    return json.loads(line[6:])


def test_a_server_whose_worker_dies_names_it_and_answers_again(deadline):
    with TinyServer(restarts={"first_delay": 0.0}) as server:
        with server.post(GREEDY, deadline(60)) as answer:
            text = json.load(answer)["choices"][0]["text"]

        os.kill(server.workers[0], signal.SIGKILL)

        line = server.log_until("starting new workers")
        assert "rank 0 of 1 in checking the workers: the worker was killed by SIGKILL" in line
        assert "(restart 1 of 5)" in line
        server.log_until("the new workers are running")
        with server.post(GREEDY, deadline(60)) as answer:
            assert json.load(answer)["choices"][0]["text"] == text


def test_a_stream_ends_with_an_error_when_its_worker_dies_and_the_server_ends_after_too_many(deadline):
    with TinyServer(restarts={"max_restarts": 0}, steps=5) as server:
        with server.post(GREEDY | {"stream": True}, deadline(60)) as answer:
            first_event(answer)
            os.kill(server.workers[0], signal.SIGKILL)
            server.make_steps(1)
            last = events_of(answer)[-1]

        assert "the model failed: rank 0 of 1 in a call: the worker was killed by SIGKILL" in last["error"]["message"]
        assert server.wait(deadline(60)) == 1
        assert "giving up after 0 restarts" in "".join(server.log)
        assert "WorkerError: the workers failed too often: rank 0 of 1" in server.log[-1]


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(deadline):
    with TinyServer(steps=5) as server:
        with server.post(GREEDY | {"stream": True}, deadline(60)) as answer:
            first_event(answer)
            server.process.send_signal(signal.SIGTERM)
            server.log_until("Waiting for connections to close")
            with pytest.raises(ConnectionRefusedError):
                server.connect(deadline(60))
            server.make_steps(40)
            last = events_of(answer)[-1]

        assert last["choices"][0]["finish_reason"] is not None
        assert server.wait(deadline(60)) == 0
        assert "Traceback" not in "".join(server.log)


def test_sigterm_ends_requests_with_an_error_at_the_deadline_even_while_a_step_takes_long(deadline):
    with TinyServer({"shutdown_timeout": 0.1}, steps=5) as server:
        with (
            server.post(GREEDY | {"stream": True}, deadline(60)) as answer,
            server.connect(deadline(60)) as half,
        ):
            half.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            )  # and no more
            first_event(answer)
            server.process.send_signal(signal.SIGTERM)
            last = events_of(answer)[-1]
            code = server.wait(deadline(60))

        assert last["error"]["message"] == "the server is closing; try again later"
        assert code == 0
        assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(deadline):
    with TinyServer(steps=5) as server, server.post(GREEDY | {"stream": True}, deadline(60)) as answer:
        first_event(answer)
        server.process.send_signal(signal.SIGINT)
        server.log_until("Waiting for connections to close")
        server.process.send_signal(signal.SIGTERM)

        assert server.wait(deadline(60)) == 128 + signal.SIGTERM


def test_a_server_without_requests_ends_at_sigterm_and_leaves_nothing_behind(deadline):
    with TinyServer() as server:
        assert server.folder.exists()

        server.process.send_signal(signal.SIGTERM)

        assert server.wait(deadline(60)) == 0
        assert not server.folder.exists()
