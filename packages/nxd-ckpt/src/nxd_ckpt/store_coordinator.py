"""Gathering objects through a torch key-value store, with a deadline that names the ranks that did not answer.

A process group's own collectives are not suitable: they report missing ranks late or never, and some backends only take
tensors of an accelerator. Every process group was made from a store, and a store can also be opened from another
process, so the same code serves a save in the background.

No rank waits until the deadline for a process of this machine that has died, or for one that has said that it will not
come: because an error ended its save or load, its work between two of these, or its program.
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
# How often a rank that waits looks whether those that it waits for have died on its machine, or have left.
_LOOK_SECONDS = 1.0
# How long a rank tries to say that it leaves: the process that hosts the store may be stopped.
_FAREWELL_SECONDS = 5.0

_LEFT = "left"

# A child has its parent's connection to the store: what either of them says would garble what the other hears.
_is_fork_of_rank = False

_of_group: "WeakKeyDictionary[dist.ProcessGroup, StoreCoordinator]" = WeakKeyDictionary()


def coordinator_of_group(process_group: "dist.ProcessGroup | None", timeout: float) -> "StoreCoordinator":
    """Gathers over the members of a process group of any backend, through the store that groups are made from.

    Called once per save or load, by all members: what was left of an earlier one is not mistaken for this one.

    Raises:
        ValueError: this process is not a member.
        RuntimeError: this process was forked from a member.
    """
    coordinator = _coordinator_of(process_group, timeout)
    coordinator.begin(timeout)
    return coordinator


def leave_default_group(reason: str) -> None:
    """Tells the ranks of torch's default process group that this one will not come, see `StoreCoordinator.leave`."""
    if dist.is_available() and dist.is_initialized() and not _is_fork_of_rank:
        _coordinator_of(None, _FAREWELL_SECONDS).leave(reason)


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
    global _is_fork_of_rank  # noqa: PLW0603 - what a process is, is one value
    _is_fork_of_rank = dist.is_available() and dist.is_initialized()


os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def _leave_after_an_error() -> None:
    """A program takes its time to end after an error, and before its first save nobody knows its process."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        leave_default_group(f"ended its program: {one_line(error)}")


class StoreCoordinator:
    """A `Coordinator` over a key-value store that all ranks reach.

    Args:
        store: torch's TCPStore, FileStore or HashStore.
        rank: number of this rank.
        world_size: how many ranks take part.
        prefix: of its keys; the same on all ranks and used by no other coordinator on this store.
        timeout: seconds to wait for the others in each gather.
        lives: the ranks' processes, as far as they are known; else they are once all have answered.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        prefix: str,
        timeout: float,
        lives: "Sequence[Life | None] | None" = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore(prefix, store)
        self._timeout = timeout
        self._session = 0
        self._round = 0
        self._keys: list[str] = []
        self._has_left = False
        self._left_before: tuple[int, str] | None = None  # the farewell at the last look
        self._life = own_life()
        self.lives: Sequence[Life | None] = lives or [None] * world_size

    @property
    def store(self) -> dist.Store:
        """The store, as seen under this coordinator's prefix."""
        return self._store

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return has_ended(self.lives[rank], self._life)

    def begin(self, timeout: float) -> None:
        """Starts anew, so that a rank which left the last save halfway is in step again. Called by all ranks."""
        self._timeout = timeout
        self._session += 1
        self._round = 0
        self._left_before = None
        if self._has_left:
            self._tell(lambda: self._store.delete_key(_LEFT))
            self._has_left = False

    def abandon(self, reason: str) -> None:
        """Tells the ranks that wait for this one that it will not come before the next `begin`. Raises nothing.

        Args:
            reason: what it did, such as "left: KeyboardInterrupt".
        """
        key = f"{self._session}/{_LEFT}"
        self._tell(lambda: self._store.compare_set(key, "", self._farewell(reason)))
        self._keys.append(key)

    def leave(self, reason: str) -> None:
        """As `abandon`, also to those that begin without it, until it begins again itself."""
        self._has_left = True
        self._tell(lambda: self._store.compare_set(_LEFT, "", self._farewell(reason)))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; what JSON can hold, tuples come back as lists.

        Raises:
            RanksLostError: ranks did not answer in time; names them, on every rank that still runs. Or a value cannot
                be sent.
        """
        try:
            message = encode_message((self._life, value))
        except ValueError as error:
            self.abandon(f"cannot send its message: {error}")
            raise RanksLostError(f"rank {self.rank} of {self.world_size} cannot send its message: {error}") from error
        result: list[Any] = []
        here = f"{self._session}/{self._round}"  # before the thread, which an interrupt may leave behind
        self._round += 1

        def exchange() -> None:
            try:
                result.append(self._exchange(here, message))
            except Exception as error:  # handed on to the thread that waits
                result.append(error)

        # In a thread of its own, since a call to the store blocks for good if the process that hosts it is stopped.
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
        """Rank 0 collects and publishes. Whoever waits too long, or sees on its own machine that a missing rank has
        ended, publishes who is missing: the first word counts.
        """
        deadline = time.monotonic() + self._timeout
        stale, self._keys = self._keys, []
        self._put(f"{here}/{self.rank}", message)
        if self.rank == 0:
            from_ranks = [f"{here}/{rank}" for rank in range(self.world_size)]
            if self._wait(from_ranks, deadline, here):
                self._put(f"{here}/all", join(self._get(key) for key in from_ranks))
                self._say(here, "complete")
        if not self._wait([f"{here}/outcome"], deadline, here):
            self._say(
                here,
                f"no answer within {self._timeout:g} seconds from {self._missing(here)}; "
                "it is stopped, gone, or needs longer than timeout=",
            )
        outcome = self._store.get(f"{here}/outcome").decode(errors="replace")
        if outcome != "complete":
            raise RanksLostError(printable(outcome))
        for key in stale:  # every rank has reached this point, so none still reads the previous values
            self._store.delete_key(key)
        heard = [decode_message(data) for data in split(self._get(f"{here}/all"))]
        if len(heard) != self.world_size:
            raise ValueError(f"the store holds the messages of {len(heard)} ranks, expected {self.world_size}")
        self.lives = [_life_from(life) for life, _ in heard]
        return [value for _, value in heard]

    def _say(self, here: str, outcome: str) -> None:
        key = f"{here}/outcome"
        self._store.compare_set(key, "", outcome)
        self._keys.append(key)

    def _wait(self, keys: list[str], deadline: float, here: str) -> bool:
        """Whether all keys are there before the deadline, and before it is said that they will not be.

        Asks again and again, so that other threads can, too.
        """
        pause = 0.001
        next_look = time.monotonic() + _LOOK_SECONDS
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                return False
            if time.monotonic() >= next_look:
                self._look_for_the_dead(here)
                self._look_for_those_who_left(here)
                if self._store.check([f"{here}/outcome"]):
                    return keys == [f"{here}/outcome"]
                next_look = time.monotonic() + _LOOK_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _look_for_those_who_left(self, here: str) -> None:
        farewells = [self._farewell_in(f"{here.partition('/')[0]}/{_LEFT}")]
        # One that left may be about to begin again, as when all ranks raise and catch the same: so look twice.
        before, self._left_before = self._left_before, self._farewell_in(_LEFT)
        if self._left_before == before:
            farewells.append(before)
        for farewell in farewells:
            if farewell is not None and not self._store.check([f"{here}/{farewell[0]}"]):
                self._say(here, f"rank {farewell[0]} of {self.world_size} {farewell[1]}")

    def _farewell_in(self, key: str) -> tuple[int, str] | None:
        if not self._store.check([key]):
            return None
        try:
            rank, reason = json.loads(self._store.get(key))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the store holds an invalid farewell: {error}") from error
        if type(rank) is not int or not isinstance(reason, str):
            raise ValueError("the store holds an invalid farewell")
        return rank, reason

    def _farewell(self, reason: str) -> str:
        return json.dumps([self.rank, reason])

    def _tell(self, action: Callable[[], object]) -> None:
        """In a thread of its own, and not for long: the process that hosts the store may be stopped or gone."""

        def attempt() -> None:
            with contextlib.suppress(Exception):
                action()

        thread = threading.Thread(target=attempt, name="nxd_ckpt farewell", daemon=True)
        thread.start()
        thread.join(_FAREWELL_SECONDS)

    def _look_for_the_dead(self, here: str) -> None:
        for rank in range(self.world_size):
            # The first one publishes what all have said, so its word alone is not enough.
            if self.has_ended(rank) and (rank == 0 or not self._store.check([f"{here}/{rank}"])):
                self._say(here, f"rank {rank} of {self.world_size} is gone: its process has ended")

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


class Life(NamedTuple):
    """One process: the machine and namespace in which its number means something, the number, and when it began."""

    place: str
    pid: int
    began: str


def _life_from(message: Any) -> Life | None:
    if message is None:
        return None
    place, pid, began = message
    if not (isinstance(place, str) and type(pid) is int and 0 < pid < 2**31 and isinstance(began, str)):
        raise ValueError(f"invalid description of a process: {message!r}")
    return Life(place, pid, began)


def own_life() -> Life | None:
    """That of this process; None where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return Life(f"{boot}/{namespace}", os.getpid(), _state_and_beginning(os.getpid())[1])
    except OSError:
        return None


def has_ended(life: Life | None, observer: Life | None) -> bool:
    """Whether `observer`, the process that asks, can tell that this one has ended; False where it cannot."""
    if life is None or observer is None or life.place != observer.place:
        return False
    try:
        state, began = _state_and_beginning(life.pid)
    except FileNotFoundError:
        return not _takes_signals(life.pid)  # it may only be hidden
    except OSError:
        return False
    return state in "ZX" or began != life.began


def _state_and_beginning(pid: int) -> tuple[str, str]:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], fields[19]


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
