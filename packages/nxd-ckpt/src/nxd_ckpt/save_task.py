"""Prepares a save: checks the arguments, compares them among the ranks, and plans one rank's writes; writes nothing.

A `SaveTask` is plain data and can be pickled: a task prepared in one process can run in another, which needs only the
tensors of `task.layout` and a way to reach the other ranks.
"""

import json
import os
import pickle
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash

from nxd_ckpt.arguments import check_flags
from nxd_ckpt.asynchronous.handle import RankKey, mark_reported, unreported_failures
from nxd_ckpt.boxes import Box
from nxd_ckpt.coordinator import Coordinator, gather_from_every_rank, on_every_rank
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.incremental import CHUNK_BYTES, Base, Increment, find_increment
from nxd_ckpt.manifest import MANIFEST_NAME, extra_file_name
from nxd_ckpt.messages import all_are, expect, parsed
from nxd_ckpt.objects import check_json, is_unicode
from nxd_ckpt.optimizer_states import merged_groups
from nxd_ckpt.plan import SavePlan, TensorDescription, plan_save
from nxd_ckpt.replicas import ReplicaHashes, check_replicas, hash_replicas
from nxd_ckpt.safetensors_file import FileLayout, lay_out
from nxd_ckpt.sharded_tensor import ShardedTensor, as_sharded_state, tensors_of
from nxd_ckpt.state_walk import flatten_state
from nxd_ckpt.stores import SaveTransaction, Store, check_processes, check_tag, open_store, process_of
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE, DTYPE_OF_CODE
from nxd_ckpt.training_state import PER_RANK, VALUES_FILE, TrainingState, values_file

_CHECKING = "checking the arguments of save"

# Parts of tensors are stored as the name followed by the box, so tensor names must not have that form.
_RESERVED_NAME = re.compile(r"|__metadata__|.*\[\d+:\d+(,\d+:\d+)*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The arguments of a save besides tensors; `save` describes each."""

    tag: str
    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = False
    incremental: bool = False
    objects: Any = None
    rank_objects: Any = None
    extra: Mapping[str, bytes] | None = None
    mesh: Any = None


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One rank's part of a save.

    Attributes:
        save_id: unique to this save, the same on all ranks.
        location: the store's folder, for messages.
        transaction: the store's transaction, not begun yet.
        layout: the file that this rank writes; its tensors are needed when the task runs.
        plan: the writes of all ranks.
        options: this rank's options; the `rank_objects` of all ranks are in `all_rank_objects`.
        all_rank_objects: the `rank_objects` by rank number.
        replica_hashes: hashes of this rank's copies of boxes that others write; empty unless they are compared.
        digests: the XXH3-128 of the boxes that all ranks write, by name and box; empty unless the save is incremental.
        base: the data that is referenced instead of written, on rank 0; see `incremental.py`.
    """

    save_id: str
    location: str
    transaction: SaveTransaction
    layout: FileLayout
    plan: SavePlan
    options: SaveOptions
    all_rank_objects: Mapping[int, Any]
    replica_hashes: ReplicaHashes
    digests: Mapping[tuple[str, Box], str]
    base: Base | None


class _Request(NamedTuple):
    """One rank's request, as it is sent to the others."""

    save_id: str
    common: tuple[str, int | None, bool, bool, bool]
    rank_objects: Any
    layout_digest: str
    cached_plan: str
    failed_saves: dict[str, str]
    process: str
    values_digest: str
    is_taken: bool


def _request_from(message: Any) -> _Request:
    save_id, common, rank_objects, layout_digest, cached_plan, failed_saves, process, values_digest, is_taken = message
    tag, step, overwrite, compared, incremental = common
    expect(
        all_are(str, (save_id, tag, layout_digest, cached_plan, process, values_digest)),
        f"a value that is not a string in {message!r:.200}",
    )
    expect(all_are(str, (*failed_saves, *failed_saves.values())), "failed saves that are not strings")
    common = (tag, step, overwrite, compared, incremental)
    expect(isinstance(is_taken, bool), f"is_taken {is_taken!r:.200}")
    return _Request(
        save_id, common, rank_objects, layout_digest, cached_plan, failed_saves, process, values_digest, is_taken
    )


def _descriptions_from(message: Any) -> dict[str, TensorDescription]:
    found = {}
    for name, (dtype, shape, boxes, of_first_holder) in message.items():
        box_list = [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
        numbers = (*shape, *(number for box in box_list for side in box for number in side))
        expect(dtype in DTYPE_OF_CODE and all_are(int, numbers), f"the tensor {name!r:.200} of {dtype!r:.200}")
        expect(all(box.fits_in(tuple(shape)) for box in box_list), f"a box of {name!r:.200} outside of {shape}")
        expect(isinstance(of_first_holder, bool), f"the tensor {name!r:.200} with {of_first_holder!r:.200}")
        found[name] = TensorDescription(dtype, tuple(shape), tuple(box_list), of_first_holder)
    return found


class _Details(NamedTuple):
    """One rank's values and tensors, each empty if it is the same on all ranks or as in their last save.

    Attributes:
        descriptions: the rank's tensors.
        values: its values by path.
        groups: the paths of values that are optimizer groups.
    """

    descriptions: dict[str, TensorDescription]
    values: dict[str, Any]
    groups: list[str]


class _OwnState(NamedTuple):
    """This rank's checked arguments: the state, and the options with the rank's `PerRank` values."""

    flattened: TrainingState
    sharded: dict[str, ShardedTensor]
    descriptions: dict[str, TensorDescription]
    options: SaveOptions


class _CachedPlan(NamedTuple):
    digest: str
    plan: SavePlan
    layout: FileLayout


# The plan of the last layout, per rank, since a run saves the same tensors repeatedly. In some tests ranks are threads.
_cache: dict[RankKey, _CachedPlan] = {}


def prepare_save(
    path: "str | os.PathLike[str]",
    state: Mapping[str, Any],
    options: SaveOptions,
    coordinator: Coordinator,
    check: Callable[[], None],
) -> tuple[SaveTask, dict[str, ShardedTensor]]:
    """Check the arguments, compare them among the ranks, and plan the writes. Call it on all ranks.

    `check` checks the caller's own arguments; its errors are raised on all ranks.

    Returns:
        This rank's task, and the state with every value as a ShardedTensor.

    Raises:
        ValueError: a rank's arguments are invalid or do not match the others'; raised on every rank.
        CheckpointError: the tag is taken, or an earlier background save failed on a rank and was never waited for.
    """
    own, requests = _compare_arguments(path, state, options, coordinator, check)
    values, cached = _gather_details(requests, own, coordinator)
    options, sharded = own.options, own.sharded
    if values and coordinator.rank == 0:
        options = replace(options, extra={**(options.extra or {}), **values_file(values)})
    replica_hashes: ReplicaHashes = {}
    if options.check_replicas:
        doing = f"comparing replicas to save checkpoint {options.tag!r}"
        may_differ = own.flattened.may_differ
        replica_hashes = on_every_rank(
            coordinator, doing, lambda: hash_replicas(cached.plan, sharded, coordinator.rank, may_differ)
        )
    store, save_id = open_store(path), requests[0].save_id
    increment, layout = Increment(cached.plan), cached.layout
    if options.incremental:
        doing = f"finding what has changed since the checkpoint before {options.tag!r}"
        increment, hashes = find_increment(store, cached.plan, tensors_of(sharded), coordinator, doing)
        if options.check_replicas:  # including the data that will not be written
            on_every_rank(coordinator, doing, lambda: check_replicas(cached.plan, replica_hashes, hashes))
        layout = lay_out(increment.plan.writes[coordinator.rank], increment.plan.tensors)
    task = SaveTask(
        save_id=save_id,
        location=store.location,
        transaction=store.begin_save(options.tag, save_id, overwrite=options.overwrite),
        layout=layout,
        plan=increment.plan,
        options=options,
        all_rank_objects={
            rank: request.rank_objects for rank, request in enumerate(requests) if request.rank_objects is not None
        },
        replica_hashes=replica_hashes,
        digests=increment.digests,
        base=increment.base,
    )
    return task, sharded


def _compare_arguments(
    path: "str | os.PathLike[str]",
    state: Mapping[str, Any],
    options: SaveOptions,
    coordinator: Coordinator,
    check: Callable[[], None],
) -> tuple[_OwnState, list[_Request]]:
    """Check this rank's arguments, and compare them with those of other ranks in one gather."""
    checked: list[_OwnState] = []
    key = RankKey(coordinator.rank, coordinator.world_size)
    last_digest = _cache[key].digest if key in _cache else ""

    def check_arguments() -> _Request:
        check()
        process = process_of(path)
        own = _own_state(state, options, several_ranks=coordinator.world_size > 1)
        checked.append(own)
        values, groups, given = own.flattened.values, own.flattened.groups, own.options
        return _Request(
            save_id=uuid.uuid4().hex,
            common=(given.tag, given.step, given.overwrite, given.check_replicas, given.incremental),
            rank_objects=given.rank_objects,
            layout_digest=xxhash.xxh3_128_hexdigest(pickle.dumps(own.descriptions)),  # only hashed, never loaded
            cached_plan=last_digest,
            failed_saves=unreported_failures(key),
            process=process,
            values_digest=xxhash.xxh3_128_hexdigest(
                json.dumps([list(values), [values[it] for it in sorted(groups)]]).encode()
            ),
            is_taken=coordinator.rank == 0 and not given.overwrite and _is_taken(open_store(path), given.tag),
        )

    sent = gather_from_every_rank(coordinator, _CHECKING, check_arguments, error_type=ValueError)
    requests = parsed(sent, _request_from, _CHECKING)
    _check_earlier_saves(requests, key)
    _check_same_save(requests)
    check_processes(path, [request.process for request in requests])
    if requests[0].is_taken:
        where = f"{open_store(path).location}/{options.tag}"
        raise CheckpointError(f"{where} exists; choose another tag or pass overwrite=True")
    return checked[0], requests


def _is_taken(store: Store, tag: str) -> bool:
    """Whether the store has a checkpoint with this tag; if it cannot be asked, the save's `begin` tells why."""
    try:
        store.file_size(tag, MANIFEST_NAME)
    except (OSError, CheckpointError):
        return False
    return True


def _own_state(state: Mapping[str, Any], options: SaveOptions, *, several_ranks: bool) -> _OwnState:
    flattened = flatten_state(state, several_ranks=several_ranks)
    sharded = as_sharded_state(flattened.tensors)
    descriptions = {
        _check_name(name): _describe(tensor, of_first_holder=name in flattened.of_first_holder)
        for name, tensor in sharded.items()
    }
    _check_options(options)
    return _OwnState(flattened, sharded, descriptions, _with_rank_values(options, flattened))


def _gather_details(
    requests: Sequence[_Request], own: _OwnState, coordinator: Coordinator
) -> tuple[dict[str, Any], _CachedPlan]:
    """Return the values of all ranks and the plan; one gather if ranks' values differ or the layout is new.

    Raises:
        ValueError: the ranks' tensors do not fit together; on every rank.
    """
    key = RankKey(coordinator.rank, coordinator.world_size)
    max_write_bytes = CHUNK_BYTES if own.options.incremental else None
    digest = "".join([str(max_write_bytes), *(request.layout_digest for request in requests)])
    is_new_layout = any(request.cached_plan != digest for request in requests)
    values_differ = any(request.values_digest != requests[0].values_digest for request in requests)
    values = own.flattened.values
    if is_new_layout or values_differ:
        sent = _Details(
            own.descriptions if is_new_layout else {},
            values if values_differ else {},
            sorted(own.flattened.groups) if values_differ else [],
        )
        details = parsed(coordinator.all_gather_object(sent), _details_from, _CHECKING)
        if values_differ:
            values = _merged(details)
        if is_new_layout:
            plan = plan_save([of_rank.descriptions for of_rank in details], max_write_bytes=max_write_bytes)
            _cache[key] = _CachedPlan(digest, plan, lay_out(plan.writes[coordinator.rank], plan.tensors))
    return _without_empty_parts(values, _cache[key].plan.tensors), _cache[key]


def _details_from(message: Any) -> _Details:
    descriptions, values, groups = message
    expect(isinstance(values, dict) and all_are(str, groups), "invalid values")
    of_groups = [values.get(path) for path in groups]
    expect(
        all(isinstance(it, list) and all(isinstance(group, dict) for group in it) for it in of_groups)
        and all_are(list, (group.get("params") for it in of_groups for group in it or ())),
        "invalid optimizer groups",
    )
    return _Details(_descriptions_from(descriptions), values, list(groups))


def _merged(details: Sequence[_Details]) -> dict[str, Any]:
    """Merge the values of ranks with different parts of a model: the first rank that has a value provides it."""
    merged: dict[str, Any] = {}
    for of_rank in details:
        merged = {**of_rank.values, **merged}
    for path in {path for of_rank in details for path in of_rank.groups}:
        merged[path] = merged_groups([of_rank.values[path] for of_rank in details if path in of_rank.groups])
    return merged


def _without_empty_parts(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Drop a rank's empty lists and dicts at paths where other ranks have tensors."""
    empty = [path for path, value in values.items() if isinstance(value, list | dict) and not value]
    filled = {path for path in empty if any(name.startswith(f"{path}.") for name in tensors)}
    return {path: value for path, value in values.items() if path not in filled}


def _with_rank_values(options: SaveOptions, state: TrainingState) -> SaveOptions:
    """Add the `PerRank` values to this rank's objects."""
    rank_objects = options.rank_objects
    if state.values and VALUES_FILE in (options.extra or {}):
        raise ValueError(f"extra has a file {VALUES_FILE!r}, a name reserved for the values of the state; rename it")
    if state.rank_values:
        if not isinstance(rank_objects, dict | None) or PER_RANK in (rank_objects or {}):
            raise ValueError(
                f"rank_objects={rank_objects!r:.200} cannot be saved with PerRank values; pass a dict without "
                f"{PER_RANK!r}, or None"
            )
        rank_objects = {**(rank_objects or {}), PER_RANK: state.rank_values}
    return replace(options, rank_objects=rank_objects)


def _check_options(options: SaveOptions) -> None:
    check_tag(options.tag)
    check_flags(overwrite=options.overwrite, check_replicas=options.check_replicas, incremental=options.incremental)
    step = options.step
    if step is not None and not (type(step) is int and 0 <= step < 2**63):
        raise ValueError(f"step={step!r} is not a number of steps; pass an int from 0 to 2**63 - 1, or None")
    check_json(options.objects, "objects")
    check_json(options.rank_objects, "rank_objects")
    check_json(options.mesh, "mesh")
    if not isinstance(options.extra, Mapping | None):
        raise ValueError(f"extra is a {type(options.extra).__name__}; pass {{name: content as bytes}}, or None")
    for name, content in (options.extra or {}).items():
        extra_file_name("0" * 32, name)
        if not isinstance(content, bytes):
            raise ValueError(f"extra[{name!r}] is a {type(content).__name__}; pass the file's content as bytes")


def _check_name(name: str) -> str:
    if not isinstance(name, str) or _RESERVED_NAME.fullmatch(name) or not is_unicode(name):
        raise ValueError(
            f"the name {name!r} is not allowed: empty, '__metadata__', ending in a box like [0:4], or not Unicode"
        )
    return name


def _describe(tensor: ShardedTensor, *, of_first_holder: bool) -> TensorDescription:
    boxes = tuple(shard.box for shard in tensor.shards)
    return TensorDescription(CODE_OF_DTYPE[tensor.dtype], tensor.global_shape, boxes, of_first_holder)


def _check_earlier_saves(requests: list[_Request], key: RankKey) -> None:
    """Raise the errors of background saves that were never waited for, once and on all ranks."""
    failed = {save_id: text for request in requests for save_id, text in request.failed_saves.items()}
    mark_reported(key, set(failed))
    if failed:
        raise CheckpointError("; ".join(sorted(failed.values())) + "; this save was not started")


def _check_same_save(requests: list[_Request]) -> None:
    expected = requests[0].common
    for rank, request in enumerate(requests):
        if request.common != expected:
            raise ValueError(
                f"ranks passed different arguments to save: (tag, step, overwrite, check_replicas, incremental) is "
                f"{expected} on rank 0 but {request.common} on rank {rank}"
            )
