"""What the trainers of a job write into its key-value store about themselves and about generations.

A generation is a set of members that train together, numbered from 1. Its first key, `closed`, names them; its last
one, `over`, says why they ended. Both are written once: the first word counts. All of it is JSON.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist
from nxd_state import ParallelDegrees
from nxd_state.processes import Process
from nxd_state.store_messages import printable, read_message

T = TypeVar("T")

PREFIX = "nxd_elastic"

# lost: a member has ended or is silent. change: another trainer wants to join. failed: an error of the program.
Ending = Literal["lost", "change", "failed", "stopped", "done"]


@dataclass(frozen=True)
class Member:
    """A trainer.

    Attributes:
        slot: the rank that the launcher gave it, which its replacement has as well.
        incarnation: another text for each process.
        process: itself.
        launcher: the agent of its host; if that ends, nobody replaces it.
    """

    slot: int
    incarnation: str
    process: Process
    launcher: Process

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Member":
        """Of what `asdict` gave, as JSON has it; raises ValueError, TypeError or KeyError for anything else."""
        processes = {name: Process.from_json(content[name]) for name in ("process", "launcher")}
        if type(content["slot"]) is not int or not isinstance(content["incarnation"], str):
            raise ValueError("a trainer has a slot and an incarnation")
        return cls(content["slot"], printable(content["incarnation"]), **processes)


@dataclass(frozen=True)
class Generation:
    """The members that train together, and how.

    Attributes:
        number: from 1.
        members: by slot; the first ones train, the others wait for the next generation.
        degrees: of their mesh; `dp` is how many replicas train.
    """

    number: int
    members: Sequence[Member]
    degrees: ParallelDegrees

    @property
    def active(self) -> Sequence[Member]:
        """Those that train, in the order of their ranks."""
        return self.members[: self.degrees.world_size]

    @property
    def incarnations(self) -> frozenset[str]:
        """The processes of all members."""
        return frozenset(member.incarnation for member in self.members)


@dataclass(frozen=True)
class Over:
    """Why a generation has ended."""

    ending: Ending
    reason: str

    @classmethod
    def from_json(cls, content: Any) -> "Over":
        """Of a list of both; raises ValueError or TypeError for anything else."""
        ending, reason = content
        if ending not in get_args(Ending):
            raise ValueError(f"unknown end of a generation: {ending!r}")
        return cls(ending, printable(str(reason)))


class Rendezvous:
    """The keys of a job's store that generations are made of; any thread may ask.

    Every method raises `torch.distributed.DistError` if the store cannot be reached, and `PeerError` if it holds
    something that no trainer has written.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore(PREFIX, store)

    def latest(self) -> int:
        """The number of a generation that is closed, at most one or two behind the newest; 0 before the first."""
        return self._read("latest", int) or 0

    def announce(self, number: int, member: Member) -> None:
        """Say that a trainer is ready for a generation."""
        self._store.set(f"{number}/announced/{member.slot}", json.dumps(asdict(member)))

    def announced(self, number: int, slots: int) -> dict[int, Member]:
        """By slot, those that are ready."""
        found = {slot: self._read(f"{number}/announced/{slot}", Member.from_json) for slot in range(slots)}
        return {slot: member for slot, member in found.items() if member is not None}

    def close(self, generation: Generation) -> None:
        """Make up a generation, unless another trainer was first."""
        content = {
            "members": [asdict(member) for member in generation.members],
            "degrees": asdict(generation.degrees),
        }
        self._store.compare_set(f"{generation.number}/closed", "", json.dumps(content))
        self._store.set("latest", str(generation.number))

    def closed(self, number: int) -> Generation | None:
        """A generation, once it is made up."""
        return self._read(f"{number}/closed", lambda content: _generation_from(number, content))

    def end(self, number: int, over: Over) -> Over:
        """Say why a generation is over; returns what was said first."""
        key = f"{number}/over"
        said = self._store.compare_set(key, "", json.dumps([over.ending, over.reason]))
        return read_message(key, said, Over.from_json)

    def over(self, number: int) -> Over | None:
        """Why a generation is over; None while it is not."""
        return self._read(f"{number}/over", Over.from_json)

    def ask_for_change(self, number: int) -> None:
        """Ask the members of a generation to end it between two steps."""
        self._store.set(f"{number}/change", "1")

    def change_is_wanted(self, number: int) -> bool:
        """Whether somebody has asked for that."""
        return self._store.check([f"{number}/change"])

    def beat(self, incarnation: str, count: int) -> None:
        """Give a sign of life."""
        self._store.set(f"beat/{incarnation}", str(count))

    def last_beat(self, incarnation: str) -> bytes | None:
        """A process's newest sign of life: another text each time."""
        return self._get(f"beat/{incarnation}")

    def set_memory_server(self, launcher: Process, server: str) -> None:
        """Say which memory server a launcher's host has."""
        self._store.set(_memory_server_key(launcher), server)

    def servers(self, generation: Generation) -> dict[Process, str]:
        """By launcher, the memory servers of the hosts that have members in a generation, in the members' order."""
        launchers = dict.fromkeys(member.launcher for member in generation.members)
        found = {launcher: self._get(_memory_server_key(launcher)) for launcher in launchers}
        return {launcher: server.decode(errors="replace") for launcher, server in found.items() if server is not None}

    def store_of(self, number: int) -> dist.Store:
        """The store for a generation's own process groups."""
        return dist.PrefixStore(f"{number}/groups", self._store)

    def _read(self, key: str, parse: Callable[[Any], T]) -> T | None:
        data = self._get(key)
        return None if data is None else read_message(key, data, parse)

    def _get(self, key: str) -> bytes | None:
        # `get` of a key that is not there would block all threads' requests until it is.
        return self._store.get(key) if self._store.check([key]) else None


def _generation_from(number: int, content: Any) -> Generation:
    members = tuple(Member.from_json(member) for member in content["members"])
    degrees = ParallelDegrees(**content["degrees"])
    if not degrees.dp:
        raise ValueError("a generation has replicas")
    return Generation(number, members, degrees)


def _memory_server_key(launcher: Process) -> str:
    return f"memory_server/{'/'.join(map(str, launcher))}"
