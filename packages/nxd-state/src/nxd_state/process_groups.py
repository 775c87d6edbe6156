"""Starting torch.distributed and making the groups of a mesh, in a way that can be repeated in one process.

`parallel_state` keeps the groups; `collectives` communicates over them.
"""

import inspect
import math
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from nxd_state.device import backend_of_device, get_device, is_lazy_device, set_current_device
from nxd_state.group import Group
from nxd_state.mesh import Mesh, RankGroups
from nxd_state.network import choose_interface, wait_for_address
from nxd_state.script_world import all_ranks, rank_of_job, size_of_job, store_of_job, whole_world

GROUP_AXES: tuple[tuple[str, ...], ...] = (
    *(("tp",), ("dp",), ("pp",), ("cp",), ("ep",), ("etp",), ("dp_exp",)),
    *(("dp", "cp"), ("pp", "tp"), ("pp", "ep", "etp"), ("pp", "dp", "cp", "tp")),
)
_LONGEST_TIMEOUT = 1e9  # seconds; torch counts milliseconds in 64 bits, and adds to them
_LONGEST_TO_RESOLVE = 60.0  # seconds; the name of a new pod may be known a little later than its neighbours run

# Variables that torchrun, or another launcher, sets: the same values mean the same launch.
_LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")

# Kept for the life of the process: where rank 0 hosts the store, a second one could not have its port.
_launcher_stores: dict[tuple[str | None, ...], dist.Store] = {}


def launched_rank_and_world_size() -> tuple[int, int]:
    """The rank and world size from torch.distributed if it runs, else from the launcher's environment."""
    if dist.is_initialized():
        return rank_of_job(), size_of_job()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and is_lazy_device() and os.environ.get("PJRT_DEVICE") == "CPU":
        raise RuntimeError(
            f"WORLD_SIZE={world_size} with PJRT_DEVICE=CPU: torch-xla's CPU client has no collectives between "
            "processes; use one rank, or NXD_DEVICE=cpu, or, in a test, nxd_testing.run_on_replicas"
        )
    return int(os.environ.get("RANK", "0")), world_size


def timeout_from_environment() -> timedelta | None:
    """The timeout of collectives that `NXD_TIMEOUT` sets; None without it."""
    text = os.environ.get("NXD_TIMEOUT")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < _LONGEST_TIMEOUT:
        raise ValueError(f"NXD_TIMEOUT={text!r} must be a number of seconds above 0, such as 600")
    return timedelta(seconds=seconds)


def start_torch_distributed(rank: int, world_size: int, timeout: timedelta | None, store: dist.Store | None) -> None:
    """Start torch.distributed on this process's device: a world of one by itself, else over the store, or over the
    launcher's if `store` is None."""
    backend = backend_of_device()
    set_current_device()
    # A world of one needs no rendezvous, hence no free port and no launcher.
    if world_size == 1:
        store = dist.HashStore()
    elif store is None:
        store = _fresh_store(rank, world_size, timeout)
    if world_size > 1 and backend == "gloo":
        choose_interface()
    groups = distributed_c10d._world.group_count
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except BaseException:
        # torch has counted the group, by which the next one, and its keys in the store, would be named otherwise than
        # on ranks whose start has not failed: all would wait for each other.
        distributed_c10d._world.group_count = groups
        raise


def _fresh_store(rank: int, world_size: int, timeout: timedelta | None) -> dist.Store:
    """The launcher's key-value store, seen through a prefix of its own for each start of torch.distributed.

    Without it a second start would find the addresses that the ranks had during the first.
    """
    store = launcher_store()
    if store is None:
        timeout = timeout or distributed_c10d.default_pg_timeout
        wait_for_address(min(timeout.total_seconds(), _LONGEST_TO_RESOLVE))
        try:
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            port = os.environ.get("MASTER_PORT")
            raise ValueError(
                f"MASTER_PORT={port} is taken on this host; set another one, the same on all ranks"
            ) from error
        _launcher_stores[_launch()] = store
    start = store.add(f"nxd_state/starts_of_rank_{rank}", 1)
    return dist.PrefixStore(f"nxd_state/start_{start}", store)


def world_barrier() -> None:
    """Wait for all ranks of the world."""
    # Without an index torch warns that it takes the accelerator's current device, which is this one.
    index = get_device().index
    dist.barrier(whole_world(), device_ids=None if index is None or dist.get_backend() == "gloo" else [index])


def launcher_store() -> dist.Store | None:
    """The key-value store of this launch, without a prefix; None where `start_torch_distributed` did not use it."""
    return _launcher_stores.get(_launch())


def job_store() -> dist.Store:
    """The launcher's store; without a launcher, the store that torch.distributed was started with."""
    return launcher_store() or store_of_job()


def _launch() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in _LAUNCH_VARIABLES)


def transport_device(group: Group) -> torch.device:
    """The device of tensors that a group can exchange whatever the model's are on: the CPU over gloo, else our own."""
    if group.size == 1 or dist.get_backend(group.process_group) == "gloo":
        return torch.device("cpu")
    return get_device()


def groups_of_axes(mesh: Mesh) -> dict[str, RankGroups]:
    """The ranks of all groups of each axis, or combination of axes, that has groups."""
    return {"+".join(axes): mesh.groups(*axes) for axes in GROUP_AXES} | {"embedding": mesh.embedding_groups()}


def make_groups(
    mesh: Mesh, rank: int, timeout: timedelta | None, groups: dict[str, Group], created: list[dist.ProcessGroup]
) -> None:
    """Make the process groups of all axes: on every rank in the same order; axes that cut the world alike share them.

    Args:
        mesh: the mesh of all ranks.
        rank: this rank.
        timeout: timeout of each process group.
        groups: filled with this rank's group of each axis.
        created: filled with the process groups made, to destroy them even if a later one fails.
    """
    process_groups: dict[RankGroups, dist.ProcessGroup | None] = {(tuple(range(mesh.world_size)),): whole_world()}
    for axis, replica_groups in groups_of_axes(mesh).items():
        if replica_groups not in process_groups:
            made = [new_process_group(ranks, timeout) for ranks in replica_groups]
            mine = next((process_group for process_group in made if process_group is not None), None)
            process_groups[replica_groups] = mine
            created += [mine] if mine is not None else []
        process_group = process_groups[replica_groups]
        if process_group is not None:  # a middle stage is in no embedding group
            group = group_with_rank(rank, mesh, axis, replica_groups)
            groups[axis] = replace(group, process_group=process_group, name=process_group.group_name)


def group_with_rank(rank: int, mesh: Mesh, axis: str, replica_groups: RankGroups) -> Group:
    """The group of `rank` among `replica_groups`, without a process group."""
    ranks = next(ranks for ranks in replica_groups if rank in ranks)
    return Group(
        axis=axis,
        ranks=ranks,
        rank=ranks.index(rank),
        replica_groups=replica_groups,
        crosses_stages=crosses_stages(mesh, ranks),
    )


def crosses_stages(mesh: Mesh, ranks: tuple[int, ...]) -> bool:
    """Whether the ranks are in several pipeline stages."""
    first = mesh.coordinates(ranks[0])["pp"]
    return any(mesh.coordinates(rank)["pp"] != first for rank in reversed(ranks))


def new_process_group(ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup | None:
    """A process group whose members are numbered in the order of `ranks`; None on a rank that is no member.

    Every rank of the world calls this, in the same order: torch then names the group by a count that is the same
    everywhere. (`use_local_synchronization` would spare the others the call, but names groups by what each rank has
    made so far, and so hangs once ranks differ in that.)
    """
    if list(ranks) == sorted(ranks):
        process_group = dist.new_group(list(ranks), timeout=timeout)
    elif "sort_ranks" in inspect.signature(dist.new_group).parameters:
        process_group = dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)
    else:
        process_group = _new_unsorted_group(ranks, timeout)
    return None if process_group == dist.GroupMember.NON_GROUP_MEMBER else process_group


def new_process_group_of_members(ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a process group on its members only; each must call this equally often.

    So its name cannot be a count of the world's groups. It is made of the ranks, and of how often they made one.
    """
    world, store = whole_world(), store_of_job()
    assert world is not None  # torch.distributed runs
    members = "_".join(map(str, ranks))
    # Counted in the store, which lives and ends with the names that earlier groups have left in it.
    count = store.add(f"nxd_state/groups_of_members/{members}/by_rank_{rank_of_job()}", 1)
    # A world bound to a device would split its communicator for the new group, in which all its ranks must take part.
    bound_device, world.bound_device_id = world.bound_device_id, None
    try:
        with all_ranks():
            return _new_named_group(ranks, f"nxd_members_{members}_{count}", timeout)
    finally:
        world.bound_device_id = bound_device


def _new_unsorted_group(ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    """`new_group(sort_ranks=False)` for versions of torch without that argument, which always sort."""
    return _new_named_group(ranks, distributed_c10d._process_group_name(list(ranks), use_hashed_name=False), timeout)


def _new_named_group(ranks: tuple[int, ...], name: Any, timeout: timedelta | None) -> dist.ProcessGroup:
    state = distributed_c10d._world
    world = distributed_c10d._get_default_group()
    backend, store = state.pg_map[world]
    process_group: Any
    process_group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None,
        list(ranks),
        dist.Backend(backend),
        store,
        name,
        timeout=timeout or distributed_c10d._get_default_timeout(dist.Backend(backend)),
        device_id=world.bound_device_id,
    )
    if process_group != dist.GroupMember.NON_GROUP_MEMBER:
        state.pg_group_ranks[process_group] = {rank: index for index, rank in enumerate(ranks)}
    made: dist.ProcessGroup = process_group
    return made
