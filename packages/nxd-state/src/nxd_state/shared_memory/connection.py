"""Sharing memory among the ranks of a group, if they are on one host and all of them can.

Through the job's key-value store, the ranks tell each other where their memory is, map it, and tell each other
whether that succeeded; a group whose memory some rank could not map does without it.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nxd_state.group import Group
from nxd_state.processes import Process
from nxd_state.script_world import store_of_job
from nxd_state.shared_memory.channel import Peer, SharedChannel
from nxd_state.shared_memory.memory import LAYOUT_FORMAT, OwnSegment, SegmentLayout, host_identity, map_segment
from nxd_state.shared_memory.progress import ProgressEngine
from nxd_state.shared_memory.transport import SharedMemoryTransport, serve_graphs
from nxd_state.shared_memory.wakeups import EventCount, PeerEventCount
from nxd_state.store_messages import read_message

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_RANKS = 64  # no host has more ranks; larger groups are not tried


class GroupMembers(NamedTuple):
    """The description of a group, as needed here."""

    axis: str
    ranks: tuple[int, ...]
    timeout: float


class _ThisProcess:
    """The objects that a process has once for all its groups."""

    def __init__(self) -> None:
        self.event_count = EventCount()
        self.progress = ProgressEngine(self.event_count)
        self.process = Process.of(os.getpid())


_this_process: _ThisProcess | None = None


def _forget_parent() -> None:
    global _this_process  # noqa: PLW0603  (what is one for each process)
    if _this_process is not None:
        _this_process.progress.disown()
    _this_process = None


os.register_at_fork(after_in_child=_forget_parent)


def connect(memberships: Mapping[str, GroupMembers], rank: int, store: dist.Store) -> dict[str, SharedMemoryTransport]:
    """Share memory with the members of this rank's groups; every member calls this with the same groups.

    Args:
        memberships: the groups, by a name that is the same on all their ranks.
        rank: the global rank of this process.
        store: the store in which the members meet, with keys that nothing else uses.

    Returns:
        The transports of the groups that share memory, by name.
    """
    asked = {name: group for name, group in memberships.items() if 1 < len(group.ranks) <= _MOST_RANKS}
    own, process = _share(asked)
    try:
        store.set(f"{rank}/offer", json.dumps(_offer(own, process)))
        peers = sorted({peer for group in asked.values() for peer in group.ranks} - {rank})
        offers = _read(store, peers, "offer", _offer_from)
        mapped = _map_all(asked, rank, own, process, offers)
        store.set(f"{rank}/mapped", json.dumps(list(mapped)))
        agreed = _read(store, peers, "mapped", set)
    finally:
        for segment in own.values():
            segment.seal()
    return {
        name: SharedMemoryTransport(channel, process.progress)
        for name, channel in mapped.items()
        if process is not None and all(name in agreed[peer] for peer in channel.ranks if peer != rank)
    }


def _share(groups: Mapping[str, GroupMembers]) -> tuple[dict[str, OwnSegment], _ThisProcess | None]:
    global _this_process  # noqa: PLW0603
    if host_identity() is None or not groups:
        return {}, None
    try:
        if _this_process is None:
            _this_process = _ThisProcess()
        _this_process.event_count.check()
        return {
            name: OwnSegment(SegmentLayout(len(group.ranks)).bytes) for name, group in groups.items()
        }, _this_process
    except OSError as error:  # no memory or descriptors to be had, or the calls are forbidden
        _go_without(error)
        return {}, None


def _go_without(error: OSError) -> None:
    logger.warning(
        "Collectives use torch.distributed because no memory can be shared here: %s. NXD_SHM=0 does the same silently.",
        error,
    )


def _offer(own: Mapping[str, OwnSegment], process: _ThisProcess | None) -> dict[str, Any]:
    if process is None:
        return {"host": None}
    return {
        "host": host_identity(),
        "format": LAYOUT_FORMAT,
        "process": process.process,
        "event_count": process.event_count.handle.to_json(),
        "segments": {name: segment.handle.to_json() for name, segment in own.items()},
    }


def _offer_from(message: Any) -> dict[str, Any]:
    if message["host"] is not None and message["format"] == LAYOUT_FORMAT:
        Process.from_json(message["process"])
        handles = [message["event_count"], *message["segments"].values()]
        if any(len(handle) != 4 or not all(type(number) is int for number in handle) for handle in handles):
            raise ValueError("it does not describe memory by four integers")
    return {"format": None, "segments": {}} | message


def _read(store: dist.Store, ranks: Sequence[int], what: str, parse: Callable[[Any], T]) -> dict[int, T]:
    if not ranks:
        return {}
    keys = [f"{rank}/{what}" for rank in ranks]
    found = zip(ranks, keys, store.multi_get(keys), strict=True)
    return {rank: read_message(key, data, parse) for rank, key, data in found}


def _map_all(
    groups: Mapping[str, GroupMembers],
    rank: int,
    own: Mapping[str, OwnSegment],
    process: _ThisProcess | None,
    offers: Mapping[int, Any],
) -> dict[str, SharedChannel]:
    if process is None:
        return {}
    here = host_identity()
    channels = {}
    errors: list[OSError] = []
    event_counts: dict[int, PeerEventCount] = {}
    for name, group in groups.items():
        others = [peer for peer in group.ranks if peer != rank]
        if any((offers[peer]["host"], offers[peer]["format"]) != (here, LAYOUT_FORMAT) for peer in others):
            continue
        if any(name not in offers[peer]["segments"] for peer in others):
            continue
        try:
            for peer in others:
                if peer not in event_counts:
                    event_counts[peer] = PeerEventCount(map_segment(offers[peer]["event_count"]))
            neighbours = {
                group.ranks.index(peer): Peer(
                    Process(*offers[peer]["process"]), map_segment(offers[peer]["segments"][name]), event_counts[peer]
                )
                for peer in others
            }
        except OSError as error:  # another user's process, or a sandbox
            errors.append(error)
            continue
        title = f"group {group.axis} {list(group.ranks)}"
        channels[name] = SharedChannel(
            title, group.ranks, group.ranks.index(rank), own[name], neighbours, group.timeout
        )
    if errors:  # of one cause, as a rule
        _go_without(errors[0])
    return channels


def share_memory(
    groups: Iterable[Group], rank: int, members: str, timeout: timedelta | None
) -> dict[str, SharedMemoryTransport]:
    """Connect groups through shared memory; all their ranks call this, in the same order.

    Args:
        groups: groups over gloo get shared memory if their ranks can; several with one process group share its memory.
        rank: the global rank of this process.
        members: a name for the ranks that call this together.
        timeout: how long a collective may wait for a peer; that of the process group if None.

    Returns:
        The transports of the groups that share memory, by the name of the process group.
    """
    memberships: dict[str, GroupMembers] = {}
    process_groups: dict[str, dist.ProcessGroup] = {}
    for group in groups:
        process_group = group.process_group
        if process_group is None or group.size == 1 or dist.get_backend(process_group) != "gloo":
            continue
        if group.name not in memberships:
            seconds = (timeout or _timeout(process_group)).total_seconds()
            memberships[group.name] = GroupMembers(group.axis, group.ranks, seconds)
            process_groups[group.name] = process_group
    if not memberships:
        return {}
    store = store_of_job()
    # Counted in the store because keys of earlier calls remain there.
    count = store.add(f"nxd_state/shared_memory/{members}/times_of_rank_{rank}", 1)
    transports = connect(memberships, rank, dist.PrefixStore(f"nxd_state/shared_memory/{members}/{count}", store))
    for name, transport in transports.items():
        serve_graphs(transport, process_groups[name])
    return transports


def _timeout(process_group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = process_group._get_backend(torch.device("cpu")).options._timeout
    return timeout
