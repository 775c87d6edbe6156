"""Members and generations of an elastic job, and the keys of the job's store through which they find each other.

A generation is a set of trainers that train together, numbered from 1. The key `members` holds its members and
layout, and `over` the reason why it ended. Each is written once: the first value counts. All values are JSON.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist
from nxd_state import ParallelDegrees, PeerError
from nxd_state.processes import Process
from nxd_state.store_messages import printable, read_message

T = TypeVar("T")

PREFIX = "nxd_elastic"

# lost: a member ended or is silent. change: another trainer wants to join. failed: the program raised an error.
Ending = Literal["lost", "change", "failed", "stopped", "done"]

_POLL_SECONDS = 0.002
_DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Member:
    """A trainer."""

    slot: int  # the rank that the launcher assigned, which a replacement inherits
    incarnation: str  # a string that is unique to each process
    process: Process  # the trainer's process
    launcher: Process  # the agent on the trainer's host; if it ends, nobody replaces the trainer

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Member":
        """Parse the JSON of `asdict`; raises ValueError, TypeError or KeyError for anything else."""
        processes = {name: Process.from_json(content[name]) for name in ("process", "launcher")}
        if type(content["slot"]) is not int or not isinstance(content["incarnation"], str):
            raise ValueError("a trainer needs an integer slot and an incarnation")
        return cls(content["slot"], printable(content["incarnation"]), **processes)


@dataclass(frozen=True)
class Generation:
    """The members that train together, and their layout."""

    number: int  # the generation's number, from 1
    members: Sequence[Member]  # all members by slot; the first ones train, the others are spares
    degrees: ParallelDegrees  # degrees of the mesh; `dp` is the number of replicas

    @property
    def active(self) -> Sequence[Member]:
        """The members that train, in rank order."""
        return self.members[: self.degrees.world_size]

    @property
    def incarnations(self) -> frozenset[str]:
        """The incarnations of all members."""
        return frozenset(member.incarnation for member in self.members)


@dataclass(frozen=True)
class GenerationEnd:
    """How and why a generation ended."""

    ending: Ending
    reason: str

    @classmethod
    def from_json(cls, content: Any) -> "GenerationEnd":
        """Parse a list of both; raises ValueError or TypeError for anything else."""
        ending, reason = content
        if ending not in get_args(Ending):
            raise ValueError(f"unknown end of a generation: {ending!r}")
        return cls(ending, printable(str(reason)))


class GenerationKeys:
    """The keys of a job's store that describe generations; safe to use from any thread.

    Every method raises `torch.distributed.DistError` if the store cannot be reached, and `PeerError` if it holds a
    value that no trainer has written.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore(PREFIX, store)

    def latest(self) -> int:
        """Return the number of a fixed generation, at most one or two behind the newest; 0 before the first."""
        return self._read("latest", int) or 0

    def announce(self, number: int, member: Member) -> None:
        """Announce that a trainer is ready for a generation."""
        self._store.set(f"{number}/announced/{member.slot}", json.dumps(asdict(member)))

    def announced(self, number: int, slots: int) -> dict[int, Member]:
        """Return the trainers that are ready for a generation, by slot."""
        found = {slot: self._read(f"{number}/announced/{slot}", Member.from_json) for slot in range(slots)}
        return {slot: member for slot, member in found.items() if member is not None}

    def fix_members(self, generation: Generation) -> None:
        """Fix the members of a generation, unless another trainer did so first."""
        content = {
            "members": [asdict(member) for member in generation.members],
            "degrees": asdict(generation.degrees),
        }
        self._store.compare_set(f"{generation.number}/members", "", json.dumps(content))
        self._store.set("latest", str(generation.number))

    def fixed_generation(self, number: int) -> Generation | None:
        """Return a generation once its members are fixed; None before."""
        return self._read(f"{number}/members", lambda content: _generation_from(number, content))

    def end(self, number: int, end: GenerationEnd) -> GenerationEnd:
        """Record why a generation ended; returns the end that was recorded first."""
        key = f"{number}/over"
        recorded = self._store.compare_set(key, "", json.dumps([end.ending, end.reason]))
        return read_message(key, recorded, GenerationEnd.from_json)

    def end_of(self, number: int) -> GenerationEnd | None:
        """Return why a generation ended; None while it trains."""
        return self._read(f"{number}/over", GenerationEnd.from_json)

    def ask_for_change(self, number: int) -> None:
        """Ask the members of a generation to end it between two steps."""
        self._store.set(f"{number}/change", "1")

    def change_is_wanted(self, number: int) -> bool:
        """Whether a trainer has asked for that."""
        return self._store.check([f"{number}/change"])

    def beat(self, incarnation: str, count: int) -> None:
        """Write a heartbeat."""
        self._store.set(f"beat/{incarnation}", str(count))

    def last_beat(self, incarnation: str) -> bytes | None:
        """Return a process's latest heartbeat, which is a different value each time."""
        return self._get(f"beat/{incarnation}")

    def set_memory_server(self, launcher: Process, server: str) -> None:
        """Publish the memory server on a launcher's host."""
        self._store.set(_memory_server_key(launcher), server)

    def servers(self, generation: Generation) -> dict[Process, str]:
        """Return the memory servers on the hosts of a generation, by launcher, in the members' order."""
        launchers = dict.fromkeys(member.launcher for member in generation.members)
        found = {launcher: self._get(_memory_server_key(launcher)) for launcher in launchers}
        return {launcher: server.decode(errors="replace") for launcher, server in found.items() if server is not None}

    def store_of(self, number: int) -> dist.Store:
        """Return the store for a generation's process groups."""
        return dist.PrefixStore(f"{number}/groups", self._store)

    def _read(self, key: str, parse: Callable[[Any], T]) -> T | None:
        data = self._get(key)
        return None if data is None else read_message(key, data, parse)

    def _get(self, key: str) -> bytes | None:
        # `get` of a missing key would block the requests of all threads until the key is set.
        return self._store.get(key) if self._store.check([key]) else None


def _generation_from(number: int, content: Any) -> Generation:
    members = tuple(Member.from_json(member) for member in content["members"])
    degrees = ParallelDegrees(**content["degrees"])
    if not degrees.dp:
        raise ValueError("a generation needs at least one replica")
    return Generation(number, members, degrees)


def _memory_server_key(launcher: Process) -> str:
    return f"memory_server/{'/'.join(map(str, launcher))}"


class GenerationStore(dist.Store):
    """A store for the process groups of one generation, in which waiting stops when the generation ends.

    torch's own stores wait for a key until a timeout of many minutes, even if the rank that should set it has died.

    Args:
        store: the store that holds the keys, which this one polls.
        reason_to_end: function that returns why waiting must stop, or None while it may continue.
    """

    def __init__(self, store: dist.Store, reason_to_end: Callable[[], str | None]) -> None:
        super().__init__()
        self._store, self._reason_to_end = store, reason_to_end
        self._clones: list[GenerationStore] = []

    def clone(self) -> "GenerationStore":
        """Return a store of the same keys with its own connection."""
        made = GenerationStore(self._store.clone(), self._reason_to_end)
        self._clones.append(made)  # torch keeps only its C++ half alive
        return made

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, once all are set."""
        self.wait(keys)
        return [self._store.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        """Add to a number."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value."""
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set.

        Raises:
            PeerError: the generation has ended, so a caller that polls must stop.
        """
        found = self._store.check(list(keys))
        if not found and (reason := self._reason_to_end()) is not None:
            raise PeerError(f"stopped waiting for {', '.join(keys)}: {reason}")
        return found

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - as torch calls them from C++

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set.

        Raises:
            PeerError: the generation has ended.
            torch.distributed.DistStoreError: the keys were not set in time.
        """
        deadline = time.monotonic() + (timeout or _DEFAULT_TIMEOUT).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(_POLL_SECONDS)
