"""Gathers objects through a torch key-value store, with a deadline that names the ranks that did not answer.

A process group's own collectives are not suitable: they report missing ranks late or never, and some backends only take
tensors of an accelerator. Every process group is made from a store, and other processes and threads can open the store,
too, so the same code serves background saves.

A rank does not wait until the deadline for a process of its machine that has died, or for a rank that has left because
an error ended its save or load, its work between saves and loads, or its program.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nxd_ckpt.errors import RanksLostError, one_line, printable
from nxd_ckpt.messages import decode_message, encode_message, join, split

# Stores refuse values of more than 8 MiB.
_PART_BYTES = 4 * 2**20
# Time for the exchange itself, beyond the time that a rank waits.
_GRACE_SECONDS = 5.0
# How often a waiting rank checks whether the missing ranks have died on its machine, or have left.
_CHECK_SECONDS = 1.0
# How long a rank tries to tell that it leaves: the process that hosts the store may be stopped.
_LEAVE_SECONDS = 5.0

_LEFT = "left"

# A forked child shares its parent's connection to the store; if both used it, their messages would mix.
_is_fork_of_rank = False

_of_group: "WeakKeyDictionary[dist.ProcessGroup, StoreCoordinator]" = WeakKeyDictionary()


def coordinator_of_group(process_group: "dist.ProcessGroup | None", timeout: float) -> "StoreCoordinator":
    """Return a coordinator of the members of a process group of any backend, over the store that groups are made from.

    Called once per save or load, by all members, so that messages of an earlier one are not mistaken for this one's.

    Raises:
        ValueError: this process is not a member.
        RuntimeError: this process was forked from a member.
    """
    coordinator = _coordinator_of(process_group, timeout)
    coordinator.begin(timeout)
    return coordinator


def leave_default_group(reason: str) -> None:
    """Tell the ranks of torch's default process group that this one leaves, see `StoreCoordinator.leave`."""
    if dist.is_available() and dist.is_initialized() and not _is_fork_of_rank:
        _coordinator_of(None, _LEAVE_SECONDS).leave(reason)


def _coordinator_of(process_group: "dist.ProcessGroup | None", timeout: float) -> "StoreCoordinator":
    if _is_fork_of_rank:
        raise RuntimeError(
            f"process {os.getpid()} was forked from a rank and cannot act for it: save and load in the rank itself; "
            "nxd_ckpt.open_checkpoint() works anywhere"
        )
    group = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0 or group is None:
        raise ValueError("this process is not a member of the given process_group")
    if group not in _of_group:
        prefix = f"nxd_ckpt/{group.group_name}"
        _of_group[group] = StoreCoordinator(_get_default_store(), rank, group.size(), prefix=prefix, timeout=timeout)
    return _of_group[group]


def _note_fork() -> None:
    global _is_fork_of_rank  # noqa: PLW0603 - a fact about the process
    _is_fork_of_rank = dist.is_available() and dist.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def _leave_after_an_error() -> None:
    """After an error a program may end late, and before its first save the other ranks do not know its process."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        leave_default_group(f"ended its program: {one_line(error)}")


class StoreCoordinator:
    """A `Coordinator` over a key-value store that all ranks reach.

    Args:
        store: torch's TCPStore, FileStore or HashStore.
        rank: number of this rank.
        world_size: number of ranks.
        prefix: prefix of its keys; the same on all ranks, and used by no other coordinator on this store.
        timeout: seconds to wait for the others in each gather.
        processes: the ranks' processes, if known; otherwise they are known after the first gather.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        prefix: str,
        timeout: float,
        processes: "Sequence[ProcessIdentity | None] | None" = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore(prefix, store)
        self._timeout = timeout
        self._session = 0
        self._round = 0
        self._keys: list[str] = []
        self._has_left = False
        self._left_before: tuple[int, str] | None = None  # the message found by the last check
        self._identity = own_identity()
        self.processes: Sequence[ProcessIdentity | None] = processes or [None] * world_size

    @property
    def store(self) -> dist.Store:
        """The store, as seen under this coordinator's prefix."""
        return self._store

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return has_ended(self.processes[rank], self._identity)

    def begin(self, timeout: float) -> None:
        """Begin a new session, in which a rank that left the previous one halfway takes part. Called by all ranks."""
        self._timeout = timeout
        self._session += 1
        self._round = 0
        self._left_before = None
        if self._has_left:
            self._try_to(lambda: self._store.delete_key(_LEFT))
            self._has_left = False

    def abandon(self, reason: str) -> None:
        """Tell the ranks that wait for this one that it will not answer before the next `begin`. Raises nothing."""
        key = f"{self._session}/{_LEFT}"
        self._try_to(lambda: self._store.compare_set(key, "", self._leave_message(reason)))
        self._keys.append(key)

    def leave(self, reason: str) -> None:
        """Like `abandon`, but also holds for later sessions, until this rank begins one itself."""
        self._has_left = True
        self._try_to(lambda: self._store.compare_set(_LEFT, "", self._leave_message(reason)))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Values are JSON-serializable; tuples come back as lists.

        Raises:
            RanksLostError: ranks did not answer in time; names them, on every rank that still runs. Or a value cannot
                be sent.
        """
        try:
            message = encode_message((self._identity, value))
        except ValueError as error:
            self.abandon(f"cannot send its message: {error}")
            raise RanksLostError(f"rank {self.rank} of {self.world_size} cannot send its message: {error}") from error
        result: list[Any] = []
        here = f"{self._session}/{self._round}"  # before the thread starts, which an interrupt may leave behind
        self._round += 1

        def exchange() -> None:
            try:
                result.append(self._exchange(here, message))
            except Exception as error:  # raised by the waiting thread
                result.append(error)

        # In a separate thread, since a call to the store blocks forever if the process that hosts it is stopped.
        thread = threading.Thread(target=exchange, name="nxd_ckpt gather", daemon=True)
        thread.start()
        thread.join(self._timeout + _GRACE_SECONDS)
        if not result:
            raise RanksLostError(
                f"rank {self.rank} of {self.world_size} got no response from the process that hosts the process "
                f"group's store (rank 0, or its launcher) for {self._timeout:g} seconds: it is stopped or gone"
            )
        if isinstance(result[0], RanksLostError):
            raise result[0]
        if isinstance(result[0], Exception):
            raise RanksLostError(
                f"rank {self.rank} of {self.world_size} lost contact with the other ranks: {printable(str(result[0]))}"
            ) from result[0]
        return result[0]

    def _exchange(self, here: str, message: bytes) -> list[Any]:
        """Exchange messages: rank 0 collects and publishes them. A rank that waits too long, or sees on its machine
        that a missing rank has ended, publishes which ranks are missing. The first published outcome counts.
        """
        deadline = time.monotonic() + self._timeout
        stale, self._keys = self._keys, []
        self._put(f"{here}/{self.rank}", message)
        if self.rank == 0:
            from_ranks = [f"{here}/{rank}" for rank in range(self.world_size)]
            if self._wait(from_ranks, deadline, here):
                self._put(f"{here}/all", join(self._get(key) for key in from_ranks))
                self._publish_outcome(here, "complete")
        if not self._wait([f"{here}/outcome"], deadline, here):
            self._publish_outcome(
                here,
                f"no answer within {self._timeout:g} seconds from {self._missing(here)}; "
                "it is stopped, gone, or needs longer than timeout=",
            )
        outcome = self._store.get(f"{here}/outcome").decode(errors="replace")
        if outcome != "complete":
            raise RanksLostError(printable(outcome))
        for key in stale:  # every rank got here, so none still reads the previous values
            self._store.delete_key(key)
        heard = [decode_message(data) for data in split(self._get(f"{here}/all"))]
        if len(heard) != self.world_size:
            raise ValueError(f"the store holds the messages of {len(heard)} ranks, expected {self.world_size}")
        self.processes = [_identity_from(process) for process, _ in heard]
        return [value for _, value in heard]

    def _publish_outcome(self, here: str, outcome: str) -> None:
        key = f"{here}/outcome"
        self._store.compare_set(key, "", outcome)
        self._keys.append(key)

    def _wait(self, keys: list[str], deadline: float, here: str) -> bool:
        """Whether all keys exist before the deadline, and before an outcome says that they will not.

        Polls, so that other threads can use the store as well.
        """
        pause = 0.001
        next_check = time.monotonic() + _CHECK_SECONDS
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                return False
            if time.monotonic() >= next_check:
                self._check_for_dead_ranks(here)
                self._check_for_ranks_that_left(here)
                if self._store.check([f"{here}/outcome"]):
                    return keys == [f"{here}/outcome"]
                next_check = time.monotonic() + _CHECK_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _check_for_ranks_that_left(self, here: str) -> None:
        messages = [self._leave_message_at(f"{here.partition('/')[0]}/{_LEFT}")]
        # A rank that left may be about to begin again, as when all ranks catch the same error; so check twice.
        before, self._left_before = self._left_before, self._leave_message_at(_LEFT)
        if self._left_before == before:
            messages.append(before)
        for message in messages:
            if message is not None and not self._store.check([f"{here}/{message[0]}"]):
                self._publish_outcome(here, f"rank {message[0]} of {self.world_size} {message[1]}")

    def _leave_message_at(self, key: str) -> tuple[int, str] | None:
        if not self._store.check([key]):
            return None
        try:
            rank, reason = json.loads(self._store.get(key))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the store holds an invalid leave message: {error}") from error
        if type(rank) is not int or not isinstance(reason, str):
            raise ValueError("the store holds an invalid leave message")
        return rank, reason

    def _leave_message(self, reason: str) -> str:
        return json.dumps([self.rank, reason])

    def _try_to(self, action: Callable[[], object]) -> None:
        """Try an action in a separate thread for a short time: the process that hosts the store may be gone."""

        def attempt() -> None:
            with contextlib.suppress(Exception):
                action()

        thread = threading.Thread(target=attempt, name="nxd_ckpt leave", daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)

    def _check_for_dead_ranks(self, here: str) -> None:
        for rank in range(self.world_size):
            # Rank 0 publishes the messages of all ranks, so having its own message is not enough.
            if self.has_ended(rank) and (rank == 0 or not self._store.check([f"{here}/{rank}"])):
                self._publish_outcome(here, f"rank {rank} of {self.world_size} is gone: its process has ended")

    def _missing(self, here: str) -> str:
        missing = [rank for rank in range(self.world_size) if not self._store.check([f"{here}/{rank}"])]
        return f"rank {', '.join(map(str, missing or [0]))} of {self.world_size}"

    def _put(self, key: str, data: bytes) -> None:
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/part{number}", part)  # type: ignore[arg-type]  # takes bytes, too
            self._keys.append(f"{key}/part{number}")
        self._store.set(key, str(len(parts)))
        self._keys.append(key)

    def _get(self, key: str) -> bytes:
        count = self._store.get(key)
        if not count.isdigit():
            raise ValueError(f"the store holds an invalid number of message parts, {count[:100]!r}")
        return b"".join(self._store.get(f"{key}/part{number}") for number in range(int(count)))


class ProcessIdentity(NamedTuple):
    """A process: its machine and process namespace, its id there, and its start time, since ids are reused."""

    place: str
    pid: int
    started: str


def _identity_from(message: Any) -> ProcessIdentity | None:
    if message is None:
        return None
    place, pid, started = message
    if not (isinstance(place, str) and type(pid) is int and 0 < pid < 2**31 and isinstance(started, str)):
        raise ValueError(f"invalid description of a process: {message!r}")
    return ProcessIdentity(place, pid, started)


def own_identity() -> ProcessIdentity | None:
    """Return the identity of this process; None if the system does not provide it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return ProcessIdentity(f"{boot}/{namespace}", os.getpid(), _state_and_start(os.getpid())[1])
    except OSError:
        return None


def has_ended(process: ProcessIdentity | None, observer: ProcessIdentity | None) -> bool:
    """Whether a process is known to have ended; False if the observer, this process, cannot tell."""
    if process is None or observer is None or process.place != observer.place:
        return False
    try:
        state, started = _state_and_start(process.pid)
    except FileNotFoundError:
        return not _takes_signals(process.pid)  # it may just be hidden
    except OSError:
        return False
    return state in "ZX" or started != process.started


def _state_and_start(pid: int) -> tuple[str, str]:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before the parenthesis may contain anything
    return fields[0], fields[19]


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
