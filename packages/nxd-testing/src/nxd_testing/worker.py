"""The program of one worker process: receive a job, run one rank of it, return the result, and reset.

Started by `nxd_testing.worker_process`; the protocol is in `messages`.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

import nxd_state
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.rendezvous import _rendezvous_handlers

from nxd_testing.messages import READY, Job, Raised, Success, TornDown, dumps_result, receive, send


def serve(connection_fd: int, stacks_fd: int, store_port: int) -> None:
    """Run jobs until the connection closes.

    Args:
        connection_fd: file descriptor of the socket to the pool.
        stacks_fd: file descriptor for the Python stacks of all threads, written when a signal ends this process.
        store_port: port of the pool's store.
    """
    _die_with_the_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(connection_fd)
    send(connection, READY)
    while True:
        try:
            job: Job = receive(connection)
        except EOFError:
            return
        faulthandler.enable(stacks_fd, all_threads=True)
        environment, directory = dict(os.environ), os.getcwd()
        send(connection, _run(job, store_port))
        receive(connection)  # RELEASE: no rank needs this one any more
        torn_down = TornDown(_tear_down())
        _restore(environment, directory)
        send(connection, torn_down)


def _die_with_the_parent() -> None:
    """Kill this process group when the parent dies, which closes its end of standard input."""
    parent_pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        os.read(parent_pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent watchdog", daemon=True).start()


def _run(job: Job, store_port: int) -> Success | Raised:
    try:
        _enter(job)
        # A separate connection: a job may set its timeout, or abandon it during a request.
        client = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(f"job{job.number}", client)
        _rendezvous_in(store)
        dist.init_process_group(
            job.backend,
            store=dist.PrefixStore("start0", store),
            rank=job.rank,
            world_size=job.world_size,
        )
        if job.backend == "gloo":
            dist.barrier()  # a job that ends the group at once would close connections that others still wait for
        fn, args = pickle.loads(job.call)
        return Success(dumps_result(fn(*args)))
    except BaseException as error:  # SystemExit too: the function must not end the worker silently
        moment = time.monotonic()
        own_frame_left_out = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        return Raised(
            summary="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(own_frame_left_out)),
            time=moment,
        )


def _enter(job: Job) -> None:
    """Reset the state of the process, so that every job starts from the same state."""
    os.chdir(job.working_directory)
    sys.path[:] = job.import_path
    os.environ.update(job.env)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    # Not "cpu": that would install a mode, which torch.compile does not always support.
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).clear()  # otherwise torch 2.9 loses the default device
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # turning them off imports the compiler, for a second
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)


def _rendezvous_in(store: dist.Store) -> None:
    """Make `env://` rendezvous of the job's own process groups use `store`.

    torch's handler uses the same keys in every job, and would find the addresses of the previous job.
    """
    starts = itertools.count(1)

    def rendezvous(url: str, **kwargs: object) -> Iterator[tuple[dist.Store, int, int]]:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        yield dist.PrefixStore(f"start{next(starts)}", store), rank, world_size

    _rendezvous_handlers["env"] = rendezvous


def _tear_down() -> str | None:
    # gloo's destructor waits for its event loop, about 10 ms per peer and group. It runs where the last reference to a
    # group is dropped, so a thread drops it.
    groups = list(_world.pg_map)
    try:
        if nxd_state.model_parallel_is_initialized():
            nxd_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        return traceback.format_exc()
    finally:
        _world.group_count = 0  # torch names groups by it; a default group whose start failed has been counted already
        threading.Thread(target=groups.clear, name="process group destructor").start()
    return None


def _restore(environment: dict[str, str], directory: str) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(directory)
