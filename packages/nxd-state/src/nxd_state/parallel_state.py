"""The one mesh of this process: made by `initialize_model_parallel`, read by everything else.

Holds the state (mesh and process groups). The arithmetic is in `mesh`, the documented getters are in `mesh_getters`.
"""

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from nxd_state.collectives import debug
from nxd_state.degrees import ParallelDegrees
from nxd_state.group import Group
from nxd_state.heartbeat import start_heartbeat, stop_heartbeat
from nxd_state.mesh import Mesh, RankGroups
from nxd_state.process_groups import (
    crosses_stages,
    group_with_rank,
    groups_of_axes,
    job_store,
    launched_rank_and_world_size,
    make_groups,
    new_process_group,
    new_process_group_of_members,
    start_torch_distributed,
    timeout_from_environment,
    world_barrier,
)
from nxd_state.processes import hold_standard_streams
from nxd_state.rank_failure import abort_group, report_uncaught_failures
from nxd_state.same_values import compare_at_first_steps
from nxd_state.script_world import all_ranks, show_all_ranks, show_as_world, whole_world
from nxd_state.shared_memory import share_memory

WORLD_AXES = ("pp", "dp", "cp", "tp")


@dataclass
class _ParallelState:
    mesh: Mesh
    rank: int
    groups: dict[str, Group]
    created: list[dist.ProcessGroup] = field(default_factory=list)
    subgroups: dict[tuple[str, int] | RankGroups, Group] = field(default_factory=dict)  # by axis and size, or ranks
    apart: dict[tuple[str, RankGroups], Group] = field(default_factory=dict)  # by messages and ranks

    def all_groups(self) -> tuple[Group, ...]:
        return (*self.groups.values(), *self.subgroups.values(), *self.apart.values())

    foreign: dict[dist.ProcessGroup, Group] = field(default_factory=dict)  # by the process group that was given
    timeout: timedelta | None = None
    world: dist.ProcessGroup | None = None  # all ranks, as torch.distributed had them; None if they are planned
    owns_world: bool = False  # we started torch.distributed, so we also end it
    first_steps: RemovableHandle | None = None  # of the hook that compares what tensor-parallel ranks start from

    @property
    def is_stale(self) -> bool:
        """Whether the caller has destroyed torch.distributed, and our groups with it."""
        return self.world is not None and whole_world() is not self.world


_state: _ParallelState | None = None
_planned: tuple[int, int] | None = None  # rank and world size, inside `planned_world`


def initialize_mesh(degrees: ParallelDegrees, *, store: dist.Store | None = None) -> None:
    """`initialize_model_parallel` with these degrees; data parallelism takes the remaining ranks."""
    initialize_model_parallel(
        degrees.tp,
        degrees.pp,
        degrees.ep,
        context_parallel_size=degrees.cp,
        expert_tensor_parallel_size=degrees.etp,
        store=store,
    )


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    rank_order: str = "row_major",
    timeout: timedelta | None = None,
    store: dist.Store | None = None,
) -> None:
    """Lay the launched ranks out as a mesh and make the process groups of every axis.

    Starts torch.distributed if it is not running: from torchrun's environment if there is one, else as a world of one.
    Data parallelism takes the ranks that the given degrees leave. Replaces a mesh whose torch.distributed has been
    destroyed.

    Args:
        tensor_model_parallel_size: ranks that split each layer.
        pipeline_model_parallel_size: pipeline stages.
        expert_model_parallel_size: ranks that split the experts of a layer.
        context_parallel_size: ranks that split each sequence.
        expert_tensor_parallel_size: ranks that split each expert; as many as split each layer if None.
        rank_order: name of the order in which ranks take positions of the mesh; see `nxd_state.mesh`.
        timeout: how long a collective may wait for a peer; if None, the seconds of `NXD_TIMEOUT`, else torch's default.
        store: a new store, through which the ranks find each other; the launcher's if None. Whoever can write to it can
            pose as a rank.

    Raises:
        RuntimeError: already initialized.
        ValueError: the degrees do not divide the world size, or `NXD_TIMEOUT` is not a number of seconds.
    """
    global _state  # noqa: PLW0603  (the process has one mesh)
    if _state is not None and _state.is_stale:
        destroy_model_parallel()
    if _state is not None:
        raise RuntimeError(
            f"model parallelism is already initialized as {_state.mesh}; call destroy_model_parallel() first"
        )
    hold_standard_streams()
    debug.read_environment()
    timeout = timeout or timeout_from_environment()
    rank, world_size = _planned or launched_rank_and_world_size()
    mesh = Mesh(
        world_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        tp=tensor_model_parallel_size,
        ep=expert_model_parallel_size,
        etp=tensor_model_parallel_size if expert_tensor_parallel_size is None else expert_tensor_parallel_size,
        order=rank_order,
    )
    if _planned is not None:
        _state = _ParallelState(mesh=mesh, rank=rank, groups=_planned_groups(mesh, rank))
        return
    owns_world = not dist.is_initialized()
    if owns_world:
        start_torch_distributed(rank, world_size, timeout, store)
        # For programs that end without it. Gloo's threads live as long as anything refers to a group, and one that
        # releases a message's tensor while Python ends aborts the process: the groups must be dropped, too.
        atexit.unregister(destroy_model_parallel)
        atexit.register(destroy_model_parallel)
    if world_size > 1:
        report_uncaught_failures()
        start_heartbeat(rank, job_store())
    world = whole_world()
    state = _ParallelState(mesh=mesh, rank=rank, groups={}, timeout=timeout, world=world, owns_world=owns_world)
    try:
        make_groups(mesh, rank, timeout, state.groups, state.created)
        _share_memory(state)
        if mesh.tp > 1 and dist.get_backend() != "fake":  # whose peers are not there
            state.first_steps = compare_at_first_steps(state.groups["tp"], splits_experts=mesh.splits_experts)
        if world_size > 1:
            world_barrier()  # one that continued and ended at once would close connections that others still make
    except BaseException:  # as where a rank has ended meanwhile: a program that catches it can start again
        _end(state)
        raise
    _state = state


def show_replicas_as_world() -> None:
    """Let torch.distributed's default group be this rank's replicas, until the mesh ends. Called by all ranks.

    A script then sees as many ranks as there are replicas: what it divides by rank and world size, gathers, and takes
    the mean of are data. `all_ranks` is for what concerns every rank of the job.

    Raises:
        RuntimeError: not initialized.
    """
    state = _current()
    replicas = state.groups["dp"]
    if replicas.size == state.mesh.world_size:
        return
    with all_ranks():
        # A group of its own: torch takes the ranks of the default group as they are, those of others as global ones.
        made = [new_process_group(ranks, state.timeout) for ranks in replicas.replica_groups]
    mine = next(it for it in made if it is not None)
    state.created.append(mine)
    world_barrier()  # a rank that continued and ended at once would close connections that others still make
    show_as_world(mine)


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` has been called (and not undone)."""
    return _state is not None


def ranks_run() -> bool:
    """Whether the ranks of the mesh run: not inside `planned_world`."""
    return _planned is None


def destroy_model_parallel() -> None:
    """Undo `initialize_model_parallel`; it can be called again afterwards. Does nothing if not initialized.

    Ends torch.distributed only if `initialize_model_parallel` started it.
    """
    global _state
    if _state is None:
        return
    state, _state = _state, None
    _end(state)


def abort_model_parallel(reason: str) -> None:
    """Abort every group (see `abort_group`): whatever waits in a collective, here or on a peer, raises.

    Any thread may call it. Nothing can be sent afterwards; call `destroy_model_parallel` next. Does nothing if not
    initialized.

    Args:
        reason: why this rank cannot continue.
    """
    state = _state
    if state is not None and dist.is_initialized():
        groups = {group.name: group for group in state.all_groups()}
        for group in groups.values():
            abort_group(group, reason)


def _end(state: _ParallelState) -> None:
    stop_heartbeat()
    if state.first_steps is not None:
        state.first_steps.remove()
    for group in state.all_groups():
        if group.shared_memory is not None:
            group.shared_memory.close()
    if state.is_stale:
        return
    show_all_ranks()
    if state.owns_world:
        dist.destroy_process_group()
        return
    for process_group in reversed(state.created):
        dist.destroy_process_group(process_group)


@contextmanager
def planned_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Context in which `initialize_model_parallel` lays out ranks that do not run; this process acts as one of them.

    Layers are made with that rank's shapes and shard metadata. Nothing can be sent, so a model cannot be called. The
    mesh ends with the block.

    Args:
        world_size: number of ranks of the planned job.
        rank: the rank that this process acts as.

    Raises:
        RuntimeError: model parallelism is initialized.
        ValueError: there is no such rank.
    """
    global _planned  # noqa: PLW0603
    if _state is not None or _planned is not None:
        raise RuntimeError("model parallelism is already initialized; call destroy_model_parallel() first")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is outside 0..{world_size - 1}, the ranks of world_size={world_size}")
    _planned = (rank, world_size)
    try:
        yield
    finally:
        _planned = None
        destroy_model_parallel()


def get_mesh() -> Mesh:
    """The mesh of this job."""
    return _current().mesh


def splits_experts() -> bool:
    """Whether expert layers are laid out differently from dense ones; False without an initialized mesh."""
    return model_parallel_is_initialized() and get_mesh().splits_experts


def has_whole_experts() -> bool:
    """Whether experts are whole on their ranks while other layers are sharded over tensor-parallel ranks.

    These ranks may then hold different experts; see `nxd_state.degrees.expert_tensor_parallel_mistake`.
    """
    return active_group("etp").size < active_group("tp").size


def get_group(*axes: str) -> Group:
    """This rank's group along an axis ("tp", "dp", "pp", "cp", "ep", "etp", "dp_exp", "embedding") or a
    combination.

    Combinations made at start: ("dp", "cp"), ("pp", "tp"), ("pp", "ep", "etp"), and all dense axes for the world.

    Raises:
        RuntimeError: not initialized.
        ValueError: no such group.
    """
    state = _current()
    key = "+".join(axes)
    if key not in state.groups:
        raise ValueError(f"no group for axes {axes}; use one of {sorted(state.groups)}")
    return state.groups[key]


def active_group(*axes: str) -> Group:
    """`get_group(*axes)`, or a group of one without an initialized mesh: layers then act as ordinary ones."""
    return get_group(*axes) if model_parallel_is_initialized() else Group.solo("+".join(axes))


def get_world_group() -> Group:
    """The group of all ranks."""
    return get_group(*WORLD_AXES)


def subgroup(axis: str, size: int) -> Group:
    """This rank's run of `size` consecutive ranks of its group along `axis`; the same object at each call.

    The first call makes the process group and waits for the other members' first calls; other ranks need not call it.

    Raises:
        RuntimeError: not initialized.
        ValueError: no such axis, or `size` does not divide the ranks along it.
    """
    state = _current()
    if (axis, size) not in state.subgroups:
        whole = get_group(axis)
        if size < 1 or whole.size % size:
            raise ValueError(
                f"size={size} does not divide the {whole.size} ranks of {whole}; use a divisor of {whole.size}"
            )
        runs = [ranks[start : start + size] for ranks in whole.replica_groups for start in range(0, whole.size, size)]
        made = whole if size == whole.size else _make_subgroup(state, axis, tuple(runs))
        state.subgroups[axis, size] = made
    return state.subgroups[axis, size]


def group_among(replica_groups: Sequence[Sequence[int]], *, messages: str | None = None) -> Group:
    """This rank's group among given ones, each rank in at most one of them; the same object at each call.

    The first call makes the process group and waits for the other members' first calls; other ranks need not call it.

    Args:
        replica_groups: global ranks of each group, the same on all its members. If an axis or an earlier subgroup has
            these groups, its group is returned.
        messages: a name for messages that overlap those of the axes. They need a group of their own, which the calls
            with this name share: within a group all ranks must send in the same order.

    Raises:
        RuntimeError: not initialized.
        ValueError: this rank is in none of them.
    """
    state, wanted = _current(), tuple(tuple(ranks) for ranks in replica_groups)
    if messages is not None and (messages, wanted) in state.apart:
        return state.apart[messages, wanted]
    for group in (*state.groups.values(), *state.subgroups.values()) if messages is None else ():
        if group.replica_groups == wanted:
            return group
    if not any(state.rank in ranks for ranks in wanted):
        raise ValueError(
            f"rank {state.rank} is in none of the groups {list(map(list, wanted))}; "
            "do not call this on ranks outside them"
        )
    made = _make_subgroup(state, "given", wanted)
    if messages is None:
        state.subgroups[wanted] = made
    else:
        state.apart[messages, wanted] = made
    return made


def group_of(process_group: dist.ProcessGroup) -> Group:
    """The `Group` of a torch process group: the mesh's own, or a new one if it was made elsewhere.

    Raises:
        ValueError: it is not a process group, or this rank is not in it.
    """
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group={process_group!r} is a {type(process_group).__name__}, not a process group of this rank; "
            "pass one from torch.distributed.new_group or get_tensor_model_parallel_group()"
        )
    state = _state
    known = state.all_groups() if state is not None else ()
    for group in known:
        if group.process_group is process_group:
            return group
    if state is not None and process_group in state.foreign:
        return state.foreign[process_group]
    ranks = tuple(dist.get_process_group_ranks(process_group))
    made = Group(
        axis="given",
        ranks=ranks,
        rank=process_group.rank(),
        replica_groups=(ranks,),
        process_group=process_group,
        name=process_group.group_name,
        crosses_stages=state is not None and crosses_stages(state.mesh, ranks),
    )
    if state is not None:
        state.foreign[process_group] = made
    return made


def _current() -> _ParallelState:
    if _state is None:
        raise RuntimeError("model parallelism is not initialized; call initialize_model_parallel() first")
    return _state


class _PlannedProcessGroup(dist.ProcessGroup):
    """The process group of ranks that do not run, which knows its size; unpickled in a running rank, the real one."""

    def __init__(self, axis: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._axis = axis

    def __reduce__(self) -> tuple[Callable[[str], dist.ProcessGroup | None], tuple[str]]:
        return _process_group_of_axis, (self._axis,)


def _process_group_of_axis(axis: str) -> dist.ProcessGroup | None:
    return _current().groups[axis].process_group


def _planned_groups(mesh: Mesh, rank: int) -> dict[str, Group]:
    groups = {}
    for axis, replica_groups in groups_of_axes(mesh).items():
        if any(rank in ranks for ranks in replica_groups):
            group = group_with_rank(rank, mesh, axis, replica_groups)
            groups[axis] = replace(group, process_group=_PlannedProcessGroup(axis, group.rank, group.size))
    return groups


def _share_memory(state: _ParallelState) -> None:
    memories = share_memory(state.groups.values(), state.rank, "world", state.timeout)
    for axis, group in state.groups.items():
        state.groups[axis] = replace(group, shared_memory=memories.get(group.name))


def _make_subgroup(state: _ParallelState, axis: str, replica_groups: RankGroups) -> Group:
    group = group_with_rank(state.rank, state.mesh, axis, replica_groups)
    if group.size == 1:
        return group
    process_group = new_process_group_of_members(group.ranks, state.timeout)
    state.created.append(process_group)
    group = replace(group, process_group=process_group, name=process_group.group_name)
    memory = share_memory([group], state.rank, group.name, state.timeout).get(group.name)
    return replace(group, shared_memory=memory)
