"""Which groups of this rank get shared memory: those over gloo whose ranks `nxd_state.shared_memory` can connect."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nxd_state.group import Group
from nxd_state.shared_memory import Membership, SharedMemoryTransport, connect, serve_graphs


def share_memory(
    groups: Iterable[Group], rank: int, members: str, timeout: timedelta | None
) -> dict[str, SharedMemoryTransport]:
    """Connect groups through shared memory; all their ranks call this, in the same order.

    Args:
        groups: some with the same process group may be among them, which share its memory, too.
        rank: this global rank.
        members: names those that call this together.
        timeout: how long a collective may wait for a peer; as in the process group if None.

    Returns:
        By the name of the process group, for those that share memory.
    """
    memberships: dict[str, Membership] = {}
    process_groups: dict[str, dist.ProcessGroup] = {}
    for group in groups:
        process_group = group.process_group
        if process_group is None or group.size == 1 or dist.get_backend(process_group) != "gloo":
            continue
        if group.name not in memberships:
            seconds = (timeout or _timeout(process_group)).total_seconds()
            memberships[group.name] = Membership(group.axis, group.ranks, seconds)
            process_groups[group.name] = process_group
    if not memberships:
        return {}
    store = _get_default_store()
    # Counted in the store, as it is there that keys of an earlier time are left.
    count = store.add(f"nxd_state/shared_memory/{members}/times_of_rank_{rank}", 1)
    transports = connect(memberships, rank, dist.PrefixStore(f"nxd_state/shared_memory/{members}/{count}", store))
    for name, transport in transports.items():
        serve_graphs(transport, process_groups[name])
    return transports


def _timeout(process_group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = process_group._get_backend(torch.device("cpu")).options._timeout
    return timeout
