"""`load`: every rank fills its own tensors, no matter in which layout they were saved.

All ranks first check everything and agree that it succeeded; only then is any destination changed.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch.distributed as dist

from nxd_ckpt.arguments import check_flags, check_timeout, default_timeout
from nxd_ckpt.catalog import complete_tags, find_tag
from nxd_ckpt.coordinator import (
    Coordinator,
    abandoned_on_error,
    coordinator_for,
    gather_from_every_rank,
    on_every_rank,
    on_rank_zero,
)
from nxd_ckpt.errors import LISTED, CheckpointError, MismatchError, RanksLostError, by_prefix
from nxd_ckpt.messages import all_are, expect, parsed
from nxd_ckpt.reader import Checkpoint, open_checkpoint
from nxd_ckpt.sharded_tensor import ShardedTensor, as_sharded_state
from nxd_ckpt.shared_reads import SharedBox, assign_reads, decode_wants, encode_wants, own_reads, send_shared
from nxd_ckpt.state_walk import flatten_state
from nxd_ckpt.stores import check_processes, check_tag, open_store, process_of
from nxd_ckpt.tensor_bytes import is_non_overlapping
from nxd_ckpt.training_state import PER_RANK, VALUES_FILE, Stored, TrainingState, read_values

_NOT_REQUESTED = ("is in the checkpoint but was not requested", "are in the checkpoint but were not requested")
_NOT_STORED = ("was requested but is not in the checkpoint", "were requested but are not in the checkpoint")


@dataclass(frozen=True, slots=True)
class LoadedObjects:
    """The contents of a checkpoint besides tensors.

    Attributes:
        tag: the checkpoint's name.
        step: the step passed to `save`, if any.
        world_size: number of ranks that saved it.
        objects: the `objects` that rank 0 passed to `save`.
        rank_objects: the `rank_objects` of the rank with this rank's number; None if it passed none or did not exist.
    """

    tag: str
    step: int | None
    world_size: int
    objects: Any
    rank_objects: Any


@dataclass(frozen=True, slots=True)
class _LoadOptions:
    """The options of a load; equal on all ranks."""

    tag: str | None
    strict: bool
    verify: bool
    convert_dtype: bool
    fallback: bool
    share_reads: bool


def load(
    path: "str | os.PathLike[str]",
    tag: str | None = None,
    *,
    into: Mapping[str, Any],
    strict: bool = True,
    verify: bool = True,
    convert_dtype: bool = False,
    fallback: bool = False,
    share_reads: bool = False,
    timeout: float | None = None,
    process_group: "dist.ProcessGroup | Coordinator | None" = None,
) -> LoadedObjects:
    """Fill tensors in place from a checkpoint; each rank reads only the bytes that it needs. Call it on all ranks.

    Args:
        path: the folder passed to `save`.
        tag: name of the checkpoint; default: the newest one.
        into: this rank's destinations for each logical tensor; the shards' memory is filled. Ranks may request
            different names and any boxes, whatever layout was saved. It takes everything that `save` takes: modules
            are filled in place, optimizers get the states that they lack, numbers in dicts and lists are replaced.
        strict: refuse a checkpoint with tensors that no rank asks for. Tensors that a rank asks for must always exist.
        verify: compare the data with its checksums. They cover blocks of 16 MiB, so a rank that needs part of a block
            reads all of it.
        convert_dtype: convert tensors that were saved with another dtype instead of refusing them.
        fallback: if the newest checkpoint cannot be read, warn and use the one before it, and so on. Skipped
            checkpoints may have partially filled the destinations. Cannot be combined with `tag`.
        share_reads: if several ranks need the same box in the same dtype, one of them reads it and sends it to the
            others through `process_group`, which must be a torch process group. For storage slower than the network.
        timeout: seconds to wait for the other ranks, at each step, before giving up; None: the value of
            `NXD_TIMEOUT`, else half an hour.
        process_group: the ranks; default: torch's default group if initialized, else this process alone.

    Raises:
        ValueError: a rank's arguments are invalid or differ from those of the others.
        MismatchError: a CheckpointError: the checkpoint does not match `into`. One error tells all differences of
            name, shape and dtype; of many names that begin alike, their number and the first.
        CheckpointError: there is no such checkpoint, or files are missing, damaged or unreadable. All ranks raise with
            the same text. Without `tag` and `fallback`, also if the manifest of any checkpoint is damaged: it may be
            the newest. Only an error while reading, after all checks, can leave destinations partially filled.
    """
    timeout = default_timeout() if timeout is None else timeout
    coordinator = coordinator_for(process_group, timeout)
    options = _LoadOptions(tag, strict, verify, convert_dtype, fallback, share_reads)
    with abandoned_on_error(coordinator):
        loaded, skipped = _load(path, into, options, coordinator, process_group, timeout)
    for problem in skipped:
        warnings.warn(f"skipped a checkpoint and loaded {loaded.tag!r} instead: {problem}", stacklevel=2)
    return loaded


def _load(
    path: "str | os.PathLike[str]",
    into: Mapping[str, Any],
    options: _LoadOptions,
    coordinator: Coordinator,
    process_group: "dist.ProcessGroup | Coordinator | None",
    timeout: float,
) -> tuple[LoadedObjects, list[str]]:
    """Also returns the errors of newer checkpoints that were skipped."""

    def check_arguments() -> tuple[dict[str, Any], str]:
        check_timeout(timeout)
        check_flags(**{name: value for name, value in asdict(options).items() if name != "tag"})
        process = process_of(path)
        if options.tag is not None:
            check_tag(options.tag)
            if options.fallback:
                raise ValueError(
                    f"fallback=True takes the newest readable checkpoint, so tag={options.tag!r} cannot be given"
                )
        if options.share_reads and coordinator.world_size > 1 and isinstance(process_group, Coordinator):
            raise ValueError("share_reads=True sends tensors, so process_group must be a torch process group")
        _destinations(flatten_state(into, several_ranks=coordinator.world_size > 1))
        return asdict(options), process

    doing = "checking the arguments of load"
    sent = gather_from_every_rank(coordinator, doing, check_arguments, error_type=ValueError)
    asked = parsed(sent, _asked_from, doing)
    _check_same_load([wished for wished, _ in asked])
    check_processes(path, [process for _, process in asked])
    store = open_store(path)
    group = process_group if isinstance(process_group, dist.ProcessGroup) else dist.group.WORLD

    def load_tag(found: str) -> LoadedObjects:
        return _load_tag(path, found, into, options, coordinator, group, timeout)

    if not options.fallback:
        found = on_rank_zero(coordinator, f"loading from {store.location}", lambda: find_tag(store, options.tag))
        return _with_advice(lambda: load_tag(found)), []
    newest_last = on_rank_zero(coordinator, f"loading from {store.location}", lambda: complete_tags(store))
    skipped: list[str] = []
    for found in reversed(newest_last):
        try:
            return load_tag(found), skipped
        except (MismatchError, RanksLostError):
            raise
        except CheckpointError as error:
            skipped.append(str(error))
    listed = "".join(f"\n  {problem}" for problem in skipped) or " there are none"
    raise CheckpointError(f"no checkpoint in {store.location} could be loaded:{listed}")


def _with_advice(load_one: Callable[[], LoadedObjects]) -> LoadedObjects:
    """Load without a fallback; an error on a file of the checkpoint says how to use another one."""
    try:
        return load_one()
    except (MismatchError, RanksLostError):
        raise
    except CheckpointError as error:
        if "data file " not in str(error):
            raise
        instead = "use another checkpoint: pass its tag, or fallback=True without a tag"
        raise CheckpointError(f"{error}; {instead}") from error.__cause__


def _load_tag(
    path: "str | os.PathLike[str]",
    tag: str,
    into: Mapping[str, Any],
    options: _LoadOptions,
    coordinator: Coordinator,
    group: "dist.ProcessGroup | None",
    timeout: float,
) -> LoadedObjects:
    doing = f"loading checkpoint {tag!r} from {open_store(path).location}"
    checkpoint = on_every_rank(coordinator, doing, lambda: open_checkpoint(path, tag, verify=options.verify))
    read = cache(lambda: _values_of(checkpoint))
    stored, several_ranks = Stored(checkpoint.tensors, read), coordinator.world_size > 1
    state = on_every_rank(coordinator, doing, lambda: flatten_state(into, stored, several_ranks=several_ranks))
    wanted = _destinations(state)
    values = on_every_rank(coordinator, doing, lambda: _checked(read, state))
    left_out = _unrequested(into, values, state) if options.strict else []
    _check_fit(coordinator, doing, checkpoint, wanted, options, left_out)
    share = options.share_reads and group is not None and coordinator.world_size > 1
    shared: list[SharedBox] = []
    if share:
        shared = assign_reads(parsed(coordinator.all_gather_object(encode_wants(wanted)), decode_wants, doing))
    to_read = own_reads(wanted, shared, coordinator.rank)
    transfers = on_every_rank(coordinator, doing, lambda: checkpoint.plan(to_read))
    on_every_rank(coordinator, doing, lambda: checkpoint.fill(transfers))
    if shared and group is not None:
        on_every_rank(coordinator, doing, lambda: send_shared(shared, wanted, group, timeout))
    rank_objects = checkpoint.rank_objects.get(coordinator.rank)
    on_every_rank(coordinator, doing, lambda: _load_into_owners(state, values, rank_objects))
    return LoadedObjects(
        tag=checkpoint.tag,
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        objects=checkpoint.objects,
        rank_objects=rank_objects,
    )


def _destinations(state: TrainingState) -> dict[str, ShardedTensor]:
    destinations = as_sharded_state(state.tensors)
    for name, tensor in destinations.items():
        _check_destinations(name, tensor)
    return destinations


def _values_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return read_values(checkpoint.read_extra(VALUES_FILE)) if VALUES_FILE in checkpoint.extra else {}


def _checked(read: Callable[[], dict[str, Any]], state: TrainingState) -> dict[str, Any]:
    """Return the values; all values in the request must exist."""
    values = read()
    if missing := [path for path in state.values if path not in values]:
        there = ", ".join([*islice(values, LISTED), *(["..."] if len(values) > LISTED else [])]) or "no values"
        raise CheckpointError(
            f"the value {missing[0]!r} was requested but is not in the checkpoint, which has {there}; leave it out of "
            "what you load, and set it yourself"
        )
    return values


def _unrequested(into: Mapping[str, Any], values: Mapping[str, Any], state: TrainingState) -> list[str]:
    """Return the stored values below a requested key that are not requested themselves."""
    asked = tuple(f"{key}." for key in into)
    return [path for path in values if path.startswith(asked) and path not in state.values]


def _load_into_owners(state: TrainingState, values: Mapping[str, Any], rank_objects: Any) -> None:
    """Hand the loaded values and optimizer states to their owners."""
    of_rank = rank_objects.get(PER_RANK, {}) if isinstance(rank_objects, dict) else {}
    for path, put in state.setters.items():
        here = of_rank if path in state.rank_values else values
        if path in here:
            put(here[path])
    for finish in state.finish:
        finish()


def _check_destinations(name: str, tensor: ShardedTensor) -> None:
    for shard in tensor.shards:
        if not is_non_overlapping(shard.tensor):
            raise ValueError(
                f"{name!r} {shard.box} cannot be loaded into a tensor of strides {list(shard.tensor.stride())}, whose "
                "elements share memory; load into a clone of it"
            )


def _asked_from(message: Any) -> tuple[_LoadOptions, str]:
    wished, process = message
    expect(isinstance(process, str), f"the process {process!r:.200}")
    return _LoadOptions(**wished), process


def _check_same_load(asked: list[_LoadOptions]) -> None:
    for rank, found in enumerate(asked):
        if found != asked[0]:
            name = next(name for name in asdict(found) if getattr(found, name) != getattr(asked[0], name))
            raise ValueError(
                f"ranks passed different arguments to load: {name} is {getattr(asked[0], name)!r} on rank 0 but "
                f"{getattr(found, name)!r} on rank {rank}"
            )


def _check_fit(
    coordinator: Coordinator,
    doing: str,
    checkpoint: Checkpoint,
    wanted: Mapping[str, ShardedTensor],
    options: _LoadOptions,
    left_out: list[str],
) -> None:
    """Compare names, shapes and dtypes over all ranks; a name is unexpected only if no rank asks for it.

    `left_out` lists the values that this rank does not ask for.
    """
    sent = gather_from_every_rank(
        coordinator,
        doing,
        lambda: (
            checkpoint.save_id,
            list(wanted) if options.strict else [],
            _differences(checkpoint, wanted, convert_dtype=options.convert_dtype),
            left_out,
        ),
    )
    views = parsed(sent, _view_from, doing)
    if len({save_id for save_id, _, _, _ in views}) > 1:
        raise CheckpointError(f"{doing} failed: ranks found different saves under this tag; was it just overwritten?")
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, _, differences, _) in enumerate(views):
        for difference in differences:
            ranks_of.setdefault(difference, []).append(rank)
    problems = [
        difference if len(ranks) == len(views) else f"{difference} (rank {', '.join(map(str, ranks))})"
        for difference, ranks in ranks_of.items()
    ]
    if options.strict:
        known = {name for _, names, _, _ in views for name in names}
        unexpected = [name for name in checkpoint.tensors if name not in known]
        problems += _by_prefix(unexpected, lambda name: _layout(checkpoint, name), _NOT_REQUESTED)
        of_no_rank = [path for path in views[0][3] if all(path in left for _, _, _, left in views)]
        problems.extend(f"the value {path!r} is in the checkpoint but was not requested" for path in of_no_rank)
        if unexpected or of_no_rank:
            problems.append("(pass strict=False to leave these out)")
    if problems:
        raise MismatchError(f"{doing} failed: the checkpoint does not match the request\n  " + "\n  ".join(problems))


def _view_from(message: Any) -> tuple[str, list[str], list[str], list[str]]:
    save_id, names, differences, left_out = message
    expect(all_are(str, (save_id, *names, *differences, *left_out)), "names that are not strings")
    return save_id, list(names), list(differences), list(left_out)


def _differences(checkpoint: Checkpoint, wanted: Mapping[str, ShardedTensor], *, convert_dtype: bool) -> list[str]:
    def asked(name: str) -> str:
        return f"{wanted[name].dtype} {list(wanted[name].global_shape)}"

    found = _by_prefix([name for name in wanted if name not in checkpoint.tensors], asked, _NOT_STORED)
    for name, tensor in wanted.items():
        info = checkpoint.tensors.get(name)
        if info is not None and (
            tensor.global_shape != info.global_shape or (tensor.dtype != info.dtype and not convert_dtype)
        ):
            held = ", ".join(str(shard.box) for shard in tensor.shards) or "none of it"
            found.append(f"{name!r} is {_layout(checkpoint, name)}; requested: {asked(name)} as {held}")
    hint = "(pass convert_dtype=True to convert)"
    if any(tensor.dtype != checkpoint.tensors[n].dtype for n, tensor in wanted.items() if n in checkpoint.tensors):
        found += [] if convert_dtype else [hint]
    return found


def _by_prefix(names: Iterable[str], describe: Callable[[str], str], problem: tuple[str, str]) -> list[str]:
    """Return a line for each tensor, or one for many whose names begin alike.

    `problem` says what is wrong with one tensor and with several.
    """
    lines = []
    for pattern, group in by_prefix(names).items():
        if len(group) > LISTED:
            lines.append(f"{len(group)} tensors {pattern!r}, such as {group[0]!r} {describe(group[0])}, {problem[1]}")
        else:
            lines += [f"{name!r} {describe(name)} {problem[0]}" for name in group]
    return lines


def _layout(checkpoint: Checkpoint, name: str) -> str:
    """Describe the dtype, shape and boxes of a stored tensor."""
    info, chunks = checkpoint.tensors[name], checkpoint.manifest.tensors[name].chunks
    boxes = ", ".join(str(chunk.box) for chunk in chunks[:3]) + (", ..." if len(chunks) > 3 else "")
    return f"{info.dtype} {list(info.global_shape)} as {boxes or 'nothing'}"
