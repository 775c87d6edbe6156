"""Ends a group's communication: a rank that fails releases the ranks that wait for it, and tells them why."""

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nxd_state.group import Group
from nxd_state.store_messages import printable

_AT_ONCE = timedelta(milliseconds=1)
_TAG = 1  # no message has it, so none is taken for an answer


def abort_group(group: Group, reason: str) -> str:
    """Break this rank's connections to the others of the group: those that wait for it raise, now or when they do.

    For a rank that cannot continue, or that learnt from a collective's exception that another rank could not. The
    group is unusable afterwards; groups of other ranks are not affected. Over nccl only this rank's own calls are
    sure to end: the others may not notice before the timeout of the group.

    Args:
        group: the group to abort.
        reason: why this rank cannot continue.

    Returns:
        The reason given by the first rank that aborted this group: `reason`, if this one was first.
    """
    if group.size == 1:
        return reason
    first = _first_reason(group, reason)
    if group.shared_memory is not None:
        group.shared_memory.abort(first)
    if dist.get_backend(group.process_group) == "gloo":
        _close_gloo(group)
    elif group.process_group is not None:
        group.process_group.abort()
    return first


def _first_reason(group: Group, reason: str) -> str:
    try:
        first = _get_default_store().compare_set(f"nxd_aborted/{group.name}", "", reason)
        return printable(first.decode(errors="replace"))
    except dist.DistError:  # the rank that serves the store has ended
        return reason


def _close_gloo(group: Group) -> None:
    """gloo's own abort leaves connections open; but one that has waited in vain closes all connections of its group."""
    for rank in set(group.ranks) - {group.ranks[group.rank]}:
        with suppress(RuntimeError):  # as meant; or closed before
            work = dist.irecv(torch.empty(1), src=rank, group=group.process_group, tag=_TAG)
            assert work is not None  # this rank is in its group
            work.wait(_AT_ONCE)
